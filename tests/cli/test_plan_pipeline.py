"""``penstock plan`` of a file with ``pipeline``: each rank's plan, and the time of the world that they make."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.cli.pipeline import expected, fastest
from penstock.cli.settings import load
from penstock.cli.showing.pace import Pace
from penstock.cli.task import form_of, shape_of
from penstock.config import TrainConfig
from penstock.hardware.machine import Machine, Network
from penstock.hardware.profiles import save_profile
from penstock.planner.dealt import Pipeline
from penstock.report.sentence import format_time
from penstock.schedule.check.worlds import check_world
from penstock.schedule.ir.lanes import Lane
from penstock.shape.model import ModelShape, stage_times
from penstock.state.stats import StepStats
from tests.cli.test_plan import CONFIG, as_ever
from tests.machines import measured_here
from tests.questions import DRIVE, MACHINE

pytestmark = pytest.mark.usefixtures("_measured")
NETWORK = Network(bandwidth=1e8, latency=1e-4)


@pytest.fixture(scope="module", autouse=True)
def _each_pipeline_once() -> Iterator[None]:
    """A pipeline that several tests look at is planned once: most of what these tests take is plans."""
    known: dict[str, Pipeline] = {}
    better: dict[int, Pipeline] = {}
    improved = Pipeline.improved

    def once(config: TrainConfig, shape: ModelShape, machine: Machine, *cut: int) -> Pipeline:
        key = repr((config, as_ever(machine), cut))
        if key not in known:
            known[key] = expected(config, shape, machine, *cut)
        return known[key]

    def improved_once(found: Pipeline, check: Callable[[Pipeline], None]) -> Pipeline:
        assert any(found is one for one in known.values()), "which stay, each with a number of its own"
        if id(found) not in better:
            better[id(found)] = improved(found, check)
        return better[id(found)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.cli.pipeline.expected", once)
        patch.setattr(Pipeline, "improved", improved_once)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planned")


@pytest.fixture
def _measured(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_profile(measured_here(replace(MACHINE, drives=(replace(DRIVE, path=str(folder)),), network=NETWORK)))


@pytest.fixture
def config(folder: Path) -> Path:
    path = folder / "config.yaml"
    path.write_text(CONFIG.format(run=folder / "run", device="10MiB", host="16MiB") + "pipeline: 2\n")
    return path


def planned(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    assert main(["plan", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_each_rank_has_its_own_blocks_and_the_step_is_the_world_s(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(capsys, config)
    assert planned(capsys, config, "--ranks", 2) == found
    first, second = found["ranks"]
    assert first["blocks"] + second["blocks"] == 6
    assert 0 < first["blocks"] <= second["blocks"]  # the first has the head, too
    assert found["step"]["seconds"] > found["step"]["limit_seconds"] > 0
    # 4 micro-batches of 2 x 128 tokens of 128 fp32 numbers: what one rank puts out for the other, and its gradient back
    crossings = first["bytes"]["send"] // (4 * 2 * 128 * 128 * 4)
    assert first["bytes"]["send"] == second["bytes"]["send"] == crossings * 4 * 2 * 128 * 128 * 4
    assert crossings > 2  # in loops
    assert main(["plan", str(config)]) == 0
    said = capsys.readouterr().out
    assert "a pipeline of 2 ranks, each with blocks of its own" in said


def test_in_turn_less_crosses_and_less_is_kept(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loops, pieces = (planned(capsys, config, "--schedule", order) for order in ("interleaved-1f1b", "1f1b"))
    vertical = planned(capsys, config)
    sent = [sum(rank["bytes"]["send"] for rank in found["ranks"]) for found in (vertical, loops, pieces)]
    assert sent[0] == sent[1] > sent[2] == 4 * 4 * 2 * 128 * 128 * 4, "of two blocks, there and back"
    assert pieces["step"]["seconds"] > 0
    assert [rank["blocks"] for rank in pieces["ranks"]] == [rank["blocks"] for rank in vertical["ranks"]]


def test_split_backwards_send_as_much_and_hold_more(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    room = ("--budget.device", "32MiB")
    whole, split = (
        planned(capsys, config, *room, *more, "--schedule", order)
        for order, more in (("1f1b", ("--recompute", "true")), ("zero-bubble", ()))
    )
    for one, other in zip(whole["ranks"], split["ranks"], strict=True):
        assert one["bytes"]["send"] == other["bytes"]["send"]
        assert one["memory"]["device"] < other["memory"]["device"] <= 32 << 20
    assert split["step"]["seconds"] < whole["step"]["seconds"]
    assert main(["plan", str(config), "--schedule", "zero-bubble", "--budget.device", "4MiB"]) != 0
    said = capsys.readouterr().err
    assert "rank 0 of the pipeline: budget.device=4MiB is too small for this model" in said
    assert "another schedule than zero-bubble, which holds there what waits of backwards" in said


def test_ranks_of_one_processor_have_a_part_of_it_each(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, config, "--recompute", "true")
    settings = load(config, ())
    profile = shape_of(settings, "cpu").profile(found["micro_batch_size"], 128, form_of(settings, "cpu"))
    alone = stage_times(profile, MACHINE, "fp32")
    work = sum(rank["work_seconds"]["compute"] for rank in found["ranks"])
    assert work == pytest.approx(2 * found["micro_batches"] * (sum(alone.forward) + sum(alone.backward)), rel=0.01)


def test_ranks_that_share_each_sequence_have_a_part_of_it(
    config: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts = (planned(capsys, config, "--cp", cp) for cp in (1, 2))
    assert planned(capsys, config, "--cp", 2, "--ranks", 4) == parts
    assert (parts["pipelines"], parts["cp"]) == (2, 2)
    assert parts["step"]["tokens"] == whole["step"]["tokens"]
    for one, other in zip(parts["ranks"], whole["ranks"], strict=True):
        assert one["bytes"]["send"] == other["bytes"]["send"] // 2, "of its tokens"
        assert one["memory"]["device"] < other["memory"]["device"]
    slow = replace(MACHINE, drives=(replace(DRIVE, path=str(folder)),), network=replace(NETWORK, bandwidth=1e5))
    save_profile(measured_here(slow))
    found = planned(capsys, config, "--cp", 2, "--ranks", 4)
    for one, other in zip(found["ranks"], parts["ranks"], strict=True):
        assert one["work_seconds"]["compute"] > 3 * other["work_seconds"]["compute"], "it waits for what is exchanged"
    assert main(["plan", str(config), "--cp", "2", "--ranks", "4"]) == 0
    assert "2 pipelines of 2 ranks beside each other, which share each sequence 2 by 2" in capsys.readouterr().out


def test_a_slower_network_makes_a_longer_step_of_the_same_bytes(
    config: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = planned(capsys, config)
    slow = replace(MACHINE, drives=(replace(DRIVE, path=str(folder)),), network=replace(NETWORK, bandwidth=1e5))
    save_profile(measured_here(slow))
    found = planned(capsys, config)
    assert found["step"]["seconds"] > 1.2 * fast["step"]["seconds"]
    assert [rank["bytes"]["send"] for rank in found["ranks"]] == [rank["bytes"]["send"] for rank in fast["ranks"]]


def test_the_cut_is_the_one_whose_world_is_fastest(config: Path) -> None:
    settings = load(config, (("micro_batch_size", "null"),))
    machine = replace(MACHINE, drives=(replace(DRIVE, path="/disk"),), network=NETWORK)
    found = fastest(settings, machine, settings.pipeline)
    assert [one.step.seconds for one in found] == sorted(one.step.seconds for one in found)
    assert len({one.size for one in found}) == len(found) > 1
    for one in found:
        check_world(one.step.simulation.world)
        assert one.size * one.count == settings.sequences_per_step


def test_a_slow_step_is_told_by_a_lane_that_had_something_to_do(config: Path) -> None:
    """A rank's ``recv`` lane, of which nothing is planned, is busy for as long as it waits for the other."""
    settings = load(config, ())
    machine = replace(MACHINE, drives=(replace(DRIVE, path="/disk"),), network=NETWORK)
    prediction = expected(settings, shape_of(settings, "cpu"), machine, *settings.split, ranks=2).step.simulation
    planned, seconds = prediction.busy(0), 10 * prediction.time
    assert planned["recv"] == 0
    moved = prediction.world.ranks[0].bytes_per_lane()
    lanes = {**planned, "recv": seconds, "compute": 3 * planned["compute"]}
    pace = Pace()
    assert pace.check(stats_of(seconds, moved, lanes), prediction) is None, "the first counts for nothing"
    said = pace.check(stats_of(seconds, moved, lanes), prediction)
    assert said is not None
    assert "10x the" in said
    assert "the compute lane was busy for" in said


