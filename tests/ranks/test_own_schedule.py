"""A schedule of one's own on several ranks: in an order that no builder makes, with the bits of one rank; one that is
another step is refused on all."""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import ScheduleError
from penstock.schedule.check.worlds import check_world
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.ir.text import parse_schedule
from penstock.schedule.meaning import Needs, prove
from tests.conftest import Campaign
from tests.ranks.launched import Launched, launched
from tests.ranks.test_bits import BF16, CASES, FP32, STRANDS, Numbers, alone, equal, of_rank, results
from tests.ranks.test_command import STRANDS as STRANDS_OF_TWO
from tests.ranks.test_command import numbers
from tests.ranks.test_copies import copies_of
from tests.ranks.test_levels import on_a_host
from tests.ranks.worlds import together
from tests.runs import write_run_of_three_blocks as write_run
from tests.training import budget, run_steps, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

WAYS: dict[str, tuple[Numbers, dict[str, Any], bool]] = {
    "stage 3 on disk": (FP32, {"stage": 3}, True),
    "delayed, bf16": (BF16, {"stage": 3, "delay": 0.5}, True),
    "stage 2": (BF16, {"stage": 2}, False),
    "stage 0": (FP32, {"stage": 0}, False),
    "horizontal": (FP32, {"stage": 3, "schedule": "horizontal"}, False),
}
"""Numbers, settings of what is built and then changed, and whether it is on disk."""


def built(mesh: DeviceMesh, numbers: Numbers, settings: dict[str, Any], disk: Path | None) -> Any:
    """The plan and the request of a step as a builder makes it."""
    with wrap(
        CASES[numbers.model], budget(disk), mesh=mesh, strands=STRANDS, **numbers.settings(), **settings
    ) as engine:
        engine.prepare(of_rank(numbers.model, mesh)[0])
        return engine.plan, engine.inside.planning.request


def reordered(plan: Any, request: Any, rng: Random, swaps: int) -> Schedule:
    """The schedule of a plan with neighbours of a lane in the other order, where that is safe and the same step: of so
    many that are tried."""
    seat = request.seat(plan.settings)
    needs = Needs.of(plan.program, plan.settings, request.ranks, request.copies, seat.hosts.size)
    found, ops = plan.schedule, list(plan.schedule.ops)
    for _ in range(swaps):
        lane = rng.choice([ops for ops in found.lanes.values() if len(ops) > 1])
        i = rng.randrange(len(lane) - 1)
        a, b = ops.index(lane[i]), ops.index(lane[i + 1])
        ops[a], ops[b] = ops[b], ops[a]
        other = replace(found, ops=tuple(ops))
        try:
            check_world(seat.of_few().world(other))
            prove(other, needs)
        except ScheduleError:
            ops[a], ops[b] = ops[b], ops[a]
        else:
            found = other
    return replace(found, fixed=())  # another order may hold more


def trained(
    mesh: DeviceMesh, way: str, disk: Path, swaps: int, *, copies: bool = False, hosts: bool = False
) -> dict[str, Any]:
    numbers, settings, on_disk = WAYS[way]
    mesh = copies_of(mesh) if copies else mesh
    if hosts:
        on_a_host(mesh)
    plan, request = built(mesh, numbers, settings, disk / "built" if on_disk else None)
    text = [str(reordered(plan, request, Random(way), swaps)) if mesh.get_rank() == 0 else ""]
    dist.broadcast_object_list(text)
    own = parse_schedule(text[0])
    assert {lane: [op.id for op in ops] for lane, ops in own.lanes.items()} != {
        lane: [op.id for op in ops] for lane, ops in plan.schedule.lanes.items()
    }
    where = budget(disk / "own" if on_disk else None, weights=None, state=None)
    whole = {"stage": 0} if settings.get("stage") == 0 else {}
    with wrap(
        CASES[numbers.model],
        where,
        mesh=mesh,
        strands=STRANDS,
        **numbers.settings(),
        schedule=own,
        **whole,
    ) as engine:
        found = results(engine, run_steps(engine, of_rank(numbers.model, mesh)))
        assert engine.plan.schedule.ops == own.ops
        return found


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if way == "horizontal" else [pytest.mark.campaign]) for way in WAYS]
)
def test_ranks_that_share_the_state_have_the_bits_of_one_rank(way: str, campaign: Campaign, tmp_path: Path) -> None:
    """The first one is run each time below."""
    for found in together(2, trained, way, tmp_path, campaign.cases(20, 60)):
        equal(found, alone(WAYS[way][0]))


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("ranks", ["copies", "hosts"])
def test_so_have_copies_of_the_state_and_several_hosts(ranks: str, campaign: Campaign, tmp_path: Path) -> None:
    for found in together(4, trained, "stage 3 on disk", tmp_path, campaign.cases(20, 60), **{ranks: True}):
        equal(found, alone(FP32))


