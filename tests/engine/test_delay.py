"""The delay ratio: the same work and the same numbers, part of it a step later, and memory as stated."""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import Budget, Family, Tier
from penstock.errors import ScheduleError
from penstock.planner.fit import fit
from penstock.planner.own_schedule import own_plan
from penstock.planner.request import Request
from penstock.schedule.check import check
from penstock.schedule.check.clocks import Clocks
from penstock.schedule.check.order import run_order
from penstock.schedule.check.worlds import check_world
from penstock.schedule.ir.lanes import Lane
from penstock.schedule.ir.ops import Op, Schedule, chunk_of
from penstock.schedule.ir.text import parse_schedule
from penstock.schedule.ir.worlds import World
from penstock.schedule.lower.seat import streaming_seat
from penstock.schedule.lower.visits import lower_step
from penstock.schedule.mesh import Mesh
from penstock.schedule.place import FP32, PAGE, Depths, Format, Placement, Settings, chunks, delayed_share
from penstock.schedule.program import ALIGN, Program
from penstock.sim.costs import Costs
from penstock.sim.simulate import simulate
from tests.programs import Case, random_case, transformer

SHARES = (0.25, 0.5, 1.0)


def training(seed: int) -> Case:
    """A random vertical training step."""
    case = random_case(seed)
    return replace(case, family="vertical", settings=replace(case.settings, train=True))


def delayed(case: Case, share: float) -> Case:
    return replace(case, settings=replace(case.settings, delay=share))


def late_steps(schedule: Schedule) -> list[Op]:
    """The optimizer steps that use the gradient of the step before."""
    return [op for op in schedule.lanes["cpu"] if op.id.kind == "OP" and op.reads[0][0] in "hr"]


def late_count(plain: Schedule, share: float, last: int = 0) -> int:
    """How many chunks a share delays: all of the embedding (group ``last``), and as many of the others."""
    groups = [op.id.group for op in plain.ops if op.id.kind == "OP"]
    return groups.count(last) + ceil(share * (len(groups) - groups.count(last)))


def steps(schedule: Schedule) -> list[str]:
    return sorted(op.id for op in schedule.ops if op.id.kind in ("OP", "OD"))


cases = st.builds(training, st.integers(0, 10_000))


def moves_work_and_adds_none(case: Case, share: float, late: Schedule) -> None:
    """Every chunk is stepped once a step, as without; bytes are the same on every lane but one. A delayed chunk whose
    weights live on disk is not read from there for its first load of the step, but for its optimizer step where that
    finds it in host memory without a delay; and a gradient may wait on disk."""
    plain = case.build()
    assert steps(plain) == steps(late)
    assert len(late_steps(late)) == late_count(plain, share)
    assert {op.id for op in late.ops if op.id.kind == "OP" and op.id.group == 0} <= {op.id for op in late_steps(late)}
    expected: dict[Lane, int] = dict(plain.bytes_per_lane())
    cuts = [chunks(g, case.settings.chunk) for g in case.program.groups]
    kept = {chunk_of(op) for op in plain.lanes["read"] if op.id.kind == "RW" and op.writes[0].holds == "new weights"}
    for op in late_steps(late):
        numel = cuts[op.id.group][op.id.chunk].numel
        width = case.gradient_bytes(plain, op.id[2:])
        if f"NG{op.id[2:]}" not in plain.by_id:  # its step would have computed its part of the norm in passing
            expected["cpu"] += numel * width
        if case.settings.place.weights[op.id.group] == "disk" and chunk_of(op) not in kept:
            expected["read"] -= numel * case.settings.form.weight_bytes
        if case.settings.place.gradients == "disk" and not case.settings.waits(op.id.group):
            expected["read"] += numel * width
            expected["write"] += numel * width
    assert late.bytes_per_lane() == expected


def steps_before_weights_are_used(case: Case, schedule: Schedule, clocks: Clocks) -> None:
    for step in late_steps(schedule):
        g, c = step.id.group, step.id.chunk
        loads = [op for op in schedule.ops if op.id.kind in ("RW", "UW") and (op.id.group, op.id.chunk) == (g, c)]
        assert loads or case.settings.place.weights[g] == "device"
        for op in loads:
            assert clocks.before(step, op)
        if not loads:
            users = [
                op
                for op in schedule.lanes["compute"]
                if op.id.kind in "FEB" and g in case.program.stages[op.id.stage].forward_reads
            ]
            home = schedule.by_id.get(f"UN{g}.{c}", step)
            for op in users:
                assert clocks.before(home, op)


