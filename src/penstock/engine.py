"""The engine: ``wrap`` a model, then ``step``. Everything else is a room below this one."""

import contextlib
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn

from penstock.config import Budget, Precision, Tier, format_size
from penstock.errors import BudgetError, ConfigError, NonFiniteError, StoreError
from penstock.optim.facade import StreamedOptimizer
from penstock.optim.spec import OptimizerSpec
from penstock.plan.fit import Plan, Request, fit, with_schedule
from penstock.run import batch, snapshots, start
from penstock.run.memory import DeviceSlab, HostSlab
from penstock.run.moves import StepContext
from penstock.run.precision import DTYPES, LossScale, format_of
from penstock.run.residence import Residence, parts_of
from penstock.run.runner import Machinery, Run, Runner
from penstock.run.trace import MemorySample, TraceEvent
from penstock.schedule.check import check
from penstock.schedule.op import LANES, Schedule
from penstock.schedule.place import Placement
from penstock.schedule.program import Program, Stage
from penstock.store.layout import Layout
from penstock.store.store import Store
from penstock.tape.blocks import find_blocks
from penstock.tape.groups import ParamGroup, group_parameters
from penstock.tape.tape import StageFacts, Tape

log = logging.getLogger("penstock")

LossFn = Callable[[nn.Module, Mapping[str, Any]], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """What one step did. Bytes and seconds; lanes are those of ``penstock.schedule.op``."""

    step: int
    """1 for the first"""
    loss: float
    """mean over all items of all micro-batches"""
    grad_norm: float
    """global L2 norm before clipping"""
    tokens: int
    seconds: float
    lr: float
    """of the first param group"""
    clipped: bool
    skipped: bool
    """whether a gradient overflowed, so that nothing was updated"""
    loss_scale: float
    bytes_moved: dict[str, int] = field(default_factory=dict)
    lane_seconds: dict[str, float] = field(default_factory=dict)
    """time that each lane was busy"""
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """per tier"""


def wrap(
    model: nn.Module,
    *,
    optimizer: OptimizerSpec,
    budget: Budget,
    precision: Precision | None = None,
    schedule: Literal["vertical", "horizontal"] | Schedule = "vertical",
    clip_grad_norm: float | None = 1.0,
    device: torch.device | str | None = None,
    blocks: Sequence[nn.Module] | None = None,
    loss_fn: LossFn | None = None,
    seed: int = 0,
    io_threads: int = 4,
    overlap: bool = True,
) -> "Engine":
    """Put a model's state where the budget says and return the engine that trains it.

    Args:
        model: any module with repeated blocks, on the CPU or on the meta device (then it is initialised group by group
            with its own initialisation). Its parameters own no memory afterwards; the engine holds them.
        optimizer: ``penstock.AdamW(...)``, ``Adam``, ``SGD`` or ``Lion``.
        budget: memory per tier, and the directories of the disk tier. A directory that holds a store of the same
            model is continued from its last step.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``; None: bf16 on an accelerator, fp32 on the CPU.
        schedule: a family, or a schedule of your own, which is checked.
        clip_grad_norm: largest global gradient norm; None: no clipping, and the optimizer overlaps with the backward.
        device: None: the accelerator if there is one, else the CPU.
        blocks: the submodules to run one by one; None: found.
        loss_fn: from (model, micro-batch) to a mean loss; None: ``model(**micro_batch).loss``.
        seed: of dropout and of initialisation.
        io_threads: threads that help with disk transfers. Changes no result.
        overlap: False runs everything one op at a time: the oracle.

    Raises:
        ConfigError, BudgetError, ModelError, StoreError: see their messages.
    """
    if clip_grad_norm is not None and not (clip_grad_norm > 0 and math.isfinite(clip_grad_norm)):
        raise ConfigError(f"clip_grad_norm={clip_grad_norm!r}: must be a positive number, or None for no clipping")
    if not isinstance(schedule, Schedule) and schedule not in ("vertical", "horizontal"):
        raise ConfigError(f"schedule={schedule!r}: must be 'vertical', 'horizontal' or a penstock.Schedule")
    if io_threads < 1:
        raise ConfigError(f"io_threads={io_threads}: must be at least 1")
    where = torch.device(device) if device is not None else _default_device()
    if precision is None:
        precision = "fp32" if where.type == "cpu" else "bf16"
    if precision not in DTYPES:
        raise ConfigError(f"precision={precision!r}: must be one of {', '.join(DTYPES)}")
    if isinstance(schedule, Schedule):
        check(schedule)
    return Engine(
        model,
        optimizer=optimizer,
        budget=budget,
        precision=precision,
        schedule=schedule,
        clip_grad_norm=clip_grad_norm,
        device=where,
        blocks=blocks,
        loss_fn=loss_fn or _model_loss,
        seed=seed,
        io_threads=io_threads,
        overlap=overlap,
    )


def _default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _model_loss(model: nn.Module, micro_batch: Mapping[str, Any]) -> torch.Tensor:
    loss = model(**micro_batch).loss
    if loss is None:
        raise ConfigError("the model returned no loss: give micro-batches with 'labels', or pass loss_fn to wrap()")
    assert isinstance(loss, torch.Tensor)
    return loss


@contextlib.contextmanager
def _whole_steps() -> Iterator[None]:
    """Ctrl-C during a step takes effect after it; a second one at once. Leaves a program's own handler alone."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    asked = False

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    signal.signal(signal.SIGINT, receive)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if asked:
        raise KeyboardInterrupt


class Engine:
    """Trains a model whose state lives on device, host and disk. Made by ``wrap``; a context manager.

    Not thread-safe: one thread makes all calls, always the same one.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: OptimizerSpec,
        budget: Budget,
        precision: Precision,
        schedule: Literal["vertical", "horizontal"] | Schedule,
        clip_grad_norm: float | None,
        device: torch.device,
        blocks: Sequence[nn.Module] | None,
        loss_fn: LossFn,
        seed: int,
        io_threads: int,
        overlap: bool,
    ) -> None:
        self.model = model
        self.budget = budget
        self.device = device
        self.step_count = 0
        """Steps taken, skipped ones included."""
        self.trace: list[TraceEvent] = []
        """Every op of the last step, as it ran."""
        self.counters: list[MemorySample] = []
        """Bytes in use per tier over the last step."""
        self._began = time.perf_counter()
        self._updates = 0
        self._schedule = schedule
        self._clip = clip_grad_norm
        self._seed = seed
        self._dtype = DTYPES[precision]
        self._scale = LossScale.of(precision)
        self._plans: list[tuple[tuple[batch.Shapes, ...], Plan, tuple[StageFacts, ...]]] = []
        self._runner: Runner | None = None
        self._placed: Placement | None = None
        self._broken: str | None = None
        self._closed = False
        found = find_blocks(model, blocks)
        from_meta = any(p.is_meta for p in model.parameters())
        if from_meta:
            start.take_over(model, self._dtype, device)
        self._groups = group_parameters(model, found)
        self.optimizer = StreamedOptimizer(
            optimizer, [(s.name, s.parameter) for g in self._groups for s in g.slices if s.trainable]
        )
        form = format_of(precision, optimizer.moments)
        self._description = start.describe_model(self._groups, precision, type(optimizer).__name__)
        self._store, resumed = self._open_store(form_parts=form, io_threads=io_threads)
        try:
            if from_meta:
                from penstock.tape.init import materialise_buffers

                materialise_buffers(model, device, seed)
            start.buffers_to(model, device)
            specs = [g.spec for g in self._groups]
            self._check_home(specs, form)
            self._residence = Residence(specs, form, self._dtype, device, self._store)
            if resumed is None:
                start.fill(model, self._groups, self._residence, from_meta=from_meta, seed=seed)
            else:
                for group in self._groups:
                    group.detach(self._dtype, device)
                self._adopt(resumed)
                log.warning("continuing the store in %s from step %d", self.budget.disk_paths[0], self.step_count)
            self._tape = Tape(model, found, self._groups, loss_fn, seed=seed, device=device)
        except BaseException:
            if self._store is not None:
                self._store.close()
            raise
        self._machinery = Machinery(
            tape=self._tape,
            groups=self._groups,
            residence=self._residence,
            runs={g.spec.index: self._runs(g) for g in self._groups if g.spec.trainable},
            device=device,
            scratch_paths=tuple(path / "scratch" for path in budget.disk_paths),
            io_threads=io_threads,
            threads=torch.get_num_threads(),
            overlap=overlap,
        )
        self._commit(clean=True)

    # ---- training

    def step(self, micro_batches: Sequence[Mapping[str, Any]]) -> StepStats:
        """One optimizer step over the micro-batches: gradients are summed, weighted by their number of labels.

        Micro-batches are mappings of tensors, what ``loss_fn`` (or the model) takes. Their number and sizes may change
        from step to step; a plan is made whenever one is larger than all before.

        Raises:
            ModelError: the list is empty, or a micro-batch takes another way through the model than the first.
            BudgetError: a step of this size does not fit; says what would.
            NonFiniteError: a loss is infinite or NaN (nothing was updated).
            StoreError: the disk failed.
            KeyboardInterrupt: Ctrl-C arrived; the step is complete.
        """
        self._check_usable()
        with _whole_steps():
            return self._step(micro_batches)

    def _step(self, micro_batches: Sequence[Mapping[str, Any]]) -> StepStats:
        began = time.perf_counter()
        batch.check(micro_batches)
        weights = batch.loss_weights(self.model, micro_batches)
        runner = self._runner_for(micro_batches, train=True)
        context = StepContext(
            step=self.step_count + 1,
            count=self._updates + 1,
            hypers=self.optimizer.hypers(),
            clip=self._clip,
            loss_scale=self._scale.value,
        )
        self._commit(clean=False)
        try:
            losses = runner.run(context, self._to_device(micro_batches), weights)
        except NonFiniteError:  # found before the first update
            self._commit(clean=True)
            raise
        except BaseException as error:
            self._broken = f"step {context.step} was broken off by {type(error).__name__}: {error}"
            raise
        assert context.norm is not None
        if not context.skip and not math.isfinite(context.norm):
            self._broken = f"a gradient of step {context.step} was infinite or NaN, and the state was updated with it"
            raise NonFiniteError(f"{self._broken}. Load a snapshot; with clip_grad_norm set such a step is skipped")
        self.step_count += 1
        self._updates += not context.skip
        if context.skip:
            log.warning("step %d: a gradient was infinite or NaN; nothing was updated", context.step)
        self._scale.update(overflow=context.skip)
        self.optimizer.record_step()
        self._commit(clean=True)
        return self._stats(runner, context, micro_batches, losses, weights, time.perf_counter() - began)

    def evaluate(self, micro_batches: Sequence[Mapping[str, Any]]) -> float:
        """Mean loss of the micro-batches in evaluation mode, forward only; changes nothing.

        Raises: as ``step``.
        """
        self._check_usable()
        batch.check(micro_batches)
        weights = batch.loss_weights(self.model, micro_batches)
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            runner = self._runner_for(micro_batches, train=False)
            context = StepContext(
                step=self.step_count, count=1, hypers=self.optimizer.hypers(), clip=None, loss_scale=1.0
            )
            losses = runner.run(context, self._to_device(micro_batches), weights)
        finally:
            for module, training in modes.items():
                module.training = training
        return math.fsum(w * loss for w, loss in zip(weights, losses, strict=True))

    @property
    def plan(self) -> Plan:
        """The plan of the last step or evaluation.

        Raises:
            ConfigError: there was none yet; a plan needs to see a micro-batch.
        """
        if self._runner is None:
            raise ConfigError("there is no plan before the first step: it depends on the micro-batches' shapes")
        return self._runner.plan

    def _to_device(self, micro_batches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [batch.to_device(mb, self.device, self._dtype) for mb in micro_batches]

    def _stats(
        self,
        runner: Runner,
        context: StepContext,
        micro_batches: Sequence[Mapping[str, Any]],
        losses: Sequence[float],
        weights: Sequence[float],
        seconds: float,
    ) -> StepStats:
        self.trace = runner.trace(context.step, self._began)
        self.counters = runner.samples(self._began)
        busy = dict.fromkeys(LANES, 0.0)
        for event in self.trace:
            busy[event.lane] += event.end - event.start  # type: ignore[index]
        assert context.norm is not None
        return StepStats(
            step=context.step,
            loss=math.fsum(w * loss for w, loss in zip(weights, losses, strict=True)),
            grad_norm=context.norm,
            tokens=sum(batch.tokens(mb) for mb in micro_batches),
            seconds=seconds,
            lr=float(context.hypers[0].lr) if context.hypers else 0.0,
            clipped=self._clip is not None and not context.skip and context.norm > self._clip,
            skipped=context.skip,
            loss_scale=context.loss_scale,
            bytes_moved=dict(runner.plan.schedule.bytes_per_lane()),
            lane_seconds=dict(busy),
            peak_bytes=dict(runner.pools.peak),
        )

    # ---- plans

    def _runner_for(self, micro_batches: Sequence[Mapping[str, Any]], *, train: bool) -> Runner:
        shapes = tuple(batch.shapes(mb) for mb in micro_batches)
        for planned, plan, facts in self._plans:
            same = plan.settings.train == train and len(planned) == len(shapes)
            if same and all(batch.covers(p, s) for p, s in zip(planned, shapes, strict=True)):
                return self._use(plan, facts)
        if self._runner is not None:
            self._runner.close()
            self._runner = None
        largest = max(micro_batches, key=batch.nbytes)
        stages = self._probe(largest, train=train)
        plan = self._fit(stages, micro_batches, train=train)
        if isinstance(self._schedule, str):
            check(plan.schedule)
        if train:
            self._placed = plan.settings.place
        self._residence.settle(plan.settings.place)
        shape = max(shapes, key=lambda s: sum(math.prod(dims) for _, dims, _ in s))
        entry = ((shape,) * len(shapes), plan, self._tape.facts)
        self._plans = [*(p for p in self._plans if p[1].settings.train != train), entry]
        return self._use(plan, self._tape.facts)

    def _use(self, plan: Plan, facts: tuple[StageFacts, ...]) -> Runner:
        if self._runner is None or self._runner.plan is not plan:
            if self._runner is not None:
                self._runner.close()
                self._runner = None
            self._runner = Runner(plan, facts, self._machinery)
        return self._runner

    def _fit(self, stages: Sequence[Stage], micro_batches: Sequence[Mapping[str, Any]], *, train: bool) -> Plan:
        own = self._schedule
        request = Request(
            program=Program(groups=tuple(g.spec for g in self._groups), stages=tuple(stages)),
            budget=self.budget,
            form=self._residence.form,
            micro_batches=len(micro_batches),
            wait=self._clip is not None or self._scale.dynamic,
            train=train,
            family="horizontal" if own == "horizontal" or getattr(own, "name", "") == "horizontal" else "vertical",
            inputs=sum(batch.nbytes(mb) for mb in micro_batches),
        )
        plan = self._best(request)
        return plan if isinstance(own, str) or not train else with_schedule(request, plan, own)

    def _best(self, request: Request) -> Plan:
        """The plan for a request; what is resident stays where it is if it can."""
        keep = self._placed
        if keep is None and not request.train:  # nothing has been placed: evaluate from where the state is at home
            home: Tier = "disk" if self._store is not None else "host"
            count = len(self._groups)
            keep = Placement(weights=(home,) * count, state=(home,) * count, gradients="host", checkpoints="device")
        try:
            return fit(request, keep)
        except BudgetError:
            if keep is None:
                raise
            return fit(request)

    def _probe(self, micro_batch: Mapping[str, Any], *, train: bool) -> tuple[Stage, ...]:
        slabs: dict[int, DeviceSlab] = {}
        bounce = HostSlab(8 << 20, pin=self.device.type == "cuda")

        def load(g: int) -> None:
            name = f"weights.{g}"
            if self._residence.tier_of(name) == "device":
                self._groups[g].attach(self._residence.array(name))
                return
            part = self._residence.parts[name]
            slabs[g] = DeviceSlab(part.nbytes, self.device)
            flat = slabs[g].bytes[: part.nbytes].view(part.dtype)
            for first, piece in self._residence.pieces(name, bounce):
                self._residence.read(name, first, piece)
                flat[first : first + piece.numel()].copy_(piece)
            self._groups[g].attach(flat)

        def unload(g: int) -> None:
            self._groups[g].detach(self._dtype, self.device)
            slab = slabs.pop(g, None)
            if slab is not None:
                slab.close()

        try:
            return self._tape.probe(batch.to_device(micro_batch, self.device, self._dtype), load, unload, train=train)
        finally:
            for g in list(slabs):
                unload(g)
            bounce.close()

    def _runs(self, group: ParamGroup) -> tuple[Run, ...]:
        """Ranges of a group's buffer by torch param group; padding goes with what precedes it."""
        runs: list[list[int]] = []
        for s in (s for s in group.slices if s.trainable):
            hyper = self.optimizer.group_of(s.parameter)
            if runs and runs[-1][2] == hyper:
                continue
            if runs:
                runs[-1][1] = s.offset
            runs.append([s.offset, group.spec.trainable, hyper])
        return tuple((first, end, hyper) for first, end, hyper in runs)

    # ---- state

    def master_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 tensor on the CPU) of every parameter, frozen ones in the compute dtype's values.

        One parameter is in memory at a time: what was yielded is overwritten only if you keep no reference.
        """
        self._check_usable()
        for group in self._groups:
            master = f"master.{group.spec.index}" if self._residence.form.split else f"weights.{group.spec.index}"
            for s in group.slices:
                yield s.name, self._fetch(master if s.trainable else f"weights.{group.spec.index}", s.offset, s.shape)

    def _fetch(self, name: str, offset: int, shape: torch.Size) -> torch.Tensor:
        """A parameter out of a group's array, whose reads must be whole pages."""
        part, out = self._residence.parts[name], torch.empty(shape, dtype=torch.float32)
        flat, end = out.view(-1), offset + shape.numel()
        bounce = HostSlab(8 << 20)
        page = 4096
        step = bounce.nbytes // part.dtype.itemsize // page * page
        for first in range(offset // page * page, end, step):
            piece = bounce.bytes[: min(step, part.numel - first) * part.dtype.itemsize].view(part.dtype)
            self._residence.read(name, first, piece)
            a, b = max(first, offset), min(first + piece.numel(), end)
            flat[a - offset : b - offset].copy_(piece[a - first : b - first])
        bounce.close()
        return out

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write a snapshot: parameters, optimizer state, step, random state, settings of the optimizer; exact.

        Raises:
            StoreError: the path exists (and ``overwrite`` is not set), or the disk is full or fails.
        """
        self._check_usable()
        meta = {"model": self._description, **self._progress()}
        snapshots.save(Path(path), self._residence, self.model, meta, overwrite=overwrite)

    def load(self, path: str | Path) -> None:
        """Take over a snapshot. Training goes on exactly as it would have where it was saved.

        Raises:
            StoreError: the snapshot is missing, damaged, or made for another model, precision or optimizer.
        """
        self._check_open()
        self._commit(clean=False)
        meta = snapshots.load(Path(path), self._residence, self.model, self._description)
        self._adopt(meta)
        for mine, saved in zip(self.optimizer.param_groups, meta["param_groups"], strict=True):
            mine.update({k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()})
        self._broken = None
        self._commit(clean=True)

    def close(self) -> None:
        """Bring what is in memory to the store and give everything back. The model's parameters stay placeholders."""
        if self._closed:
            return
        self._closed = True
        if self._runner is not None:
            self._runner.close()
        self._tape.close()
        for group in self._groups:
            group.detach(self._dtype, self.device)
        if self._store is not None:
            if self._broken is None:
                self._residence.to_disk()
                self._store.commit({**self._progress(), "clean": True})
            self._store.close()
        self._residence.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _progress(self) -> dict[str, Any]:
        """All that a run is besides its arrays. Random state is a function of seed and step."""
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return {
            "step": self.step_count,
            "updates": self._updates,
            "seed": self._seed,
            "loss_scale": asdict(self._scale),
            "param_groups": groups,
        }

    def _adopt(self, progress: Mapping[str, Any]) -> None:
        self.step_count = int(progress["step"])
        self._updates = int(progress["updates"])
        self._scale = LossScale(**progress["loss_scale"])
        if progress["seed"] != self._seed:
            raise ConfigError(
                f"this run was started with seed={progress['seed']}, not {self._seed}: random numbers would differ. "
                f"Pass seed={progress['seed']}"
            )

    # ---- the store

    def _open_store(self, *, form_parts: Any, io_threads: int) -> tuple[Store | None, Mapping[str, Any] | None]:
        """Open or create the disk tier; and the progress to continue from, if it holds a trained model."""
        paths = self.budget.disk_paths
        if not paths:
            return None, None
        parts = [part for g in self._groups for part in parts_of(g.spec, form_parts, self._dtype)]
        if not Store.exists(paths):
            layout = Layout.build((part.name, part.nbytes, 1) for part in parts)
            return Store.create(paths, layout, model=self._description, io_threads=io_threads), None
        store = Store.open(paths, io_threads=io_threads)
        try:
            store.require_model(self._description)
            record = store.last_commit()
            if record is not None and not record["clean"]:
                raise StoreError(
                    f"{paths[0]}: the run that used this store was stopped in step {record['step'] + 1}, so its state is "
                    "half updated. Remove the directory to start over (and load a snapshot if there is one)"
                )
        except BaseException:
            store.close()
            raise
        return store, record

    def _commit(self, *, clean: bool) -> None:
        """Note whether the store is whole. It is only when all state lives there and no step is under way."""
        if self._store is None:
            return
        everything = all(self._residence.tier_of(name) == "disk" for name in self._residence.parts)
        whole = clean and everything and self._broken is None
        last = self._store.last_commit()
        if whole or last is None or last["clean"]:
            self._store.commit({**self._progress(), "clean": whole})

    def _check_home(self, specs: Sequence[Any], form: Any) -> None:
        """Without a disk, all state must fit into memory: said before anything is allocated."""
        if self._store is not None:
            return
        need = sum(part.nbytes for spec in specs for part in parts_of(spec, form, self._dtype))
        have = self.budget.host_bytes + (0 if self.device.type == "cpu" else self.budget.device_bytes)
        if need > self.budget.host_bytes + self.budget.device_bytes:
            raise BudgetError(
                f"weights and optimizer state take {format_size(need)}, and the budget gives {format_size(have)} of "
                "memory: give budget.disk a directory, or raise budget.host"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this engine is closed: wrap the model again")

    def _check_usable(self) -> None:
        self._check_open()
        if self._broken is not None:
            raise StoreError(f"{self._broken}. The state is half updated: engine.load a snapshot, or start over")
