"""The strategy: Fabric's ``setup``, ``backward``, ``clip_gradients``, ``step``, ``save`` and ``load`` on one engine."""

import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.compat.fabric import OneDevice, note_compiled, resolve_first
from penstock.compat.fabric import Precision as Plugin
from penstock.compat.torch import note_step
from penstock.config import Precision, fields_of
from penstock.config.engine import check_seed
from penstock.config.layout import LayoutConfig
from penstock.config.meanings import takes
from penstock.config.optimizer import MomentsConfig
from penstock.config.step import check_clip
from penstock.engine.arguments import LoopArguments, WrapArguments
from penstock.engine.device import resolve_device
from penstock.engine.engine import Engine
from penstock.engine.wrap import wrap_among
from penstock.errors import ConfigError, ModelError, NonFiniteError
from penstock.fabric.deferred import MODEL, Deferred, check_unchanged, is_spent, nodes, spend
from penstock.fabric.pipelines import tell_numbers
from penstock.fabric.recorder import Computing, Recorded, Recorder, loss_of_root, modes_of
from penstock.optim.driven import DrivenOptimizer
from penstock.optim.from_torch import spec_of_optimizer
from penstock.optim.precision import DTYPES, precision_of_weights
from penstock.ranks.group import ALONE, Ranks
from penstock.ranks.process_groups import join
from penstock.ranks.start import torchrun_mesh
from penstock.store.snapshot_parts import opened_snapshot
from penstock.tape.guard import guard

_PRECISIONS: Mapping[str, Precision | None] = {
    "32-true": None,  # Fabric's default: as the model is
    "bf16-true": "bf16",
    "bf16-mixed": "bf16",
    "16-true": "fp16",
    "16-mixed": "fp16",
}
_SNAPSHOT = "penstock.snapshot"
_REST = "state-{}.pt"
"""The rest of a checkpoint, by the step that its snapshot is of; another name where that is taken."""
_NAMED = "penstock.fabric.rest"
"""The key of that name in the position that a snapshot keeps. Versions up to 0.1.0 have not written it."""
resolve_first(Deferred, Deferred.resolve)
_is_given_compiled = note_compiled()
_TOGETHER = "fabric.setup(model, optimizer): the engine needs the model and its optimizer together"


@dataclass(frozen=True, kw_only=True)
class StrategyArguments(LoopArguments, MomentsConfig, LayoutConfig):
    """The keyword arguments of ``PenstockStrategy``.

    | field | meaning |
    |---|---|
    | ``clip_grad_norm`` | what the loop's ``fabric.clip_gradients(max_norm=...)`` asks for at each step; None: never |
    | ``seed`` | of dropout and initialisation |
    """

    clip_grad_norm: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_layout()
        if self.cp > 1:
            raise ConfigError(
                f"cp={self.cp} is not there for loops on Fabric, whose losses are of whole sequences: leave it out, or "
                "train with penstock.hf.Trainer or penstock.wrap"
            )
        check_clip(self.clip_grad_norm)
        check_seed(self.seed)