def commits_between_two_steps(schedule: Schedule, clocks: Clocks) -> None:
    """Behind the last write of the step before, and before the first one of this."""
    late = {op.id[2:] for op in late_steps(schedule)}
    writes = [op for op in schedule.lanes["write"] if op.id.kind in ("WS", "WW")]
    assert ("CM" in schedule.by_id) == any(op.id[2:] in late for op in writes)
    for op in writes if "CM" in schedule.by_id else ():
        commit = schedule.by_id["CM"]
        assert clocks.before(op, commit) if op.id[2:] in late else clocks.before(commit, op)


def pool_of_waiting_gradients_is_full(case: Case, schedule: Schedule) -> None:
    """At most; where saved activations share it, up to one visit's, as a lane that runs ahead frees them sooner."""
    for pool in schedule.pools:
        most = max(in_use(schedule, pool.name))
        if pool.name == "gradients_held":
            assert most == pool.count
        if pool.name == "held":
            visit = case.settings.micro_batches * max(op.id.startswith("DC") * len(op.takes) for op in schedule.ops)
            cut = max(len([c for c in chunks(g, case.settings.chunk) if c.trainable]) for g in case.program.groups)
            assert pool.count - visit - 2 * case.settings.depths.weights * cut <= most <= pool.count


def in_use(schedule: Schedule, name: str) -> Iterator[int]:
    """Buffers of a pool that are taken, after each op's takes, when ops run one by one in the schedule's order."""
    held = {start for start, _, pool in schedule.carried if pool == name}
    yield len(held)
    for op in schedule.ops:
        held |= {buffer for buffer, pool in op.takes if pool == name}
        yield len(held)
        held -= set(op.gives)


@settings(max_examples=30, deadline=None)
@given(cases, st.sampled_from(SHARES))
def test_a_delayed_schedule_is_safe_adds_no_work_and_commits_between_two_steps(case: Case, share: float) -> None:
    """Of one schedule, which takes longest, all that holds of any."""
    schedule = delayed(case, share).build()
    check(schedule)
    assert parse_schedule(str(schedule)) == schedule
    clocks = Clocks(run_order(schedule))
    moves_work_and_adds_none(case, share, schedule)
    steps_before_weights_are_used(case, schedule, clocks)
    commits_between_two_steps(schedule, clocks)
    pool_of_waiting_gradients_is_full(case, schedule)


def test_a_share_of_nothing_is_the_schedule_without_a_delay() -> None:
    for seed in range(20):
        case = training(seed)
        assert delayed(case, 0.0).build() == case.build()
        assert not case.build().carried


# ---- the numbers