def wrong(mesh: DeviceMesh) -> list[str]:
    """What is said of a built schedule without one of its exchanges, and of the whole one in other stages."""
    plan, _ = built(mesh, FP32, {"stage": 3}, None)
    whole = str(plan.schedule)
    gone = next(line for line in whole.splitlines() if line.startswith("SG"))
    name = gone.split()[0]
    text = whole.replace(f"{gone}\n", "").replace(f",{name}", "").replace(f"{name},", "")
    cases: list[tuple[str, dict[str, Any]]] = [(text, {}), (whole, {"stage": 2}), (whole, {"stage": 0})]
    said = []
    for text, settings in cases:
        common = FP32.settings() | {"mesh": mesh, "strands": STRANDS, "schedule": parse_schedule(text)}
        with (
            pytest.raises(ScheduleError) as caught,
            wrap(CASES[FP32.model], budget(None), **common, **settings) as engine,
        ):
            engine.step(of_rank(FP32.model, mesh)[0])
        said.append(str(caught.value))
    return said


def test_one_that_is_another_step_is_refused_on_all_ranks() -> None:
    for found in together(2, wrong):
        for said, words in zip(found, ("SG", "leave stage=2 out", "leave stage=0 out"), strict=True):
            assert words in said


WRITTEN = """
import os, sys
from pathlib import Path
from penstock.cli import main
from penstock.engine.engine import Engine
step = Engine.step
def written(engine, *args, **given):
    done = step(engine, *args, **given)
    if os.environ["RANK"] == "0":
        plan = engine.plan
        seat = engine.inside.planning.request.seat(plan.settings)
        Path("own.txt").write_text(str(seat.world(plan.schedule)))
    return done
Engine.step = written
sys.exit(main(sys.argv[1:]))
"""
"""``penstock``, which writes down the schedule of all ranks."""


def test_the_command_takes_one_for_all_ranks_from_a_file(tmp_path: Path) -> None:
    write_run(tmp_path)
    words = ["train", "config.yaml", *STRANDS_OF_TWO, "--steps", "2"]
    for code, _, errors in Launched(2, ["-c", WRITTEN, *words], tmp_path).outcomes():
        assert code == 0, errors
    own = ["--run", "own", "--budget.disk", "own/store", "--schedule", "own.txt"]
    for code, _, errors in launched(2, [*words, *own], tmp_path):
        assert code == 0, errors
    assert numbers(tmp_path / "own") == numbers(tmp_path / "run")
    text = (tmp_path / "own.txt").read_text()
    assert "\nrank 0-1\n" in text
    (tmp_path / "own.txt").write_text(text.replace("ranks 2", "ranks 3").replace(" 0-1\n", " 0-2\n"))
    for code, _, errors in launched(2, [*words, "--run", "other", *own[2:]], tmp_path):
        assert (code, "is for 3 ranks: this is 2" in errors) == (2, True), errors
