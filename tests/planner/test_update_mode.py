"""The update mode of a plan (waiting for the norm, speculating, delaying): chosen, forced, refused."""

from dataclasses import replace
from random import Random

import pytest

from penstock.config import Budget, Family
from penstock.errors import ConfigError, ScheduleError
from penstock.planner.fit import fit, fitted
from penstock.planner.own_schedule import own_plan
from penstock.planner.placement_lp import PlacementLP
from penstock.planner.question import Question
from penstock.planner.request import Request
from penstock.planner.search import best, search
from penstock.planner.update_mode import no_speculation, steps_early
from penstock.schedule.check import check
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.ir.text import parse_schedule
from penstock.schedule.ir.worlds import World
from penstock.schedule.place import Depths, Format
from penstock.schedule.program import ALIGN, Program
from penstock.shape.model import StageTimes
from penstock.sim.simulate import simulate
from tests.programs import placement, transformer
from tests.questions import DRIVE, MACHINE, question, searched

ADAM32, ADAM16 = Format.of("fp32", 2), Format.of("bf16", 2)
MIB = 1 << 20
WRITES_HALF = replace(
    MACHINE, drives=(replace(DRIVE, read=2e7, write=1e7, read_both=1.9e7, write_both=0.95e7),), name="writes slowly"
)
"""A drive that writes half as fast as it reads, both at once."""


def open_question(form: Format = ADAM16, *, wait: bool = True, host: int = 14 * MIB, **more: object) -> Question:
    """A step that its disk bounds, with all state on disk, and its update mode left open."""
    asked = question(transformer(6, block=40), form=form, wait=wait, device=5 * MIB, host=host, machine=WRITES_HALF)
    budget = replace(asked.request.budget, state="disk", weights="disk")
    return replace(asked, request=replace(asked.request, budget=budget, speculate=None, delay=None), **more)  # type: ignore[arg-type]


def forced(asked: Question, **mode: object) -> Question:
    return replace(asked, request=replace(asked.request, **mode))  # type: ignore[arg-type]


# ---- speculation


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("form", [ADAM32, ADAM16])
def test_the_choice_flips_with_the_share_of_steps_that_are_repeated(form: Format) -> None:
    asked = open_question(form)
    rarely, always = (searched(replace(asked, repeats=share)) for share in (0.0, 1.0))
    assert rarely.plan.settings.speculate
    assert not always.plan.settings.speculate
    assert rarely.repeats == always.repeats == 0.0
    assert rarely.seconds < always.seconds < 2 * rarely.seconds, "each is the better one for its share"


def test_seconds_count_a_step_that_is_run_again_as_often_as_is_expected() -> None:
    asked = forced(open_question(), speculate=True)
    choice = searched(replace(asked, repeats=0.25))
    assert steps_early(choice.plan.program, choice.plan.settings)
    assert choice.seconds == simulate(World.of(choice.plan.schedule), asked.costs).time
    assert choice.expected_seconds == pytest.approx(1.25 * choice.seconds)
    assert choice.repeats == 0.25
    waits = searched(forced(asked, speculate=False))
    assert waits.expected_seconds == waits.seconds
    assert waits.repeats == 0.0


def test_a_step_that_is_run_again_has_read_the_weights_in_memory_that_it_has_changed() -> None:
    asked = forced(open_question(), speculate=True, delay=0.0)
    kept = forced(asked, budget=replace(asked.request.budget, weights="host", host=64 * MIB))
    choice = searched(replace(kept, repeats=0.25))
    back = ADAM16.weight_bytes * sum(group.numel for group in choice.plan.program.groups)
    assert choice.plan.taken_back_bytes == back
    seconds = back / WRITES_HALF.drives[0].read + back / WRITES_HALF.host.copy
    assert choice.expected_seconds == pytest.approx(1.25 * choice.seconds + 0.25 * seconds)
    never = searched(replace(kept, repeats=0.0))
    assert never.expected_seconds == never.seconds


def test_the_better_update_mode_is_chosen_at_every_share() -> None:
    asked = open_question()
    early, late = (searched(forced(asked, speculate=early)) for early in (True, False))
    for share in (0.0, 0.05, 0.3, 1.0):
        chosen = searched(replace(asked, repeats=share))
        assert chosen.expected_seconds <= min(early.seconds * (1 + share), late.seconds) * 1.01