class Run:
    """Runs schedules op by op on counts instead of numbers: how many steps each chunk's state and weights have taken.

    Starts in a step's steady state: delayed chunks lack the step before's update, whose gradient is there.
    """

    def __init__(self, case: Case, schedule: Schedule) -> None:
        self.case, self.schedule = case, schedule
        self.place = case.settings.place
        self.cuts = [[c.index for c in chunks(g, case.settings.chunk) if c.trainable] for g in case.program.groups]
        late = {(op.id.group, op.id.chunk) for op in late_steps(schedule)}
        self.now = 1
        self.state = {(g, c): 1 - ((g, c) in late) for g, cut in enumerate(self.cuts) for c in cut}
        self.weights, self.home = dict(self.state), dict(self.state)
        self.waiting = dict.fromkeys(late, 0)
        self.held = {start: 0 for start, _, _ in schedule.carried}
        self.uploaded: dict[tuple[str, int], int] = {}

    def step(self) -> None:
        for op in run_order(self.schedule):
            self._op(op)
            for name in op.gives:
                self.held.pop(name, None)
        ends = {end: start for start, end, _ in self.schedule.carried}
        assert self.held.keys() == ends.keys()
        self.held = {ends[name]: version for name, version in self.held.items()}
        self.now += 1

    def _op(self, op: Op) -> None:
        kind, at = op.id.kind, (op.id.group, op.id.chunk)
        match kind:
            case "RW" if at in self.weights:
                self.held[op.writes[0]] = self.weights[at]
            case "UW" if at in self.weights:
                self.uploaded[op.writes[0], at[1]] = self.held[op.reads[0]] if op.reads else self.weights[at]
            case "GW":
                for c in self.cuts[at[0]]:
                    self.uploaded[op.writes[0], c] = self.uploaded[op.reads[0], c]
            case "F" | "B" | "E":
                self._compute(op)
            case "DG":
                self.held[op.writes[0]] = self.now
            case "AG":
                assert self.held[op.reads[0]] == self.held[op.reads[1]]
            case "WG":
                self.waiting[at] = self.held[op.reads[0]]
            case "RG":
                self.held[op.writes[0]] = self.waiting[at]
            case "RS":
                for name in op.writes:
                    self.held[name] = self.state[at] if name.kind == "S" else self.home[at]
            case "OP":
                self._optimize(op, at)
            case "OD":
                for c in self.cuts[at[0]]:
                    self.state[at[0], c] = self.weights[at[0], c] = self.home[at[0], c] = self.now + 1
            case "WS":
                self.state[at] = self.held[op.reads[0]]
            case "WW":
                self.home[at] = self.held[op.reads[0]] if op.reads else self.weights[at]
                if self.place.weights[at[0]] == "disk":
                    self.weights[at] = self.home[at]
            case "UN":
                self.weights[at] = self.held[op.reads[0]] if op.reads else self.home[at]

    def _optimize(self, op: Op, at: tuple[int, int]) -> None:
        gradient, *through = op.reads
        holds = [name.holds for name in through]
        old = [*(self.held[name] for name in through)]
        old += [self.state[at]] * ("state" not in holds) + [self._in_memory(at)] * ("new weights" not in holds)
        assert {*old} == {self.held[gradient]}, "each gradient is applied once, in order"
        for name in op.writes:
            self.held[name] = old[0] + 1
        if "state" not in holds:
            self.state[at] = old[0] + 1
        if "new weights" not in holds and self.place.weights[at[0]] == "host":
            self.weights[at] = old[0] + 1
        if "new weights" not in holds and self._is_home(at[0]):
            self.home[at] = old[0] + 1

    def _is_home(self, g: int) -> bool:
        """True if a group's weights are at home in host memory."""
        return self.place.home(self.case.program.groups[g]) == "host"

    def _in_memory(self, at: tuple[int, int]) -> int:
        return self.weights[at] if self.place.weights[at[0]] == "host" else self.home[at]

    def _compute(self, op: Op) -> None:
        stage = self.case.program.stages[op.id.stage]
        groups = {"F": stage.forward_reads, "B": stage.backward_reads}.get(op.id.kind) or (
            *stage.forward_reads,
            *stage.backward_reads,
        )
        for g in groups:
            buffer = next((name for name in op.reads if name.startswith(f"W{g}@")), None)
            for c in self.cuts[g]:
                version = self.weights[g, c] if buffer is None else self.uploaded[buffer, c]
                assert version == self.now, f"{op.id} reads chunk {g}.{c} after {version} steps"


@settings(max_examples=30, deadline=None)
@given(cases, st.sampled_from((0.0, *SHARES)))
def test_every_forward_and_backward_sees_all_steps_before_its_own(case: Case, share: float) -> None:
    """That is why a delay does not change the numbers."""
    case = delayed(case, share)
    run = Run(case, case.build())
    for _ in range(3):
        run.step()


@settings(max_examples=20, deadline=None)
@given(cases, st.sampled_from((0.0, 0.5)), st.integers(2, 5), st.sampled_from(("vertical", "horizontal")))
def test_the_same_holds_on_each_of_several_ranks(case: Case, share: float, ranks: int, family: Family) -> None:
    place = case.settings.place
    host = [tuple("host" if tier == "device" else tier for tier in tiers) for tiers in (place.weights, place.state)]
    s = replace(case.settings, place=replace(place, weights=host[0], state=host[1]))
    s = replace(s, delay=share if family == "vertical" else 0.0)
    everyone = Mesh(data=ranks).everyone()
    case = replace(case, program=everyone.part(case.program), family=family, settings=s)
    schedule = lower_step(family, case.program, s, seat=streaming_seat(ranks))
    check_world(World(name="ranks", ranks=(schedule,) * ranks, groups={everyone.name: everyone.members}))
    run = Run(case, schedule)
    for _ in range(3):
        run.step()


# ---- the commit in between


def _without(schedule: Schedule, ident: str, *names: str) -> Schedule:
    """The schedule in which one op does not wait for some others."""
    ops = (
        replace(op, after=tuple(n for n in op.after if n not in names)) if op.id == ident else op for op in schedule.ops
    )
    return replace(schedule, ops=tuple(ops))


def test_a_commit_that_may_come_too_early_or_too_late_is_found() -> None:
    schedule = lower_step("vertical", PLAIN, placed(delay=0.5))
    check(schedule)
    last = schedule.by_id["CM"].after[-1]
    with pytest.raises(ScheduleError, match=rf"op CM may run before {last}"):
        check(_without(schedule, "CM", last))
    first = next(op for op in schedule.ops if "CM" in op.after)
    with pytest.raises(ScheduleError, match=rf"op {first.id} may run before CM"):
        check(_without(schedule, first.id, "CM"))
    ops = tuple(replace(op, after=tuple(n for n in op.after if n != "CM")) for op in schedule.ops if op.id != "CM")
    with pytest.raises(ScheduleError, match="which no op CM commits"):
        check(replace(schedule, ops=ops))


