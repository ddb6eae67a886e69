"""From a gradient in host memory to an orthogonal update there, of groups whose steps take matrices whole (Muon).

Buffers, per group ``g`` and chunk ``c``:

    M{g}.{c}       momentum in flight
    U{g}.{c}       update on its way up to the device
    q{g}           there, with several ranks: the updates of this rank's part
    Q{g}           there: those of all of the group, made orthogonal in place
    V{g}.{c}       orthogonal update on its way down, to be stepped with

Momentum and the rest of the state move by themselves, as what needs them lies apart. The compute lane is in order, and
what a visit completes has to go down, through the optimizer and up again before it can be made orthogonal. So that is
written down behind the next visit's compute, which it then comes after without holding it up:

    compute  B5m0 B5m1            B4m0 B4m1     NS5  B3m0 B3m1     NS4
    d2h                DG5.0 DG5.1           DG4.0 DG4.1 DU5.0 DU5.1
    cpu                   MU5.0 MU5.1           MU4.0 MU4.1  OP5.0 OP5.1
    h2d                     UU5.0 UU5.1

Each rank makes all updates of a group orthogonal, out of the parts of all: momentum is cut over them, and matrices are
not.
"""

from penstock.schedule.ir.references import Buffer, OpId, group_buffer, group_op
from penstock.schedule.lower.build import Builder
from penstock.schedule.lower.emitter import Touched
from penstock.schedule.place import BF16, Chunk


class MatrixUpdates:
    """Emits what comes between the gradients of such groups and their steps."""

    def __init__(self, builder: Builder) -> None:
        self.b = builder
        self._up: dict[int, list[OpId]] = {}
        """group -> what has brought its updates to the device so far"""
        self._made: dict[int, OpId] = {}

    def up(self, g: int, c: Chunk, gradient: Buffer, after: list[OpId], commit: list[OpId]) -> tuple[OpId, list[OpId]]:
        """Emit the way of a chunk's gradient through the momentum to the device; the op that makes its update, and the
        one, if any, that writes momentum. ``commit``: what that comes after, too."""
        b, group, form = self.b, self.b.program.groups[g], self.b.s.form
        on_disk = b.s.place.state[g] == "disk"
        momentum = [group_buffer("M", g, c.index)] if on_disk else []
        moved = form.momentum_bytes(group, c.numel)
        if on_disk:
            read = group_op("RM", g, c.index)
            takes = [(momentum[0], "momentum")]
            after = [*after, b.emit(read, takes=takes, writes=momentum, nbytes=moved)]
        update = group_buffer("U", g, c.index)
        made = b.emit(
            group_op("MU", g, c.index),
            after=after,
            takes=[(update, b.provision.updates_up)],
            reads=[gradient, *momentum],
            writes=[*momentum, update],
            gives=[gradient],
            nbytes=form.momentum_step_bytes(group, c.numel, b.provision.gradient_bytes(g)),
        )
        written = list[OpId]()
        if on_disk:
            ident, first = group_op("WM", g, c.index), [made, *commit]
            written = [b.emit(ident, after=first, reads=momentum, gives=momentum, nbytes=moved)]
        cut = b.seat.parts > 1
        into, pool = (group_buffer("q", g), "update_parts") if cut else (group_buffer("Q", g), "updates")
        before = self._up.setdefault(g, [])
        up = b.emit(
            group_op("UU", g, c.index),
            after=[made],
            takes=[] if before else [(into, pool)],
            reads=[update],
            writes=[into],
            gives=[update],
            nbytes=c.numel * BF16,
        )
        before.append(up)
        return made, written

    def make(self, g: int) -> None:
        """Emit the op that makes a group's updates orthogonal, once all are on the device."""
        b, whole, after = self.b, group_buffer("Q", g), self._up.pop(g)
        if b.seat.parts > 1:
            op, seat = Touched(), b.seat
            op.use_up(group_buffer("q", g))
            op.make(whole, "updates")
            amount = seat.parts * b.program.groups[g].trainable * BF16
            if seat.hosts.size > 1:
                after = [b.collective(group_op("HU", g), seat.hosts, amount // seat.near.size, op, after=after)]
                op = Touched(reads=[whole], writes=[whole])
            after = [b.collective(group_op("GU", g), seat.near, amount, op, after=after)]
        self._made[g] = b.emit(group_op("NS", g), after=after, reads=[whole], writes=[whole])

    def down(self, g: int, c: Chunk) -> tuple[Buffer, OpId]:
        """Emit the way of a chunk of what was made to the host; its buffer, and the op."""
        whole, chunk = group_buffer("Q", g), group_buffer("V", g, c.index)
        last = c is self.b.trained_chunks(g)[-1]
        ident, takes = group_op("DU", g, c.index), [(chunk, "updates_down")]
        after, gives = [self._made[g]], [whole] if last else []
        nbytes = c.numel * BF16
        return chunk, self.b.emit(
            ident, after=after, takes=takes, reads=[whole], writes=[chunk], gives=gives, nbytes=nbytes
        )
