"""How a run's batch is cut into micro-batches: by what, said how, kept for the run; and how many steps epochs are."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main, settings, split
from penstock.cli.durable import with_durability
from penstock.cli.launch import in_words
from penstock.cli.split import Cut
from penstock.config import BatchConfig, Endurance, TrainConfig
from penstock.errors import BudgetError, ConfigError
from penstock.hardware.machine import Machine
from penstock.hardware.profiles import save_profile
from tests.engine.test_prediction import machine
from tests.machines import measured_here
from tests.runs import FROM_NOTHING, write_run

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_run(tmp_path, settings=FROM_NOTHING.replace("micro_batch_size: 2\n", ""))


@pytest.fixture
def config(path: Path) -> TrainConfig:
    return settings.load(path)


def _cut(
    config: TrainConfig, machine: Machine | None, sequences: int, ranks: int = 1, hosts: int = 1, **budget: Any
) -> Cut:
    config = replace(config, batch=BatchConfig(sequences=sequences), budget=replace(config.budget, **budget))
    return split.cut_batch(config, "vertical", machine, "cpu", ranks, hosts)


def test_without_a_profile_the_largest_that_fit_are_taken(config: TrainConfig) -> None:
    whole = _cut(config, None, 8)
    assert (whole.size, whole.smaller) == (8, (4, 2, 1))
    found = _cut(config, None, 8, device="1MiB", host="64MiB").size
    assert 1 < found < 8
    with pytest.raises(BudgetError):
        _cut(config, None, 8, device="32KiB")


def test_a_batch_that_cannot_be_cut_is_refused_with_what_could_be(config: TrainConfig) -> None:
    with pytest.raises(ConfigError, match=r"at most 256 equal micro-batches of at most 32 sequences, .* 8,192 at most"):
        _cut(config, None, 1_000_000)


def test_on_several_hosts_there_is_room_for_what_crosses_within_and_between_them(config: TrainConfig) -> None:
    sizes = [_cut(config, None, 32, 4, hosts, device="2000KiB", host="256MiB").size for hosts in (1, 2)]
    assert sizes == [4, 2], "collectives of two levels take a buffer more"


@pytest.fixture
def profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has a profile."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_profile(measured_here(machine(tmp_path)))


@pytest.mark.usefixtures("brief", "profiled")
def test_with_a_profile_it_is_what_the_plan_command_chooses(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--plan", "auto", "--delay", "0", "--speculate", "false", "--evaluate", "null"]
    assert main(["plan", str(path), *flags, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["plan"]
    assert main(["train", str(path), *flags, "--steps", "1"]) == 0
    said = capsys.readouterr().out
    ran = settings.load(tmp_path / "run" / "config.yaml")
    assert ran.split == (planned["micro_batch_size"], planned["micro_batches"])
    (line,) = (line for line in said.splitlines() if line.startswith("Planning a step"))
    assert re.search(r"predicted to be the fastest \((\d+ of \d+: [1-9]\d*\.\d\dx(, )?)+", line), line
    assert " s " not in line.partition("(")[2].partition(")")[0], "its seconds are of formulas"
    assert said.count("a step predicted, from the model's own stages") == 1


@pytest.mark.usefixtures("brief", "profiled")
def test_what_does_not_fit_is_refused_in_the_words_of_the_plan_command(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what is missing of both tiers, and not of the one that was looked at first."""
    flags = ["--plan", "auto", "--evaluate", "null", "--budget.device", "64KiB", "--budget.host", "64KiB"]
    said = []
    for command in ("plan", "train"):
        assert main([command, str(path), *flags]) == 2
        said.append(re.sub(r"[\d.]+ .iB of disk", "(what is free) of disk", capsys.readouterr().err))
    assert "(what is free) of disk" in said[0]  # which other processes change meanwhile
    assert re.search(r"What makes it fit: .* more device \(.* in all\) and .* more host", said[0])
    assert said[0] == said[1]


