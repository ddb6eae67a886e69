"""The optimizer's steps of chunks in host memory: what each reads from disk, the step itself, and the way home.

Buffers, per group ``g`` and chunk ``c``:

    S{g}.{c}       optimizer state in flight
    O{g}.{c}       weights that are stepped in passing: they are at home on disk, and not found in host memory; read
                   with the state, or by the last load before the step
    s{g}.{c}       delayed chunks: the S{g}.{c} that the step before has read ahead
    o{g}.{c}       the same of O{g}.{c}

Nothing hides the reads of a step's first delayed chunks: the first block waits for their weights, and the write lane
has nothing else to do yet. So each step ends with the reads of what the next one steps first (``Provision.ahead``),
beside the last of its own writes:

    read    ...                 RS0.0 RS1.0 |             RS4.0  RS4.1
    cpu          OP4.3                      | OP0.0 OP1.0   OP4.0  OP4.1
    write          WS4.3 WW4.3              |   WS0.0 WW0.0 WS1.0 WW1.0
    compute ... B4m7                        |   F0m0 ... F4m0 F4m1

They take buffers that are there anyway, of each pool all but one, which the last write has until the end.
"""

from penstock.schedule.ir.ops import ChunkAt, Take
from penstock.schedule.ir.references import Buffer, OpId, group_buffer, group_op
from penstock.schedule.lower.build import Builder
from penstock.schedule.place import Chunk


class ChunkSteps:
    """Emits steps of chunks, and what they read and write.

    ``commit``: the op that commits the step before, once there is one: writes come after it. ``written``: chunk stepped
    so far whose weights are found on disk -> the op that has written them there.
    """

    def __init__(self, builder: Builder) -> None:
        self.b = builder
        self.s = builder.s
        self.commit: list[OpId] = []
        self.written: dict[ChunkAt, OpId] = {}
        self._ahead: dict[ChunkAt, OpId | None] = dict.fromkeys(builder.provision.ahead)
        """chunk that is read ahead -> what brings it home in this step"""

    def step(self, g: int, c: Chunk, gradient: Buffer, after: list[OpId]) -> OpId:
        """Emit what a step reads from disk, if that is not there, and the step itself; its id."""
        state, new = self._state(g, c), self.new_weights(g, c)
        group, read = self.b.program.groups[g], [] if self.b.provision.keeps(g, c) else new
        if (g, c.index) in self._ahead:
            for name, pool in _takes(state, new):
                self.b.emitter.carry(name, _next(name), pool)
        elif state or read:
            after = [*after, self._read(g, c, state, read, [])]
        return self.b.emit(
            group_op("OP", g, c.index),
            after=after,
            reads=[gradient, *state, *new],
            writes=[*state, *new],
            gives=[gradient],
            nbytes=self.s.form.step_bytes(group, c.numel, self.b.provision.gradient_bytes(g)),
        )

    def home(self, g: int, c: Chunk, after: list[OpId]) -> OpId:
        """Emit the way home of state and weights, and of weights to a copy on the device; the last of them (the step
        itself if all is at home).

        ``after``: the step, then who reads the new weights from the buffer that goes home.
        """
        place, form, last = self.s.place, self.s.form, after[0]
        state, new, nbytes = self._state(g, c), self.new_weights(g, c), c.numel * form.weight_bytes
        if state:
            ident, first = group_op("WS", g, c.index), [after[0], *self.commit]
            moved = form.passed_bytes(self.b.program.groups[g], c.numel)
            last = self.b.emit(ident, after=first, reads=state, gives=state, nbytes=moved)
        if place.weights[g] == "device":
            last = self.b.emit(group_op("UN", g, c.index), after=after[:1], reads=new, nbytes=nbytes)
            after = [*after, last]
        if place.home(self.b.program.groups[g]) == "disk":
            ident, first = group_op("WW", g, c.index), [*after, *self.commit]
            last = self.b.emit(ident, after=first, reads=new, gives=new, nbytes=nbytes)
        if place.weights[g] == "disk":
            self.written[g, c.index] = last
        if (g, c.index) in self._ahead:
            self._ahead[g, c.index] = last
        return last

    def read_ahead(self) -> None:
        """Emit the reads of what the next step steps first, which is at home by now."""
        for (g, index), at_home in self._ahead.items():
            c = self.b.cuts[g][index]
            assert at_home is not None
            state, new = [*map(_next, self._state(g, c))], [*map(_next, self.new_weights(g, c))]
            self._read(g, c, state, new, [at_home])

    def new_weights(self, g: int, c: Chunk) -> list[Buffer]:
        """The buffer of a chunk's weights, if they are stepped in passing."""
        passing = self.s.place.stepped_in_passing(self.b.program.groups[g])
        return [self._buffer("O", g, c)] if passing else []

    def _state(self, g: int, c: Chunk) -> list[Buffer]:
        """The buffer of a chunk's state, if that is on disk; of matrices, of what the momentum is not."""
        return [self._buffer("S", g, c)] if self.b.provision.state_passes(g, c.numel) else []

    def _buffer(self, kind: str, g: int, c: Chunk) -> Buffer:
        """A buffer of this step's, or one that the step before has left to it."""
        return group_buffer(kind.lower() if (g, c.index) in self._ahead else kind, g, c.index)

    def _read(self, g: int, c: Chunk, state: list[Buffer], new: list[Buffer], after: list[OpId]) -> OpId:
        form = self.s.form
        weights = form.weight_bytes * c.numel * len(new) * form.steps_weights
        nbytes = form.passed_bytes(self.b.program.groups[g], c.numel) * len(state) + weights
        ident, takes = group_op("RS", g, c.index), _takes(state, new)
        return self.b.emit(ident, after=after, takes=takes, writes=[*state, *new], nbytes=nbytes)


def _takes(state: list[Buffer], new: list[Buffer]) -> list[Take]:
    """Buffers of state and of new weights, with the pools that they are from."""
    return [*((name, "state") for name in state), *((name, "new_weights") for name in new)]


def _next(name: Buffer) -> Buffer:
    """The buffer that a step leaves to the next one in the place of one that the step before has left to it."""
    return group_buffer(name.kind.upper(), name.group, name.chunk)