def test_a_slow_step_whose_ops_were_not_slow_is_blamed_on_no_lane(config: Path) -> None:
    settings = load(config, ())
    machine = replace(MACHINE, drives=(replace(DRIVE, path="/disk"),), network=NETWORK)
    prediction = expected(settings, shape_of(settings, "cpu"), machine, *settings.split, ranks=2).step.simulation
    planned, seconds = prediction.busy(0), 4 * prediction.time + 2.0
    pace = Pace()
    stats = stats_of(seconds, prediction.world.ranks[0].bytes_per_lane(), {**planned, "write": planned["write"] + 0.1})
    assert pace.check(stats, prediction) is None, "the first counts for nothing"
    said = pace.check(stats, prediction)
    assert said is not None
    assert f"{format_time(3 * prediction.time + 1.9)} of that went by outside of its ops" in said
    assert "doctor" not in said


def stats_of(seconds: float, moved: dict[Lane, int], lanes: dict[Lane, float]) -> StepStats:
    return StepStats(
        step=1,
        loss=1.0,
        grad_norm=1.0,
        tokens=1,
        seconds=seconds,
        lr=1.0,
        clipped=False,
        skipped=False,
        loss_scale=1.0,
        bytes_moved=moved,
        lane_seconds=lanes,
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ranks", "3"), "the file says pipeline: 2: give a multiple of 2"),
        (("--cp", "2", "--ranks", "6"), "the file says pipeline: 2 and cp: 2: give a multiple of 4"),
        (("--stage", "2"), "stage=2 is not for the ranks of a pipeline (pipeline=2 of 2 ranks)"),
        (("--longest",), "--longest is not there yet for a pipeline"),
        (("--tbw", "100"), "--tbw is not there yet for a pipeline"),
        (("--disk_free", "1MiB"), "the stores take"),
        (("--pipeline", "9"), "use at most 7 ranks"),
        (("--budget.host", "1MiB"), "rank 0 of the pipeline: budget.host=512 KiB for each rank is too small"),
    ],
)
def test_what_cannot_be_is_refused(
    words: tuple[str, ...], message: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(config), *words]) == 2
    assert message in capsys.readouterr().err


