"""Settings of an engine as Python gives them, checked for their types: what is wrong says what to write.

LoopArguments    what every loop that trains on an engine asks: that of ``wrap``'s caller, a Trainer's, Fabric's
WrapArguments    all keyword arguments of ``wrap``
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.config import Budget, Family, StreamConfig
from penstock.config.checked import check_field, check_value
from penstock.config.engine import EngineConfig, RunConfig
from penstock.config.optimizer import SGD, Adam, AdamW, Lion, Muon, OptimizerSpec
from penstock.documents.typed import hints_of, shown
from penstock.engine.start import WeightSource
from penstock.errors import ConfigError
from penstock.hardware.machine import Machine
from penstock.optim.from_torch import spec_of
from penstock.schedule.ir.ops import Schedule
from penstock.tape.suspended import LossFn


@dataclass(frozen=True, kw_only=True)
class LoopArguments(EngineConfig):
    """Settings of an engine as Python gives them, whoever's loop it trains in.

    | field | meaning |
    |---|---|
    | ``budget`` | memory per tier, and the directories of the disk tier. One that holds a store of the same model is
    continued from its last step. With directories all that is trained lives there and every step is durable, unless
    the budget says otherwise; without any, a kill costs what was not saved (``Engine.save``) |
    | ``plan`` | the machine to plan for. ``"auto"``: the profile that ``penstock doctor`` has stored for this machine
    with this kind of device and the budget's directories; what is not stored is measured, in a few seconds, and kept
    (``PENSTOCK_MEASURE=never`` in the environment: it is not). With a profile, placement, chunk size and depths are
    those that are predicted to be fastest, and ``Engine.prediction`` tells what was predicted. None, or where nothing
    can be measured: state is placed by an order of preference, and nothing is predicted. Of several ranks, rank 0's
    counts. Changes no result |
    | ``blocks`` | the submodules to run one by one; None: found |
    | ``io_threads`` | threads that wait for the disk, half for reads and half for writes, each for a chunk: 1 to 32.
    Changes no result |
    | ``weights`` | where the values of a model on the meta device come from, such as
    ``penstock.hf.load(folder).weights``, which streams the shards of a folder. Not read where a store is continued.
    None: the model's own values, or on the meta device its own initialisation |
    | ``init`` | whether a model whose folder's weights are waiting (``penstock.hf.load``) initialises itself instead.
    Without this, and without ``weights``, it is refused |
    """

    schedule: Family | Schedule = "vertical"
    plan: Machine | Literal["auto"] | None = "auto"
    blocks: Sequence[nn.Module] | None = None
    io_threads: int = 4
    weights: WeightSource | None = None
    init: bool = False

    def __post_init__(self) -> None:
        blocks: object = self.blocks
        if isinstance(blocks, Iterator):  # such as ``model.children()``: they are looked at more than once
            object.__setattr__(self, "blocks", tuple(blocks))
        check_types(self)
        super().__post_init__()
        if not 1 <= self.io_threads <= 32:
            raise ConfigError(f"io_threads={self.io_threads}: must be at least 1 and at most 32")


@dataclass(frozen=True, kw_only=True)
class WrapArguments(LoopArguments, RunConfig):
    """The keyword arguments of ``wrap``.

    | field | meaning |
    |---|---|
    | ``optimizer`` | ``penstock.AdamW(...)``, ``Adam``, ``SGD``, ``Lion`` or ``Muon``. Its settings hold also where a
    store is continued; a snapshot brings its own |
    | ``loss_fn`` | from (model, micro-batch) to a mean loss; None: ``model(**micro_batch).loss``. Micro-batches count
    by their labels that are not -100 (a share that a 16-bit loss rounds to 16 bits). Whether the first label of a row
    counts, too, is found out in the first pass, from the targets that torch's losses are called with
    (``StepStats.labels``); where that cannot be seen, ``step`` wants ``loss_weights`` |
    | ``mesh`` | the ranks that train the model together, each with its part of all state: ``penstock.torchrun_mesh()``
    in each process that ``torchrun`` has started, or another ``DeviceMesh`` with one axis, ``"dp_shard"``. All of them
    make the same calls, each with its own micro-batches, as many as the others; or with the axis ``"pp"``
    (``penstock.torchrun_mesh(pp=N)``) as a pipeline, in which each has some of the blocks, and all are given all
    micro-batches; or with ``"cp"`` behind these, so that neighbours share each sequence. The budget's ``host`` is for
    all ranks of the machine, its ``device`` for each; directories are dealt out. None: one process |
    | ``overlap`` | False runs everything one op at a time: the oracle |
    | ``run`` | the folder of a run of ``penstock train`` whose state is in the budget's directories, to go on with it.
    A store belongs to its run: nobody else may open it. None: the store belongs to no run |
    """

    optimizer: OptimizerSpec
    loss_fn: LossFn | None = None
    device: torch.device | str | None = None
    run: str | Path | None = None
    mesh: DeviceMesh | None = None
    overlap: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replan and not self.overlap:
            raise ConfigError("replan has no effect with overlap=False, whose steps nothing predicts: leave one out")

    @property
    def follows_machine(self) -> bool:
        """True if plans may change for what steps show of the machine."""
        return self.replan is not False and self.overlap and not self.has_own_schedule


def check_types(arguments: StreamConfig) -> None:
    """Check all fields for their types, the ones that people mistake most with words of their own, and make numbers
    Python's own.

    Raises:
        ConfigError: one is not what it must be; with what to write instead, where that is known.
    """
    for key, hint in hints_of(type(arguments)).items():
        value = getattr(arguments, key)
        if key in _CHECKS:
            _CHECKS[key](value)
        elif key in _OPTIONAL:
            fits, what = _OPTIONAL[key]
            if value is not None and not fits(value):
                raise ConfigError(f"{key} is {_a(value)}: give {what}")
        else:
            check_field(arguments, key, hint, key)


_SPECS = (AdamW, Adam, SGD, Lion, Muon)


def check_model(value: Any) -> None:
    """Raises:
    ConfigError: it is no module; with how to come by one, where that is clear.
    """
    if isinstance(value, type) and issubclass(value, nn.Module):
        raise ConfigError(f"model is the class {value.__name__}: give a model of it, {value.__name__}(...)")
    if isinstance(value, str):
        raise ConfigError(
            f"model={shown(value)}: give a module. One from a folder: loaded = penstock.hf.load({value!r}), then "
            "wrap(loaded.model, weights=loaded.weights, ...)"
        )
    if not isinstance(value, nn.Module):
        raise ConfigError(f"model is {_a(value)}: give a torch.nn.Module")


def _optimizer(value: Any) -> None:
    if isinstance(value, OptimizerSpec) and type(value) is not OptimizerSpec:
        return
    names = ", ".join(f"penstock.{spec.__name__}(...)" for spec in _SPECS)
    if isinstance(value, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer is one of torch's ({type(value).__name__}), which would hold all of the state in memory. The "
            f"engine needs only to be told which: {_translated(value) or f'one of {names}'}. The learning rate is "
            "scheduled by engine.optimizer.param_groups"
        )
    if isinstance(value, type) and issubclass(value, (*_SPECS, torch.optim.Optimizer)):
        raise ConfigError(f"optimizer is the class {value.__name__}: give its settings too, one of {names}")
    near = difflib.get_close_matches(str(value).lower(), [spec.__name__.lower() for spec in _SPECS], n=1)
    found = next((spec for spec in _SPECS if near and spec.__name__.lower() == near[0]), None)
    hint = f"penstock.{found.__name__}(lr=...)" if isinstance(value, str) and found else f"one of {names}"
    raise ConfigError(f"optimizer is {_a(value)}: give {hint}")


def _translated(optimizer: torch.optim.Optimizer) -> str | None:
    """The engine's optimizer that does what one of torch's would; None: there is none."""
    first, *others = ({k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups)
    try:
        spec = spec_of(type(optimizer), first)
    except ConfigError:
        return None
    settings = ", ".join(f"{key}={value!r}" for key, value in spec.group_settings.items())
    overrides = ", overrides=(penstock.Override(match=..., ...), ...)" if any(o != first for o in others) else ""
    return f"penstock.{type(spec).__name__}({settings}{overrides})"


def _budget(value: Any) -> None:
    if isinstance(value, Budget):
        return
    written = 'penstock.Budget(device="4GiB", host="8GiB", disk="/ssd/run")'
    if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
        written = f"penstock.Budget({', '.join(f'{key}={shown(item)}' for key, item in value.items())})"
    which = " does not say of which memory" if isinstance(value, str | int) and not isinstance(value, bool) else ""
    raise ConfigError(f"budget={shown(value)}{which}: give a budget, as {written}")


def _are_modules(value: Any) -> bool:
    several = isinstance(value, Iterable) and not isinstance(value, str | type)
    return several and all(isinstance(block, nn.Module) for block in value)


def _is_source(value: Any) -> bool:
    known = callable(getattr(value, "fill", None)) and hasattr(type(value), "__contains__")
    return known and not isinstance(value, type)


def _schedule(value: Any) -> None:
    if not isinstance(value, Schedule) and value not in get_args(Family):
        known = ", ".join(map(repr, get_args(Family)))
        raise ConfigError(f"schedule={shown(value)}: must be one of {known}, or a penstock.Schedule")


def _plan(value: Any) -> None:
    if value is not None and value != "auto" and not isinstance(value, Machine):
        raise ConfigError(f"plan={shown(value)}: must be 'auto', a penstock.hardware.machine.Machine or None")


def check_compile(value: Any) -> None:
    """Raises:
    ConfigError: it is no backend of ``torch.compile``.
    """
    check_value("compile", value, bool | str)
    if isinstance(value, str) and value not in (known := torch.compiler.list_backends(exclude_tags=())):
        raise ConfigError(
            f"compile={shown(value)} is no backend of torch.compile's: give True, or one of {', '.join(known)}"
        )


def _a(value: Any) -> str:
    """A value for a message: its type, and itself where that is short."""
    return f"{shown(value, 60)}, {type(value).__name__}" if value is not None else "None"


_CHECKS: Mapping[str, Callable[[Any], None]] = {
    "optimizer": _optimizer,
    "budget": _budget,
    "compile": check_compile,
    "schedule": _schedule,
    "plan": _plan,
}
_OPTIONAL: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "mesh": (
        lambda value: isinstance(value, DeviceMesh),
        (
            "penstock.torchrun_mesh() in each process that torchrun has started, one of "
            "torch.distributed.device_mesh.init_device_mesh, or None"
        ),
    ),
    "blocks": (_are_modules, "a list of the model's own modules, or None to have them found"),
    "loss_fn": (callable, "a function of (model, micro-batch), or None"),
    "weights": (_is_source, "penstock.hf.load(folder).weights, or None"),
}
"""By argument that may be None: a check of other values, and the words for what to give in place of a wrong one."""
