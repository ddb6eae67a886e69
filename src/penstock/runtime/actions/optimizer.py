"""The optimizer's steps, and its state on the way from disk and back."""

from collections.abc import Callable

import torch

from penstock.runtime.access import Access
from penstock.runtime.actions.norm import Norm
from penstock.runtime.stepping import Stepping
from penstock.schedule.ir.ops import Op
from penstock.schedule.place import FP32


class OptimizerSteps:
    """Steps chunks on the host, and whole groups on the device.

    A state buffer has a chunk's arrays one behind the other, master copy (in fp32: the weights) first, then the
    moments; of those that live in memory its part is not used.
    """

    def __init__(self, access: Access, norm: Norm, stepping: Stepping) -> None:
        self._to = access
        self._arrays = access.arrays
        self._norm = norm
        self._stepping = stepping

    def kinds(self) -> dict[str, Callable[[Op], None]]:
        return {
            "RS": self.read_state,
            "OP": self.step,
            "WS": self.write_state,
            "OD": self.step_on_device,
            "CM": self.commit,
        }

    def _names(self, g: int) -> list[str]:
        """The arrays of a group's state."""
        form = self._arrays.form
        return [f"master.{g}" if form.split else f"weights.{g}", *(f"moment{i}.{g}" for i in range(form.moments))]

    def _on_disk(self, op: Op) -> list[tuple[str, int]]:
        """(array, byte offset in the state buffer) of those that are read from disk and written there."""
        numel = self._to.bound.chunk(op).numel
        names = enumerate(self._names(op.id.group))
        return [(name, i * numel * FP32) for i, name in names if self._arrays.tier_of(name) == "disk"]

    def read_state(self, op: Op) -> None:
        c, before = self._to.bound.chunk(op), self._to.bound.is_late(op) and self._to.context.left is not None
        for name, offset in self._on_disk(op):
            self._to.read(name, c.start, self._to.view(op.writes[0], c.numel, offset=offset), before=before)

    def write_state(self, op: Op) -> None:
        if self._to.idle(op):
            return
        c = self._to.bound.chunk(op)
        for name, offset in self._on_disk(op):
            self._to.write(name, c.start, self._to.view(op.reads[0], c.numel, offset=offset))

    def step(self, op: Op) -> None:
        """One chunk, in host memory."""
        g, c, arrays = op.id.group, self._to.bound.chunk(op), self._arrays
        arrays.about_to_change(g, c.start, c.numel)
        offsets, span = dict(self._on_disk(op)), slice(c.start, c.start + c.numel)

        def state(name: str) -> torch.Tensor:
            if name in offsets:
                return self._to.view(op.reads[1], c.numel, offset=offsets[name])
            return arrays.array(name)[span]

        out = None
        if arrays.form.split:
            new = [name for name in op.writes if name not in op.reads]
            out = self._to.view(new[0], c.numel, arrays.dtype) if new else arrays.array(f"weights.{g}")[span]
        late = self._to.bound.is_late(op)
        in_passing = not (late or self._to.bound.normed)
        master, *moments = map(state, self._names(g))
        gradient = self._to.gradient(op, op.reads[0])
        self._update(g, c.start, gradient, master, moments, out, late=late, in_passing=in_passing)

    def step_on_device(self, op: Op) -> None:
        """A whole group, where its state is."""
        g, arrays = op.id.group, self._arrays
        numel = self._to.bound.program.groups[g].trainable
        gradient, weights = self._to.view(op.reads[0], numel), arrays.array(f"weights.{g}")[:numel]
        arrays.about_to_change(g, 0, numel)
        in_passing = not self._to.bound.normed
        master, *moments = (arrays.array(name)[:numel] for name in self._names(g))
        out = weights if arrays.form.split else None
        self._update(g, 0, gradient, master, moments, out, late=False, in_passing=in_passing)

    def _update(
        self,
        g: int,
        start: int,
        gradient: torch.Tensor,
        master: torch.Tensor,
        moments: list[torch.Tensor],
        out: torch.Tensor | None,
        *,
        late: bool,
        in_passing: bool,
    ) -> None:
        """The optimizer on elements ``[start, start + n)`` of a group.

        ``late``: with what the step before has left; it may be stepped by now, and only the weights are wanted.
        ``in_passing``: whether the gradient's sums of squares are computed, too.
        """
        context = self._to.context
        update = context.left if late else None if context.idle else context.update
        if update is None:
            if out is not None:
                self._stepping.cast(out, master)
            return
        self._arrays.note_step(g, late=late)
        norms = self._norm.in_passing(g, start, gradient) if in_passing else None
        self._stepping.step(update, g, start, gradient, master, tuple(moments), out, norms)

    def commit(self, op: Op) -> None:
        """What the step before has left is at home: it counts from now on, whatever happens."""
        if self._to.context.completed is not None:
            self._to.context.completed()