@pytest.mark.usefixtures("one_simulation")
@pytest.mark.parametrize("speculate", [True, False])
def test_what_is_forced_is_kept_whatever_it_costs(speculate: bool) -> None:
    asked = replace(forced(open_question(), speculate=speculate), repeats=0.0 if not speculate else 1.0)
    settings = searched(asked).plan.settings
    assert settings.speculate is speculate
    assert steps_early(asked.request.program, settings) is speculate


@pytest.mark.usefixtures("one_simulation")
def test_without_a_norm_to_wait_for_nothing_speculates() -> None:
    assert not searched(open_question(wait=False)).plan.settings.speculate


NO_DISK, PLAIN = Budget(device=MIB, host=MIB), Budget(device=MIB, host=MIB, disk="store")


@pytest.mark.parametrize(
    ("budget", "wait", "said"),
    [
        (PLAIN, False, "neither clip_grad_norm nor fp16"),
        (NO_DISK, True, "there is no disk: give budget.disk"),
        (replace(PLAIN, slots=1), True, "budget.slots=1 .* use budget.slots=2"),
        (replace(PLAIN, state="host"), True, "budget.state='host' leaves no group's state on disk"),
    ],
)
def test_speculation_that_cannot_be_is_refused_with_the_reason_and_not_chosen(
    budget: Budget, wait: bool, said: str
) -> None:
    why = no_speculation(budget, wait=wait)
    assert why is not None
    asked = question(transformer(3), form=ADAM16, wait=wait)
    roomy = replace(budget, device=1 << 40, host=1 << 40, activations="host", gradients="host")
    request = replace(asked.request, budget=roomy, speculate=True)
    for ask in (lambda: fit(request), lambda: search(replace(asked, request=request))):
        with pytest.raises(ConfigError, match=f"speculate=True cannot be: .*{said}"):
            ask()
    assert not replace(request, speculate=None).speculates
    open_ = replace(asked, request=replace(request, speculate=None), simulated_ops=1)  # any plan does
    assert not searched(open_).plan.settings.speculate


def test_copies_of_weights_in_memory_do_not_stand_in_the_way_of_speculation() -> None:
    assert no_speculation(replace(PLAIN, weights="host"), wait=True) is None


# ---- without a machine


@pytest.mark.parametrize("form", [ADAM32, ADAM16])
def test_without_a_profile_what_ends_on_disk_speculates_and_holds_no_gradients(form: Format) -> None:
    asked = question(transformer(6, block=40), form=form, wait=True, device=5 * MIB, host=6 * MIB).request
    plan = fit(replace(asked, speculate=None))
    check(plan.schedule)
    assert plan.schedule.speculative
    on_disk = [g for g in asked.program.groups if plan.settings.place.all_on_disk(g.index)]
    assert len(on_disk) > 3
    assert not any(plan.settings.waits(group.index) for group in on_disk)
    assert not fit(replace(asked, speculate=False)).schedule.speculative
    roomy = fit(replace(asked, speculate=None, budget=replace(asked.budget, device=1 << 40, host=1 << 40)))
    assert not roomy.schedule.speculative, "nothing is on disk"


def test_without_a_profile_a_forced_delay_is_kept_and_none_is_chosen() -> None:
    asked = question(transformer(6, block=40), form=ADAM16, wait=True, device=5 * MIB, host=14 * MIB).request
    plan = fit(replace(asked, delay=0.3))
    check(plan.schedule)
    assert plan.settings.delay == 0.3
    assert plan.host_bytes <= 14 * MIB
    assert fit(replace(asked, delay=None)).settings.delay == 0.0
    assert fit(replace(asked, delay=0.3, train=False)).settings.delay == 0.0, "an evaluation steps nothing"


# ---- delays


@pytest.mark.parametrize("wait", [False, True])
def test_where_the_disk_writes_slower_than_it_reads_a_delay_is_chosen_and_beats_none(wait: bool) -> None:
    asked = open_question(Format.of("fp16", 2), wait=wait)
    chosen, none = searched(asked), searched(forced(asked, delay=0.0))
    check(chosen.plan.schedule)
    assert chosen.plan.settings.delay > 0
    assert none.plan.settings.delay == 0.0
    assert chosen.expected_seconds < 0.97 * none.expected_seconds
    assert chosen.plan.host_bytes <= 14 * MIB


