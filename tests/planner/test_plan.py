"""A plan fits its budget, says what would fit, keeps pins, and never wastes a larger budget."""

import re
import time
from dataclasses import replace
from itertools import pairwise, product
from random import Random
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import Budget, Family, Tier
from penstock.errors import BudgetError, ConfigError, ScheduleError
from penstock.planner.fit import fit, fitted, with_home
from penstock.planner.own_schedule import own_plan
from penstock.planner.plan import Plan
from penstock.planner.request import Request
from penstock.schedule.check import check
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.ir.text import parse_schedule
from penstock.schedule.place import GRAIN, LARGE_PART, Format, Placement, Settings, page_up
from penstock.schedule.program import ALIGN, GroupSpec, Program, Stage
from tests.programs import ACTIVATION, transformer

KIB, MIB = 1024, 1024 * 1024
ADAM32, ADAM16 = Format.of("fp32", 2), Format.of("bf16", 2)
FORMS = (ADAM32, ADAM16)
PLENTY = 1 << 40


def request(
    device: int = PLENTY,
    host: int = PLENTY,
    *,
    program: Program | None = None,
    disk: bool = True,
    form: Format = ADAM32,
    micro_batches: int = 3,
    wait: bool = True,
    train: bool = True,
    family: Family = "vertical",
    weights: Tier | None = None,
    state: Tier | None = None,
    gradients: Tier | None = None,
    activations: Tier | None = None,
) -> Request:
    assert gradients != "device"
    return Request(
        program=program or transformer(4),
        budget=Budget(
            device=device,
            host=host,
            disk="store" if disk else None,
            weights=weights,
            state=state,
            gradients=gradients,
            activations=activations,
        ),
        form=form,
        micro_batches=micro_batches,
        wait=wait,
        speculate=False,
        delay=0.0,
        train=train,
        family=family,
        inputs=4096,
    )


def smallest(r: Request, tier: str) -> int:
    """The smallest budget of a tier that the error names when it is given nothing."""
    none = replace(r, budget=replace(r.budget, **{tier: 0}))  # type: ignore[arg-type]
    with pytest.raises(BudgetError, match=f"budget.{tier}=0 B is too small") as caught:
        fit(none)
    found = re.search(r"the smallest that works is [^(]+ \((\d+) bytes\)", str(caught.value))
    assert found is not None, str(caught.value)
    return int(found[1])


def test_a_larger_model_has_no_more_ops_where_its_chunks_have_room() -> None:
    """An op costs the same whatever it moves."""
    programs = [transformer(8, block=numel) for numel in (32 << 10, 128 << 10)]
    small, large = (fit(request(program=program, state="host", weights="host")) for program in programs)
    assert len(large.schedule.ops) == len(small.schedule.ops)
    assert large.settings.chunk == 4 * small.settings.chunk


@settings(max_examples=40)
@given(share=st.floats(0.05, 1.5), tight=st.booleans(), block=st.integers(1, 64 << 10), form=st.sampled_from(FORMS))
def test_larger_chunks_take_only_what_is_left(share: float, tight: bool, block: int, form: Format) -> None:
    """No state moves to a slower tier for them, and no budget that was enough is refused."""
    program = transformer(6, block=block)
    asked = request(program=program, form=form)
    if tight:
        asked = replace(asked, budget=replace(asked.budget, device=smallest(asked, "device")))
    state = sum(4 * g.trainable + form.state_bytes(g) for g in program.groups)
    asked = replace(asked, budget=replace(asked.budget, host=int(share * state)))
    try:
        before = fitted(asked)
    except BudgetError:
        return
    found = fit(asked).settings
    assert found.chunk >= before.chunk
    assert replace(found, chunk=before.chunk, depths=before.depths) == before


FAMILIES: tuple[Family, ...] = ("vertical", "horizontal")