def test_a_resumed_run_keeps_its_cut(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the plan would now choose another one; a size that is asked for and is another one is refused."""
    assert main(["train", str(path), "--micro_batch_size", "1", "--steps", "1"]) == 0
    assert main(["train", str(path), "--steps", "2", "--resume"]) == 0
    assert settings.load(tmp_path / "run" / "config.yaml").split == (1, 4)
    assert "4 micro-batches of 1 sequence: as the run began" in capsys.readouterr().out
    assert main(["train", str(path), "--steps", "3", "--resume", "--micro_batch_size", "2"]) == 2
    assert "started with micro_batch_size=1, not 2" in capsys.readouterr().err
    assert main(["train", str(path), "--steps", "3", "--resume", "--batch.sequences", "8"]) == 2
    assert "batch.sequences=4, not 8" in capsys.readouterr().err


def test_what_turns_out_not_to_fit_is_cut_smaller(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice was made from the model's configuration; the engine sees the model."""
    monkeypatch.setattr(split, "fit", lambda request: None)  # which takes the first size, the largest
    assert main(["train", str(path), "--steps", "1", "--budget.device", "900KiB"]) == 0
    said = capsys.readouterr().out
    assert "Micro-batches of 4 sequences do not fit after all: budget.device=900KiB is too small" in said
    assert "Planning a step of micro-batches of 2 instead" in said
    assert settings.load(tmp_path / "run" / "config.yaml").micro_batch_size == 2


def test_a_schedule_of_ones_own_has_its_own_number_of_micro_batches(config: TrainConfig) -> None:
    from penstock.schedule.ir.text import parse_schedule

    own = parse_schedule("schedule s micro-batches 3 chunk 4096\n")
    asked = replace(config, batch=BatchConfig(sequences=12), schedule=Path("own.schedule"))
    assert split.cut_batch(asked, own, None, "cpu").size == 4
    with pytest.raises(ConfigError, match="a multiple of 3"):
        split.cut_batch(replace(asked, batch=BatchConfig(sequences=8)), own, None, "cpu")
    with pytest.raises(ConfigError, match="make micro-batches of 4"):
        split.cut_batch(replace(asked, micro_batch_size=2), own, None, "cpu")


@pytest.mark.parametrize(
    ("sequences", "size", "said"),
    [
        (12, 4, "3 micro-batches cannot be shared evenly by 2 ranks: give a batch of a multiple of 8 sequences"),
        (7, None, "7 sequences cannot be shared evenly by 2 ranks: give a batch of a multiple of 2 sequences"),
    ],
)
def test_what_ranks_cannot_share_is_said_with_a_batch_that_they_can(
    config: TrainConfig, sequences: int, size: int | None, said: str
) -> None:
    asked = replace(config, batch=BatchConfig(sequences=sequences), micro_batch_size=size)
    with pytest.raises(ConfigError) as caught:
        split.check_shared(asked, 2)
    assert str(caught.value) == f"batch: {said}"
    advised = int(said.split()[-2])
    split.check_shared(replace(asked, batch=BatchConfig(sequences=advised)), 2)


def test_more_ranks_than_a_run_can_say_that_it_has_are_refused(config: TrainConfig) -> None:
    asked = replace(config, batch=BatchConfig(sequences=4096), micro_batch_size=2)
    split.check_shared(asked, 1024)
    with pytest.raises(ConfigError, match="2,048 ranks are started, and at most 1,024 train one run: start fewer"):
        split.check_shared(asked, 2048)


@pytest.mark.parametrize(
    ("strands", "sequences", "ranks", "able", "other"),
    [
        (1, 4, 2, "1", "penstock"),
        (4, 16, 3, "1 or 2 or 4", "torchrun --nproc-per-node 2 -m penstock"),
        (4, 6, 4, "1 or 2", "torchrun --nproc-per-node 2 -m penstock"),
        (6, 12, 1, "3 or 6", "torchrun --nproc-per-node 3 -m penstock"),
    ],
)
def test_a_run_that_goes_on_says_which_ranks_can_share_its_batch_and_strands(
    config: TrainConfig, strands: int, sequences: int, ranks: int, able: str, other: str
) -> None:
    kept = replace(config, run="r", batch=BatchConfig(sequences=sequences), micro_batch_size=1)
    for number in map(int, able.split(" or ")):
        split.check_goes_on(kept, strands, number)
        split.check_shared(replace(kept, strands=strands), number)
    with pytest.raises(ConfigError) as caught:
        split.check_goes_on(kept, strands, ranks)
    assert str(caught.value) == (
        f"r: {in_words(ranks)} cannot share the {sequences} micro-batches and strands={strands} of its steps, which "
        f"stay as they are. {able} can: {other} resume r"
    )


def test_epochs_become_steps_of_the_data_that_is_there(path: Path, tmp_path: Path) -> None:
    flags = ["--steps", "null", "--epochs", "0.02", "--evaluate", "null"]
    assert main(["train", str(path), *flags]) == 0
    ran = settings.load(tmp_path / "run" / "config.yaml")
    (prepared,) = (tmp_path / "run" / "data").glob("*/train-0.tokens")
    tokens = prepared.stat().st_size // 2
    assert (ran.epochs, ran.steps) == (None, round(0.02 * (tokens // 32) / 4))
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == ran.steps


@pytest.mark.usefixtures("one_simulation")
def test_a_run_whose_drives_last_with_commits_now_and_then_has_these(config: TrainConfig, tmp_path: Path) -> None:
    """The run chooses as the plan command does; where durable steps are asked for they are refused before anything is
    trained."""
    cpu = machine(tmp_path)
    assert isinstance(config.model.config, Mapping)
    config = replace(config, model=replace(config.model, config={**config.model.config, "num_hidden_layers": 2}))
    free = replace(config.budget, device="64MiB", host="64MiB", weights=None, state=None)
    roomy = replace(free, endurance=Endurance(per_day="1TB"))
    config = replace(config, batch=BatchConfig(sequences=2), delay=0.0, speculate=False)
    lasting = replace(config, budget=roomy)
    cut = split.cut_batch(lasting, "vertical", cpu, "cpu")
    assert cut.size == split.cut_batch(replace(config, budget=free), "vertical", cpu, "cpu").size
    found, _ = with_durability(lasting, "vertical", cpu, cut, 1)
    assert found.budget.durability == "interval"
    every = replace(lasting, budget=replace(roomy, durability="step"))
    with pytest.raises(BudgetError, match="wears its drives too fast"):
        split.cut_batch(every, "vertical", cpu, "cpu")
    with pytest.raises(BudgetError, match=r"wears its drives too fast.* budget\.durability: interval, which may keep"):
        with_durability(every, "vertical", cpu, cut, 1)