def test_the_delay_is_within_three_percent_of_the_best_of_a_fine_grid() -> None:
    asked = open_question()
    grid = [searched(forced(asked, delay=i / 10)).expected_seconds for i in range(6)]
    assert searched(asked).expected_seconds <= 1.03 * min(grid)


@pytest.mark.usefixtures("one_simulation")
@pytest.mark.parametrize("delay", [0.0, 0.35, 1.0])
def test_a_forced_delay_is_kept(delay: float) -> None:
    asked = forced(open_question(), delay=delay)
    assert searched(asked).plan.settings.delay == delay
    assert best(asked).settings.delay == delay


@pytest.mark.parametrize(
    ("mode", "family", "said"),
    [
        ({"delay": 1.5}, "vertical", "delay=1.5: must be from 0 to 1"),
        ({"delay": float("nan")}, "vertical", "delay=nan: must be a number"),
        ({"delay": 0.2}, "horizontal", "delay=0.2 needs schedule='vertical'"),
    ],
)
def test_delays_that_cannot_be_are_refused(mode: dict[str, float], family: Family, said: str) -> None:
    asked = question(transformer(3), form=ADAM16, wait=True, family=family)
    with pytest.raises(ConfigError, match=said):
        searched(forced(asked, **mode))
    with pytest.raises(ConfigError, match=said):
        fit(replace(asked.request, **mode))


@pytest.mark.usefixtures("one_simulation")
def test_where_only_the_vertical_schedule_can_the_other_is_left_out() -> None:
    found = searched(forced(open_question(families=("vertical", "horizontal")), delay=0.2))
    assert (found.request.family, found.plan.settings.delay) == ("vertical", 0.2)


@pytest.mark.usefixtures("one_simulation")
@pytest.mark.parametrize("family", ["vertical", "horizontal"])
def test_either_schedule_sums_in_strands(family: Family) -> None:
    """Wherever everything is: that is given here, as a search for it takes seconds."""
    asked = question(transformer(3), form=ADAM16, wait=True, family=family, micro_batches=4)
    given = replace(asked.request.budget, weights="disk", state="disk", activations="host", gradients="host")
    asked = forced(asked, budget=given)
    for strands in (1, 4):
        found = searched(forced(asked, strands=strands, delay=0.0))
        assert (found.request.family, found.plan.settings.strands) == (family, strands)
        on_device = any(op.id.kind == "AD" for op in found.plan.schedule.ops)
        sums = {name for op in found.plan.schedule.ops for name, _ in op.takes if name.kind == "H" and name.visit}
        assert (on_device or bool(sums)) == (strands > 1)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("speculate", [False, True])
def test_with_a_delay_the_linear_program_never_promises_room_that_there_is_not(seed: int, speculate: bool) -> None:
    rng = Random(seed)
    asked = question(transformer(rng.randint(2, 6)), form=rng.choice((ADAM32, ADAM16)), wait=speculate or seed % 2 == 0)
    request = replace(asked.request, speculate=speculate, delay=rng.choice((0.1, 0.25, 0.5, 1.0)))
    settings = replace(fitted(request), depths=Depths(), chunk=1 << 12)
    lp = PlacementLP(request, settings, asked.costs)
    place = placement(rng, request.program, tied=False)
    counted = lp.base_sizes(place.activations, place.gradients)
    for g, home in enumerate(zip(place.weights, place.state, strict=True)):
        counted = counted + lp.group_sizes(g, home, place.gradients)
    taken = request.peaks(replace(settings, place=place))
    assert counted[0] >= taken[0]
    assert counted[1] >= taken[1]


# ---- a schedule of the user's own


def planned(*, delay: float, speculate: bool = False, gradients: str | None = None) -> tuple[Request, Schedule]:
    asked = question(transformer(4), form=ADAM16, wait=True, device=1 << 40, host=1 << 40).request
    budget = replace(asked.budget, weights="disk", state="disk", gradients=gradients)  # type: ignore[arg-type]
    request = replace(asked, budget=budget, delay=delay, speculate=speculate)
    return request, fit(request).schedule