class PenstockStrategy(OneDevice):
    """Fabric on the engine.

        fabric = Fabric(devices=1, strategy=PenstockStrategy(budget=penstock.Budget(...), clip_grad_norm=1.0))
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-4))

    In training ``model(...)`` returns a ``Deferred`` (see there), and ``optimizer.step()`` runs every micro-batch whose
    loss was given to ``fabric.backward`` since the last step. Under ``torch.no_grad()`` and ``model.eval()`` the model
    runs at once and returns its outputs.

    ``torchrun --nproc-per-node N`` starts N processes, with ``Fabric(devices=N)``: each runs its own micro-batches, and
    gradients are the mean of all, as under Fabric's own strategies. On several hosts with ``torchrun --nnodes H``, and
    ``num_nodes=H``. With ``pipeline`` those that are one pipeline have the same micro-batches.
    """

    @takes(StrategyArguments)
    def __init__(self, asked: StrategyArguments) -> None:
        self._asked = asked
        self._clip = asked.clip_grad_norm
        self._compute: Precision | None = None
        self._computing = Computing(dtype=torch.float32, widens=False)  # until there is an engine
        self.parallel_devices: list[torch.device] = []  # which Fabric sets
        self._mesh: DeviceMesh | None = None
        self._ranks: Ranks = ALONE  # until there is an engine, whose ranks they are
        self._engine: Engine | None = None
        self._given: torch.optim.Optimizer | None = None
        self._collected: list[Deferred] = []
        self._loads = 0  # of checkpoints
        self._stepped = False  # and no zero_grad() since
        self._norm: Deferred | None = None
        self._strict = False
        super().__init__(device="cpu")

    # ---- what Fabric is told

    @property
    def engine(self) -> Engine:
        """The engine, once ``fabric.setup`` has made it. Close it at the end."""
        if self._engine is None:
            raise ConfigError(f"there is no engine yet. Call {_TOGETHER}")
        return self._engine

    @property
    def precision(self) -> Plugin:
        """Nothing is converted by Fabric: the engine computes in the precision that Fabric was given."""
        return Plugin()

    @precision.setter
    def precision(self, plugin: Plugin | None) -> None:
        name = "32-true" if plugin is None else plugin.precision
        if name not in _PRECISIONS:
            raise ConfigError(f"precision={name!r} cannot be honoured: use one of {', '.join(_PRECISIONS)}")
        self._compute = _PRECISIONS[name]

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[self.local_rank] if self.parallel_devices else torch.device("cpu")

    def check_devices(self) -> None:
        """Refuse more devices, or fewer, than ``torchrun`` has started processes; or take this process's place among
        them."""
        by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        started, hosts, each = (
            int(os.environ.get(f"{whose}WORLD_SIZE", 1)) if by_torchrun else 1 for whose in ("", "GROUP_", "LOCAL_")
        )
        devices = len(self.parallel_devices)
        if (devices, self.host_count) != (each, hosts):
            several = f"--nnodes {self.host_count} " if self.host_count > 1 else ""
            wanted = f"devices={each}" + (f", num_nodes={hosts}" if max(hosts, self.host_count) > 1 else "")
            raise ConfigError(
                f"Fabric(devices={devices}, num_nodes={self.host_count}) in a run of {started} process(es) on {hosts} "
                f"host(s): the engine trains on one device in each. Start it with torchrun {several}--nproc-per-node "
                f"{devices} SCRIPT, or give {wanted}"
            )
        self._asked.check_started(started)
        if started > 1:
            kind, layout = self.parallel_devices[0].type, self._asked
            self._mesh = torchrun_mesh(kind, copies=layout.copies, pp=layout.pipeline)
            self.global_rank, self.world_size = self._mesh.get_rank(), started
            self.local_rank = int(os.environ["LOCAL_RANK"])

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """For ``fabric.setup_dataloaders``: processes that are one pipeline are given the same data, as by Fabric's own
        strategies for a model that is cut."""
        groups = self._asked.sharing(self.world_size)
        return None if self.world_size == 1 else {"num_replicas": groups, "rank": self.global_rank % groups}

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """For ``fabric.init_module``: with ``empty_init`` on the meta device, where a model takes no memory."""
        return torch.device("meta") if empty_init else nullcontext()

    def module_to_device(self, module: nn.Module) -> None:
        """Nothing: the engine brings what is needed."""

    # ---- setup

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[torch.optim.Optimizer], Any]:
        """Hand the model's state to an engine whose optimizer does what the given one would."""
        if self._engine is not None:
            raise ConfigError("a PenstockStrategy trains one model: make another Fabric for another one")
        if len(optimizers) != 1:
            raise ConfigError(f"{len(optimizers)} optimizers were given, and the engine has one. Use its param groups")
        if _is_given_compiled(module):
            raise ConfigError(
                "fabric.setup() was given a model that torch.compile has compiled as a whole, and the engine runs "
                "its blocks one by one: give it the model as it was, and PenstockStrategy(compile=True), or a "
                "backend's name"
            )
        (given,) = optimizers
        names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
        device = resolve_device(self.root_device)
        precision = self._compute or precision_of_weights(module)
        self._computing = Computing(dtype=DTYPES[precision], widens=self._compute is not None)
        asked = WrapArguments(
            optimizer=replace(spec_of_optimizer(given, names), moments=self._asked.moments),
            precision=precision,
            device=device,
            loss_fn=loss_of_root,
            clip_grad_norm=self._clip,
            seed=self._asked.seed,
            **fields_of(self._asked, LoopArguments),
        )
        ranks = join(self._mesh, device)
        try:
            engine = wrap_among(ranks, module, asked)
        except BaseException:
            ranks.close()
            raise
        self._ranks = ranks
        # A learning rate schedule made before holds the given optimizer: what it writes there must count.
        engine.optimizer.param_groups, engine.optimizer.defaults = given.param_groups, dict(given.defaults)
        guard(module, "use fabric.save and fabric.load, or strategy.engine")
        self._engine, self._given = engine, given
        return (
            Recorder(module, engine, self._moment, self._discard, ranks, device, self._computing),
            [DrivenOptimizer(engine.optimizer, self._step, self._discard)],
            scheduler,
        )

    def setup_module(self, module: nn.Module) -> NoReturn:
        raise ConfigError(f"Call {_TOGETHER}")

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> NoReturn:
        raise ConfigError(f"Call {_TOGETHER}")

    # ---- a step

    def backward(self, tensor: Any, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Collect a loss for the next ``optimizer.step``; gradients of several add up, as they always do."""
        if not isinstance(tensor, Deferred):
            raise ModelError("fabric.backward() was given a loss that does not come from the model's training output")
        if args or kwargs:
            raise ConfigError(f"fabric.backward() takes the loss alone: {(*args, *kwargs)} cannot be honoured")
        if self._stepped:
            raise ModelError(
                "fabric.backward() after optimizer.step() would add to the gradients of that step, and there are none "
                "any more: call optimizer.zero_grad() after each step"
            )
        if is_spent(tensor):
            raise ModelError(
                "fabric.backward() was given a loss of outputs that a step was taken with already, and these are gone: "
                "call the model again"
            )
        if any(node.moment != self._moment() for node in nodes(tensor) if node.modes):
            raise ModelError(
                "fabric.backward() was given a loss of outputs that the model was called for before the last "
                "optimizer.step() or fabric.load(), and its weights are others now: call the model again"
            )
        self._collected.append(tensor)

    def _moment(self) -> tuple[int, int]:
        return self.engine.step_count, self._loads

    def _discard(self) -> None:
        """Carry out ``optimizer.zero_grad``, or the model's."""
        self._collected.clear()
        self._norm = None
        self._stepped = False

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Any:
        """Ask for the clipping that the strategy was set up with. Returns the norm, known after the step."""
        if norm_type != 2.0:
            raise ConfigError(f"norm_type={norm_type!r} cannot be honoured: the engine clips by the 2-norm")
        asked = None if max_norm == math.inf else max_norm  # for the norm alone
        if asked != self._clip:
            raise ConfigError(
                f"fabric.clip_gradients(max_norm={max_norm!r}), and the strategy was made with clip_grad_norm="
                f"{self._clip!r}: give it PenstockStrategy(clip_grad_norm={asked!r})"
            )
        if self._norm is not None:
            raise ModelError(
                "fabric.clip_gradients() was called before optimizer.step() already: the engine clips the gradients of "
                "all micro-batches, once. Call it once, behind the last fabric.backward() of the step"
            )
        self._norm, self._strict = Deferred(MODEL), error_if_nonfinite
        return self._norm

    def clip_gradients_value(self, module: nn.Module, optimizer: torch.optim.Optimizer, clip_val: float) -> NoReturn:
        raise ConfigError("clip_gradients(clip_val=...) cannot be honoured: the engine clips by the norm, max_norm=...")

    def _step(self) -> None:
        """Carry out ``optimizer.step``.

        Of a step that fails and does not count, what was collected stays: it can be taken again.

        Raises:
            ModelError: no loss was given to ``fabric.backward`` since the last step.
            NonFiniteError: a gradient was infinite or NaN, and nothing was updated.
        """
        roots, norm = list(self._collected), self._norm
        if not roots:
            raise ModelError(
                "optimizer.step() has nothing to do: no loss was given to fabric.backward() since the last"
            )
        if norm is None and self._clip is not None:
            raise ConfigError(
                f"the strategy was made with clip_grad_norm={self._clip!r}: call fabric.clip_gradients(model, "
                f"optimizer, max_norm={self._clip!r}) before each optimizer.step(), or leave it out there"
            )
        for root in roots:
            check_unchanged(root)
            self._check_modes(root)
        self._discard()  # what is refused above can be mended, and the step taken
        self._stepped = True
        pipeline = self._asked.pipeline > 1
        recorded = [Recorded(root, self._computing) for root in roots]
        micro_batches = [one.micro_batch(with_values=pipeline) for one in recorded]
        # the mean of all that have micro-batches of their own, as Fabric's own strategies have it
        groups, before = self._asked.sharing(self.world_size), self.engine.step_count
        try:
            stats = self.engine.step(micro_batches, loss_weights=[1.0 / groups] * len(roots))
            if pipeline:
                tell_numbers(self._ranks, roots, self.root_device)
        finally:
            if self.engine.step_count > before:
                assert self._given is not None
                note_step(self._given)  # its learning rate schedule looks there
                for root in roots:
                    spend(root)
            else:
                self._collected, self._norm, self._stepped = roots, norm, False
        if norm is not None:
            norm.settle(torch.tensor(stats.grad_norm))
        if stats.skipped and norm is not None and self._strict:
            raise NonFiniteError(
                f"step {stats.step}: {stats.non_finite or 'a gradient'} was infinite or NaN, and nothing was updated. "
                "To go on past such steps: fabric.clip_gradients(error_if_nonfinite=False)"
            )

    def _check_modes(self, root: Deferred) -> None:
        """Refuse to run a recorded call with dropout where it was asked without, or the other way round."""
        now = modes_of(self.engine.model)
        if any(node.modes != now for node in nodes(root) if node.modes):
            raise ModelError(
                "model.eval() or model.train() was called after the model was, and before optimizer.step(), where the "
                "call is carried out: put the model back into the mode that it was in, or evaluate behind the step"
            )

    # ---- checkpoints

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,  # noqa: A002 - Lightning's name
    ) -> None:
        """Write a folder: a snapshot of the engine for the model and the optimizer, and the rest of ``state``, which of
        several processes is the first's. Until the snapshot is whole, the one that was there stands, with its rest."""
        if filter or storage_options is not None:
            raise ConfigError("fabric.save(filter=..., storage_options=...) cannot be honoured: a snapshot is whole")
        folder, rest = Path(path), self._rest_of(state)
        if folder.is_file():
            raise ConfigError(f"fabric.save: {folder} is a file, and this checkpoint is a folder: give another name")
        folder.mkdir(parents=True, exist_ok=True)
        kept, position = self.plain(rest), self.engine.position
        with self._ranks.together("fabric.save"):
            name = self._ranks.once("the rest of a checkpoint", partial(self._write_rest, kept, folder))
        self.engine.position = {**(position or {}), _NAMED: name}
        try:
            self.engine.save(folder / _SNAPSHOT, overwrite=True)
        finally:
            self.engine.position = position
        if self._ranks.rank == 0:
            for old in folder.glob(_REST.format("*")):
                if old.name != name:
                    old.unlink()

    def _write_rest(self, kept: dict[str, Any], folder: Path) -> str:
        """Write the rest of a checkpoint beside that of one of the same step, if there is one; returns the name."""
        step = self.engine.step_count
        names = chain([_REST.format(step)], (_REST.format(f"{step}-{number}") for number in count(2)))
        name = next(name for name in names if not (folder / name).exists())
        self.checkpoint_io.save_checkpoint(kept, folder / name)
        return name

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Take over a folder that ``fabric.save`` wrote; what ``state`` does not name is returned."""
        if not isinstance(state, dict):
            raise ConfigError(
                "fabric.load() needs state={'model': model, 'optimizer': optimizer, ...}: the engine takes both over. "
                "A file of plain weights is loaded into the model before fabric.setup()"
            )
        if self._collected:
            raise ModelError(
                "fabric.load() between fabric.backward() and optimizer.step(), which would compute these losses with "
                "the weights that are loaded: take the step before, or drop them by optimizer.zero_grad()"
            )
        folder, rest = Path(path), self._rest_of(state)
        with opened_snapshot(folder / _SNAPSHOT) as parts:
            file = folder / _name_of_rest(parts[0].meta)
        found = self.checkpoint_io.load_checkpoint(file, weights_only=weights_only)
        if strict and (missing := [key for key in rest if key not in found]):
            raise KeyError(f"{path} has no {missing[0]!r}: leave it out of the state, or load with strict=False")
        self._loads += 1
        self.engine.load(folder / _SNAPSHOT)
        position = self.engine.position or {}
        self.engine.position = {key: value for key, value in position.items() if key != _NAMED} or None
        for key, value in rest.items():
            if key not in found:
                continue
            if callable(getattr(value, "load_state_dict", None)):
                value.load_state_dict(found.pop(key))
            else:
                state[key] = found.pop(key)
        return dict(found)

    def _rest_of(self, state: dict[str, Any]) -> dict[str, Any]:
        """The part of a state that is not the engine's.

        Raises:
            ConfigError: the model, or the optimizer, is there without the other.
        """
        model = [key for key, value in state.items() if isinstance(value, nn.Module)]
        optimizer = [key for key, value in state.items() if isinstance(value, torch.optim.Optimizer)]
        if len(model) != 1 or len(optimizer) != 1:
            raise ConfigError("a checkpoint is of the model and its optimizer together: give both, once, in the state")
        return {key: value for key, value in state.items() if key not in (*model, *optimizer)}

    def teardown(self) -> None:
        if self._engine is not None:
            self._engine.close()
        super().teardown()


def _name_of_rest(meta: Mapping[str, Any]) -> str:
    """The name of the file that the rest of a checkpoint is in. ``meta``: its snapshot's."""
    position = meta.get("position")
    named = position.get(_NAMED) if isinstance(position, Mapping) else None
    return named if isinstance(named, str) and Path(named).name == named else _REST.format(meta["step"])
