"""The linear program's loads are the simulator's work, its sizes are the schedule's, and its optimum is one."""

import pytest
from tests.programs import Case, random_case

from penstock.config import Budget
from penstock.plan.costs import machine_costs
from penstock.plan.fit import Request
from penstock.plan.lane_loads import Loads, by_lane
from penstock.plan.machine import Device, Drive, Host, Machine
from penstock.plan.model import StageTimes
from penstock.schedule.world import World
from penstock.sim.simulate import simulate

DRIVE = Drive(path="disk", read=2e6, write=1e6, read_both=1.5e6, write_both=0.9e6, free=1 << 40)
MACHINE = Machine(
    name="small",
    host=Host(cores=2, memory=1 << 30, lockable=1 << 30, copy=1e8, optimizer={"adamw.fp32": 3e6, "adamw.bf16": 3e6}),
    device=Device(
        name="none", kind="cpu", memory=1 << 30, flops={"fp32": 1e9}, h2d=2e7, d2h=1e7, h2d_both=1.5e7, d2h_both=1e7
    ),
    drives=(DRIVE,),
    overhead=1e-3,
)


def asked(case: Case) -> Request:
    return Request(
        program=case.program,
        budget=Budget(device=1 << 40, host=1 << 40, disk="store"),
        form=case.settings.form,
        micro_batches=case.settings.micro_batches,
        wait=case.settings.wait,
        train=case.settings.train,
        family="horizontal" if case.family == "horizontal" else "vertical",
    )


def times_of(case: Case) -> StageTimes:
    n = len(case.program.stages)
    return StageTimes(forward=tuple(0.01 * (i + 1) for i in range(n)), backward=tuple(0.02 * (i + 1) for i in range(n)))


@pytest.mark.parametrize("seed", range(60))
def test_loads_are_the_simulated_work_of_every_lane(seed: int) -> None:
    case = random_case(seed)
    costs = machine_costs(MACHINE, case.program, case.settings.form, times_of(case), "adamw.fp32")
    found = by_lane(Loads(asked(case), case.settings, costs).of(case.settings.place))
    schedule = case.build()
    work = simulate(World.of(schedule), costs).work(0)
    for lane, seconds in found.items():
        assert seconds == pytest.approx(work.get(lane, 0.0), rel=1e-9, abs=1e-12), lane