@pytest.mark.parametrize("delay", [0.0, 0.07, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("gradients", ["host", "disk"])
@pytest.mark.parametrize("speculate", [False, True])
def test_a_schedule_tells_the_update_mode_it_was_made_for(delay: float, gradients: str, speculate: bool) -> None:
    request, schedule = planned(delay=delay, speculate=speculate, gradients=gradients)
    plan = own_plan(replace(request, speculate=None, delay=None), parse_schedule(str(schedule)))
    assert plan.schedule.ops == schedule.ops
    assert plan.settings.speculate is speculate
    assert (plan.settings.delay > 0) is (delay > 0)
    asked = fit(request).settings.place
    assert (plan.settings.place.weights, plan.settings.place.state) == (asked.weights, asked.state)


def test_what_is_asked_for_and_the_schedule_does_otherwise_is_refused() -> None:
    request, schedule = planned(delay=0.25)
    late = sum(start.holds == "chunk of gradient" for start, _, _ in schedule.carried)
    with pytest.raises(ScheduleError, match=rf"itself delays the steps of {late} chunks: leave delay=0\.5 out"):
        own_plan(replace(request, delay=0.5), schedule)
    with pytest.raises(ScheduleError, match="the schedule speculates: leave speculate=False out"):
        own_plan(replace(request, delay=None), planned(delay=0.25, speculate=True)[1])
    with pytest.raises(ScheduleError, match=r"weights of embed on disk, and budget\.weights='host'"):
        own_plan(replace(request, delay=None, budget=replace(request.budget, weights="host")), schedule)


def test_a_gradient_that_is_not_handed_on_is_missed() -> None:
    request, schedule = planned(delay=0.25)
    name = schedule.carried[0][0]
    with pytest.raises(ScheduleError, match=f"gives back {name}, which is not taken"):
        own_plan(replace(request, delay=None), replace(schedule, carried=schedule.carried[1:]))


def test_the_delay_that_is_chosen_is_about_the_best_where_the_drive_bounds_the_step() -> None:
    """With an embedding that is delayed whole, as large as a block: what is chosen stands beside larger delays."""
    sizes = {0: 2048, 1: 1, 2: 2048}
    small = transformer(12)
    groups = tuple(replace(g, trainable=sizes.get(g.index, 2048) * ALIGN) for g in small.groups)
    program = Program(groups=groups, stages=small.stages)
    rates = {"read": 2e8, "write": 1e8, "read_both": 2e8, "write_both": 1e8}
    links = {"h2d": 6e9, "d2h": 6e9, "h2d_both": 4e9, "d2h_both": 4e9}
    machine = replace(
        MACHINE,
        host=replace(MACHINE.host, copy=8e9, optimizer={"adamw.fp32": 1e9}),
        device=replace(MACHINE.device, **links),
        drives=(replace(DRIVE, **rates),),
    )
    asked = question(program, form=ADAM32, wait=True, micro_batches=6, host=1 << 30, device=256 << 20, machine=machine)
    budget = replace(asked.request.budget, weights="disk", state="disk")
    times = StageTimes(forward=(0.012,) * 14, backward=(0.024,) * 14)
    seconds = {
        delay: searched(
            replace(asked, times=times, request=replace(asked.request, budget=budget, speculate=None, delay=delay))
        ).seconds
        for delay in (None, 0.4)
    }
    assert seconds[None] <= 1.03 * seconds[0.4]


# ---- what a plan keeps, and what it tells


@pytest.mark.usefixtures("one_simulation")
def test_a_placement_that_stays_still_has_its_update_mode_chosen() -> None:
    asked = open_question()
    first = best(asked)
    again = best(asked, first.settings.place)
    assert again.settings.place.weights == first.settings.place.weights
    assert again.settings.place.state == first.settings.place.state
    assert again.settings.speculate
    assert again.settings.delay > 0
    kept = best(forced(asked, delay=0.0, speculate=False), first.settings.place)
    assert (kept.settings.speculate, kept.settings.delay) == (False, 0.0)


@pytest.mark.usefixtures("one_simulation")
def test_the_search_weighs_how_many_blocks_state_lives_on_the_device() -> None:
    """More device memory moves the state of some blocks there, not of all or none, and that is faster."""
    asked = question(transformer(6, block=40), form=ADAM16, wait=True, host=14 * MIB, machine=WRITES_HALF)
    counts, seconds = [], []
    for device in (3, 6, 9):
        budget = replace(asked.request.budget, device=device * MIB)
        choice = searched(forced(asked, budget=budget, speculate=None, delay=0.0))
        counts.append(sum(tier == "device" for tier in choice.plan.settings.place.state[2:]))
        seconds.append(choice.expected_seconds)
    assert counts == sorted(counts)
    assert len({*counts}) == 3, counts
    assert seconds[-1] < seconds[0] * 0.9
