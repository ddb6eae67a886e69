"""What every offload schedule is made with: ops are emitted, buffers taken from pools, compute ops put together.

A family (``vertical``, ``horizontal``) decides the order of visits; ``Loads``, ``Updates`` and ``Activations`` emit
the ops around each through one ``Builder``. The order of emission is each lane's order.

There is no deadlock because the step could also be done one op at a time without a buffer missing: visit by visit, and
within what follows a visit chunk by chunk, a chunk's gradient down, added, stepped and home before the next one's comes
down. Lanes, dependencies and pools keep that order, so the first op of it that is not done yet can always run. It needs

- of weights what a visit reads and what stays through it (``stay``), and nothing ahead that has no room beside these
  (``Loads.ahead``): a load that waits would hold up the new weights, checkpoints and state behind it in its lane, which
  the visit that it waits for may need;
- of gradients on the host those that are held (``Provision.held``), and one buffer more: no other gradient outlives
  what follows its visit, since that of a second stage is added to the first one's as soon as it is whole.
"""

from collections import defaultdict

from penstock.schedule.ir.ops import Take
from penstock.schedule.ir.references import Buffer, OpId, VisitId, group_buffer
from penstock.schedule.lower.emitter import Emitter, Touched
from penstock.schedule.lower.mesh import ProcessGroup
from penstock.schedule.lower.provision import Provision
from penstock.schedule.lower.route import Route, Visit
from penstock.schedule.place import Chunk, Settings, chunks


class Builder(Emitter):
    """Emits the ops of one step on one rank, with buffers from the pools that ``Provision`` has sized."""

    def __init__(self, route: Route, settings: Settings, shards: ProcessGroup) -> None:
        settings.place.check(route.program, settings.form)
        self.route = route
        self.program = route.program
        self.s = settings
        self.visits = route.visits
        self.shards = shards
        self.provision = Provision(route, settings, shards)
        self.stay = self.provision.stay
        super().__init__(self.provision.pools.values())
        assert shards.size == 1 or "device" not in (*settings.place.weights, *settings.place.state)
        self.cuts: list[tuple[Chunk, ...]] = [chunks(group, settings.chunk) for group in route.program.groups]
        self.ready: dict[VisitId, list[OpId]] = defaultdict(list)
        """visit -> ops that its first compute op waits for"""
        self._touched: dict[int, tuple[list[Buffer], list[Buffer], list[Take], list[Buffer]]] = {}
        """what ``_of_groups`` says of each visit, which all of its micro-batches ask"""

    # ---- what a visit touches

    def reads(self, visit: Visit) -> tuple[int, ...]:
        return self.route.reads(visit.kind, visit.stage)

    def gradients(self, visit: Visit) -> tuple[int, ...]:
        return self.route.gradients(visit.kind, visit.stage)

    def moving(self, visit: Visit) -> list[int]:
        """Groups whose weights this visit brings to the device."""
        return self.provision.moving(visit.kind, visit.stage)

    def trained_chunks(self, g: int) -> list[Chunk]:
        return [c for c in self.cuts[g] if c.trainable]

    # ---- weights

    def weight_buffer(self, g: int, index: int) -> Buffer:
        """What visit ``index`` reads a group's weights from: it has the name of the visit that loaded them."""
        return group_buffer("W", g, visit=self.visits[self.stay.source[g, index]].name)

    # ---- gradients

    def gradient_buffer(self, g: int, visit: Visit) -> Buffer:
        if self.s.place.state[g] == "device":
            return group_buffer("G", g)
        return group_buffer("G", g, visit=visit.name)

    def touched(self, index: int, m: int) -> Touched:
        """What the compute op of visit ``index`` for micro-batch ``m`` reads of weights and adds to of gradients. The
        visit's first takes those of the gradients that it begins, its last gives the weights back that do not stay.
        """
        visit = self.visits[index]
        if index not in self._touched:
            self._touched[index] = self._of_groups(index)
        weights, gradients, fresh, done = self._touched[index]
        return Touched(
            takes=[*fresh] if m == visit.micro_batches[0] else [],
            reads=[*weights, *gradients],
            writes=[*gradients],
            gives=[*done] if m == visit.micro_batches[-1] else [],
        )

    def _of_groups(self, index: int) -> tuple[list[Buffer], list[Buffer], list[Take], list[Buffer]]:
        """Weights, gradients, those of these that begin, and those of the weights that end with a visit."""
        visit = self.visits[index]
        weights = {g: self.weight_buffer(g, index) for g in self.moving(visit)}
        gradients = {g: self.gradient_buffer(g, visit) for g in self.gradients(visit)}
        fresh = [
            (name, self.provision.gradients_pool[g])
            for g, name in gradients.items()
            if self.s.place.state[g] != "device" or self.route.gradient_visits[g][0] == index
        ]
        done = [name for g, name in weights.items() if (g, index) in self.stay.gives]
        return list(weights.values()), list(gradients.values()), fresh, done

    def speculates(self) -> bool:
        """Whether the step waits for its norm, and any chunk is stepped in it without."""
        return self.s.wait and any(
            not self.s.waits(g) and len(self.provision.delayed.get(g, ())) < self.provision.trained_count(g)
            for g in self.route.gradient_visits
        )
