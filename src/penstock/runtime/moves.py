"""What each kind of op does: the only place where bytes of a step are moved or changed.

``Moves`` looks buffers up by the names that the schedule gave them, and finds everything else (resident arrays, the
tape, the store) by group and chunk. It decides nothing: order, place and sizes are the schedule's.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.errors import ModelError, NonFiniteError
from penstock.optim import kernels
from penstock.optim.crossing import copy_cast
from penstock.optim.fallback import fold_squares
from penstock.optim.norm import grad_norm
from penstock.runtime.context import NonFinite, StepContext
from penstock.runtime.pools import Pools
from penstock.runtime.stepping import Stepping
from penstock.runtime.streams import CudaStreams, HostStreams
from penstock.schedule.op import Op, Schedule
from penstock.schedule.place import FP32, Chunk, Settings, chunks, page_up
from penstock.schedule.program import ALIGN, Program
from penstock.state.arrays import StateArrays, numpy_bytes
from penstock.store.store import Store
from penstock.tape.groups import ParamGroup
from penstock.tape.tape import Tape

_KINDS = (
    *("f", "b", "e", "rw", "uw", "ww", "un"),
    *("dg", "ag", "ng", "nd", "norm", "wg", "rg"),
    *("rs", "op", "ws", "od", "dc", "wc", "rc", "uc", "cm"),
)


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy bytes of equal length; asynchronous when a GPU is involved, else without torch's thread pool."""
    if target.device.type == source.device.type == "cpu":
        np.copyto(numpy_bytes(target), numpy_bytes(source))
    else:
        target.copy_(source, non_blocking=True)


def _left(schedule: Schedule) -> set[str]:
    """Buffers into which a step reads gradients that the step before has left on disk."""
    return {name for op in schedule.lanes["read"] if op.word.kind == "RG" for name in op.writes if name[0] == "r"}


class _Tally(threading.local):
    """Bytes that the op under way in a thread has moved."""

    moved = 0