# ---- memory


LAYERS, M = 8, 3
PLAIN = transformer(LAYERS, block=24)


def placed(
    *, wait: bool = False, activations: Tier = "host", chunk: int = 4, program: Program = PLAIN, delay: float = 0.0
) -> Settings:
    count = len(program.groups)
    return Settings(
        micro_batches=M,
        chunk=chunk * ALIGN,
        form=Format.of("bf16", 2),
        place=Placement(weights=("disk",) * count, state=("disk",) * count, gradients="host", activations=activations),
        depths=Depths(),
        wait=wait,
        delay=delay,
    )


def pool_bytes(schedule: Schedule, *names: str) -> int:
    return sum(pool.size * pool.count for pool in schedule.pools if pool.name in names)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("activations", ["device", "host", "disk"])
def test_with_a_wait_for_the_norm_a_delay_costs_no_memory(share: float, activations: Tier) -> None:
    plain = lower_step("vertical", PLAIN, placed(wait=True, activations=activations))
    late = lower_step("vertical", PLAIN, placed(wait=True, activations=activations, delay=share))
    assert late.peak_bytes("host") <= plain.peak_bytes("host")
    assert late.peak_bytes("device") == plain.peak_bytes("device")


@pytest.mark.parametrize("share", SHARES)
def test_without_a_wait_a_delay_costs_what_it_delays_of_the_gradients(share: float) -> None:
    plain, late = (lower_step("vertical", PLAIN, placed(activations="device", delay=a)) for a in (0.0, share))
    assert pool_bytes(late, "gradients_held") == late_count(plain, share) * 4 * ALIGN * FP32
    out = 0 if share < 1 else pool_bytes(plain, "gradients_out")  # nothing else comes down
    more = pool_bytes(late, "gradients_held") - out
    assert late.peak_bytes("host") == plain.peak_bytes("host") + more
    assert late.peak_bytes("device") == plain.peak_bytes("device")


@pytest.mark.parametrize("chunk", [1, 4])
def test_saved_activations_and_delayed_gradients_take_turns_in_one_pool(chunk: int) -> None:
    """With saved activations as large as the gradients of a block that wait: one pool of either's size and one visit's
    more, where two would take twice as much."""
    share, block = 0.5, 24
    activation = block * ALIGN * FP32 // 2 // M  # M saved activations are as large as half of a block's gradient
    stages = tuple(
        replace(s, activation=activation if s.activation else 0) for s in transformer(LAYERS, block=block).stages
    )
    program = replace(PLAIN, stages=stages)
    plain = lower_step("vertical", program, placed(chunk=chunk, program=program))
    late = lower_step("vertical", program, placed(chunk=chunk, program=program, delay=share))
    check(late)
    apart = pool_bytes(plain, "saved_activations")
    gradients = late_count(plain, share) * chunk * ALIGN * FP32
    together = pool_bytes(late, "held")
    assert not pool_bytes(late, "saved_activations", "gradients_held")
    assert max(apart, gradients) <= together <= max(apart, gradients) + M * activation + chunk * ALIGN * FP32
    assert together < 0.6 * (apart + gradients)


def test_a_saved_activation_that_fits_no_shared_buffer_well_keeps_a_pool_of_its_own() -> None:
    """Saved activations of 2 pages in buffers of a gradient chunk, 4 times as large: apart they take less."""
    late = lower_step("vertical", PLAIN, replace(placed(chunk=2, delay=0.25), micro_batches=16))
    assert 4 * 2 * PAGE == 2 * ALIGN * FP32
    assert {"saved_activations", "gradients_held"} <= {pool.name for pool in late.pools}


# ---- which chunks


@pytest.mark.parametrize(("changes", "expected"), [({}, {0}), ({"tied": True}, {0}), ({"frozen": True}, {0})])
def test_the_embedding_is_what_the_backward_is_done_with_last(changes: dict[str, bool], expected: set[int]) -> None:
    assert transformer(3, **changes).last_stepped == expected  # type: ignore[arg-type]


def test_with_a_frozen_embedding_the_first_block_that_is_trained_is() -> None:
    program = transformer(3)
    groups = (replace(program.groups[0], trainable=0, frozen=20 * ALIGN), *program.groups[1:])
    stages = tuple(replace(s, gradients=tuple(g for g in s.gradients if g)) for s in program.stages)
    assert Program(groups=groups, stages=stages).last_stepped == {3}


