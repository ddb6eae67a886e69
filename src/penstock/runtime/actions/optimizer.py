"""The optimizer's steps, and its state on the way from disk and back."""

from collections.abc import Callable, Iterator

import torch

from penstock.optim.codes import as_moments
from penstock.runtime.access import Access
from penstock.runtime.actions.norm import Norm
from penstock.runtime.stepping import Stepping
from penstock.schedule.ir.ops import Op
from penstock.schedule.ir.references import Buffer


class OptimizerSteps:
    """Steps chunks on the host, and whole groups on the device.

    A buffer of state has a chunk's arrays one behind the other: what is kept of its master copy besides the weights,
    the moments, and their scales if they have any. Weights that are stepped in passing have one of their own.
    """

    def __init__(self, access: Access, norm: Norm, stepping: Stepping) -> None:
        self._to = access
        self._arrays = access.arrays
        self._norm = norm
        self._stepping = stepping

    def kinds(self) -> dict[str, Callable[[Op], None]]:
        return {
            "RS": self.read,
            "OP": self.step,
            "WS": self.write_state,
            "WW": self.write_weights,
            "OD": self.step_on_device,
            "CM": self.commit,
        }

    def _buffers(self, op: Op) -> tuple[Buffer | None, Buffer | None]:
        """The buffers of the state and of the weights of an op's chunk, as far as these go through one."""
        names = {name.holds: name for name in (*op.reads, *op.writes)}
        return names.get("state"), names.get("new weights")

    def _state(self, op: Op, buffer: Buffer | None) -> Iterator[tuple[str, int, torch.Tensor]]:
        return self._to.state(op, self._arrays.parts_of_step(op.id.group), buffer)

    def _weights(self, op: Op, name: Buffer | None) -> torch.Tensor:
        """The weights of an op's chunk that a step on the host changes: in a buffer, or in memory."""
        g, c, arrays = op.id.group, self._to.bound.chunk(op), self._arrays
        if name is not None:
            return self._to.view(name, c.numel, arrays.dtype)
        home = arrays.weights(g) if arrays.found_on(g) == "host" else arrays.array(f"weights.{g}")
        return home[c.start : c.start + c.numel]

    def read(self, op: Op) -> None:
        """Bring what a chunk's step takes from disk. Of a delayed one, what was before the step that has left it; but
        what is read for the next step is as this one has left it."""
        late = self._to.bound.is_late(op) and op.id not in self._to.bound.reads_ahead
        self._read(op, *self._buffers(op), before=late and self._to.context.left is not None)

    def read_anew(self) -> None:
        """Before a step that nothing was left to: bring what its first delayed chunks take from disk, since what is in
        their buffers does not count."""
        starts = {end: start for start, end, _ in self._to.bound.schedule.carried}
        for op in self._to.bound.schedule.lanes["read"]:
            if op.id in self._to.bound.reads_ahead:
                state, new = (None if name is None else starts[name] for name in self._buffers(op))
                self._read(op, state, new, before=False)

    def _read(self, op: Op, state: Buffer | None, new: Buffer | None, *, before: bool) -> None:
        if state is not None:
            for array, start, view in self._state(op, state):
                self._to.read(array, start, view, before=before)
        if new is not None and self._arrays.form.steps_weights:
            start = self._to.bound.chunk(op).start
            self._to.read(f"weights.{op.id.group}", start, self._weights(op, new), before=before)

    def write_state(self, op: Op) -> None:
        if self._to.update(op) is not None:
            for array, start, view in self._state(op, op.reads[0]):
                self._to.write(array, start, view)

    def write_weights(self, op: Op) -> None:
        if self._to.update(op) is not None:
            _, new = self._buffers(op)
            self._to.write(f"weights.{op.id.group}", self._to.bound.chunk(op).start, self._weights(op, new))

    def step(self, op: Op) -> None:
        """One chunk, in host memory."""
        g, c, arrays = op.id.group, self._to.bound.chunk(op), self._arrays
        arrays.about_to_change(g, c.start, c.numel)
        buffer, new = self._buffers(op)
        state = [view for _, _, view in self._state(op, buffer)]
        in_passing = not (self._to.bound.is_late(op) or self._to.bound.normed or arrays.groups[g].whole)
        if arrays.groups[g].whole:
            gradient = self._to.view(op.reads[0], c.numel, torch.bfloat16)
        else:
            gradient = self._to.gradient(op, op.reads[0])
        self._update(op, c.start, gradient, self._weights(op, new), state, in_passing=in_passing)

    def step_on_device(self, op: Op) -> None:
        """A whole group, where its state is."""
        g, arrays = op.id.group, self._arrays
        numel = self._to.bound.group(op).trainable
        gradient = self._to.view(op.reads[0], numel)
        arrays.about_to_change(g, 0, numel)
        weights, state = arrays.array(f"weights.{g}")[:numel], [arrays.array(n) for n in arrays.parts_of_state(g)]
        self._update(op, 0, gradient, weights, state, in_passing=not self._to.bound.normed)

    def _update(
        self,
        op: Op,
        start: int,
        gradient: torch.Tensor,
        weights: torch.Tensor,
        state: list[torch.Tensor],
        *,
        in_passing: bool,
    ) -> None:
        """The optimizer on elements ``[start, start + n)`` of a group. Of matrices that step in host memory, whose
        ``state`` is without momentum, ``gradient`` is their orthogonal update.

        What the step before has left may be stepped by now, and only the weights are wanted. ``in_passing``: whether
        the gradient's sums of squares are computed, too.
        """
        g, update = op.id.group, self._to.update(op)
        rest = state.pop(0) if self._arrays.form.rest_bytes else None
        moments = as_moments(state, weights.numel())
        if update is None:
            self._stepping.restore(weights, rest)
            return
        self._arrays.note_step(g, late=self._to.bound.is_late(op))
        norms = self._norm.in_passing(g, start, gradient) if in_passing else None
        if not self._arrays.groups[g].whole:
            self._stepping.step(update, g, start, gradient, weights, rest, moments, norms)
            return
        if moments:  # the state is here, and the gradient is all of the group's
            gradient = self._stepping.orthogonal_update(update, g, gradient, moments, norms)
        self._stepping.step(update, g, start, gradient, weights, rest, (), None, half="second")

    def commit(self, op: Op) -> None:
        """Count the step before from now on, whatever happens: all that it has left is at home."""
        if self._to.context.completed is not None:
            self._to.context.completed()
