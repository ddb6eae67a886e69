"""Layouts of the ranks of several hosts: the few that are simulated stand for all, bytes are those of the formulas, and
a slower host has fewer blocks."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.config import Budget, Endurance
from penstock.errors import BudgetError, ConfigError
from penstock.hardware.hosts import Hosts, Kind
from penstock.hardware.machine import Between, Machine, Network
from penstock.hardware.sharing import room_of_each
from penstock.planner.comparison import compared, layouts
from penstock.planner.endurance import EnduranceError
from penstock.planner.fit import fit
from penstock.planner.layouts import Asked, Layout, Outcome, asked_seat, planned, shared_by_all
from penstock.planner.pipelines import pipeline, simulated, views_of
from penstock.planner.task import Task
from penstock.schedule.check.worlds import check_world
from penstock.schedule.ir.worlds import World
from penstock.schedule.lower.seat import pipeline_world, shards_at
from penstock.schedule.mesh import Mesh
from penstock.shape.huggingface import model_shape
from penstock.sim.costs import Costs
from penstock.sim.simulate import simulate
from tests.questions import LLAMA, MACHINE

FAST = replace(
    MACHINE,
    name="fast",
    nic=Network(bandwidth=2e7, latency=1e-3),
    between=(Between(ranks=2, bandwidth=1e8, latency=1e-3),),
)
SLOW = replace(
    FAST,
    name="slow",
    device=replace(FAST.device, flops={name: rate / 2 for name, rate in FAST.device.flops.items()}),
    drives=tuple(replace(d, read=d.read / 2, read_both=d.read_both / 2) for d in FAST.drives),
)


def asked(*kinds: tuple[Machine, int], each: int = 2, layers: int = 6, batch: int = 16, **changes: Any) -> Asked:
    """Without a delay to choose, which takes most of a search, unless ``changes`` ask for it."""
    hosts = Hosts(
        kinds=tuple(Kind(name=machine.name, machine=machine, count=count) for machine, count in kinds), each=each
    )
    task = Task(
        shape=model_shape(LLAMA | {"num_hidden_layers": layers}, kind="cpu"),
        machine=kinds[0][0],
        budget=Budget(device="256MiB", host="64MiB", disk="/disk"),
        sequence_length=64,
        precision="fp32",
        optimizer="adamw",
        moment_count=2,
        families=("vertical",),
        disk_free=room_of_each(kinds[0][0].drives, 1),
        clip_grad_norm=None,
        **{"delay": 0.0} | changes,
    )
    return Asked(task=task, hosts=hosts, batch=batch)


BOTH = (FAST, 1), (SLOW, 1)
ALIKE, DIFFERENT = asked((FAST, 2), delay=None), asked(*BOTH, delay=None)


def as_pipelines(what: Asked, stages: int | None = None) -> tuple[Asked, Layout, list[Machine]]:
    """What to simulate: one pipeline of all ranks, or several of so many stages."""
    layout = Layout(kind="pipeline", ranks=what.hosts.ranks, stages=stages or what.hosts.ranks)
    return what, layout, views_of(what, layout)


SHARED = [layout for layout in layouts(ALIKE) if layout.kind != "pipeline"]


@pytest.mark.sampled(2, values=False)
@pytest.mark.parametrize("layout", SHARED, ids=lambda layout: layout.name)
@pytest.mark.parametrize("what", [ALIKE, DIFFERENT], ids=["alike", "different"])
def test_one_rank_of_each_kind_of_host_takes_as_long_as_the_whole_world(what: Asked, layout: Layout) -> None:
    found = planned(what, layout)
    schedule, hosts = found.choice.plan.schedule, what.hosts
    seat = asked_seat(layout, hosts.count)
    whole = simulate(seat.world(schedule), [found.costs[hosts.kind_of(rank)] for rank in range(hosts.ranks)])
    few = simulate(seat.of_kinds(schedule, len(hosts.kinds)), found.costs)
    assert len(whole.world.ranks) == 4
    assert few.time == pytest.approx(whole.time, rel=1e-9)
    if hosts.alike:
        assert found.choice.seconds == pytest.approx(whole.time, rel=1e-9)
    for kind in range(len(hosts.kinds)):
        rank = next(rank for rank in range(hosts.ranks) if hosts.kind_of(rank) == kind)
        assert few.work(kind) == pytest.approx(whole.work(rank))


def elements(what: Asked, parts: int) -> tuple[int, int]:
    """Elements of all groups, padded for so many parts, and of the gradients that stages make."""
    program = Mesh(data=parts).everyone().part(what.task.profile(1).program)
    made = sum(program.groups[g].trainable for stage in program.stages for g in stage.gradients)
    return parts * sum(group.numel for group in program.groups), parts * made


def test_bytes_that_leave_a_host_are_those_of_the_formulas() -> None:
    """In fp32, of N parameters and N' gradients, which each stage that uses a group makes: (4 N + 4 N') (H - 1) / H in
    stage 2, 8 N' (H - 1) / H in stage 0 and with copies. Gradients of 3 ranks go on one level."""
    for each in (2, 3):
        what = replace(asked((FAST, 2), each=each, layers=3, batch=4 * each), size=2)
        sent = {
            layout.name: shared_by_all(what, layout).hosts[0].sent
            for layout in layouts(what)
            if layout.kind == "shared" or (layout.kind == "copies" and layout.stage == 3 and each == 2)
        }
        flat, shared = 1 if each == 2 else 3, f"dp_shard {2 * each}, stage "
        n, made = elements(what, 2 * each)
        assert sent[shared + "2"] == pytest.approx(4 * n / 2 + flat * 4 * made / 2, rel=0.01)
        assert 1.2 < (sent[shared + "3"] - flat * 4 * made / 2) / (4 * n / 2) < 2
        _, made = elements(what, 1)
        assert sent[shared + "0"] == pytest.approx((1 + flat) * 4 * made / 2, rel=0.01)
        if each == 2:
            _, made = elements(what, 2)
            assert sent["dp_replicate 2 x dp_shard 2, stage 3"] == pytest.approx(8 * made / 2, rel=0.01)


