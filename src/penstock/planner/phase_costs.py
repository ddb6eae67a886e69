"""What a step asks of each lane, phase by phase, as a function of where things live: the linear program's coefficients.

A *phase* is a stretch of the step whose work can overlap with itself but hardly with that of the next one:

    start       the loads of the embedding and the first block, which the first block's compute waits for
    forward     every F visit, and the other loads up to the epilogue's
    backward    the epilogue and every B visit; without a norm to wait for, also the optimizer
    last        horizontal without such a wait: the last micro-batch's backward, which the optimizer's work falls into
    tail        the first block's and the embedding's gradients and steps: the last compute is over by then
    update      after the global norm, where the optimizer waits for it

With a delay ratio α, that share of the optimizer's work falls into the forward, and delayed chunks on disk are not read
a first time. All are in seconds of a lane that works alone, taken from the same ``Costs`` that the simulator uses,
per op with its own constant cost: summed over a placement they are the simulated schedule's work, exactly without a
delay and but for the rounding of chunks with one (a test holds them to it).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.config import Tier
from penstock.planner.fit import Request, tied_groups
from penstock.schedule.ir.lanes import LOCAL_LANES, Lane
from penstock.schedule.ir.ops import Op
from penstock.schedule.ir.text import op_id
from penstock.schedule.lower.provision import narrow_groups
from penstock.schedule.place import BF16, FP32, Depths, Placement, Settings, chunk_count, page_up
from penstock.sim.costs import Costs

Home = tuple[Tier, Tier]
"""Where a group's weights and its optimizer state live."""

Load = NDArray[np.float64]
"""Seconds, shape (phases + 1, lanes). The last row is of the way home of delayed steps that begin a step: the first
block waits for these steps and not for that, so it may fall into the start, the forward, or both (``step_bound``)."""

_LANE = {lane: i for i, lane in enumerate(LOCAL_LANES)}
_HOME = -1


@dataclass(frozen=True, kw_only=True)
class GroupClass:
    """Groups that cost the same wherever they live, but for weights that stay on the device between two visits: those
    of one block of many, whose loads a class spreads over all. ``homes``: those that the budget's pins and the format
    allow.
    """

    members: tuple[int, ...]
    homes: tuple[Home, ...]