def test_gradients_wait_on_disk_only_where_there_is_room_for_them(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With room for the stores and no more the plan is at least the one by preference."""
    rates = {name: 10 * getattr(DRIVE, name) for name in ("read", "write", "read_both", "write_both")}
    machine = replace(MACHINE, drives=(replace(DRIVE, **rates),), network=NETWORK)
    path = config.parent / "drives.json"
    path.write_text(machine.to_json())
    settings = load(config, (("budget.host", "8MiB"), ("clip_grad_norm", "1")))
    preferred = expected(settings, shape_of(settings, "cpu"), machine, *settings.split, ranks=2)

    def plan_within(free: int) -> int:
        words = ("--machine", path, "--budget.host", "8MiB", "--clip_grad_norm", 1, "--disk_free", free)
        found = planned(capsys, config, *words)
        taken: int = sum(rank["memory"]["disk"] for rank in found["ranks"])
        assert taken <= free
        assert found["step"]["expected_seconds"] <= preferred.step.seconds
        return taken

    stores = sum(preferred.disk_bytes)
    most = plan_within(1 << 40)
    assert most > stores, "gradients wait on disk, and the step is shorter"
    assert plan_within(most) == most
    assert plan_within(most - 1) < most
    assert plan_within(stores) == stores


def test_each_rank_s_store_has_room_on_its_own_drive(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs = [rank["memory"]["disk"] for rank in planned(capsys, config)["ranks"]]
    assert needs[0] > needs[1], "the first has the head, too"
    words = (config, "--budget.disk", "[/d0, /d1]", "--machine")
    for free, fits in (((needs[0] - 1, needs[0]), False), ([*needs[:1], needs[1] - 1], False), (needs, True)):
        drives = tuple(replace(DRIVE, path=f"/d{n}", free=room) for n, room in enumerate(free))
        path = config.parent / "drives.json"
        path.write_text(replace(MACHINE, drives=drives, network=NETWORK).to_json())
        if fits:
            assert [rank["memory"]["disk"] for rank in planned(capsys, *words, path)["ranks"]] == needs
        else:
            assert main(["plan", *map(str, (*words, path))]) == 2
            assert "budget.disk: on one drive the stores take" in capsys.readouterr().err
