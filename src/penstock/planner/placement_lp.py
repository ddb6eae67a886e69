"""The linear program: the share of weights, state, saved activations and waiting gradients that lives on each tier.

Given a family of schedules, M, the delay ratio, the chunk size and the depths of all pools, minimise the sum of the
phases' times. After the configuration search of GreedySnake (arXiv 2512.17570), and beyond it with the device as a tier
for weights and state, links that are duplex or shared as measured, gradients that wait for a norm, and horizontal.

Variables, all >= 0:

    T[p]            seconds of row p (see ``phases``); the last, seconds more of all before the backward together
    y[k, w, s, q]   how many groups of class k have weights on tier w, state on tier s, and gradients that wait on q
    c[t]            share of the saved activations on tier t
    z[q]            share of the waiting gradients on tier q
    g[t]            buffers for graphs of calls, which are not computed again, where saved activations are on tier t

Minimise sum_p T[p] + epsilon * (all seconds of all lanes), the second so that of equal times the one that moves less
wins, subject to

    T[p] >= sum_b W[i, b] * load[p, b]    for every phase p and limit i: each lane with what other busy lanes cost it,
                                          and each pool (``bounds.limits_of``); the load is linear in y and c
    and the same of some phases together, with what is delayed and has been read, or goes home (``bounds.StepBound``)
    sum_(w,s) y[k, w, s, q] = n[k] * z[q] for every class k and tier q; n[k]: groups of the class
    sum c = 1, sum z = 1
    g[t] <= most * c[t]                       for every tier t; most: buffers that a step can use
    base[m](c, z) + sum y * bytes[m] + sum g * bytes[m] <= budget[m]   for every tier m, in units of its budget
    sum_p load[p, write] <= most_writing, where drives must last; in units of it

``base`` is what the step's own pools (``Provision``) and fixed memory take with everything at the bottom, so
that a solution that the schedule can express is one that fits, up to pools that vanish when nothing needs them.

With y in whole numbers it is a mixed integer program, which HiGHS solves for these sizes in 1 to 60 ms.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Literal

import highspy
import numpy as np
from numpy.typing import NDArray

from penstock.config import TIERS, Tier
from penstock.planner.bounds import StepBound
from penstock.planner.classes import GroupClass, Home
from penstock.planner.fit import base_placement
from penstock.planner.optimum import optimum
from penstock.planner.phase_costs import PhaseCosts, Prices, columns
from penstock.planner.request import Request
from penstock.schedule.ir.lanes import STREAM_LANES
from penstock.schedule.lower.provision import Provision
from penstock.schedule.place import FP32, Settings, home_of_weights, trained_chunks
from penstock.sim.costs import Costs

Waits = Literal["host", "disk"]
Sizes = NDArray[np.float64]
"""Bytes by tier, in the order of ``TIERS``."""

_EPSILON = 1e-4


@dataclass(frozen=True, kw_only=True)
class Shares:
    """A solution. ``homes[k]``: home -> number of groups of class k, not whole. ``seconds``: of the step."""

    homes: tuple[Mapping[Home, float], ...]
    activations: Mapping[Tier, float]
    gradients: Mapping[Waits, float]
    seconds: float
    graphs: float = 0.0
    """buffers for graphs of calls"""

    @property
    def whole(self) -> bool:
        """True if saved activations and waiting gradients have one tier each, as a schedule wants it."""
        return all(max(shares.values()) > 1 - 1e-6 for shares in (self.activations, self.gradients))

    @property
    def activation_tier(self) -> Tier:
        """The tier of most of the saved activations."""
        return max(self.activations, key=lambda tier: self.activations[tier])

    @property
    def gradient_tier(self) -> Waits:
        """The tier of most of the gradients that wait."""
        return max(self.gradients, key=lambda tier: self.gradients[tier])


@dataclass(frozen=True, kw_only=True)
class _Column:
    """A choice for one group of a class: its variable y."""

    kind: int
    home: Home
    gradients: Waits
    sizes: Sizes


class PlacementLP:
    """The linear program of one request with the family, chunk, depths and delay of ``settings``."""

    def __init__(
        self,
        request: Request,
        settings: Settings,
        costs: Costs,
        *,
        disk_free: int | None = None,
        most_writing: float | None = None,
        prices: Prices | None = None,
    ) -> None:
        """``disk_free``: bytes that may be used on disk; None: enough. ``most_writing``: seconds of a step's writes;
        None: any. ``prices``: see ``PhaseCosts``."""
        self.request = request
        self.s = settings
        self.disk_free = disk_free
        self.most_writing = most_writing
        self.loads = PhaseCosts(request, settings, costs, prices)
        self._costs = costs
        self.base = base_placement(request)
        self._bases: dict[tuple[Tier, Waits], Sizes] = {}
        self._lowest: dict[tuple[Tier, Waits], Sizes] = {}
        self.budget: Sizes = np.array(
            [request.budget.device_bytes, request.budget.host_bytes, np.inf if disk_free is None else disk_free],
            dtype=np.float64,
        )

    @cached_property
    def bound(self) -> StepBound:
        """The least seconds of a step: of programs that are solved, most of which are only asked what fits."""
        return StepBound.of(self._costs, self.s, disk=self.request.bottom == "disk")

    @property
    def classes(self) -> tuple[GroupClass, ...]:
        return self.loads.probes.classes

    @cached_property
    def activation_tiers(self) -> tuple[Tier, ...]:
        if self.request.budget.activations is not None:
            return (self.request.budget.activations,)
        if not self.request.train:
            return ("device",)
        return TIERS if self.request.bottom == "disk" else TIERS[:2]

    @cached_property
    def gradient_tiers(self) -> tuple[Waits, ...]:
        pinned = self.request.budget.gradients
        if pinned is not None or not (self.s.wait or self.s.delay) or self.request.bottom != "disk":
            return (pinned or "host",)
        return ("host", "disk")

    # ---- bytes

    def group_sizes(self, g: int, home: Home, gradients: Waits) -> Sizes:
        """Bytes that follow a group to its home: weights, state, and its gradients while they wait.

        On disk weights and state have their place anyway; there only the gradients count.
        """
        group, form = self.request.program.groups[g], self.s.form
        by_tier: dict[Tier, float] = dict.fromkeys(TIERS, 0.0)
        weights, state = home
        for tier in {weights, home_of_weights(weights, state) if group.trainable else weights}:
            by_tier[tier] += group.numel * form.weight_bytes
        by_tier[state] += form.state_bytes(group)
        by_tier["disk"] = 0.0
        if group.trainable and g in self.request.route.gradient_visits:
            if state == "device":
                by_tier["device"] += group.trainable * FP32 * self._provisions[gradients].device_sums
            else:
                held = trained_chunks(group, self.s.chunk) * self.s.chunk * self._widest_gradient
                by_tier["host"] += held * self._uses_held(g, home, gradients)
                if gradients == "disk":
                    by_tier["disk"] += group.trainable * self._provisions[gradients].gradient_bytes(g)
        return np.array([by_tier[tier] for tier in TIERS])

    @cached_property
    def _widest_gradient(self) -> int:
        """``Provision.widest_gradient``: groups whose gradients cross in fp32 are all or none, but for tied ones, which
        always step in host memory."""
        found = self._provisions[self.gradient_tiers[0]]
        return max(map(found.gradient_bytes, self.request.route.gradient_visits), default=FP32)

    def _uses_held(self, g: int, home: Home, gradients: Waits) -> float:
        """The number of gradients of a group that are held in host memory: one for each stage that uses it, or a share;
        or as many sums of strands as there are of that."""
        provision, late, waits = self._provisions[gradients], self.loads.late(g), self.s.waits_with(home[1])
        return sum(
            (late * provision.held(g, use, waits=True) + (1 - late) * provision.held(g, use, waits=waits))
            * provision.sums(g, use)
            for use in range(len(self.request.route.uses[g]))
        )

    @cached_property
    def _provisions(self) -> dict[Waits, Provision]:
        return {q: self.request.provision(self._settings(self.activation_tiers[-1], q)) for q in self.gradient_tiers}

    def _settings(self, activations: Tier, gradients: Waits) -> Settings:
        return replace(self.s, place=replace(self.base, activations=activations, gradients=gradients))

    @cached_property
    def most_graphs(self) -> int:
        """The buffers for graphs that a step can use besides those that the settings have."""
        return max(self.request.most_graphs - self.s.depths.graphs, 0) if self.s.train else 0

    def graph_sizes(self, activations: Tier) -> Sizes:
        """Bytes that follow a buffer for graphs: the graph, on average, and the input of its call, which stays on the
        device. The room that this one leaves where saved activations live does not count: as many graphs need not
        fit."""
        stages = self.request.program.stages
        inputs = max(stage.activation for stage in stages[:-1]) if activations != "device" else 0
        able = [stage.graph for stage in stages if stage.graph is not None]
        graph = sum(able) / max(len(able), 1)
        return np.array([graph + inputs if tier == "device" else 0.0 for tier in TIERS])

    def base_sizes(self, activations: Tier, gradients: Waits) -> Sizes:
        """Bytes that are there wherever the groups are: pools, inputs, working memory, saved activations."""
        key = (activations, gradients)
        if key not in self._bases:
            self._bases[key] = self.lowest_sizes(activations, gradients) - self._at_the_bottom(gradients)
        return self._bases[key]

    def lowest_sizes(self, activations: Tier, gradients: Waits) -> Sizes:
        """Bytes that a step takes with every group as low as it goes."""
        key = (activations, gradients)
        if key not in self._lowest:
            option = self._settings(activations, gradients)
            total = np.array([*self.request.peaks(option), self.request.space_bytes(option)], dtype=np.float64)
            if self.s.speculate and gradients == "disk":  # those of a group whose state is in memory come back
                total[1] += self.s.depths.stage_out * self.s.chunk * self._widest_gradient
            self._lowest[key] = total
        return self._lowest[key]

    def _at_the_bottom(self, gradients: Waits) -> Sizes:
        """Bytes of all groups as low as they go."""
        homes = tuple(zip(self.base.weights, self.base.state, strict=True))
        total = np.zeros(len(TIERS))
        for kind in self.classes:
            g = kind.members[0]
            total += len(kind.members) * self.group_sizes(g, homes[g], gradients)
        return total

    @cached_property
    def device_is_full(self) -> bool:
        """True if the device is too small even with everything as low as it goes."""
        pairs = product(self.activation_tiers[::-1], self.gradient_tiers[::-1])
        return all(self.lowest_sizes(c, q)[0] > self.budget[0] for c, q in pairs)

    @cached_property
    def fits(self) -> bool:
        """True if anything fits. With a disk that is so if everything does as low as it goes."""
        pairs = product(self.gradient_tiers, self.activation_tiers[::-1])
        low = any((self.lowest_sizes(c, q) <= self.budget).all() for q, c in pairs)
        return low or (self.request.bottom != "disk" and self.relaxed is not None)

    # ---- solving

    def solve(
        self, activations: Tier | None = None, gradients: Waits | None = None, *, integer: bool = False
    ) -> Shares | None:
        """The best shares, or None if nothing fits. With tiers given, all saved activations and gradients are there.

        ``integer``: in whole groups (a MILP).
        """
        on = self.activation_tiers if activations is None else (activations,)
        waits = self.gradient_tiers if gradients is None else (gradients,)
        return self._model.solve(on, waits, integer=integer)

    @cached_property
    def _model(self) -> "_Model":
        return _Model(self)

    def compute_seconds(self, shares: Shares) -> float:
        """The least seconds of a step that compute alone leaves, with the graphs that shares have."""
        return self.bound.seconds(self.loads.of_compute + shares.graphs * self.loads.of_graphs("device"))

    @cached_property
    def relaxed(self) -> Shares | None:
        """The optimum with shares of everything; None if nothing fits."""
        return self.solve()

    @cached_property
    def least_whole(self) -> Shares | None:
        """The best solution whose saved activations and gradients have one tier each; None if nothing fits."""
        if self.relaxed is not None and self.relaxed.whole:
            return self.relaxed
        return next(iter(self.solve_whole()), None)

    def solve_whole(self) -> list[Shares]:
        """Solutions whose saved activations and gradients have one tier each, best first; empty if nothing fits."""
        if self.relaxed is None:
            return []
        pairs = list(product(self.activation_tiers, self.gradient_tiers))
        solved = [self.relaxed] if len(pairs) == 1 else [self.solve(c, q) for c, q in pairs]
        return sorted((s for s in solved if s is not None), key=lambda s: s.seconds)


class _Model:
    """The program's matrix for all tiers. Columns in the order T, c, g, z, y; times in units of ``unit`` seconds."""

    def __init__(self, lp: PlacementLP) -> None:
        self.lp = lp
        self.unit = max(lp.bound.seconds(lp.loads.of_compute), 1e-9)
        numbers = {kind: k for k, kind in enumerate(lp.classes)}
        self.columns = [
            _Column(kind=numbers[kind], home=home, gradients=q, sizes=lp.group_sizes(kind.members[0], home, q))
            for kind, home, q in columns(lp.loads.probes, lp.gradient_tiers)
        ]
        self.phases = lp.loads.probes.phases.rows_of_load
        none = np.zeros_like(lp.loads.of_compute)
        parts = [lp.loads.of_activations(tier) for tier in lp.activation_tiers]
        graphs = [lp.loads.of_graphs(tier) if lp.most_graphs else none for tier in lp.activation_tiers]
        groups = lp.loads.of_columns(lp.gradient_tiers)
        loads = np.array([*parts, *graphs, *(none for _ in lp.gradient_tiers), *groups]) / self.unit
        self._loads = loads
        self._cost = np.concatenate((np.ones(self.phases), _EPSILON * loads.sum(axis=(1, 2))))
        self._times, self._least = self._time_rows(loads)

    def solve(self, on: Sequence[Tier], waits: Sequence[Waits], *, integer: bool) -> Shares | None:
        """The best shares with saved activations and gradients on these tiers; None if nothing fits."""
        chosen = [j for j, column in enumerate(self.columns) if column.gradients in waits]
        tiers, all_waits = self.lp.activation_tiers, self.lp.gradient_tiers
        first_g, first_z, first_y = self._firsts(on, waits)
        kept = [
            *range(self.phases),
            *(self.phases + tiers.index(tier) for tier in on),
            *(self.phases + len(tiers) + tiers.index(tier) for tier in on),
            *(self.phases + 2 * len(tiers) + all_waits.index(q) for q in waits),
            *(self.phases + 2 * len(tiers) + len(all_waits) + j for j in chosen),
        ]
        columns = [self.columns[j] for j in chosen]
        sizes, most = self._size_rows(columns, on, waits)
        writing, least = self._writing_row(kept[self.phases :])
        sizes, most = (
            np.concatenate((sizes, writing, self._graph_rows(on, len(columns) + len(waits)))),
            np.concatenate((most, least, np.zeros(len(on)))),
        )
        wholes, counts = self._whole_rows(columns, on, waits)
        values = optimum(
            np.concatenate((self._times[:, kept], wholes, sizes)),
            self._cost[kept],
            np.concatenate((self._least, counts, np.full(len(most), -highspy.kHighsInf))),
            np.concatenate((np.full(len(self._least), highspy.kHighsInf), counts, most)),
            first_y if integer else None,
        )
        if values is None:
            return None
        homes: list[dict[Home, float]] = [{} for _ in self.lp.classes]
        for column, value in zip(columns, values[first_y:], strict=True):
            homes[column.kind][column.home] = homes[column.kind].get(column.home, 0.0) + value
        return Shares(
            homes=tuple(homes),
            activations=dict(zip(on, values[self.phases : first_g], strict=True)),
            graphs=float(values[first_g:first_z].sum()),
            gradients=dict(zip(waits, values[first_z:first_y], strict=True)),
            seconds=float(values[: self.phases].sum()) * self.unit,
        )

    def _time_rows(self, loads: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Rows of the phases' times, and their lower limits. ``loads``: (columns but T, phases, lanes), in units."""
        fixed, limits, rows, least = self.lp.loads.of_compute / self.unit, self.lp.bound.limits, [], []
        for one in self.lp.bound.constraints(self.phases):
            row = np.zeros((len(limits), self.phases + len(loads)))
            row[:, one.times] = 1.0
            row[:, self.phases :] = -limits @ loads[:, one.loads].sum(axis=1).T
            rows.append(row)
            least.append(limits @ fixed[one.loads].sum(axis=0) - one.less / self.unit)
        return np.concatenate(rows), np.concatenate(least)

    def _whole_rows(
        self, columns: Sequence[_Column], on: Sequence[Tier], waits: Sequence[Waits]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        first_g, first_z, first_y = self._firsts(on, waits)
        rows = np.zeros((2 + len(self.lp.classes) * len(waits), first_y + len(columns)))
        rows[0, self.phases : first_g] = rows[1, first_z:first_y] = 1.0
        for k, kind in enumerate(self.lp.classes):
            for i in range(len(waits)):
                rows[2 + k * len(waits) + i, first_z + i] = -float(len(kind.members))
        for j, column in enumerate(columns):
            rows[2 + column.kind * len(waits) + waits.index(column.gradients), first_y + j] = 1.0
        return rows, np.array([1.0, 1.0, *[0.0] * (len(rows) - 2)])

    def _firsts(self, on: Sequence[Tier], waits: Sequence[Waits]) -> tuple[int, int, int]:
        """The first columns of g, z and y, of a program with saved activations and gradients on these tiers."""
        first_g = self.phases + len(on)
        return first_g, first_g + len(on), first_g + len(on) + len(waits)

    def _graph_rows(self, on: Sequence[Tier], others: int) -> NDArray[np.float64]:
        """The most graphs on each tier of saved activations. ``others``: columns behind those of g."""
        ones, nothing = np.eye(len(on)), np.zeros((len(on), self.phases))
        return np.concatenate((nothing, -float(self.lp.most_graphs) * ones, ones, np.zeros((len(on), others))), axis=1)

    def _size_rows(
        self, columns: Sequence[_Column], on: Sequence[Tier], waits: Sequence[Waits]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Memory rows. What saved activations and gradients take adds up: their pools are independent."""
        first = self.lp.base_sizes(on[0], waits[0])
        by_c = [self.lp.base_sizes(c, waits[0]) for c in on]
        by_z = [self.lp.base_sizes(on[0], q) - first for q in waits]
        by_g = [self.lp.graph_sizes(c) for c in on]
        sizes = np.array([*[np.zeros(len(TIERS))] * self.phases, *by_c, *by_g, *by_z, *(c.sizes for c in columns)]).T
        limited = np.isfinite(self.lp.budget)
        scale = np.maximum(self.lp.budget[limited], 1.0)
        return sizes[limited] / scale[:, None], self.lp.budget[limited] / scale

    def _writing_row(self, kept: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The limit on a step's writes, where there is one. ``kept``: the columns after T."""
        if self.lp.most_writing is None:
            return np.zeros((0, self.phases + len(kept))), np.zeros(0)
        writes = self._loads[:, :, STREAM_LANES.index("write")].sum(axis=1) * self.unit
        row = np.concatenate((np.zeros(self.phases), writes[np.array(kept) - self.phases]))
        return row[None] / max(self.lp.most_writing, 1e-9), np.ones(1)
