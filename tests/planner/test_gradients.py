"""The plan weighs both sides of the link on which gradients are rounded, by what doctor has measured of each."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from penstock.config import Family
from penstock.hardware.crossing import step_rate
from penstock.hardware.machine import Crossing, Machine
from penstock.planner.costs import machine_costs
from penstock.planner.fit import fit
from penstock.planner.phase_costs import PhaseCosts
from penstock.planner.question import Question
from penstock.planner.request import Request
from penstock.planner.roofline import roofline
from penstock.schedule.ir.ops import Op
from penstock.schedule.ir.worlds import World
from penstock.schedule.place import Format, Side
from penstock.sim.simulate import simulate
from tests.programs import transformer
from tests.questions import MACHINE, by_lane, question, searched, times_for

ADAM16 = Format.of("bf16", 2)
MIB = 1 << 20
LINK = 4e6
"""bytes/s down: what bounds these steps"""


def machine(grad_bf16: float) -> Machine:
    """A machine whose device rounds and sends so many gradients in a second; it sends 1e6 in fp32."""
    crossing = Crossing(
        grad_bf16=grad_bf16,
        grad_fp32=LINK / 4,
        step=3e6,
        step_grad_bf16=3.3e6,
        step_grad_rounded=2.9e6,
    )
    device = replace(MACHINE.device, d2h=LINK, d2h_both=LINK)
    return replace(MACHINE, device=device, crossing=crossing)


FAST, SLOW = machine(1.9e6), machine(2e5)


def asked(on: Machine = FAST, **more: object) -> Question:
    found = question(transformer(4, block=40), form=ADAM16, device=5 * MIB, machine=on)
    return replace(found, request=replace(found.request, grad_dtype="bf16", **more))  # type: ignore[arg-type]


@pytest.mark.parametrize(("on", "side"), [(FAST, "device"), (SLOW, "host")])
def test_the_faster_side_rounds(on: Machine, side: Side) -> None:
    choice = searched(asked(on))
    assert choice.plan.settings.cast == side
    other: Side = "host" if side == "device" else "device"
    assert choice.seconds < searched(asked(on, cast=other)).seconds
    assert searched(asked(on, cast=other)).plan.settings.cast == other, "what is forced is kept"


def test_half_the_bytes_take_less_where_the_link_bounds() -> None:
    full = question(transformer(4, block=40), form=ADAM16, device=5 * MIB, machine=FAST)
    assert searched(asked()).seconds < 0.75 * searched(full).seconds


def ops(request: Request, kind: str) -> Iterator[Op]:
    return (op for op in fit(request).schedule.ops if op.id.kind == kind)


def test_ops_take_what_was_measured_for_their_side() -> None:
    sides: tuple[Side, ...] = ("device", "host")
    for side in sides:
        found = asked(cast=side)
        costs, request = found.costs_of(found.request), found.request
        down, step = next(ops(request, "DG")), next(ops(request, "OP"))
        numel = down.nbytes / (2 if side == "device" else 4)
        assert costs.seconds(down) == pytest.approx(FAST.overhead + numel / (1.9e6 if side == "device" else 1e6))
        rate = step_rate(FAST, "adamw.bf16", "bf16" if side == "device" else "rounded")
        assert costs.seconds(step) == pytest.approx(FAST.overhead + numel / rate)


@pytest.mark.parametrize("family", ["vertical", "horizontal"])
def test_what_is_summed_on_the_host_leaves_nothing_to_choose(family: str) -> None:
    """Horizontal, and a tied group in any case."""
    found = asked(family=family)
    free = replace(found, families=(found.request.family,))
    assert [r.cast for r in free.requests] == (["device", "host"] if family == "vertical" else ["host"])
    away = replace(found.request.budget, state="host")  # gradients of what steps on the device do not cross
    tied = replace(found.request, program=transformer(4, tied=True), family="vertical", budget=away)
    plan = fit(tied)
    assert plan.settings.cast == "device"
    assert 0 not in plan.schedule.narrow
    assert plan.schedule.narrow == {g.index for g in tied.program.groups} - {0}
    pools = {pool.name: pool.size for pool in plan.schedule.pools}
    assert pools["gradients_out"] == 4 * plan.settings.chunk, "the tied group's are as wide"


def test_without_a_profile_fewer_bytes_cross_and_wait() -> None:
    waits = replace(asked().request, wait=True, budget=replace(asked().request.budget, gradients="disk"))
    narrow, wide = fit(waits), fit(replace(waits, cast="host"))
    assert narrow.settings.cast == "device"
    assert narrow.schedule.bytes_per_lane()["d2h"] * 2 == wide.schedule.bytes_per_lane()["d2h"]
    assert waits.scratch_bytes(narrow.settings) * 2 == waits.scratch_bytes(wide.settings)
    assert narrow.host_bytes < wide.host_bytes


@pytest.mark.parametrize("family", ["vertical", "horizontal"])
def test_what_waits_on_disk_has_an_extent_for_each_micro_batch(family: Family) -> None:
    request = asked(family=family).request
    away = replace(request, budget=replace(request.budget, activations="disk"))
    plan = fit(away)
    extents = {op.id: op.nbytes for op in plan.schedule.lanes["write"] if op.id.kind == "WC"}
    assert len({ident.micro_batch for ident in extents}) == request.micro_batches > 1
    assert away.scratch_bytes(plan.settings) == sum(extents.values())


def test_the_costs_of_a_plan_are_those_that_it_was_chosen_by() -> None:
    found = asked()
    choice = searched(found)
    plan = choice.plan
    costs = machine_costs(
        FAST,
        plan.program,
        ADAM16,
        times_for(plan.program),
        "adamw.bf16",
        grad_dtype="bf16",
        narrow=plan.schedule.narrow,
    )
    again = simulate(World.of(plan.schedule), costs)
    assert again.time == choice.seconds
    loads = by_lane(PhaseCosts(choice.request, plan.settings, costs).of(plan.settings.place))
    assert loads["d2h"] == pytest.approx(again.work(0)["d2h"])


def test_the_roofline_is_what_the_better_side_allows() -> None:
    wide = question(transformer(4, block=40), form=ADAM16, device=5 * MIB, machine=FAST)
    assert roofline(asked(), 100).link_seconds < roofline(wide, 100).link_seconds
    assert roofline(asked(), 100).host_seconds < roofline(wide, 100).host_seconds


def test_an_evaluation_has_no_gradients_to_round() -> None:
    plan = fit(replace(asked().request, train=False))
    assert (plan.settings.cast, plan.schedule.narrow) == ("host", frozenset())
