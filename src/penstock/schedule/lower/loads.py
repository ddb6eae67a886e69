"""Weights to the device, ahead of the visits that need them, and the delayed optimizer steps that come before them.

The lanes are in order, so where the delayed steps are written down decides what stalls. They are emitted chunk by chunk
in the order of the group's chunks, in between the loads of the chunks that are not delayed, right before the group's
first load of the step:

    read    RS5.0  RW5.1  RS5.2  RW5.3  RS6.0 ...
    cpu            OP5.0         OP5.2         OP6.0
    h2d                   UW5.0 UW5.1   UW5.2 UW5.3
    write                 WS5.0   WW5.0   WS5.2   WW5.2

- All of a block's steps before those of the next one: the forward uses the blocks in this order, and a step that came
  earlier would hold state buffers that an earlier block's step needs.
- In turns with the chunks that are loaded anyway: the optimizer's arithmetic and the state's way back to disk run
  beside such a read. All state first would wait for state buffers, which the slower write lane gives back; all weights
  first would leave the latency of the steps before the block.
- New weights that are on their way to disk go up to the device from the same buffer: the chunk is not read back. The
  write follows the upload, since the device waits for it and the disk does not.

The last load before a step may read into the buffer that the step takes, which then reads only the state
(``kept``):

    read    RW5.1@B3                   RS5.1
    h2d              UW5.1@B3
    cpu                                       OP5.1
    write                                           WW5.1

Where weights of several hosts have a secondary partition, the first load brings this rank's part, and what has crossed
between hosts goes down beside the visit; all other loads bring that:

    h2d     UW5.0@F5                               UP5@B5
    nic              HW5@F5
    net                     GW5@F5                        GW5@B5
    d2h                            DP5@F5

It goes down behind what leaves before its visit begins: saved activations would else wait for weights to cross that are
not needed yet, and compute for their buffers. A visit of one micro-batch would itself wait for these, and what has
crossed for it goes down as it comes.

The first block's delayed steps have nothing to hide behind: the step begins with them, and finds the state of the first
ones read already (``chunk_steps``).
"""

from penstock.schedule.ir.ops import Take
from penstock.schedule.ir.references import Buffer, OpId, group_buffer, group_op
from penstock.schedule.lower.build import Builder
from penstock.schedule.lower.emitter import Touched
from penstock.schedule.lower.pools import KEPT, secondary_pool
from penstock.schedule.lower.route import Visit
from penstock.schedule.lower.update import Updates