def test_ranks_of_a_pipeline_that_are_alike_have_the_plan_that_each_would_make() -> None:
    found = simulated(*as_pipelines(asked((FAST, 2), layers=10)), 2)
    for request, plan in zip(found.requests, found.step.plans, strict=True):
        assert str(fit(request).schedule) == str(plan.schedule)


@pytest.mark.parametrize("layers", [6, 9])
def test_a_rank_of_a_pipeline_keeps_to_its_budget_with_inputs_of_the_last_block_that_stay(layers: int) -> None:
    what = asked((FAST, 2), layers=layers)
    kept = 0
    for request in simulated(*as_pipelines(what), 1).requests:
        for size in range(4, 16):
            try:
                plan = fit(replace(request, budget=replace(request.budget, device=size << 20)))
            except BudgetError:
                continue
            kept += plan.settings.depths.inputs > 2
            assert plan.device_bytes <= size << 20
    assert kept


@pytest.mark.parametrize(("hosts", "each", "places"), [(2, 2, 2), (2, 4, 4), (4, 2, 2)])
def test_the_first_of_pipelines_beside_each_other_takes_as_long_as_all_of_them(
    hosts: int, each: int, places: int
) -> None:
    """There each rank has messages of its own pipeline, and collectives with the neighbours of its place, which are on
    its host, on a part of that, or on two."""
    what, layout, views = as_pipelines(asked((FAST, hosts), each=each), places)
    step, beside = simulated(what, layout, views, 2).step, layout.beside
    costs = Costs(name="any", seconds=lambda op: 1e-3 + 1e-9 * op.nbytes)
    ranks = [
        replace(
            schedule, ops=tuple(replace(op, peer=op.peer * beside + n if op.peer >= 0 else -1) for op in schedule.ops)
        )
        for schedule in (plan.schedule for plan in step.plans)
        for n in range(beside)
    ]
    groups = {shards_at(place): tuple(range(place * beside, (place + 1) * beside)) for place in range(places)}
    world = World(name="all", ranks=tuple(ranks), groups=groups | {"all": tuple(range(places * beside))})
    check_world(world)
    found, few = (simulate(one, costs) for one in (world, pipeline_world([plan.schedule for plan in step.plans])))
    assert found.time == pytest.approx(few.time, rel=1e-9)
    assert [found.work(rank) for rank in range(len(ranks))] == [few.work(n // beside) for n in range(len(ranks))]
    assert step.seconds > 0


def test_a_place_on_several_hosts_sends_its_part_of_collectives_between_them() -> None:
    """Of what a rank sends to the n - 1 others of its place those on the other host have n / 2; and messages go to
    another host, of which each has the link with the other ranks of its own."""
    what, layout, views = as_pipelines(asked((FAST, 4), each=2), 2)
    found = pipeline(replace(what, size=2), layout)
    plans = simulated(what, layout, views, 2).improved(lambda _: None).step.plans
    collectives = max(
        2 * sum(op.nbytes * 2 / 3 for op in plan.schedule.lanes["net"] if op.id.kind != "AN")
        + 2 * plan.schedule.bytes_per_lane()["send"]
        for plan in plans
    )
    assert found.hosts[0].sent == pytest.approx(collectives, rel=1e-6)
    assert FAST.nic is not None
    (network,) = (view.network for view in views)
    assert network is not None
    assert 1 / network.bandwidth == pytest.approx(2 / 3 * 2 / FAST.nic.bandwidth + 1 / 3 / FAST.between[0].bandwidth)


def test_a_model_with_too_few_blocks_for_all_ranks_is_a_pipeline_of_as_many_places_as_it_has_blocks_for() -> None:
    def places(layers: int, *kinds: tuple[Machine, int], each: int) -> list[int]:
        what = asked(*kinds, each=each, layers=layers)
        return [layout.stages for layout in layouts(what) if layout.kind == "pipeline"]

    assert places(6, (FAST, 2), each=2) == [4, 2], "they are enough"
    assert places(6, (FAST, 2), each=8) == [16, 4, 2], "four neighbours share a place"
    assert places(6, (FAST, 16), each=2) == [32, 4, 16], "eight do, of four hosts"
    assert places(6, (FAST, 8), (SLOW, 8), each=2) == [32, 16], "which may not differ"
    assert places(1, (FAST, 16), each=1) == [16, 2]


def test_a_slower_host_has_fewer_blocks_and_its_step_is_shorter_for_it() -> None:
    def dealt(*kinds: tuple[Machine, int], layers: int = 9, **more: Any) -> Outcome:
        what, layout, _ = as_pipelines(replace(asked(*kinds, each=1, layers=layers, batch=8, **more), size=1))
        return pipeline(what, layout)

    found = dealt(*BOTH)
    fast, slow = found.hosts
    assert found.by_compute is not None
    assert found.seconds < 0.8 * found.by_compute
    assert found.deal == (6, 3) == (fast.blocks, slow.blocks), "twice as many, though no other rank is like the first"
    assert found.settings["deal"] == list(found.deal)
    forced = dealt(*BOTH, deal=found.deal)
    assert (forced.seconds, forced.deal) == (found.seconds, found.deal)
    alike = dealt((FAST, 2), layers=4)
    assert (alike.deal, alike.by_compute) == ((), None)


@pytest.mark.sampled(2, values=False)
@pytest.mark.parametrize(("drive", "first"), [(4, False), (4, True), (2, False), (16, False)])
def test_a_host_whose_drive_alone_is_slower_has_the_blocks_that_make_the_step_shortest(drive: int, first: bool) -> None:
    drives = tuple(
        replace(d, read=d.read / drive, read_both=d.read_both / drive, write=d.write / drive) for d in FAST.drives
    )
    kinds = [(FAST, 1), (replace(FAST, name="shared drive", drives=drives), 1)]
    what, layout, views = as_pipelines(
        replace(asked(*(kinds[::-1] if first else kinds), each=1, layers=9, batch=8), size=1)
    )
    found = pipeline(what, layout)
    assert found.by_compute is not None
    best = min(simulated(what, layout, views, 1, (n, 9 - n)).step.seconds for n in range(1, 9))
    assert found.seconds <= best < found.by_compute


def test_shares_in_proportion_would_be_faster_where_hosts_differ_and_are_no_slower_than_the_fast() -> None:
    alike, different = (replace(asked(*kinds, layers=2, batch=8), size=1) for kinds in (((FAST, 2),), BOTH))
    for layout in SHARED[::2]:  # each stage, and copies
        fast, one = shared_by_all(alike, layout), shared_by_all(different, layout)
        assert one.in_proportion is not None
        assert 0.98 * fast.seconds <= one.in_proportion <= one.seconds
        assert fast.in_proportion is None


def test_the_fastest_layout_comes_first() -> None:
    found = compared(replace(asked((FAST, 2), layers=2, batch=8, stage=2), size=1))
    assert {one.layout.kind for one in found.outcomes} == {"shared", "copies"}
    seconds = [one.seconds for one in found.outcomes]
    assert seconds == sorted(set(seconds))
    assert found.fastest is found.outcomes[0]


def test_what_cannot_be_is_refused_with_why() -> None:
    found = compared(asked((FAST, 2), layers=2, batch=5))
    why = {one.layout.name: one.why for one in found.refused}
    assert "cannot be shared evenly by 4 ranks: give a batch of a multiple of 4" in why["dp_shard 4, stage 2"]
    assert "use at most 3 ranks" in why["pp 4"]
    assert "5 sequences cannot be shared evenly by 2 pipelines" in why["pp 2 x dp_shard 2"]
    assert not found.outcomes
    assert found.fastest is None


def test_a_layout_that_takes_more_memory_than_a_host_has_is_refused() -> None:
    """The budget of a file is for whatever machine."""
    device = replace(FAST, name="less", device=replace(FAST.device, memory=2 << 20))
    host = replace(FAST, name="less", host=replace(FAST.host, memory=1 << 20))
    for layout, outcome in ((SHARED[0], shared_by_all), (as_pipelines(ALIKE)[1], pipeline)):
        plain, *less = (
            replace(asked((FAST, 1), (other, 1), layers=3, batch=8), size=1) for other in (SLOW, device, host)
        )
        assert outcome(plain, layout).seconds > 0
        for what, who in zip(less, ("a rank takes .* of device", "a host takes .* of host"), strict=True):
            with pytest.raises(BudgetError, match=f"{who} memory, and less has 1 MiB: lower budget"):
                outcome(what, layout)


def test_ranks_have_the_room_on_disk_of_the_one_with_the_least() -> None:
    drives = tuple(replace(FAST.drives[0], path=f"/d{n}", free=1 << 40) for n in range(3))
    three, few = replace(FAST, drives=drives), replace(FAST, drives=(*drives[:2], replace(drives[2], free=1 << 30)))
    for other, room in ((three, 1 << 40), (few, 2 << 30)):
        what = asked((three, 1), (replace(other, name="other"), 1))
        assert what.of_rank(what.views()[0]).disk_free == room


def test_a_rate_that_a_kind_of_host_lacks_is_said_by_the_name_of_its_profile() -> None:
    flops = {"fp32": 1e9}
    less = replace(FAST, name="less", device=replace(FAST.device, flops=flops))
    what = replace(asked((FAST, 1), (less, 1)), size=4)
    found = compared(replace(what, task=replace(what.task, precision="bf16")))
    assert not found.outcomes
    assert {one.why.partition(",")[0] for one in found.refused} == {
        "precision='bf16': the profile of less has no rate for it"
    }
    slow = replace(less, host=replace(less.host, optimizer={"sgd.fp32": 1e6}))
    with pytest.raises(ConfigError, match=r"profile of less has no optimizer rate adamw\.fp32"):
        asked((FAST, 1), (slow, 1))


def test_the_ranks_of_a_pipeline_keep_to_the_endurance_of_their_drives_or_are_refused_with_whose_do_not() -> None:
    """All state is on disk, so that each step writes as much, and nothing is left to choose."""
    what = asked((FAST, 2))
    on_disk = replace(what.task.budget, weights="disk", state="disk")
    free, layout, views = as_pipelines(replace(what, task=replace(what.task, budget=on_disk)))
    found = simulated(free, layout, views, 2)
    written = [plan.schedule.bytes_per_lane()["write"] for plan in found.step.plans]
    worst = max(range(len(written)), key=lambda rank: written[rank])

    def limited(most: float) -> Asked:
        budget = replace(free.task.budget, endurance=Endurance(per_day=int(most)))
        return replace(free, task=replace(free.task, budget=budget))

    with pytest.raises(EnduranceError, match=rf"^rank {worst} of the pipeline: the plan wears its drives too") as by:
        simulated(limited(1e6), layout, views, 2)
    worn = by.value.worn
    assert worn is not None
    assert worn.per_day == pytest.approx(written[worst] / found.step.seconds * 86400)
    just = worn.too_fast * 1e6
    assert [*simulated(limited(1.001 * just), layout, views, 2).step.plans] == [*found.step.plans]
    with pytest.raises(EnduranceError):
        simulated(limited(0.999 * just), layout, views, 2)