class Moves:
    """The actions of one plan. ``context`` is set anew for each step."""

    def __init__(
        self,
        program: Program,
        settings: Settings,
        pools: Pools,
        groups: Sequence[ParamGroup],
        arrays: StateArrays,
        tape: Tape,
        scratch: Store | None,
        streams: HostStreams | CudaStreams,
        runs: Mapping[int, Sequence[tuple[int, int, int]]],
        threads: int,
        schedule: Schedule,
        narrow: frozenset[int],
    ) -> None:
        """``runs``: for each group, (first element, end, index of hyper-parameters) in order of elements. ``narrow``:
        as in ``Plan``."""
        assert settings.ranks == 1
        self._normed = "NORM" in schedule.by_id
        self._speculative = schedule.speculative
        carried = {name for name, _, _ in schedule.carried}
        self.late = frozenset(
            op.id[2:]
            for op in schedule.lanes["cpu"]
            if op.word.kind == "OP" and op.reads[0] in carried | _left(schedule)
        )
        """group and chunk, as ids have them, of the chunks that are stepped in the next step"""
        self.context = StepContext(step=0, count=1, hypers=(), clip=None, loss_scale=1.0)
        self._program = program
        self._settings = settings
        self._place = settings.place
        self._pools = pools
        self._groups = groups
        self._arrays = arrays
        self._tape = tape
        self._scratch = scratch
        self._streams = streams
        self._threads = threads
        self._cuts = [chunks(g, settings.chunk) for g in program.groups]
        self._dtype = arrays.dtype
        self._grad_dtype = torch.bfloat16 if settings.grad_dtype == "bf16" else torch.float32
        self._narrow = narrow
        self._stepping = Stepping(groups, runs, threads, self._grad_dtype)
        self._attached: dict[int, str] = {}
        self._accumulators: dict[int, torch.Tensor] = {}
        self._device_norms: dict[int, torch.Tensor] = {}
        tape.on_gradient = self._accumulate
        self._tally = _Tally()
        self._under_way: Op | None = None  # in the compute lane, while gradients are made
        self._kinds: dict[str, Callable[[Op], None]] = {name.upper(): getattr(self, f"_{name}") for name in _KINDS}

    def __call__(self, op: Op) -> int:
        """Do what an op says; the bytes that it has moved, counted where they are. Arithmetic moves what is planned."""
        self._tally.moved = 0
        self._kinds[op.word.kind](op)
        return op.nbytes if op.lane == "cpu" else self._tally.moved

    # ---- what is moved is counted

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        copy(target, source)
        self._tally.moved += source.numel() * source.itemsize

    def _read(self, name: str, start: int, out: torch.Tensor, *, before: bool = False) -> None:
        self._arrays.read(name, start, out, before=before)
        self._tally.moved += out.numel() * out.itemsize

    def _write(self, name: str, start: int, data: torch.Tensor) -> None:
        self._arrays.write(name, start, data)
        self._tally.moved += data.numel() * data.itemsize

    def _read_scratch(self, name: str, offset: int, out: NDArray[np.uint8]) -> None:
        assert self._scratch is not None
        self._scratch.read(name, offset, out)
        self._tally.moved += out.nbytes

    def _write_scratch(self, name: str, offset: int, data: NDArray[np.uint8]) -> None:
        assert self._scratch is not None
        self._scratch.write(name, offset, data)
        self._tally.moved += data.nbytes

    # ---- views

    def _chunk(self, op: Op) -> Chunk:
        return self._cuts[op.word.group][op.word.chunk]

    def _view(self, name: str, numel: int, dtype: torch.dtype = torch.float32, offset: int = 0) -> torch.Tensor:
        """``numel`` elements of a buffer, from byte ``offset``."""
        return self._pools.buffer(name)[offset : offset + numel * dtype.itemsize].view(dtype)

    # ---- compute

    def _f(self, op: Op) -> None:
        self._attach(op)
        self._tape.forward(op.word.stage, op.word.micro_batch)
        self._detach(op)

    def _e(self, op: Op) -> None:
        self._under_way = op
        self._attach(op)
        self._tape.forward(op.word.stage, op.word.micro_batch)
        self._detach(op)
        if op.word.micro_batch == self._settings.micro_batches - 1:
            self._check_losses()

    def _b(self, op: Op) -> None:
        self._under_way = op
        self._attach(op)
        self._tape.backward(op.word.stage, op.word.micro_batch)
        self._detach(op)

    def _check_losses(self) -> None:
        """Before any optimizer step: a loss that is no number must not reach the state."""
        for m, loss in enumerate(torch.stack(self._tape.losses()).tolist()):
            if not math.isfinite(loss):
                self.context.failure = NonFiniteError(
                    f"step {self.context.step}, micro-batch {m}: the loss is {loss}. Nothing was updated. Look at that "
                    "micro-batch, lower the learning rate, or use precision='bf16' instead of 'fp16'"
                )
                return

    def _attach(self, op: Op) -> None:
        stage = self._program.stages[op.word.stage]
        for name in op.reads:
            if name[0] == "W":
                g = int(name[1:].partition("@")[0])
                if self._attached.get(g) != name:
                    self._groups[g].attach(self._view(name, self._program.groups[g].numel, self._dtype))
                    self._attached[g] = name
        for g in {*stage.forward_reads, *stage.backward_reads}:
            if self._place.weights[g] == "device" and g not in self._attached:
                self._groups[g].attach(self._arrays.array(f"weights.{g}"))
                self._attached[g] = "device"
        taken = {name for name, _ in op.takes}
        for name in op.writes:
            if name[0] == "G":
                g = int(name[1:].partition("@")[0])
                flat = self._view(name, self._program.groups[g].trainable)
                if name in taken:
                    flat.zero_()
                for piece, view in self._groups[g].views(flat):
                    self._accumulators[id(piece.parameter)] = view

    def _detach(self, op: Op) -> None:
        for name in op.gives:
            if name[0] == "W":
                g = int(name[1:].partition("@")[0])
                if self._attached.get(g) == name:
                    self._groups[g].detach(self._dtype, self._arrays.device)
                    del self._attached[g]
        self._accumulators.clear()

    def _accumulate(self, parameter: torch.nn.Parameter, stage: int, gradient: torch.Tensor) -> None:
        target = self._accumulators.get(id(parameter))
        if target is None:
            name = next(
                (s.name for g in self._groups for s in g.slices if s.parameter is parameter), "an unknown parameter"
            )
            raise ModelError(
                f"{name} received a gradient in stage {stage} ({self._program.stages[stage].name}), which the first "
                "micro-batch did not show. Which stage uses a parameter must not depend on the data"
            )
        target.add_(gradient)
        self.context.touched.add(id(parameter))
        if self.context.search and self.context.found is None and not bool(torch.isfinite(gradient).all()):
            self.context.found = self._non_finite(parameter, stage)

    def _non_finite(self, parameter: torch.nn.Parameter, stage: int) -> NonFinite:
        name = next(s.name for g in self._groups for s in g.slices if s.parameter is parameter)
        assert self._under_way is not None
        return NonFinite(
            parameter=name,
            stage=stage,
            block=self._program.stages[stage].name,
            micro_batch=self._under_way.word.micro_batch,
        )

    # ---- weights

    def _rw(self, op: Op) -> None:
        c = self._chunk(op)
        self._read(f"weights.{op.word.group}", c.start, self._view(op.writes[0], c.numel, self._dtype))

    def _uw(self, op: Op) -> None:
        c, g = self._chunk(op), op.word.group
        if op.reads:
            source = self._view(op.reads[0], c.numel, self._dtype)
        else:
            source = self._arrays.array(f"weights.{g}")[c.start : c.start + c.numel]
        self._copy(self._view(op.writes[0], c.numel, self._dtype, c.start * self._dtype.itemsize), source)

    def _ww(self, op: Op) -> None:
        if self._idle(op):
            return
        c = self._chunk(op)
        self._write(f"weights.{op.word.group}", c.start, self._view(op.reads[0], c.numel, self._dtype))

    def _un(self, op: Op) -> None:
        c = self._chunk(op)
        self._arrays.about_to_change(op.word.group, c.start, c.numel)
        home = self._arrays.array(f"weights.{op.word.group}")[c.start : c.start + c.numel]
        self._copy(home, self._view(op.reads[0], c.numel, self._dtype))

    # ---- gradients

    def _gradient(self, op: Op, name: str) -> torch.Tensor:
        """A chunk's gradient in a host buffer, as wide as it crosses to it."""
        dtype = torch.bfloat16 if op.word.group in self._narrow else torch.float32
        return self._view(name, self._chunk(op).numel, dtype)

    def _dg(self, op: Op) -> None:
        c, target = self._chunk(op), self._gradient(op, op.writes[0])
        source = self._view(op.reads[0], c.numel, offset=c.start * FP32)
        if op.word.group not in self._narrow:
            self._copy(target, source)
            return
        # Where host and device are one memory the cast is the copy, and has no use for the buffer.
        staging = None if source.device.type == "cpu" else self._view(op.writes[1], c.numel, torch.bfloat16)
        copy_cast(target, source, staging)
        self._tally.moved += target.numel() * target.itemsize

    def _ag(self, op: Op) -> None:
        c = self._chunk(op)
        into, what = op.reads
        kernels.add(self._view(into, c.numel), self._view(what, c.numel), self._threads)

    def _partials(self, g: int, start: int, numel: int) -> NDArray[np.float64]:
        return self.context.partials[g][start // ALIGN : (start + numel) // ALIGN]

    def _ng(self, op: Op) -> None:
        c = self._chunk(op)
        partials = self._partials(op.word.group, c.start, c.numel)
        gradient = self._gradient(op, op.reads[0])
        kernels.partial_norms(gradient, partials, self._threads, grad_dtype=self._grad_dtype)

    def _nd(self, op: Op) -> None:
        g = op.word.group
        self._norm_on_device(g, self._view(op.reads[0], self._program.groups[g].trainable))

    def _norm_on_device(self, g: int, gradient: torch.Tensor) -> None:
        if gradient.device.type == "cpu":
            kernels.partial_norms(gradient, self.context.partials[g], self._threads, grad_dtype=self._grad_dtype)
        else:
            self._device_norms[g] = fold_squares(gradient, self._grad_dtype)

    def _norm(self, op: Op) -> None:
        """The global norm, the factor that every gradient is multiplied by, and whether the step is skipped."""
        context = self.context
        self.collect_norm()
        assert context.norm is not None
        context.skip = context.search or not math.isfinite(context.norm)
        if not context.skip and not context.known:
            context.repeat = self._speculative and context.clip_factor() < 1.0
            context.grad_scale = context.clip_factor() / context.loss_scale

    def collect_norm(self) -> None:
        """Add up the partial sums of squares of all groups."""
        for g, partials in self._device_norms.items():
            self.context.partials[g][:] = partials.cpu().numpy()
        self._device_norms.clear()
        ordered = [self.context.partials[g] for g in sorted(self.context.partials)]
        self.context.norm = grad_norm(ordered) / self.context.loss_scale

    def _wg(self, op: Op) -> None:
        gradient = self._gradient(op, op.reads[0])
        offset = self._chunk(op).start * gradient.itemsize
        self._write_scratch(f"gradient.{op.word.group}", offset, numpy_bytes(gradient))

    def _rg(self, op: Op) -> None:
        if self._idle(op):
            return
        gradient = self._gradient(op, op.writes[0])
        offset = self._chunk(op).start * gradient.itemsize
        self._read_scratch(f"gradient.{op.word.group}", offset, numpy_bytes(gradient))

    # ---- optimizer

    def _state_parts(self, op: Op) -> list[tuple[str, int]]:
        """(array, byte offset in the state buffer) of what this group's state buffer carries from and to disk."""
        g, c = op.word.group, self._chunk(op)
        master = f"master.{g}" if self._settings.form.split else f"weights.{g}"
        names = [master, *(f"moment{i}.{g}" for i in range(self._settings.form.moments))]
        return [(n, i * c.numel * FP32) for i, n in enumerate(names) if self._arrays.tier_of(n) == "disk"]

    def _is_late(self, op: Op) -> bool:
        """Whether an op belongs to a chunk that the step before has left to this one."""
        return op.id[2:] in self.late

    def _idle(self, op: Op) -> bool:
        """Whether an op on a chunk's way has nothing to do: it is not stepped, or was when the step before ended."""
        if self._is_late(op):
            return self.context.previous is None
        return self.context.search or self.context.failure is not None

    def _rs(self, op: Op) -> None:
        c, before = self._chunk(op), self._is_late(op) and self.context.previous is not None
        for name, offset in self._state_parts(op):
            self._read(name, c.start, self._view(op.writes[0], c.numel, offset=offset), before=before)

    def _cm(self, op: Op) -> None:
        if self.context.previous is not None:
            assert self.context.commit is not None
            self.context.commit()
            self.context.complete = True

    def _ws(self, op: Op) -> None:
        if self._idle(op):
            return
        c = self._chunk(op)
        for name, offset in self._state_parts(op):
            self._write(name, c.start, self._view(op.reads[0], c.numel, offset=offset))

    def _op(self, op: Op) -> None:
        g, c, form = op.word.group, self._chunk(op), self._settings.form
        self._arrays.about_to_change(g, c.start, c.numel)
        gradient = self._gradient(op, op.reads[0])
        offsets = dict(self._state_parts(op))
        span = slice(c.start, c.start + c.numel)

        def state(name: str) -> torch.Tensor:
            if name in offsets:
                return self._view(op.reads[1], c.numel, offset=offsets[name])
            return self._arrays.array(name)[span]

        out = None
        if form.split:
            new = [name for name in op.writes if name[0] == "O"]
            out = self._view(new[0], c.numel, self._dtype) if new else self._arrays.array(f"weights.{g}")[span]
        moments = tuple(state(f"moment{i}.{g}") for i in range(form.moments))
        master = state(f"master.{g}" if form.split else f"weights.{g}")
        context = self.context.previous if self._is_late(op) else self.context
        self._step(context, g, c.start, gradient, master, moments, out)

    def _od(self, op: Op) -> None:
        g, form = op.word.group, self._settings.form
        numel = self._program.groups[g].trainable
        gradient = self._view(op.reads[0], numel)
        weights = self._arrays.array(f"weights.{g}")[:numel]
        master = self._arrays.array(f"master.{g}") if form.split else weights
        moments = tuple(self._arrays.array(f"moment{i}.{g}") for i in range(form.moments))
        self._arrays.about_to_change(g, 0, numel)
        if not self._normed:
            self._norm_on_device(g, gradient)
        self._step(self.context, g, 0, gradient, master, moments, weights if form.split else None, partials=False)

    def _step(
        self,
        context: StepContext | None,
        g: int,
        start: int,
        gradient: torch.Tensor,
        master: torch.Tensor,
        moments: tuple[torch.Tensor, ...],
        out: torch.Tensor | None,
        *,
        partials: bool = True,
    ) -> None:
        """The optimizer on elements ``[start, start + n)`` of a group.

        ``context``: of the step whose gradient it is; None: it was stepped before, and only its weights are wanted.
        """
        n = master.numel()
        if context is None or context.idle:
            if out is not None:
                kernels.cast(out, master, self._threads)
            return
        if context is self.context:
            context.updating = True
            context.in_memory |= not self._place.all_on_disk(g, self._settings.form)
        else:
            self.context.finishing = True
        in_passing = partials and not self._normed and context is self.context
        norms = self._partials(g, start, n) if in_passing else None
        self._stepping.step(context, g, start, gradient, master, moments, out, norms)

    # ---- checkpoints

    def _dc(self, op: Op) -> None:
        k, m = op.word.stage, op.word.micro_batch
        offset = 0
        for tensor in self._tape.checkpoint(k, m):
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            for piece, first in self._pools.pieces(op.writes, offset, data.numel()):
                self._copy(piece, data[first : first + piece.numel()])
            offset += data.numel()
            self._streams.used_on("d2h", data)
        self._tape.drop(k, m)

    def _uc(self, op: Op) -> None:
        k, m = op.word.stage, op.word.micro_batch
        offset, tensors = 0, []
        for old in self._tape.checkpoint(k, m):
            tensor = torch.empty(old.shape, dtype=old.dtype, device=old.device)
            nbytes = tensor.numel() * tensor.itemsize
            data = tensor.view(-1).view(torch.uint8)
            for piece, first in self._pools.pieces(op.reads, offset, nbytes):
                self._copy(data[first : first + piece.numel()], piece)
            offset += nbytes
            self._streams.used_on("compute", tensor)
            tensors.append(tensor)
        self._tape.restore(k, m, tensors)

    def _wc(self, op: Op) -> None:
        self._write_scratch(self._checkpoint_name(op), 0, numpy_bytes(self._checkpoint_pages(op, op.reads[0])))

    def _rc(self, op: Op) -> None:
        self._read_scratch(self._checkpoint_name(op), 0, numpy_bytes(self._checkpoint_pages(op, op.writes[0])))

    def _checkpoint_name(self, op: Op) -> str:
        return f"checkpoint.{op.word.stage}.{op.word.micro_batch}"

    def _checkpoint_pages(self, op: Op, name: str) -> torch.Tensor:
        """The whole pages of a host buffer that a stage's checkpoint covers."""
        return self._pools.buffer(name)[: page_up(self._program.stages[op.word.stage].checkpoint)]

    def release(self) -> None:
        """Detach all parameters; what a step that was broken off has left behind goes with it."""
        for g in list(self._attached):
            self._groups[g].detach(self._dtype, self._arrays.device)
        self._attached.clear()
        self._accumulators.clear()
        self._device_norms.clear()