@pytest.mark.parametrize("share", [0.0, 0.07, 0.25, 1 / 3, 0.5, 0.9, 1.0])
def test_the_delayed_chunks_are_evenly_spread_over_all_groups(share: float) -> None:
    counts, first, total = (16, 1, 1, 5, 100), 0, 0
    for count in counts:
        late = delayed_share(first, count, share)
        assert late <= set(range(count))
        assert abs(len(late) - share * count) < 1
        first, total = first + count, total + len(late)
        assert total == ceil(share * first - 1e-9)


# ---- time


def disk_bound(op: Op) -> float:
    """A drive that writes at half the rate it reads at, and takes as long for a step as the device computes."""
    if op.lane == "compute":
        return {"F": 1.0, "B": 3.0}.get(op.id.kind, 1.0)
    rates: dict[Lane, float] = {"read": 2.5e5, "write": 1.25e5, "cpu": 1e7, "h2d": 2e6, "d2h": 2e6}
    return op.nbytes / rates[op.lane]


def test_a_delay_is_faster_where_the_drive_would_idle_in_the_forward() -> None:
    program = transformer(12, block=16)
    costs = Costs(name="disk", seconds=disk_bound)
    times = {}
    for share in (0.0, 0.25, 0.5):
        s = replace(placed(program=program, delay=share), micro_batches=2, form=Format.of("fp16", 2))
        found = simulate(World.of(lower_step("vertical", program, s)), costs)
        times[share] = found.time
        assert found.time >= found.lower_bound
    assert times[0.25] < 0.95 * times[0.0]
    assert times[0.5] < times[0.0]


# ---- what refuses it


def test_a_step_after_the_load_of_its_weights_is_found() -> None:
    schedule = lower_step("vertical", PLAIN, placed(delay=0.5))
    tag = next(op.id[2:] for op in late_steps(schedule) if op.id.group == 5)
    again = next(op for op in schedule.ops if op.id.startswith(f"RW{tag}@B"))
    for after, missing in (((), f"OP{tag}"), ((f"OP{tag}",), f"WW{tag}")):
        broken = replace(schedule, ops=tuple(replace(op, after=after) if op is again else op for op in schedule.ops))
        with pytest.raises(ScheduleError, match=f"op {again.id} may run before {missing}"):
            check(broken)
    upload = next(op for op in schedule.ops if op.id.startswith(f"UW{tag}@F"))
    broken = replace(schedule, ops=tuple(replace(op, after=()) if op is upload else op for op in schedule.ops))
    with pytest.raises(ScheduleError, match=tag):
        check(broken)


def test_a_gradient_that_comes_back_from_disk_is_the_step_befores_or_this_ones() -> None:
    waits = placed(wait=True)
    waits = replace(waits, place=replace(waits.place, gradients="disk"))
    late, on_time = lower_step("vertical", PLAIN, replace(waits, delay=0.5)), lower_step("vertical", PLAIN, waits)
    check(late)
    tag = late_steps(late)[0].id[2:]
    assert [op.id[:2] for op in late.ops if op.id in (f"RG{tag}", f"WG{tag}")] == ["RG", "WG"]
    broken = tuple(replace(op, after=()) if op.id == f"RG{tag}" else op for op in on_time.ops)
    with pytest.raises(ScheduleError, match=f"op RG{tag} may run before WG{tag}"):
        check(replace(on_time, ops=broken))


def test_only_the_vertical_schedule_delays() -> None:
    with pytest.raises(AssertionError):
        lower_step("horizontal", PLAIN, placed(delay=0.5))


@pytest.mark.parametrize("gradients", ["host", "disk"])
@pytest.mark.parametrize("weights", ["host", "disk"])
def test_a_users_schedule_says_itself_what_it_delays(gradients: Literal["host", "disk"], weights: Tier) -> None:
    budget = Budget(device=1 << 30, host=1 << 30, disk="/disk", weights=weights, state="disk", gradients=gradients)
    form = Format.of("bf16", 2)
    request = Request(program=PLAIN, budget=budget, form=form, micro_batches=2, wait=True, speculate=False)
    plan = fit(request)
    late = lower_step("vertical", PLAIN, replace(plan.settings, delay=0.5))
    assert own_plan(request, late).schedule.ops == late.ops
    with pytest.raises(ScheduleError, match=r"leave delay=0\.0 out"):
        own_plan(replace(request, delay=0.0), late)
