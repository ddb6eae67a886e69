"""From a device gradient to new weights: chunks down, sums, norm, optimizer step, chunks back.

Buffers, per group ``g`` and chunk ``c``:

    H{g}.{c}u{k}   host gradient of the k-th stage that uses the group, in backward order; u0 receives the total
    H{g}.{c}u{k}@{visit}  a further strand of it, which begins with that visit (horizontal only)
    L{g}.{c}u{k}   the same two with several ranks: this rank's gradient of all ranks' parts, before it is exchanged
    t{tag}         a further micro-batch's gradient on its way into H or L (horizontal only)
    g{tag}         on the device, with several ranks: what this rank has of the sum of all ranks' gradients
    Y{tag}         on the device, with several copies of the state: the same on its way between them
    T{tag}         on the device, with several ranks: all ranks' gradients of that part, before they are added up
    R{g}.{c}       gradient read back from disk
    c{tag}         on the device, a chunk's gradient rounded to bf16 on its way into H
    h{g}.{c}       delayed chunks: the H{g}.{c}u0 that the step before has left in host memory
    r{g}.{c}       the same, left on disk and read back

The order of additions is the same in every schedule: micro-batches in order within a strand, strands in pairs, then
stages in backward order. That is why the schedule does not change the numbers.

Where each visit has one micro-batch, its gradient goes down chunk by chunk, and strands are summed on the host. A
strand that ends is added to the one before it at once, so few sums are alive (``place.most_sums``). Several ranks need
all of a group for that, not only their part: when the last micro-batch is in it, each chunk goes up once more, for the
exchange that there is one of in a step.

A delayed chunk is stepped when its group is needed for the first time in the next step, by ``Loads``. The ids of its
ops are those of any step: each chunk has one in every step, with this step's gradient or the one before's. Once all of
them are on disk the step before is complete: ``CM`` commits it, and only then may a chunk of this step be written,
since that overwrites what the commit before names.
"""

from penstock.schedule.ir.references import Buffer, OpId, VisitId, group_buffer, group_op, single_op, visit
from penstock.schedule.lower.build import Builder
from penstock.schedule.lower.chunk_steps import ChunkSteps
from penstock.schedule.lower.device_steps import DeviceSteps
from penstock.schedule.lower.emitter import Touched
from penstock.schedule.lower.pools import BETWEEN_COPIES, EXCHANGE, SUMS, exchanged_between_copies, exchanged_bytes
from penstock.schedule.lower.route import Route, Visit
from penstock.schedule.lower.updates_of_matrices import MatrixUpdates
from penstock.schedule.mesh import ProcessGroup
from penstock.schedule.place import FP32, NORM_BYTES, Chunk, strand_firsts, strand_sums
from penstock.schedule.program import ALIGN