class Loads:
    """Emits the loads of visits, in order, as far ahead as it is asked to and there is room for."""

    def __init__(self, builder: Builder, updates: Updates) -> None:
        self.b = builder
        self.updates = updates
        known, route = builder.provision, builder.route
        loaded = {g for g in route.readers if known.moves(g) or known.delayed.get(g)}
        self._order = [
            (i, g)
            for i, visit in enumerate(builder.visits if loaded else ())
            for g in route.reads(visit.kind, visit.stage)
            if g in loaded and (known.stay.source[g, i] == i if known.moves(g) else route.readers[g][0] == i)
        ]
        """(visit, group that it has to load, or only to step before) in the order of the loads"""
        self._next = 0
        self._takers: dict[str, OpId] = {}
        """pool of weights -> the last op that takes from it"""
        self._crossed: dict[int, tuple[int, Buffer, OpId]] = {}
        """group of which a part is yet to go down -> the visit, its buffer on the device, the op that has brought it"""

    def until(self, index: int) -> None:
        """Emit the loads of all visits up to and including ``index``, which comes next, and as many after them as the
        seat looks ahead: there is room for them."""
        lookahead = self.b.seat.lookahead
        while self._next < len(self._order) and self._order[max(self._next - lookahead, 0)][0] <= index:
            assert self._has_room(), f"no buffer for a group of {self.b.visits[index].name}"
            self._load()
        for g in [g for g, (visit, *_) in self._crossed.items() if visit == index]:
            self._leave(g)

    def ahead(self, index: int) -> None:
        """Emit the loads of visits up to and including ``index``, as long as each finds a buffer if no lane runs ahead.

        A load that would have to wait for a later visit to give one back would hold up what comes after it in its
        lane, and with that the very visit that it waits for.
        """
        while self._next < len(self._order) and self._order[self._next][0] <= index and self._has_room():
            self._load()

    def _has_room(self) -> bool:
        """True if the next load finds a buffer."""
        _, g = self._order[self._next]
        return not self.b.provision.moves(g) or self.b.emitter.has_room(self.b.provision.weights_pool[g])

    def _load(self) -> None:
        """Emit the next load."""
        index, g = self._order[self._next]
        self._next += 1
        b, visit = self.b, self.b.visits[index]
        late = b.provision.delayed.get(g, frozenset()) if b.route.readers[g][0] == index else frozenset()
        if b.provision.moves(g):
            b.ready[visit.name].append(self._group(g, index, late))
            return
        if late:
            self.updates.make_delayed(g)
        for c in b.trained_chunks(g):
            if c.index in late:
                done, _ = self.updates.step_delayed(g, c)
                last = self.updates.home_delayed(g, c, [done])
        b.ready[visit.name].append(last)

    def _group(self, g: int, index: int, late: frozenset[int]) -> OpId:
        """Emit the loads of one group, after the steps of its ``late`` chunks; what a visit that reads it waits for."""
        b, visit, cut = self.b, self.b.visits[index], self.b.seat.sharding.weights
        whole, home = (b.weight_buffer(g, index), b.provision.weights_pool[g]), b.s.place.weights[g]
        if g in b.provision.secondary and index != b.provision.stay.loads[g][0]:
            return self._load_again(g, index, whole)
        if home == "device":  # this rank's part is there
            return self._gather(g, visit, whole, part=[], after=[])
        into = (group_buffer("P", g, visit=visit.name), "weight_parts") if cut else whole
        takes = [into]
        if late:
            self.updates.make_delayed(g)
        for c in b.cuts[g]:
            after: list[OpId] = []
            reads: list[Buffer] = []
            gives: list[Buffer] = []
            nbytes = c.numel * b.s.form.weight_bytes
            if c.index in late:
                done, reads = self.updates.step_delayed(g, c)
                after = [done]
            elif home == "disk":
                if b.provision.kept.get(g) == index and b.provision.keeps(g, c):  # the optimizer takes it from there
                    reads, pool = self.updates.chunks.new_weights(g, c), KEPT
                else:
                    reads = gives = [group_buffer("i", g, c.index, visit=visit.name)]
                    pool = "stage_in"
                written = [op] if (op := self.updates.chunks.written.get((g, c.index))) else []
                read = group_op("RW", g, c.index, visit=visit.name)
                after = [b.emit(read, after=written, takes=[(reads[0], pool)], writes=reads, nbytes=nbytes)]
            up = group_op("UW", g, c.index, visit=visit.name)
            last = b.emit(up, after=after, takes=takes, reads=reads, writes=[into[0]], gives=gives, nbytes=nbytes)
            takes = []
            if c.index in late:
                self.updates.home_delayed(g, c, [*after, last] if reads else after)
        if not cut:
            return last
        last = self._gather(g, visit, whole, part=[into[0]], after=[last])
        if g in b.provision.secondary:
            self._crossed[g] = index, whole[0], last
            if len(visit.micro_batches) == 1:
                self._leave(g)
        return last

    def _leave(self, g: int) -> None:
        """Emit the way down of what has crossed between hosts of a group's weights, for the loads to come."""
        index, whole, brought = self._crossed.pop(g)
        b, visit, stays = self.b, self.b.visits[index].name, group_buffer("p", g)
        nbytes = b.provision.secondary_bytes(g)
        takes, ident = [(stays, secondary_pool(nbytes))], group_op("DP", g, visit=visit)
        down = b.emit(ident, after=[brought], takes=takes, reads=[whole], writes=[stays], nbytes=nbytes)
        b.outlast[visit].append(down)

    def _load_again(self, g: int, index: int, whole: Take) -> OpId:
        """Emit the load of a group from what has crossed between hosts before, for the last of which that is kept."""
        b, visit, stays = self.b, self.b.visits[index], group_buffer("p", g)
        loads, ident = b.provision.stay.loads[g], group_op("UP", g, visit=visit.name)
        if g in self._crossed:  # it comes twice before the visit that it has come for
            self._leave(g)
        down = group_op("DP", g, visit=b.visits[loads[0]].name)
        up = b.emit(
            ident,
            after=[down, *self._take_in_turn(whole[1], ident)],
            takes=[whole],
            reads=[stays],
            writes=[whole[0]],
            gives=[stays] if index == loads[-1] else [],
            nbytes=b.provision.secondary_bytes(g),
        )
        return self._gather_within(g, visit, whole[0], [up]) if b.seat.hosts.size > 1 else up

    def _gather(self, g: int, visit: Visit, whole: Take, *, part: list[Buffer], after: list[OpId]) -> OpId:
        """Emit the gather of a group's weights from all ranks' parts; on two levels, between hosts first."""
        op, seat, amount = Touched(reads=[*part], gives=[*part]), self.b.seat, self.b.provision.whole_weights(g)
        op.make(*whole)
        first = group_op("HW" if seat.hosts.size > 1 else "GW", g, visit=visit.name)
        after = [*after, *self._take_in_turn(whole[1], first)]
        if seat.hosts.size > 1:
            between = self.b.collective(first, seat.hosts, amount // seat.near.size, op, after=after)
            return self._gather_within(g, visit, whole[0], [between])
        if not visit.micro_batches:  # only the others use it
            op.gives.append(whole[0])
        return self.b.collective(first, seat.near, amount, op, after=after)

    def _take_in_turn(self, pool: str, ident: OpId) -> list[OpId]:
        """The op before this one that takes from a pool of weights, if another lane's: waited for, so that all that do
        have one order."""
        before, self._takers[pool] = self._takers.get(pool), ident
        return [] if before is None or before.lane == ident.lane else [before]

    def _gather_within(self, g: int, visit: Visit, whole: Buffer, after: list[OpId]) -> OpId:
        """Emit the gather of a group's weights from what the ranks of this host have."""
        op, amount = Touched(reads=[whole], writes=[whole]), self.b.provision.whole_weights(g)
        return self.b.collective(group_op("GW", g, visit=visit.name), self.b.seat.near, amount, op, after=after)