@pytest.mark.sampled(4, pairs=True)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wait", [True, False])
def test_peaks_stay_within_every_budget_from_the_smallest_up(form: Format, family: Family, wait: bool) -> None:
    r = request(form=form, family=family, wait=wait)
    low = smallest(r, "device")
    for device in (low, low + 1, 2 * low, 5 * low, 40 * low):
        on = replace(r, budget=replace(r.budget, device=device))
        floor = 0 if device == 40 * low else smallest(on, "host")  # with so much, nothing leaves the device
        for host in {floor, floor + 4096, 2 * floor, 6 * floor, 100 * floor}:
            plan = fit(replace(on, budget=replace(on.budget, host=host)))
            assert plan.device_bytes <= device
            assert plan.host_bytes <= host
            assert plan.schedule.peak_bytes("disk") == 0
            check(plan.schedule)


@pytest.mark.sampled(8, pairs=True)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_the_smallest_budget_that_an_error_names_works_and_one_byte_less_does_not(
    form: Format, family: Family, wait: bool, layers: int, micro_batches: int
) -> None:
    program = transformer(layers, tied=layers == 3)
    r = request(program=program, form=form, family=family, wait=wait, micro_batches=micro_batches)
    device = smallest(r, "device")
    r = replace(r, budget=replace(r.budget, device=device))
    host = smallest(r, "host")
    plan = fit(replace(r, budget=replace(r.budget, host=host)))
    assert (plan.device_bytes, plan.host_bytes) == (device, host)
    with pytest.raises(BudgetError, match=r"budget\.host"):
        fit(replace(r, budget=replace(r.budget, host=host - 1)))
    with pytest.raises(BudgetError, match=r"budget\.device"):
        fit(replace(r, budget=replace(r.budget, device=device - 1)))


def test_without_a_disk_the_error_says_that_one_would_help() -> None:
    low = request(host=0, disk=False)
    with pytest.raises(BudgetError, match=re.escape("or give budget.disk a directory")):
        fit(replace(low, budget=replace(low.budget, device=smallest(low, "device"))))


def test_without_a_disk_nothing_goes_to_disk() -> None:
    r = request(disk=False)
    plan = fit(replace(r, budget=replace(r.budget, device=smallest(r, "device"))))
    assert plan.disk_bytes == 0
    lanes = plan.schedule.bytes_per_lane()
    assert lanes["read"] == lanes["write"] == 0
    assert "disk" not in {*plan.settings.place.weights, *plan.settings.place.state}


RANK = {"disk": 0, "host": 1, "device": 2}


def preference(plan: Plan) -> tuple[object, ...]:
    """A plan's choices as the planner ranks them, most important first; larger is better.

    First what decides device memory: saved activations, depths, then who lives on the device, last blocks first. Then
    what decides host memory: waiting gradients and saved activations off the disk, chunks, depths, then who lives
    there."""
    s, place = plan.settings, plan.settings.place
    on_device = tuple(t == "device" for t in place.weights[::-1] + place.state[::-1])
    on_host = tuple(RANK[t] for t in place.weights[::-1] + place.state[::-1])
    return (
        place.activations == "device",
        (s.depths.weights, s.depths.gradients),
        on_device,
        (place.gradients == "host", RANK[place.activations]),
        (s.chunk, s.depths.stage_in),
        on_host,
    )


