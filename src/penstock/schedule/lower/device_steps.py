"""From a device gradient to new weights where the state lives on the device.

Buffers, per group ``g``:

    G{g}           the gradient of all visits; G{g}@{visit} that of one
    P{g}           this rank's part of the sum of all ranks' gradients
    T{g}.{n}       a piece of a gradient on its way (ZeRO-R)
"""

from penstock.schedule.ir.references import Buffer, OpId, group_buffer, group_op
from penstock.schedule.lower.build import Builder
from penstock.schedule.lower.emitter import Touched


class DeviceSteps:
    """Emits the steps of groups whose state lives on the device, and what ranks do about their gradients."""

    def __init__(self, builder: Builder) -> None:
        self.b = builder
        self.cut = builder.seat.sharding
        self._scatters = self.cut.reduce.startswith("scatter")
        self._reduced: dict[int, OpId] = {}

    def complete(self, g: int) -> None:
        """A group's gradient is complete on this rank, where others may have more to add."""
        if self.cut.reduce == "scatter-early":
            self._reduce(g)

    def step(self, g: int, after: list[OpId]) -> OpId:
        """Emit a group's step, with what comes before it where gradients are combined at the end, and the gather of
        what is new where each rank steps a part of weights that all have whole. Returns the step's id."""
        if self.cut.reduce in ("all", "scatter-late"):
            self._reduce(g)
        stepped = [group_buffer("P", g)] if self._scatters else self._gradients(g)
        reduced = [self._reduced[g]] if g in self._reduced else []
        done = self.b.emit(group_op("OD", g), after=[*reduced, *after], reads=stepped, gives=stepped)
        if self._scatters and not self.cut.weights:
            amount = self.b.provision.whole_weights(g)
            self.b.collective(group_op("GN", g), self.b.seat.shards, amount, Touched(), after=[done])
        return done

    def _gradients(self, g: int) -> list[Buffer]:
        """The buffers that the visits that this rank computes have added a group's gradient to."""
        visits = [self.b.visits[i] for i in self.b.route.gradient_visits[g]]
        return list(dict.fromkeys(self.b.gradient_buffer(g, visit) for visit in visits if visit.micro_batches))

    def _reduce(self, g: int) -> None:
        last = self.b.visits[self.b.route.gradient_visits[g][-1]]
        after = last.ops()[-1:] or self.b.ready.pop(last.name)
        part = group_buffer("P", g) if self._scatters else None
        self._reduced[g] = self._combine(g, self._gradients(g), part, after)

    def _combine(self, g: int, gradient: list[Buffer], part: Buffer | None, after: list[OpId]) -> OpId:
        """Emit the all-reduce of a gradient in place or, where each rank gets its ``part`` of the sum, its
        reduce-scatter: at once, or piece by piece through a buffer. Returns the last op. Without a ``gradient`` this
        rank adds nothing.
        """
        left = whole = self.b.provision.whole_gradient(g)
        piece = min(self.cut.piece or whole, whole)
        for n in range(-(-whole // piece) if piece else 1):
            amount, left = min(piece, left), max(left - piece, 0)
            through = [group_buffer("T", g, n)] if self.cut.piece else []
            op = Touched(takes=[(name, "buffers") for name in through], reads=[*gradient], writes=[*through])
            op.gives += through
            if part is None:
                op.reads += through
                op.writes += gradient
            else:
                op.takes += [] if n else [(part, self.b.provision.gradient_parts_pool)]
                op.writes.append(part)
                op.gives += [] if left else gradient
            ident = group_op("AR" if part is None else "SG", g, n if through else -1)
            done = self.b.collective(ident, self.b.seat.shards, amount, op, after=after)
        return done
