"""The load of a step on each lane and phase, as a function of where things live: the linear program's coefficients.

They are read off lowered schedules (``probes``) and priced with the same ``Costs`` that the simulator uses, in seconds
of a lane that works alone. Summed over a placement they are the work of its schedule in each phase and lane (a test
holds them to it), but for three things that are not linear: a delay takes whole chunks; groups that speculate beside
others that wait have norms of their own; and the norm and the commit are an op or none.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.config import Tier
from penstock.planner.bounds import Load
from penstock.planner.classes import GroupClass, Home
from penstock.planner.probes import Facts, Probes
from penstock.planner.request import Request
from penstock.schedule.ir.lanes import STREAM_LANES
from penstock.schedule.ir.ops import Op
from penstock.schedule.ir.references import Buffer, OpId, group_op, single_op, stage_buffer, stage_op
from penstock.schedule.lower.graphs import all_graphs, kept_graphs
from penstock.schedule.lower.provision import narrow_groups
from penstock.schedule.place import Placement, Settings, chunk_count, trained_chunks
from penstock.sim.costs import Costs

_LANE = {lane: i for i, lane in enumerate(STREAM_LANES)}
_PARTS = ("trainable", "frozen")
_WAYS = ("DC", "WC", "RC", "UC")
"""Kinds of ops on the way of a saved activation."""
T = TypeVar("T", bound=Tier)


def columns(probes: Probes, gradients: Sequence[T]) -> list[tuple[GroupClass, Home, T]]:
    """The choices for a group of each class: homes, and tiers that its gradients may wait on."""
    return [(kind, home, q) for kind in probes.classes for home in kind.homes for q in gradients]


class Prices:
    """Probes, priced: seconds for one machine. ``waiting``: seconds that compute waits for other ranks of a pipeline,
    by phase."""

    def __init__(self, probes: Probes, costs: Costs, waiting: Mapping[str, float] = MappingProxyType({})) -> None:
        self.probes = probes
        self._costs = costs
        self._waiting = waiting
        self._ops: dict[tuple[object, ...], NDArray[np.float64]] = {}
        self._groups: dict[tuple[object, ...], Load] = {}
        self._columns: dict[tuple[object, ...], Load] = {}
        self._stages: dict[tuple[Tier, int, int], Load] = {}

    def of_group(self, small: int, home: Home, gradients: Tier, *, late: bool, deep: bool) -> Load:
        """The load of a group of the sample in whole parts, and the load that each further chunk of the trainable and
        of the frozen one adds: shape (3, phases + 1, lanes)."""
        key = (small, home, gradients, late, deep)
        if key not in self._groups:
            load, real = np.zeros((3, *self.none().shape)), self.probes.reals[small][0]
            for (row, kind, part, nbytes), count in self.probes.of_group(
                small, home, gradients, late=late, deep=deep
            ).items():
                ident = group_op(kind, real, -1 if part == "whole" else 0)
                load[0, row] += count * self._of_op(ident, nbytes)
                if part != "whole":
                    load[1 + _PARTS.index(part), row] += count * self._of_op(group_op(kind, real, 1))
            self._groups[key] = load
        return self._groups[key]

    def of_columns(self, gradients: Sequence[Tier], *, late: bool, deep: bool) -> Load:
        """The load of a group of each class on average, as ``of_group``: (``columns``, 3, phases + 1, lanes)."""
        key = (tuple(gradients), late, deep)
        if key not in self._columns:
            loads = [self._of_class(kind, home, q, late, deep) for kind, home, q in columns(self.probes, gradients)]
            self._columns[key] = np.array(loads)
        return self._columns[key]

    def _of_class(self, kind: GroupClass, home: Home, gradients: Tier, late: bool, deep: bool) -> Load:
        counts = Counter(self.probes.sample.groups[g] for g in kind.members)
        load = np.zeros((3, *self.none().shape))
        for small, count in counts.items():
            load += count / len(kind.members) * self.of_group(small, home, gradients, late=late, deep=deep)
        return load

    def of_stages(self, activations: Tier, inputs: int, graphs: int = 0) -> Load:
        """All compute, and the ways of saved activations that live on a tier: shape (phases + 1, lanes). ``inputs``,
        ``graphs``: as in ``Depths``."""
        key = (activations, inputs, graphs)
        if key not in self._stages:
            load, facts, route = self.none(), dict[int, Facts](), self.probes.request.route
            kept, stay = kept_graphs(route, graphs), route.stay(0)
            for stage, small in enumerate(self.probes.sample.stages):
                if small not in facts:
                    facts[small] = self.probes.of_stage(small, activations, inputs)
                leaving = stay.leaving(stage, inputs)
                stays = min(kept.get(stage + 1, 0) / leaving, 1.0) if leaving else 0.0
                with_graph = float(stage in kept) if route.takes_turns else kept.get(stage, 0) / route.at_once
                for (row, kind, _, nbytes), count in facts[small].items():
                    left = 1 - stays if kind in _WAYS else 1 - with_graph if kind == "B" else 1.0
                    load[row] += left * count * self._of_op(stage_op(kind, stage, 0), nbytes)
                    if kind == "B" and with_graph:
                        graph = stage_buffer("K", stage, 0)
                        load[row] += with_graph * count * self._of_op(stage_op(kind, stage, 0), 0, graph)
            self._stages[key] = load
        return self._stages[key]

    def of_graphs(self, activations: Tier, inputs: int) -> Load:
        """The load that a buffer for graphs saves, on average, in seconds below 0: of blocks that are not computed
        again, and of the ways of their inputs where saved activations live on a tier."""
        most = all_graphs(self.probes.request.route)
        if not most:
            return self.none()
        saved: Load = self.of_stages(activations, inputs, most) - self.of_stages(activations, inputs)
        return saved / most

    def alone(self, home: Home, gradients: Tier, *, late: bool) -> Load:
        """The ops that there is one of, where all groups live at one home."""
        load = self.none()
        for (row, kind, _, nbytes), count in self.probes.alone(home, gradients, late=late).items():
            load[row] += count * self._of_op(single_op(kind), nbytes)
        return load

    def waiting(self) -> Load:
        """The time that a rank of a pipeline waits for others: as good as the same wherever anything lives."""
        load = self.none()
        for phase, seconds in self._waiting.items():
            load[self.probes.phases.names.index(phase), _LANE["compute"]] = seconds
        return load

    def none(self) -> Load:
        return np.zeros((self.probes.phases.rows_of_load, len(STREAM_LANES)))

    def _of_op(self, ident: OpId, nbytes: int = 0, *reads: Buffer) -> NDArray[np.float64]:
        """The seconds that an op takes of each lane: shape (lanes,). Many groups and homes have the same ones."""
        key = (ident, nbytes, reads)
        if key not in self._ops:
            op, seconds = Op(id=ident, nbytes=nbytes, reads=reads), np.zeros(len(STREAM_LANES))
            if op.lane in _LANE:  # messages are waited for (``waiting``)
                seconds[_LANE[op.lane]] = self._costs.seconds(op)
            if op.lane != "compute":
                seconds[_LANE["compute"]] = self._costs.interpreter
            self._ops[key] = seconds
        return self._ops[key]


class PhaseCosts:
    """The loads of one request with the chunk size, depths and delay of ``settings``; its placement does not matter."""

    def __init__(self, request: Request, settings: Settings, costs: Costs, prices: Prices | None = None) -> None:
        """``prices``: of the request's probes with these costs, if there are any already."""
        s, own = settings, None if prices is None else prices.probes
        self.probes = own or Probes(request, wait=s.wait, speculate=s.speculate, keep=s.keep)
        self.prices = prices or Prices(self.probes, costs)
        assert (self.probes.wait, self.probes.speculate, self.probes.keep) == (s.wait, s.speculate, s.keep)
        assert (request.micro_batches, request.train) == (settings.micro_batches, settings.train)
        assert (request.form, request.narrow) == (settings.form, narrow_groups(request.route, settings))
        self.request = request
        self.s = settings
        self._deep = settings.depths.weights > 1
        self._late = (False, True) if settings.delay else (False,)
        self._cache: dict[tuple[int, Home, Tier], Load] = {}

    def of_group(self, g: int, home: Home, gradients: Tier) -> Load:
        """The load of a group: shape (phases + 1, lanes). ``gradients``: where they wait for the norm, if they do."""
        key = (self.probes.sample.groups[g], home, gradients)
        if key not in self._cache:
            self._cache[key] = self._group_load(g, *key)
        return self._cache[key]

    def _group_load(self, g: int, small: int, home: Home, gradients: Tier) -> Load:
        load = self.prices.none()
        for late in self._late:
            priced = self.prices.of_group(small, home, gradients, late=late, deep=self._deep)
            load += np.tensordot(self._weights(g, late), priced, 1)
        return load

    def of_columns(self, gradients: Sequence[Tier]) -> Load:
        """The load of a group of each class on average: shape (``columns``, phases + 1, lanes)."""
        first = [kind.members[0] for kind, _, _ in columns(self.probes, gradients)]
        load: Load = np.zeros((len(first), *self.prices.none().shape))
        for late in self._late:
            weights = {g: self._weights(g, late) for g in set(first)}
            priced = self.prices.of_columns(gradients, late=late, deep=self._deep)
            load += np.einsum("cp,cprl->crl", np.array([weights[g] for g in first]), priced)
        return load

    def _weights(self, g: int, late: bool) -> NDArray[np.float64]:
        """The counts in a group of each of ``Prices.of_group``, for the share that steps late or the one on time."""
        group, share = self.request.program.groups[g], self.late(g)
        counts = (trained_chunks(group, self.s.chunk), chunk_count(group.frozen, self.s.chunk))
        more = (max(count - 1, 0) for count in counts)
        return (share if late else 1 - share) * np.array([1.0, *more])

    def of_activations(self, tier: Tier) -> Load:
        found: Load = self._of_stages(tier) - self._of_stages("device")
        return found

    def _of_stages(self, tier: Tier, more_graphs: int = 0) -> Load:
        depths = self.s.depths
        return self.prices.of_stages(tier, depths.inputs, depths.graphs + more_graphs)

    @cached_property
    def of_compute(self) -> Load:
        """Forward, recompute and backward, what is waited for, and the norm and the commit: as good as the same
        wherever anything lives. What graphs besides those of the settings save is left out (``of_graphs``)."""
        bottom = self.request.bottom
        found: Load = self._of_stages("device")
        return found + self.prices.waiting() + self.prices.alone((bottom, bottom), "host", late=self.s.delay > 0)

    def of_graphs(self, tier: Tier) -> Load:
        """The load that each buffer for graphs saves where saved activations live on a tier."""
        return self.prices.of_graphs(tier, self.s.depths.inputs)

    def of(self, place: Placement, graphs: int = 0) -> Load:
        """The load of a whole placement: shape (phases + 1, lanes). ``graphs``: buffers for graphs besides those of the
        settings."""
        total = self.of_compute + self._of_stages(place.activations, graphs) - self._of_stages("device")
        homes = zip(place.weights, place.state, strict=True)
        return total + sum(self.of_group(g, home, place.gradients) for g, home in enumerate(homes))

    def late(self, g: int) -> float:
        """The share of a group's chunks that is delayed if they step in host memory."""
        return 1.0 if self.s.delay and g in self.request.program.last_stepped else self.s.delay