class Updates:
    """Emits everything between the last backward of a group and its new weights."""

    def __init__(self, builder: Builder) -> None:
        self.b = builder
        self.s = builder.s
        self.device = DeviceSteps(builder)
        self.matrices = MatrixUpdates(builder)
        self.chunks = ChunkSteps(builder)
        self._begun: list[tuple[int, list[OpId]]] = []
        """groups of matrices whose updates are on their way to the device, with what their steps wait for besides"""
        self._normed: list[OpId] = []
        self._stepped: list[OpId] = []  # the steps that are this step's own
        self._norm: OpId | None = None  # op after which the global norm is known
        self._waited_for = any(self.s.waits(g) for g in self.b.route.gradient_visits)
        self._late = sum(map(len, self.b.provision.delayed.values()))  # delayed chunks to come
        self._late_ends: list[OpId] = []  # what brings the delayed chunks so far home
        self._late_writes = False
        self._added: dict[int, OpId] = {}  # group -> the last addition of strands of the visit
        self._final: dict[Buffer, OpId] = {}  # H buffer u0 -> op that completes it
        self._down: dict[Buffer, OpId] = {}  # host buffer of a gradient -> op that last wrote it
        self._shared = self.b.seat.sharding.reduce != "none"
        self._sums_all_parts = self.b.provision.sums_all_parts

    def _waits(self, g: int) -> bool:
        """True if a group's step comes after all visits."""
        return self.b.seat.steps != "within" or self.s.waits(g)

    def gradients_down(self, index: int) -> None:
        """Emit what follows the compute ops of visit ``index``: gradients to the host, and what they complete."""
        self._end_updates()
        visit = self.b.visits[index]
        route, stage = self.b.route, visit.stage
        down = [g for g in route.gradients(visit.kind, stage) if self.s.place.state[g] != "device"]
        summed = [g for g in down if (g, stage) in route.summed]
        for g in summed:  # of all groups before any is stepped: a sum must not wait for a buffer that a step gives back
            trained = self.b.trained_chunks(g)
            for c in trained:
                self._into_sum(g, c, visit, last=c is trained[-1])
        for g in down:
            if g not in summed:
                self._group_down(g, visit, self._added.pop(g, visit.ops()[-1]))
            elif self._sums_all_parts and route.last_made[g, stage] == index:
                self._sum_down(g, visit)
        for g in route.trained(visit.kind, visit.stage):
            completed = route.gradient_visits[g][-1] == index
            stepped = route.last_visit[g] == index and not self._waits(g)
            first = self._before_step(g)
            if self.s.place.state[g] == "device":
                if completed:
                    self.device.complete(g)
                    if self._waited_for:
                        self._normed.append(self.b.emit(group_op("ND", g), reads=[group_buffer("G", g)]))
                if stepped:
                    self._stepped.append(self.device.step(g, first))
                continue
            later = self._complete_use(g, index)
            for c in self.b.trained_chunks(g):  # chunk by chunk: what waits on disk must not hold up what is stepped
                if later:
                    self._add_use(g, c, later)
                if completed:
                    self._complete(g, c)
                if stepped and c.index not in self._delayed(g):
                    self._step_on_time(g, c, first)
            if stepped:
                self._begin_updates(g, first)

    def strand_made(self, index: int, m: int) -> None:
        """Emit what follows a micro-batch that ends a strand: the sums on the device that are complete with it."""
        visit = self.b.visits[index]
        for into, what in strand_sums(self.s.micro_batches, self.s.strands).get(m, ()):
            for g in filter(self.b.strands_on_device, self.b.route.gradients(visit.kind, visit.stage)):
                total, part = (self.b.gradient_buffer(g, visit, strand) for strand in (into, what))
                ident = group_op("AD", g, what, visit=visit.name)
                self._added[g] = self.b.emit(ident, reads=[total, part], writes=[total], gives=[part])

    def _group_down(self, g: int, of: Visit, after: OpId) -> None:
        """Emit the way of a gradient of all micro-batches to host memory; of several ranks, that of all of them."""
        trained, source = self.b.trained_chunks(g), self.b.gradient_buffer(g, of)
        for c in trained:
            last = c is trained[-1]
            if self._shared:
                part, done = self._from_all(g, c, source, after, of.name, last=last)
                self._chunk_down(g, c, of.name, part, done, last=True)
            else:
                self._chunk_down(g, c, of.name, source, after, last=last)

    def _sum_down(self, g: int, of: Visit) -> None:
        """Emit the exchange of several ranks' sums in host memory, after a stage's last visit, and the way down."""
        of_all = visit(of.kind, of.stage)
        for c in self.b.trained_chunks(g):
            part, done = self._sum_from_all(g, c, of_all)
            self._chunk_down(g, c, of_all, part, done, last=True)

    def _chunk_down(self, g: int, c: Chunk, of: VisitId, source: Buffer, after: OpId, *, last: bool) -> None:
        """Emit the way of a chunk's gradient, complete for one stage, from the device to the host. ``last``: that of
        ``source``, which is given back."""
        width, use = self.b.provision.gradient_bytes(g), self._use(g, of)
        name = group_buffer("H", g, c.index, use=use)
        held = self.b.provision.held(g, use, waits=self.s.waits(g) or c.index in self._delayed(g))
        pool = self.b.provision.held_pool if held else "gradients_out"
        cast = [group_buffer("c", g, c.index, visit=of)] if width < FP32 else []
        self._down[name] = self.b.emit(
            group_op("DG", g, c.index, visit=of),
            after=[after],
            takes=[(name, pool), *((rounded, "casts") for rounded in cast)],
            reads=[source],
            writes=[name, *cast],
            gives=[*cast, *([source] if last else [])],
            nbytes=c.numel * width,
        )

    def _use(self, g: int, of: VisitId) -> int:
        """The index of a visit's stage among those that use a group, in backward order."""
        return self.b.route.uses[g].index(of.stage)

    def _into_sum(self, g: int, c: Chunk, of: Visit, *, last: bool) -> None:
        """Emit the way of a chunk of one micro-batch's gradient down and into the sum of its strand, and the sums of
        strands that are complete with it. What is added to another strand at once has no sum of its own."""
        (m,) = of.micro_batches
        source, after, numel = self.b.gradient_buffer(g, of), of.ops()[-1], c.numel
        sums, through = self.b.provision.held_pool, "gradients_out"
        if self._sums_all_parts:
            numel, sums, through = self.b.seat.parts * numel, SUMS, "sums_out"
        elif self._shared:  # each visit's are exchanged
            source, after = self._from_all(g, c, source, after, of.name, last=last)
            last = True
        strand, begins = self.b.strand_of(m)
        pairs = strand_sums(self.s.micro_batches, self.s.strands).get(m, ())
        total, staged = self._sum_buffer(g, c, of.name, strand), not begins or bool(pairs)
        into = group_buffer("t", g, c.index, visit=of.name) if staged else total
        self._down[into] = self.b.emit(
            group_op("DG", g, c.index, visit=of.name),
            after=[after],
            takes=[(into, through if staged else sums)],
            reads=[source],
            writes=[into],
            gives=[source] if last else [],
            nbytes=numel * FP32,
        )
        if not begins:
            self._add(group_op("AG", g, c.index, visit=of.name), total, into, numel=numel)
        firsts = strand_firsts(self.s.micro_batches, self.s.strands)
        for earlier, later in pairs:
            begun = visit(of.kind, of.stage, firsts[later])
            part = into if begins and later == strand else self._sum_buffer(g, c, of.name, later)
            before = self._sum_buffer(g, c, of.name, earlier)
            self._add(group_op("AG", g, c.index, visit=begun), before, part, numel=numel)

    def _sum_buffer(self, g: int, c: Chunk, of: VisitId, strand: int = 0) -> Buffer:
        """The host buffer of a strand's sum of one stage's gradients. In the end the first one's has the sum of all."""
        first = strand_firsts(self.s.micro_batches, self.s.strands).get(strand, 0)
        begun = visit(of.kind, of.stage, first) if first else None
        return group_buffer("L" if self._sums_all_parts else "H", g, c.index, use=self._use(g, of), visit=begun)

    def _from_all(
        self, g: int, c: Chunk, source: Buffer, after: OpId, of: VisitId, *, last: bool
    ) -> tuple[Buffer, OpId]:
        """Emit the exchange of all ranks' gradients of their parts' chunks ``c``, from the whole group's on the device:
        each gets the sum of its own; or of the chunk that they all have. Returns its buffer, and the op."""
        through = group_buffer("T", g, c.index, visit=of)
        op = Touched(reads=[source], gives=[source] if last else [], takes=[(through, EXCHANGE)])
        return self._exchange(g, c, op, through, after, of)

    def _sum_from_all(self, g: int, c: Chunk, of: VisitId) -> tuple[Buffer, OpId]:
        """Emit the exchange of all ranks' chunks ``c``, from the sum of all micro-batches in host memory. Returns the
        buffer of what it makes, and the op."""
        through, whole = group_buffer("T", g, c.index, visit=of), self._sum_buffer(g, c, of)
        up = self.b.emit(
            group_op("UG", g, c.index, visit=of),
            after=[self._down[whole]],
            takes=[(through, EXCHANGE)],
            reads=[whole],
            writes=[through],
            gives=[whole],
            nbytes=self.b.seat.parts * c.numel * FP32,
        )
        return self._exchange(g, c, Touched(reads=[through]), through, up, of)

    def _exchange(
        self, g: int, c: Chunk, op: Touched, through: Buffer, after: OpId, of: VisitId
    ) -> tuple[Buffer, OpId]:
        part, seat = group_buffer("g", g, c.index, visit=of), self.b.seat
        amount = exchanged_bytes(seat, c.numel) // 2
        ident, ranks = group_op("SG" if seat.parts > 1 else "AR", g, c.index, visit=of), seat.shards
        if seat.adds_on_levels:
            op.writes.append(through)
            after = self.b.collective(ident, seat.near, amount, op, after=[after])
            ident, ranks, amount = group_op("HG", g, c.index, visit=of), seat.hosts, amount // seat.near.size
            op = Touched(reads=[through])
        op.make(part, self.b.provision.gradient_parts_pool)
        op.writes.append(through)
        op.gives.append(through)
        done = self.b.collective(ident, ranks, amount, op, after=[after])
        return part, self._between_copies(g, c, part, done, of) if seat.copies.size > 1 else done

    def _between_copies(self, g: int, c: Chunk, part: Buffer, after: OpId, of: VisitId) -> OpId:
        """Emit the sum of what the ranks of each copy have added up of a chunk of theirs."""
        through, seat = group_buffer("Y", g, c.index, visit=of), self.b.seat
        op = Touched(takes=[(through, BETWEEN_COPIES)], reads=[part], writes=[part, through], gives=[through])
        amount = exchanged_between_copies(seat, c.numel) // 2
        return self.b.collective(group_op("HR", g, c.index, visit=of), seat.copies, amount, op, after=[after])

    def _add(self, ident: OpId, into: Buffer, what: Buffer, *, numel: int) -> None:
        """Emit the addition of a gradient in host memory to another one."""
        self._down[into] = self.b.emit(
            ident,
            after=[self._down[into], self._down[what]],
            reads=[into, what],
            writes=[into],
            gives=[what],
            nbytes=3 * numel * FP32,
        )

    def _complete_use(self, g: int, index: int) -> int:
        """The index (as ``_use``) of the stage after a group's first that has all of its gradient with visit ``index``;
        0: there is none."""
        route, stage = self.b.route, self.b.visits[index].stage
        return route.uses[g].index(stage) if route.last_made.get((g, stage)) == index else 0

    def _add_use(self, g: int, c: Chunk, use: int) -> None:
        """Add the gradient of one more stage to the total, as soon as it is whole: it holds its buffer no longer."""
        total, part = (group_buffer("H", g, c.index, use=k) for k in (0, use))
        self._add(group_op("AG", g, c.index, use=use), total, part, numel=c.numel)

    def _complete(self, g: int, c: Chunk) -> None:
        """The gradient of a chunk is whole: its partial norm, and to disk if it waits there."""
        total = group_buffer("H", g, c.index, use=0)
        op = self._down[total]
        late, nbytes = c.index in self._delayed(g), c.numel * self.b.provision.gradient_bytes(g)
        if self._waited_for or late:  # else the step itself computes it in passing
            op = self.b.emit(group_op("NG", g, c.index), after=[op], reads=[total], nbytes=nbytes)
            self._normed.append(op)
        if self.s.place.gradients == "disk" and (self.s.waits(g) or late):
            op = self.b.emit(group_op("WG", g, c.index), after=[op], reads=[total], gives=[total], nbytes=nbytes)
        self._final[total] = op

    def steps_at_the_end(self) -> None:
        """Emit the global norm, if any step waits for it, and all steps that come after the last visit."""
        seat = self.b.seat
        self._end_updates()
        if self._waited_for:
            parts = [self._partials(self._normed)] if seat.normed_with.size > 1 else self._normed
            self._norm = self.b.emit(single_op("NORM"), after=parts)
        for g in sorted(self.b.route.gradient_visits, reverse=seat.steps == "down"):
            if not self._waits(g):
                continue
            first = self._before_step(g)
            if self.s.place.state[g] == "device":
                self._stepped.append(self.device.step(g, first))
                continue
            for c in self.b.trained_chunks(g):
                if c.index not in self._delayed(g):
                    self._step_on_time(g, c, first)
            before, self._begun = self._begun, []
            self._begin_updates(g, first)
            self._end_updates(before)
        self._end_updates()
        if not self._waited_for and seat.normed_with.size > 1 and self.s.chunk:
            self._partials([*self._normed, *self._stepped])

    def _partials(self, after: list[OpId]) -> OpId:
        """Emit the gather of all ranks' partial sums of squares, which each then adds up in the same order."""
        ranks, route = self.b.seat.normed_with, self.b.route
        return self.b.collective(single_op("AN"), ranks, partials_of(ranks, route), Touched(), after=after)

    def _before_step(self, g: int) -> list[OpId]:
        """The ops that a group's step waits for besides those of its gradient: the norm if it waits for that, and the
        op that reads its weights last, if that comes after the gradient."""
        route = self.b.route
        first = [self._norm] if self._norm is not None and self.s.waits(g) else []
        if route.last_visit[g] > route.gradient_visits[g][-1]:  # else its own gradient comes after that op
            first.append(route.visits[route.last_visit[g]].ops()[-1])
        return first

    def _delayed(self, g: int) -> frozenset[int]:
        return self.b.provision.delayed.get(g, frozenset())

    def _step_on_time(self, g: int, c: Chunk, first: list[OpId]) -> None:
        """Emit one chunk's step in this step's backward, or after its norm."""
        gradient = group_buffer("H", g, c.index, use=0)
        after = self._final[gradient]
        if self.s.waits(g) and self.s.place.gradients == "disk":
            gradient = group_buffer("R", g, c.index)
            after = self._back(g, c, gradient, [after])
        if self._is_whole(g):
            norm = [self._norm] if self._norm is not None and self.s.waits(g) else []
            made, _ = self.matrices.up(g, c, gradient, [after, *norm], self.chunks.commit)
            self._stepped.append(made)
            return
        done = self.chunks.step(g, c, gradient, [after, *first])
        self._stepped.append(done)
        self.chunks.home(g, c, [done])

    def _is_whole(self, g: int) -> bool:
        """True if a group's step takes matrices whole."""
        return self.b.program.groups[g].whole is not None

    def _begin_updates(self, g: int, first: list[OpId]) -> None:
        """Updates of a group are on their way to the device, if it is one of matrices that steps on the host now."""
        if self._is_whole(g) and not self._delayed(g):
            self._begun.append((g, first))

    def _end_updates(self, begun: list[tuple[int, list[OpId]]] | None = None) -> None:
        """Emit the rest of the steps of groups whose updates are on their way to the device; None: of all."""
        if begun is None:
            begun, self._begun = self._begun, []
        for g, first in begun:
            self.matrices.make(g)
            for c in self.b.trained_chunks(g):
                update, down = self.matrices.down(g, c)
                self.chunks.home(g, c, [self.chunks.step(g, c, update, [down, *first])])

    def home_delayed(self, g: int, c: Chunk, after: list[OpId]) -> OpId:
        """``home`` of a delayed chunk; after the last of them the step before is committed."""
        before = len(self.b.emitter.ops)
        last = self.chunks.home(g, c, after)
        writes = [op.id for op in self.b.emitter.ops[before:] if op.lane == "write"]
        self._late_ends += [*writes, last]
        self._late_writes |= bool(writes)
        self._late -= 1
        if not self._late and self._late_writes:
            self.chunks.commit = [self.b.emit(single_op("CM"), after=self._late_ends)]
        return last

    def make_delayed(self, g: int) -> None:
        """Emit what comes before the delayed steps of a group's chunks, if it is one of matrices: of all together."""
        if not self._is_whole(g):
            return
        for c in self.b.trained_chunks(g):
            _, written = self.matrices.up(g, c, *self._left(g, c), [])
            self._late_ends += written
            self._late_writes |= bool(written)
        self.matrices.make(g)

    def step_delayed(self, g: int, c: Chunk) -> tuple[OpId, list[Buffer]]:
        """Emit one chunk's step with the gradient that the step before has left, without ``home``.

        Returns the op that makes the new weights, and the buffer that has them if they are on their way to disk.
        """
        if self._is_whole(g):
            gradient, down = self.matrices.down(g, c)
            after = [down]
        else:
            gradient, after = self._left(g, c)
        done = self.chunks.step(g, c, gradient, after)
        return done, self.chunks.new_weights(g, c) if self.s.place.weights[g] == "disk" else []

    def _left(self, g: int, c: Chunk) -> tuple[Buffer, list[OpId]]:
        """The buffer with the gradient of a chunk that the step before has left, and what brings it there."""
        if self.s.place.gradients == "disk":
            gradient = group_buffer("r", g, c.index)
            return gradient, [self._back(g, c, gradient, [])]
        gradient = group_buffer("h", g, c.index)
        self.b.emitter.carry(gradient, group_buffer("H", g, c.index, use=0), self.b.provision.held_pool)
        return gradient, []

    def _back(self, g: int, c: Chunk, into: Buffer, after: list[OpId]) -> OpId:
        """Emit the way back of a gradient that has waited on disk."""
        nbytes = c.numel * self.b.provision.gradient_bytes(g)
        return self.b.emit(
            group_op("RG", g, c.index), after=after, takes=[(into, "gradients_in")], writes=[into], nbytes=nbytes
        )


def partials_of(ranks: ProcessGroup, route: Route) -> int:
    """Bytes of all ranks' partial sums of squares of a step's gradients: of a pipeline of as many as any has."""
    groups = route.program.groups
    if route.program.dealt is not None:
        return ranks.size * route.program.dealt.partials * NORM_BYTES
    return sum(ranks.size * groups[g].trainable // ALIGN * NORM_BYTES for g in route.gradient_visits)