@pytest.mark.parametrize("form", [ADAM32, ADAM16])
@pytest.mark.parametrize("family", ["vertical", "horizontal"])
def test_a_larger_budget_never_gives_a_worse_plan(form: Format, family: Family) -> None:
    """In the planner's own order of preference; and for one device budget, more host memory moves no group down."""
    r = request(form=form, family=family, program=transformer(6, block=40))
    low = smallest(r, "device")
    high = fit(r).device_bytes
    budgets = [low + (high - low) * i // 12 for i in range(13)]
    plans = [fit(replace(r, budget=replace(r.budget, device=b))) for b in budgets]
    ranks = [preference(plan) for plan in plans]
    assert ranks == sorted(ranks)
    assert len(set(ranks)) > 4
    r = replace(r, budget=replace(r.budget, device=budgets[3]))
    low, high = smallest(r, "host"), fit(r).host_bytes
    plans = [fit(replace(r, budget=replace(r.budget, host=low + (high - low) * i // 12))) for i in range(13)]
    assert [preference(p) for p in plans] == sorted(preference(p) for p in plans)
    for less, more in pairwise(plans):
        same = (less.settings.chunk, less.settings.depths) == (more.settings.chunk, more.settings.depths)
        if same and less.settings.place.gradients == more.settings.place.gradients:
            assert sum(RANK[t] for t in less.settings.place.weights) <= sum(
                RANK[t] for t in more.settings.place.weights
            )


def test_with_room_for_all_nothing_moves() -> None:
    for form in (ADAM32, ADAM16):
        plan = fit(request(form=form))
        assert set(plan.settings.place.weights) == set(plan.settings.place.state) == {"device"}
        assert set(plan.schedule.bytes_per_lane().values()) == {0}


def test_tied_groups_step_in_host_memory() -> None:
    plan = fit(request(program=transformer(2, tied=True)))
    assert plan.settings.place.state[0] == "host"
    assert set(plan.settings.place.state[1:]) == {"device"}


def test_the_order_of_preference() -> None:
    """Saved activations stay on the device before weights do; later blocks before earlier; weights before state."""
    r = request(form=ADAM16, wait=False)
    base = smallest(r, "device")
    place = fit(replace(r, budget=replace(r.budget, device=base))).settings.place
    assert place.activations == "host"
    assert "device" not in place.weights[3:], "no block"
    # Room for all saved activations and full depths, but not for a block. Counted were two more than are under way, and
    # of those that come back, one more.
    stay = request(form=ADAM16, wait=False, activations="device")
    with_activations = fit(replace(stay, budget=replace(stay.budget, device=smallest(stay, "device"))))
    assert with_activations.device_bytes - base == (3 * 5 - (3 + 2)) * ACTIVATION - (3 + 1) * page_up(ACTIVATION)
    deep = fit(r).settings
    assert deep.place.activations == "device"
    on_device: list[int] = []
    for device in range(base, base + 2 * MIB, 16 * KIB):
        place = fit(replace(r, budget=replace(r.budget, device=device))).settings.place
        if place.activations == "device":
            blocks = [g for g in range(3, 7) if place.weights[g] == "device"]
            assert blocks == list(range(7 - len(blocks), 7)), "the last blocks first"
            on_device.append(len(blocks))
            if "device" in place.state[3:]:
                assert len(blocks) == 4, "the weights of all blocks before the state of any"
    assert {0, 1, 4} <= set(on_device)


PINS: list[dict[str, Tier]] = [
    {kind: tier}
    for kind in ("weights", "state", "gradients", "activations")
    for tier in ("device", "host", "disk")
    if (kind, tier) != ("gradients", "device")
] + [
    {"weights": w, "state": s}
    for w, s in product(("device", "host", "disk"), repeat=2)  # type: ignore[dict-item]
]


@pytest.mark.parametrize("pins", PINS, ids=str)
@pytest.mark.parametrize("form", [ADAM32, ADAM16])
@pytest.mark.parametrize("device", [2 * MIB, PLENTY])
def test_pins_are_kept_or_refused(pins: dict[str, Tier], form: Format, device: int) -> None:
    r = request(device, form=form, **pins)  # type: ignore[arg-type]
    weights, state = pins.get("weights"), pins.get("state")
    impossible = state == "device" and weights not in (None, "device")
    if impossible:
        with pytest.raises(ConfigError, match=re.escape(f"budget.weights={weights!r} with budget.state={state!r}")):
            fit(r)
        return
    try:
        place = fit(r).settings.place
    except BudgetError:
        assert device < PLENTY
        assert "device" in pins.values(), "what is pinned elsewhere needs little of the device"
        return
    assert weights is None or set(place.weights) == {weights}
    assert state is None or set(place.state) == {state}
    assert pins.get("gradients") in (None, place.gradients)
    assert pins.get("activations") in (None, place.activations)


def test_what_the_device_has_left_keeps_the_inputs_of_the_last_block_until_its_backward() -> None:
    pins: dict[str, Tier] = {"weights": "disk", "state": "disk", "activations": "host"}
    least = fit(replace(request(micro_batches=6, **pins), recompute=True))  # type: ignore[arg-type]
    assert least.settings.depths.inputs == 6
    assert not [op for op in least.schedule.ops if op.id.kind in ("DC", "UC") and op.id.stage == 3]
    for taken in range(5):
        tight = request(least.device_bytes - taken * ACTIVATION, micro_batches=6, **pins)  # type: ignore[arg-type]
        plan = fit(tight)
        assert plan.settings.depths.inputs == max(6 - taken, 2)
        assert plan.device_bytes <= tight.budget.device_bytes


def test_a_schedule_of_ones_own_keeps_as_many_inputs_on_the_device_as_when_it_was_made() -> None:
    pins: dict[str, Tier] = {"weights": "disk", "state": "disk", "activations": "host"}
    roomy = request(micro_batches=6, **pins)  # type: ignore[arg-type]
    most = fit(roomy)
    tight = request(most.device_bytes - 3 * ACTIVATION, micro_batches=6, **pins)  # type: ignore[arg-type]
    theirs = fit(tight).schedule
    for r in (roomy, tight):
        plan = own(r, theirs)
        assert plan.schedule.ops == theirs.ops
        assert plan.device_bytes == fit(tight).device_bytes
    with pytest.raises(BudgetError, match=r"pools take .* of budget\.device"):
        own(tight, most.schedule)


def test_a_placement_that_is_in_memory_already_is_kept() -> None:
    train = fit(request(8 * MIB, 8 * MIB))
    more = fit(request(9 * MIB, 9 * MIB, micro_batches=4), train.settings.place)
    assert more.settings.place.weights == train.settings.place.weights
    assert more.settings.place.state == train.settings.place.state
    evaluation = fit(request(8 * MIB, 8 * MIB, train=False), train.settings.place)
    assert evaluation.settings.place.weights == train.settings.place.weights
    assert evaluation.schedule.name == "evaluate"
    assert not evaluation.schedule.lanes["d2h"]


def _random_program(rng: Random) -> Program:
    """Groups of all sizes, so that moving one changes the size classes of the pools."""
    count = rng.randint(2, 9)
    groups = tuple(
        GroupSpec(index=i, name=f"g{i}", trainable=ALIGN * rng.choice((1, 2, 13, 26, 51, 100)), frozen=0)
        for i in range(count)
    )
    cut = sorted(rng.sample(range(count + 1), 2))
    reads = [tuple(range(cut[0])), tuple(range(cut[0], cut[1])), tuple(range(cut[1], count))]
    stages = tuple(
        Stage(
            index=i,
            kind="call" if i == 1 else "segment",
            name=f"s{i}",
            forward_reads=r,
            backward_reads=r,
            gradients=r,
            activation=1000 * (i < 2),
            gradient=1000 * (i < 2),
            kept=0,
            forward_peak=0,
            backward_peak=0,
        )
        for i, r in enumerate(reads)
    )
    return Program(groups=groups, stages=stages)


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("part", range(6))
def test_budgets_hold_for_groups_of_all_sizes(part: int) -> None:
    """A group that moves up can change the size classes of the others: the peak is checked, not assumed."""
    rng = Random(part)
    for _ in range(15):
        r = request(program=_random_program(rng), form=rng.choice((ADAM32, ADAM16)), micro_batches=1)
        device = smallest(r, "device")
        on = replace(r, budget=replace(r.budget, device=device))
        host = smallest(on, "host")
        for share in (1.0, 1.1, 1.3, 1.7, 2.5):
            limits = int(device * share), int(host * share)
            plan = fit(replace(r, budget=replace(r.budget, device=limits[0], host=PLENTY)))
            assert plan.device_bytes <= limits[0]
            plan = fit(replace(on, budget=replace(on.budget, host=limits[1])))
            assert plan.host_bytes <= limits[1]


@pytest.mark.parametrize("family", ["vertical", "horizontal"])
def test_a_large_model_is_planned_in_seconds(family: Family) -> None:
    """96 layers, 32 micro-batches, tens of thousands of ops, and so little host memory that every option is tried."""
    block = 256 if family == "vertical" else 16
    r = request(program=transformer(96, block=block), micro_batches=32, family=family, wait=True)
    r = replace(r, budget=replace(r.budget, device=2 * smallest(r, "device")))
    host = smallest(r, "host")
    begin = time.process_time()
    plan = fit(replace(r, budget=replace(r.budget, host=host)))
    seconds = time.process_time() - begin
    assert plan.settings.chunk == 1 << 16, "the smallest chunks"
    assert len(plan.schedule.ops) > 20_000
    assert seconds < 2


def test_of_hundreds_of_blocks_as_many_move_up_as_fit_and_few_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, peak_bytes = list[Settings](), Request.peak_bytes

    def look(r: Request, settings: Settings, tier: Literal["device", "host"]) -> int:
        looks.append(settings)
        return peak_bytes(r, settings, tier)

    r = request(8 * MIB, program=transformer(300))
    r = replace(r, budget=replace(r.budget, host=smallest(r, "host") + 120 * MIB))
    monkeypatch.setattr(Request, "peak_bytes", look)
    place = fitted(r).place
    assert len(looks) < 150
    blocks = range(3, 303)
    raised = [g for g in blocks if place.weights[g] != "disk"]
    assert 50 < len(raised) < 250
    assert raised == list(blocks[-len(raised) :]), "the last ones, whose backward comes first"
    below = blocks[-len(raised) - 1]
    more = replace(fitted(r), place=with_home(place, below, "host", place.state[below]))
    assert r.peak_bytes(more, "host") > r.budget.host_bytes


# ---- a schedule of the user's own


def own(r: Request, schedule: Schedule) -> Plan:
    """The plan that a schedule is, where nothing else is asked for."""
    return own_plan(replace(r, speculate=None, delay=None), schedule)


def _edited(schedule: Schedule, old: str, new: str) -> Schedule:
    text = str(schedule)
    assert old in text
    return parse_schedule(text.replace(old, new, 1))


OWN = request(3 * MIB, 16 * MIB, micro_batches=2, program=transformer(2), family="horizontal")


def test_a_plans_own_schedule_is_taken_back_as_it_is() -> None:
    plan = fit(OWN)
    found = own(OWN, parse_schedule(str(plan.schedule)))
    assert found.schedule == plan.schedule
    assert found.settings.place == plan.settings.place
    assert (found.state_bytes, found.disk_bytes) == (plan.state_bytes, plan.disk_bytes)


def test_more_buffers_and_other_waits_are_the_users_choice() -> None:
    plan = fit(OWN)
    pool = next(pool for pool in plan.schedule.pools if pool.tier == "host")
    more = _edited(plan.schedule, str(pool), str(replace(pool, count=pool.count + 1)))
    assert own(OWN, more).host_bytes == plan.host_bytes + pool.size
    many = _edited(plan.schedule, str(pool), str(replace(pool, count=10**6)))
    with pytest.raises(BudgetError, match=r"of budget\.host"):
        own(OWN, many)


def test_what_a_schedule_says_that_it_keeps_besides_its_pools_is_kept_or_refused() -> None:
    plan = fit(OWN)
    tier, what, nbytes = plan.schedule.fixed[0]
    line = f"fixed {tier} {what} {nbytes}"
    for text, more in ((f"fixed {tier} {what} {nbytes + 4096}", 4096), (f"{line}\nfixed {tier} mine 8192", 8192)):
        found = own(OWN, _edited(plan.schedule, line, text))
        assert getattr(found, f"{tier}_bytes") == getattr(plan, f"{tier}_bytes") + more
    assert own(OWN, _edited(plan.schedule, f"{line}\n", "")).schedule.fixed == plan.schedule.fixed
    with pytest.raises(ScheduleError, match=f"fixed {tier} {what} {nbytes - 1}: a step of this model holds {nbytes}"):
        own(OWN, _edited(plan.schedule, line, f"fixed {tier} {what} {nbytes - 1}"))
    with pytest.raises(BudgetError, match=rf"of budget\.{tier}"):
        own(OWN, _edited(plan.schedule, line, f"fixed {tier} {what} {1 << 40}"))
    with pytest.raises(ScheduleError, match=f"says fixed {tier} mine more than once: write one line with the sum"):
        own(OWN, _edited(plan.schedule, line, f"{line}\nfixed {tier} mine 100\nfixed {tier} mine 300"))


def test_a_schedule_for_something_else_is_refused() -> None:
    plan = fit(OWN)
    text = str(plan.schedule)
    last = plan.schedule.ops[-1]
    with pytest.raises(ScheduleError, match="is for 3 micro-batches, not 2"):
        own(OWN, _edited(plan.schedule, "micro-batches 2", "micro-batches 3"))
    with pytest.raises(ScheduleError, match="is never given back"):
        own(OWN, parse_schedule(text.replace(f"{last}\n", "")))
    with pytest.raises(ScheduleError, match="op F77m0 is of a stage that this model does not have"):
        own(OWN, parse_schedule(text + "F77m0\n"))
    moved = next(op for op in plan.schedule.ops if op.nbytes)
    with pytest.raises(ScheduleError, match=f"op {re.escape(moved.id)} says that it moves 1 bytes"):
        own(OWN, _edited(plan.schedule, str(moved), str(replace(moved, nbytes=1))))
    pool = plan.schedule.pools[0]
    with pytest.raises(ScheduleError, match=f"and pool {re.escape(pool.name)} is not that"):
        own(OWN, _edited(plan.schedule, str(pool), str(replace(pool, size=pool.size // 2))))


def test_a_schedule_that_adds_gradients_up_in_another_order_is_refused() -> None:
    """It would be safe, and change the bits."""
    r = request(program=transformer(2), micro_batches=3, family="horizontal", weights="host", state="host")
    plan = fit(r)
    first, second = [op for op in plan.schedule.ops if op.id.startswith("AG4.0@")][:2]
    before = replace(second, after=tuple(name for name in second.after if name != first.id))
    swapped = {first.id: before, second.id: first}
    ops = tuple(swapped.get(op.id, op) for op in plan.schedule.ops)
    pools = tuple(replace(pool, count=pool.count + 3) for pool in plan.schedule.pools)
    with pytest.raises(ScheduleError, match="another order of the sum changes the numbers"):
        own(r, replace(plan.schedule, ops=ops, pools=pools))


def test_a_placement_must_be_possible() -> None:
    program = transformer(1)
    count = len(program.groups)
    place = Placement(weights=("disk",) * count, state=("device",) * count, gradients="host", activations="device")
    with pytest.raises(AssertionError):
        place.check(program)


def test_a_step_before_the_last_reader_of_weights_on_the_device_is_refused() -> None:
    """No buffer of the schedule tells, since such weights are in none: the program does."""
    r = request(
        64 * MIB,
        64 * MIB,
        micro_batches=1,
        wait=False,
        program=transformer(2, reader=True),
        weights="device",
        state="device",
    )
    plan = fit(r)
    assert own(r, plan.schedule).schedule == plan.schedule
    step = plan.schedule.by_id["OD1"]
    ops = [op for op in plan.schedule.ops if op is not step]
    early = ops.index(plan.schedule.by_id["E3m0"]) + 1
    with pytest.raises(ScheduleError, match=r"op B1m0 reads chunk 1\.0 of the weights, which is stepped already"):
        own(r, replace(plan.schedule, ops=(*ops[:early], replace(step, after=()), *ops[early:])))


@pytest.mark.parametrize("chunk", [0, 1000, 4097])
def test_a_schedule_with_a_chunk_of_parts_is_refused(chunk: int) -> None:
    plan = fit(OWN)
    with pytest.raises(ScheduleError, match=f"chunk of {chunk} elements is not a multiple of 4096"):
        own(OWN, replace(plan.schedule, chunk=chunk))


def test_a_schedule_with_chunks_below_what_has_one_checksum_is_refused() -> None:
    groups = tuple(replace(g, trainable=LARGE_PART) if g.index == 1 else g for g in OWN.program.groups)
    budget = replace(OWN.budget, device=64 * MIB, host=64 * MIB)
    large = replace(OWN, program=replace(OWN.program, groups=groups), budget=budget)
    plan = fit(large)
    with pytest.raises(ScheduleError, match=f"chunk of {ALIGN} elements is smaller .* make it {GRAIN} or more"):
        own(large, replace(plan.schedule, chunk=ALIGN))


def test_a_schedule_without_state_leaves_the_pin_of_state_alone() -> None:
    """Plain SGD in fp32: what goes to disk is weights, and nothing says where state would be."""
    r = request(64 * MIB, form=Format.of("fp32", 0), weights="disk", state="host", wait=False)
    plan = fit(r)
    assert own(r, plan.schedule).settings.place == plan.settings.place