class Phases:
    """What each group of a request meets on its way through the step's phases, whatever the sizes of chunks.

    | attribute | meaning |
    |---|---|
    | ``names`` | of the phases, in order |
    | ``loads`` | by depth of the pools of weights, 1 or more: group -> phase -> how often its weights are loaded |
    | ``classes`` | all groups, those that are alike together |
    """

    def __init__(self, request: Request, *, wait: bool, speculate: bool = False) -> None:
        """``wait``, ``speculate``: as in ``Settings``."""
        self.request = request
        self.route = request.route
        self.groups = request.program.groups
        self.wait = wait
        self.speculate = speculate
        self.split_last = request.one_by_one and (speculate or not wait) and request.micro_batches > 1
        self.names = (
            "start",
            "forward",
            "backward",
            *(["last"] * self.split_last),
            "tail",
            *(["update"] * wait),
        )
        self.tied = tied_groups(request.program)
        self._index = {name: i for i, name in enumerate(self.names)}
        visits, stages = self.route.visits, request.program.stages
        calls = [i for i, v in enumerate(visits) if stages[v.stage].kind == "call"]
        self._started = calls[0] if calls else 0
        self._tail = calls[-1] if calls and visits[calls[-1]].kind == "B" else len(visits)
        self.loads = tuple(
            {g: Counter(map(self._load_phase, loads)) for g, loads in self.route.stay(depth).loads.items()}
            for depth in (1, 2)
        )
        self.first = {g: min(phases) for g, phases in self.loads[0].items()}
        self.keys = [self._key(group.index) for group in self.groups]

    @cached_property
    def classes(self) -> tuple[GroupClass, ...]:
        found: dict[tuple[object, ...], list[int]] = {}
        for g, (key, _) in enumerate(self.keys):
            found.setdefault(key, []).append(g)
        return tuple(GroupClass(members=tuple(m), homes=self._homes(m[0])) for m in found.values())

    def phase(self, name: str) -> int:
        """Index of a phase by its name."""
        return self._index[name]

    def compute_phase(self, index: int) -> int:
        """Index of the phase that a visit's compute falls into."""
        visit = self.route.visits[index]
        if visit.kind == "F":
            return self.phase("forward")
        last = self.split_last and visit.micro_batches[-1] == self.request.micro_batches - 1
        return self.phase("last" if last else "backward")

    def _load_phase(self, index: int) -> int:
        """... that the loads of a visit's weights fall into."""
        if index <= self._started:
            return self.phase("start")
        ahead = self.route.visits[index].kind == "E"
        return self.phase("forward") if ahead else self.compute_phase(index)

    def gradient_phase(self, index: int) -> int:
        """... that the way of a visit's gradients to the host falls into."""
        return self.phase("tail") if index >= self._tail else self.compute_phase(index)

    def step_phase(self, g: int, *, waits: bool) -> int:
        """... that a group is stepped in, if it is not delayed. ``waits``: for the norm."""
        return self.phase("update") if waits else self.gradient_phase(self.route.last_visit[g])

    def steps(self, g: int) -> bool:
        """Whether a group is trained."""
        return self.groups[g].trainable > 0 and g in self.route.gradient_visits

    def _key(self, g: int) -> tuple[tuple[object, ...], object]:
        """All that a group's loads depend on besides its home: what is alike in a class, and what it need not load."""
        return self._alike(g), tuple(tuple(sorted(loads.get(g, {}).items())) for loads in self.loads)

    def _alike(self, g: int) -> tuple[object, ...]:
        group, route = self.groups[g], self.route
        visits = Counter(map(self._load_phase, route.readers.get(g, ())))
        size: tuple[object, ...] = (group.trainable, group.frozen, tuple(sorted(visits.items())))
        if g not in route.gradient_visits:
            return size
        return (
            *size,
            g in self.tied,
            tuple(self.gradient_phase(i) for i in route.gradient_visits[g]),
            self.gradient_phase(route.last_visit[g]),
            route.last_visit[g] > route.gradient_visits[g][-1],
            tuple((g, stage) in route.summed for stage in route.uses[g]),
            g in route.program.last_stepped,
        )

    def _homes(self, g: int) -> tuple[Home, ...]:
        """Where a group may live, highest first."""
        budget, split, trainable = self.request.budget, self.request.form.split, self.groups[g].trainable
        tiers: tuple[Tier, ...] = ("device", "host", "disk") if self.request.bottom == "disk" else ("device", "host")
        bottom = budget.state or self.request.bottom
        homes: list[Home] = []
        for weights in tiers:
            for state in tiers if trainable else ("host" if bottom == "device" else bottom,):
                together = not trainable or split or (weights == "device") == (state == "device")
                possible = state != "device" or (weights == "device" and g not in self.tied)
                if together and possible and self._pinned(g, weights, state):
                    homes.append((weights, state))
        return tuple(homes)

    def _pinned(self, g: int, weights: Tier, state: Tier) -> bool:
        budget, trainable = self.request.budget, self.groups[g].trainable
        want_weights, want_state = budget.weights, budget.state
        if trainable and self.request.holds_weights:
            want_weights = "disk"
        if g in self.tied and want_state == "device":  # its gradient comes in parts: it steps in host memory
            want_state, want_weights = "host", want_weights if self.request.form.split else "host"
        elif want_state == "device" and trainable and want_weights is None:
            want_weights = "device"
        fp32_device = not self.request.form.split and want_weights == "device" and trainable and want_state is None
        want_state = "device" if fp32_device and g not in self.tied else want_state
        return want_weights in (None, weights) and (not trainable or want_state in (None, state))


