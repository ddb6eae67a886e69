"""What a run says of its disk space and of what a kill would cost, before it starts or as soon as it is planned."""

import json
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.config import format_size
from penstock.store.store import Store
from tests.runs import write_run

pytestmark = pytest.mark.usefixtures("one_thread")

BF16 = ["--precision", "bf16"]


@pytest.mark.sampled(3, values=False)
@pytest.mark.parametrize(
    ("flags", "cost"),
    [
        ([], "As planned, every step is a commit: a kill costs the step in flight"),
        (["--delay", "0.5"], "As planned, every step is a commit: a kill costs the step in flight and the one before"),
        (["--budget.slots", "1"], "As planned, with one slot a kill within a step costs the whole run"),
        (["--budget.weights", "host", *BF16], "As planned, every step is a commit: a kill costs the step in flight"),
        (
            ["--budget.state", "host", "--budget.weights", "host"],
            "; a commit every 5 min or step: a kill costs",
        ),
        (["--budget.durability", "interval", "--budget.interval", "90s"], "; a commit every 1.5 min or step: a kill"),
        (["--budget.durability", "none"], "; a kill costs the whole run"),
        (["--budget.durability", "interval", "--budget.interval", "2"], "; a commit every 2 steps: a kill costs the"),
    ],
)
def test_the_space_and_the_cost_of_a_kill_are_said(
    flags: list[str], cost: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_run(tmp_path)
    assert main(["train", str(config), "--steps", "1", "--evaluate", "null", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("step 1"))
    said = [line for line in lines if "of disk taken" in line]
    with Store.open([tmp_path / "run" / "store"]) as store:
        size = sum((path / "penstock.store").stat().st_size for path in store.paths)
    slots = "the state in one slot" if "--budget.slots" in flags else "twice the state, in two slots"
    assert said[0].startswith(f"{format_size(size)} of disk taken in {tmp_path / 'run' / 'store'}: {slots}")
    assert lines.index(said[0]) < first
    assert cost in "\n".join(lines[:first]) + "\n"
    (step,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert 0.97 * size < step["disk_bytes"] <= size, "all but checksums and the ends of pages"
    assert set(step["peak_bytes"]) == set(step["planned_peak_bytes"]) == {"device", "host"}
    assert f"  drives {format_size(step['disk_bytes'])} taken, " in "\n".join(lines)


def test_a_run_that_wears_its_drive_faster_than_allowed_says_so_once_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Without a plan for this machine nothing is predicted, so that nothing could be refused."""
    config = write_run(tmp_path)
    flags = ["--plan", "null", "--steps", "13", "--evaluate", "null", "--budget.endurance.per_day", "1MB"]
    assert main(["train", str(config), *flags]) == 0
    said = [record.message for record in caplog.records if "budget.endurance allows" in record.message]
    assert len(said) == 1
    assert "times the 977 KiB that budget.endurance allows its drives: it goes on" in said[0]
    (drives,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("drives   "))
    assert "a day of the 977 KiB allowed" in drives
