"""The common ground of all who write down one rank's ops: its route, seat and pools, and what each visit touches.

A rank is a walk over its visits (``rank``); ``Loads``, ``Activations`` and ``Updates`` emit the ops around each through
one ``Builder``. The order of emission is each lane's order.

There is no deadlock because the step could also be done one op at a time without a buffer missing: visit by visit, and
within what follows a visit chunk by chunk, a chunk's gradient down, added, stepped and home before the next one's comes
down. Lanes, dependencies and pools keep that order, so the first op of it that is not done yet can always run. It needs

- of weights what a visit reads and what stays through it (``stay``), and nothing ahead that has no room beside these
  (``Loads.ahead``): a load that waits would hold up the new weights, saved activations and state behind it in its lane,
  which the visit that it waits for may need;
- of gradients on the host those that are held (``Provision.held``), and one buffer more: no other gradient outlives
  what follows its visit, since that of a second stage is added to the first one's as soon as it is whole.
"""

from collections import defaultdict

from penstock.schedule.ir.ops import Take
from penstock.schedule.ir.references import Buffer, OpId, VisitId, group_buffer
from penstock.schedule.lower.emitter import Emitter, Touched
from penstock.schedule.lower.provision import Provision
from penstock.schedule.lower.route import Visit
from penstock.schedule.place import Chunk, chunks, strand_ends, strand_firsts


class Builder:
    """All that is known of a rank, and the ``emitter`` that its ops are written down with, with buffers from the pools
    that ``provision`` has."""

    def __init__(self, provision: Provision, emitter: Emitter) -> None:
        self.provision = provision
        self.seat = provision.seat
        self.route = provision.route
        self.program = self.route.program
        self.s = provision.s
        self.visits = self.route.visits
        self.emitter = emitter
        self.emit, self.collective = emitter.emit, emitter.collective
        cut = self.s.chunk
        self.cuts: list[tuple[Chunk, ...]] = [chunks(group, cut) for group in self.program.groups] if cut else []
        self.ready: dict[VisitId, list[OpId]] = defaultdict(list)
        """visit -> ops that its first compute op waits for"""
        self.outlast: dict[VisitId, list[OpId]] = defaultdict(list)
        """visit -> ops that read weights beside it: its last compute op, after which these may go, waits for them"""
        self._of_visit: tuple[list[Buffer], list[Buffer], list[Take], list[Buffer]] = [], [], [], []
        """the answer of ``_of_groups`` for the visit under way, which all of its micro-batches ask for"""

    # ---- what a visit touches

    def trained_chunks(self, g: int) -> list[Chunk]:
        return [c for c in self.cuts[g] if c.trainable]

    # ---- weights

    def weight_buffer(self, g: int, index: int) -> Buffer:
        """The buffer that visit ``index`` reads a group's weights from: its name has the visit that loaded them."""
        return group_buffer("W", g, visit=self.visits[self.provision.stay.source[g, index]].name)

    # ---- gradients

    def gradient_buffer(self, g: int, visit: Visit, strand: int = 0) -> Buffer:
        """The buffer that a visit adds a group's gradient to. The first of several strands has the sum of all in the
        end."""
        of_visit = visit.name if self._is_of_visit(g) else None
        first = not strand or strand == next(iter(strand_firsts(self.s.micro_batches, self.s.strands)))
        return group_buffer("G", g, visit=of_visit, use=-1 if first else strand)

    def strand_of(self, m: int) -> tuple[int, bool]:
        """The strand of a micro-batch, and whether that begins it."""
        ends = strand_ends(self.s.micro_batches, self.s.strands)
        return next(strand for last, strand in ends.items() if m <= last), m == 0 or m - 1 in ends

    def _is_of_visit(self, g: int) -> bool:
        """True if each visit has a device gradient of a group of its own, or all have one."""
        return self.s.place.state[g] != "device" or self.seat.sharding.apart

    def strands_on_device(self, g: int) -> bool:
        """True if a group's strands are added up on the device: of one visit, or where all visits have one gradient."""
        return self.s.strands > 1 and (self.route.together == self.s.micro_batches or not self._is_of_visit(g))

    def touched(self, index: int, m: int) -> Touched:
        """The buffers of weights that the next op of visit ``index``, for micro-batch ``m``, reads, and those of
        gradients that it adds to. The visit's first op takes those of the gradients that it begins, its last one gives
        the weights back that do not stay.
        """
        of_all = self.visits[index].micro_batches
        if m == of_all[0]:
            self._of_visit = self._of_groups(index)
        weights, gradients, fresh, done = self._of_visit
        takes = [*fresh] if m == of_all[0] else []
        if self.s.strands > 1 and gradients:
            gradients, takes = self._in_strands(self.visits[index], gradients, m)
        return Touched(
            takes=takes,
            reads=weights + gradients,
            writes=[*gradients],
            gives=[*done] if m == of_all[-1] else [],
        )

    def _in_strands(self, visit: Visit, gradients: list[Buffer], m: int) -> tuple[list[Buffer], list[Take]]:
        """The buffers that a visit's op for micro-batch ``m`` adds to where there are several strands, and those of
        them that it begins."""
        strand, begins = self.strand_of(m)
        of_strand: list[Buffer] = []
        fresh: list[Take] = []
        for name in gradients:
            on_device = self.strands_on_device(name.group)
            of_strand.append(self.gradient_buffer(name.group, visit, strand) if on_device else name)
            if begins or not on_device:  # each visit of one micro-batch begins its own
                fresh.append((of_strand[-1], self.provision.gradients_pool[name.group]))
        return of_strand, fresh

    def _of_groups(self, index: int) -> tuple[list[Buffer], list[Buffer], list[Take], list[Buffer]]:
        """Weights, gradients, those of these that begin, and those of the weights that end with a visit."""
        visit = self.visits[index]
        kind, stage = visit.kind, visit.stage
        moved = [g for g in self.route.reads(kind, stage) if self.provision.moves(g)]
        weights = {g: self.weight_buffer(g, index) for g in moved}
        gradients = {g: self.gradient_buffer(g, visit) for g in self.route.gradients(kind, stage)}
        fresh = [
            (name, self.provision.gradients_pool[g])
            for g, name in gradients.items()
            if self._is_of_visit(g) or self.route.gradient_visits[g][0] == index
        ]
        done = [name for g, name in weights.items() if (g, index) in self.provision.stay.gives]
        return list(weights.values()), list(gradients.values()), fresh, done

    def speculates(self) -> bool:
        """True if the step waits for its norm, and any chunk is stepped in it without."""
        return self.s.wait and any(
            not self.s.waits(g) and len(self.provision.delayed.get(g, ())) < self.provision.trained_count(g)
            for g in self.route.gradient_visits
        )