class PhaseCosts:
    """The loads of one request with the chunk size and delay of ``settings``; its placement does not matter."""

    def __init__(self, request: Request, settings: Settings, costs: Costs, phases: Phases | None = None) -> None:
        """``phases``: the request's, if there is one already."""
        self.phases = phases or Phases(request, wait=settings.wait, speculate=settings.speculate)
        assert (self.phases.wait, self.phases.speculate) == (settings.wait, settings.speculate)
        self.request = request
        self.s = settings
        self.route = request.route
        self.groups = request.program.groups
        self.narrow = narrow_groups(self.route, settings)
        self._costs = costs
        self._cache: dict[tuple[object, ...], Load] = {}

    # ---- loads

    def of_group(self, g: int, home: Home, gradients: Tier) -> Load:
        """What a group asks for; ``gradients``: where they wait for the norm, if they do."""
        key = (self.phases.keys[g], home, gradients)
        if key not in self._cache:
            self._cache[key] = self._group_load(g, home, gradients)
        return self._cache[key]

    def of_class(self, kind: GroupClass, home: Home, gradients: Tier) -> Load:
        """What a group of a class asks for on average."""
        alike = {self.phases.keys[g]: g for g in kind.members}
        counts = Counter(self.phases.keys[g] for g in kind.members)
        total = sum((n * self.of_group(alike[key], home, gradients) for key, n in counts.items()), start=self._none())
        mean: Load = total / len(kind.members)
        return mean

    def of_checkpoints(self, tier: Tier) -> Load:
        load = self._none()
        if tier == "device" or not self.request.train:
            return load
        stages = self.request.program.stages
        stay = self.route.stay(self.s.depths.weights)
        sizes: Counter[int] = Counter()
        for stage in stages:
            sizes[stage.checkpoint] += stay.leaving(stage.index, self.s.depths.inputs)
        times = self.s.micro_batches // self.route.at_once
        phases = self.phases
        out = phases.phase("forward")
        back = {phases.phase("backward"): times}
        if phases.split_last:
            back = {phases.phase("backward"): times - 1, phases.phase("last"): 1}
        for nbytes, count in sizes.items():
            pages = page_up(nbytes)
            self._add(load, out, "DC0m0", count * nbytes, count, times)
            if tier == "disk":
                self._add(load, out, "WC0m0", count * pages, count, times)
            for phase, n in back.items():
                self._add(load, phase, "UC0m0", count * nbytes, count, n)
                if tier == "disk":
                    self._add(load, phase, "RC0m0", count * pages, count, n)
        return load

    @cached_property
    def of_compute(self) -> Load:
        """Forward, recompute and backward: the same wherever anything lives."""
        load = self._none()
        visits = enumerate(self.route.visits)
        counts = Counter((v.kind, v.stage, self.phases.compute_phase(i), len(v.micro_batches)) for i, v in visits)
        for (kind, stage, phase, items), n in counts.items():
            self._add(load, phase, f"{kind}{stage}m0", 0, n, items)
        if self.s.wait and not self.s.speculate:
            self._add(load, self.phases.phase("update"), "NORM", 0, 1)
        return load

    def of(self, place: Placement) -> Load:
        """What a whole placement asks for."""
        total = self.of_compute + self.of_checkpoints(place.checkpoints)
        homes = zip(place.weights, place.state, strict=True)
        return total + sum(
            (self.of_group(g, home, place.gradients) for g, home in enumerate(homes)), start=self._none()
        )

    def _group_load(self, g: int, home: Home, gradients: Tier) -> Load:
        load, (weights, _) = self._none(), home
        if weights != "device" and g in self.phases.first:
            self._weight_load(load, g, home)
        if self.phases.steps(g):
            if home[1] == "device":
                self._on_device(load, g)
            else:
                self._gradient_load(load, g, home, gradients)
                self._step_load(load, g, home, gradients)
        return load

    def _weight_load(self, load: Load, g: int, home: Home) -> None:
        group, (weights, state) = self.groups[g], home
        late = self.late(g) if self.phases.steps(g) and state != "device" else 0.0
        for phase, times in self.phases.loads[self.s.depths.weights > 1][g].items():
            for numel, share in ((group.trainable, late), (group.frozen, 0.0)):
                n, nbytes = chunk_count(numel, self.s.chunk), self.s.form.weight_bytes * numel
                self._add(load, phase, f"UW{g}.0@F0", nbytes, n, times)
                if weights == "disk":  # what is stepped just before is still there, and not read
                    self._add(load, phase, f"RW{g}.0@F0", nbytes, n, times - share * (phase == self.phases.first[g]))

    def _on_device(self, load: Load, g: int) -> None:
        done = self.phases.gradient_phase(self.route.gradient_visits[g][-1])
        if self.s.wait:
            self._add(load, done, f"ND{g}", 0, 1)
        self._add(load, self.phases.step_phase(g, waits=self.s.wait), f"OD{g}", 0, 1)

    def waits(self, home: Home) -> bool:
        """``Settings.waits`` of a group with this home."""
        form = self.s.form
        on_disk = home_state_on_disk(home, form.moments, split=form.split)
        return self.s.wait and not (self.s.speculate and on_disk == form.state_slot_bytes)

    def late(self, g: int) -> float:
        """The share of a group's chunks that is delayed if they step in host memory."""
        return 1.0 if self.s.delay and g in self.request.program.last_stepped else self.s.delay

    def gradient_bytes(self, g: int) -> int:
        """``Provision.gradient_bytes``."""
        return BF16 if g in self.narrow else FP32

    def _gradient_load(self, load: Load, g: int, home: Home, gradients: Tier) -> None:
        route, nbytes = self.route, self.groups[g].trainable * self.gradient_bytes(g)
        n = chunk_count(self.groups[g].trainable, self.s.chunk)
        seen: set[int] = set()
        for i in route.gradient_visits[g]:
            stage, phase = route.visits[i].stage, self.phases.gradient_phase(i)
            self._add(load, phase, f"DG{g}.0@B0", nbytes, n)
            if stage in seen:
                self._add(load, phase, f"AG{g}.0@B0", 3 * nbytes, n)
            seen.add(stage)
        done = self.phases.gradient_phase(route.gradient_visits[g][-1])
        self._add(load, done, f"AG{g}.0@sum1", 3 * nbytes, n, len(route.uses[g]) - 1)
        waiting = 1.0 if self.waits(home) else self.late(g)
        self._add(load, done, f"NG{g}.0", nbytes, n, waiting)
        if gradients == "disk":  # the norm waits for its parts, and not for gradients to be on disk
            late = self.phases.wait and done == self.phases.phase("tail")
            written = self.phases.phase("update") if late else done
            self._add(load, written, f"WG{g}.0", nbytes, n, waiting)

    def _step_load(self, load: Load, g: int, home: Home, gradients: Tier) -> None:
        form, numel = self.s.form, self.groups[g].trainable
        n, late = chunk_count(numel, self.s.chunk), self.late(g)
        moves: list[tuple[str, int]] = []
        on_disk = home_state_on_disk(home, form.moments, split=form.split)
        if on_disk:
            moves += [("RS", on_disk), ("WS", on_disk)]
        moves.append(("OP", form.step_bytes(self.gradient_bytes(g))))
        if form.split and home[0] != "host":
            moves.append(("WW" if home[0] == "disk" else "UN", form.weight_bytes))
        waits = self.waits(home)
        for phase, share in ((self.phases.step_phase(g, waits=waits), 1.0 - late), (self.phases.first[g], late)):
            for kind, width in moves:
                home_bound = phase == self.phases.phase("start") and kind in ("WS", "WW", "UN")
                self._add(load, _HOME if home_bound else phase, f"{kind}{g}.0", width * numel, n, share)
            if gradients == "disk" and (waits or phase == self.phases.first[g]):
                self._add(load, phase, f"RG{g}.0", self.gradient_bytes(g) * numel, n, share)

    def _none(self) -> Load:
        return np.zeros((len(self.phases.names) + 1, len(LOCAL_LANES)))

    def _add(self, load: Load, phase: int, word: str, nbytes: int, ops: int, times: float = 1.0) -> None:
        """Add ``ops`` ops that move ``nbytes`` together, ``times`` over."""
        if ops and times > 0:
            each = Op(id=op_id(word), nbytes=nbytes // ops)
            load[phase, _LANE[each.lane]] += times * ops * self._costs.seconds(each)


def home_state_on_disk(home: Home, moments: int, *, split: bool) -> int:
    """``Placement.state_on_disk`` of one group: bytes per trainable element that a step reads, and writes."""
    weights, state = home
    return FP32 * ((state if split else weights) == "disk") + FP32 * moments * (state == "disk")


def limits_of(costs: Costs, depths: Depths) -> NDArray[np.float64]:
    """Shape (limits, lanes): a phase takes at least ``sum_b limits[i, b] * load[b]`` for every limit i.

    First each lane. While lane b is busy beside a, a runs at u = 1 / (1 + c_ab) and b at v = 1 / (1 + c_ba) of its
    speed, so each second of b's work costs a (1 - u) / v; never more than the second that it takes by itself.

    Then each pool of n buffers: all the time that buffers are held in a phase is at most n times the phase. A buffer of
    weights is held from its upload to the end of the visit, one of gradients from the backward until it is down, one of
    state from its read to its write. What else these lanes do counts along, so that with few buffers this is too much.
    """
    rows = np.eye(len(LOCAL_LANES))
    for i, a in enumerate(LOCAL_LANES):
        for j, b in enumerate(LOCAL_LANES):
            if a != b:
                u, v = (1 / (1 + costs.contention.get(pair, 0.0)) for pair in ((a, b), (b, a)))
                rows[i, j] = min((1 - u) / v, 1.0)
    held: tuple[tuple[int, tuple[Lane, ...]], ...] = (
        (depths.weights, ("h2d", "compute")),
        (depths.gradients, ("compute", "d2h")),
        (depths.state, ("read", "cpu", "write")),
        (depths.stage_in, ("read", "h2d")),
    )
    pools = [[(lane in lanes) / count for lane in LOCAL_LANES] for count, lanes in held]
    return np.concatenate((rows, np.array(pools)))


def bound(load: Load, limits: NDArray[np.float64]) -> float:
    """Seconds that a step takes at least if its phases do not overlap: the sum of each phase's tightest limit."""
    return float((load @ limits.T).max(axis=1).sum())


def step_bound(load: Load, limits: NDArray[np.float64]) -> float:
    """``bound`` of all loads of a step: start and forward together also take as long as their limits with the way home
    of the delayed steps that begin it, wherever in the two it falls."""
    start, forward, home = load[0], load[1], load[_HOME]
    alone = (limits @ start).max() + (limits @ forward).max()
    return bound(load[:_HOME], limits) + max(float((limits @ (start + forward + home)).max() - alone), 0.0)


def by_lane(load: Load) -> Mapping[str, float]:
    """Seconds of each lane over all phases."""
    return {lane: float(load[:, i].sum()) for lane, i in _LANE.items()}
