"""The benchmarks' harness: what it measures is what ran, at the rate it says, and results keep their neighbours."""

import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from bench.harness import MB, BenchError, DiskLimit, Run, Side, Step

from bench import harness, workload, zero_infinity
from tests.patience import until

_REPORTS = """
import json, sys
report, work = sys.argv[sys.argv.index("--report") + 1], json.loads(sys.argv[sys.argv.index("--work") + 1])
with open(report, "w") as file:
    for step in range(work["steps"]):
        line = {"seconds": SCALE * (step + 1), "loss": LOSS, "peak_rss": 1, "read": 2, "written": 3}
        file.write(json.dumps(line) + "\\n")
print("the end of the log")
sys.exit(CODE)
"""


def _side(name: str, *, scale: float = 1.0, loss: float = 2.0, code: int = 0) -> Side:
    script = _REPORTS.replace("SCALE", str(scale)).replace("LOSS", str(loss)).replace("CODE", str(code))
    return Side(name=name, command=(sys.executable, "-c", script))


def _work(scratch: Path, steps: int = 3) -> workload.Work:
    return workload.Work(
        model="gpt-tiny", micro_batches=2, batch=3, length=8, steps=steps, threads=1, scratch=str(scratch)
    )


def test_sides_take_turns_and_the_warm_up_step_does_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = (_side("a"), _side("b", scale=2.0))
    runs = harness.alternate(sides, _work(tmp_path), rounds=2, limit=None, logs=tmp_path / "logs")
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()] == ["a", "b", "a", "b"]
    assert harness.median_seconds(runs["a"]) == 2.5  # of steps 2 and 3 of both rounds; 1 is warm-up
    assert harness.median_seconds(runs["b"]) == 5.0


def test_sides_plan_for_the_machine_as_it_is_in_their_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No profile of the machine without a limit is found: that of doctor, or none."""
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(harness, "run_in", lambda *how, cache: asked.append((*how, cache)))
    script = "import os; open(os.environ['SEEN'], 'a').write(os.environ['XDG_CACHE_HOME'] + chr(10))" + _REPORTS
    script = script.replace("SCALE", "1.0").replace("LOSS", "2.0").replace("CODE", "0")
    seen = tmp_path / "seen"
    sides = [
        Side(name=name, command=(sys.executable, "-c", script), environment={"SEEN": str(seen)}, doctor=doctor)
        for name, doctor in (("a", False), ("b", True), ("c", True), ("d", False))
    ]
    harness.alternate(sides, _work(tmp_path), rounds=2, limit=None, logs=tmp_path / "logs")
    found = seen.read_text().splitlines()
    b = found[1]
    assert [cache for cache in found if cache == b] == [found[i] for i in (1, 2, 5, 6)]
    assert len(set(found)) == 5, "who has none finds none in the next round, either"
    assert not Path(b).exists()
    assert asked == [(None, "penstock.cli", "doctor", "--path", str(tmp_path), "--quick", Path(b))]


def test_a_side_that_fails_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"(?s)a ended with code 3 after 3 of 3 steps.*the end of the log"):
        harness.run(_side("a", code=3), _work(tmp_path), group=None, logs=tmp_path / "logs", warm_up=1)


def test_what_a_side_has_started_ends_with_it(tmp_path: Path) -> None:
    """Else it would run beside the next one, whether the side came to its end or took too long."""
    script = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True); " + "WAIT" + _REPORTS
    script = script.replace("SCALE", "1.0").replace("LOSS", "2.0").replace("CODE", "0")
    for wait, patience in (("", None), ("import time; time.sleep(600); ", 2.0)):
        side = Side(name="a", command=(sys.executable, "-c", script.replace("WAIT", wait)))
        with nullcontext() if patience is None else pytest.raises(BenchError, match="ended with code -9"):
            harness.run(side, _work(tmp_path), group=None, logs=tmp_path, warm_up=1, patience=patience)
        started = int((tmp_path / "a.log").read_text().split()[0])
        until(lambda pid=started: not _is_running(pid))


def _is_running(pid: int) -> bool:
    """False of one that has ended and that nobody has asked for."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_side_that_leaves_too_few_steps_is_an_error_even_after_a_good_run(tmp_path: Path) -> None:
    harness.run(_side("a"), _work(tmp_path), group=None, logs=tmp_path, warm_up=1)
    silent = Side(name="a", command=(sys.executable, "-c", "pass"))
    with pytest.raises(BenchError, match="after 0 of 3 steps"):
        harness.run(silent, _work(tmp_path), group=None, logs=tmp_path, warm_up=1)


def test_sides_that_compute_different_losses_are_not_compared(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"loss 2.0 of a, but 2.1 of b"):
        harness.alternate(
            (_side("a"), _side("b", loss=2.1)), _work(tmp_path), rounds=1, limit=None, logs=tmp_path / "logs"
        )
    nan = Run(steps=(Step(seconds=1, loss=float("nan"), peak_rss=1, read=0, written=0),), warm_up=0)
    with pytest.raises(BenchError, match="loss nan"):
        harness.check_same_losses({"a": [nan], "b": [nan]})


@pytest.mark.skipif(harness.why_no_limit() is not None, reason="needs root and the cgroup v1 blkio controller")
def test_a_limited_side_reads_and_writes_at_the_rate_and_the_cgroup_goes_away(tmp_path: Path) -> None:
    # Slow, since the kernel lets a tenth of a second's bytes through before it holds anything back.
    limit = DiskLimit(read=10 * MB, write=14 * MB)
    script = """
import mmap, os, sys, time
buffer = mmap.mmap(-1, 10 * 2**20)
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_DIRECT)
for transfer in (os.pwritev, os.preadv):
    start = time.perf_counter()
    assert transfer(fd, [buffer], 0) == len(buffer)
    print(time.perf_counter() - start)
"""
    path = tmp_path / "data"
    try:
        harness.block_device(tmp_path)
    except BenchError:
        pytest.skip("the temporary directory is on no block device")
    with harness.disk_cgroup(limit, tmp_path) as group:
        assert group is not None
        side = Side(name="io", command=(sys.executable, "-c", script, str(path)))
        with pytest.raises(BenchError, match="after 0 of 3 steps"):  # it reports no steps; its log has the times
            harness.run(side, _work(tmp_path), group=group, logs=tmp_path, warm_up=1)
        write, read = (float(line) for line in (tmp_path / "io.log").read_text().split())
    assert write > 0.8 * 10 * 2**20 / limit.write
    assert read > 0.8 * 10 * 2**20 / limit.read
    assert not group.exists()


def test_a_path_on_no_block_device_is_an_error() -> None:
    with pytest.raises(BenchError, match="on no block device"):
        harness.block_device(Path("/proc"))


def test_a_section_replaces_itself_and_leaves_its_neighbours(tmp_path: Path) -> None:
    path = tmp_path / "results" / "machine.md"
    harness.write_section("one", "first", path)
    harness.write_section("two", "second", path)
    harness.write_section("one", "third\n\n### part", path)
    head, one, two = path.read_text().split("\n## ")
    assert head == f"# machine\n\n{harness.machine()}\n"
    assert one == "one\n\nthird\n\n### part\n"
    assert two == "two\n\nsecond\n"


def test_the_results_file_is_named_by_hardware_and_date() -> None:
    name = harness.results_file().name
    assert name.endswith(f"core-{time.strftime('%Y-%m-%d')}.md")
    assert f"-{os.cpu_count()}core" in name


def test_both_sides_start_from_the_same_weights_and_see_the_same_tokens(tmp_path: Path) -> None:
    work = _work(tmp_path)
    workload.write_initial_weights(work)
    one, two = workload.build_initial(work), workload.build_initial(work)
    assert all(bool((a == b).all()) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    steps = [workload.Tokens(work).step(step) for step in range(work.steps)]
    assert all(len(step) == 2 and step[0]["input_ids"].shape == (3, 8) for step in steps)
    flat = [bytes(mb["input_ids"].flatten().tolist()) for step in steps for mb in step]
    assert len(set(flat)) == len(flat), "micro-batches repeat"
    assert workload.Tokens(work).step(1)[0]["input_ids"].tolist() == steps[1][0]["input_ids"].tolist()


def test_the_ratio_is_of_median_steps_and_the_bound_of_each_is_of_the_slower_direction_or_of_compute() -> None:
    def runs(*seconds: float, compute: float | None = None) -> list[Run]:
        steps = (
            Step(seconds=s, loss=1.0, peak_rss=1, read=300 * MB, written=200 * MB, compute=compute)
            for s in (99.0, *seconds)
        )
        return [Run(steps=tuple(steps), warm_up=1)]

    ours, planned = zero_infinity.ON_DISK, zero_infinity.PLANNED
    case = zero_infinity.Case(limit=DiskLimit(read=100 * MB, write=50 * MB), micro_batches=8, required=3.0)
    beside = zero_infinity.Outcome(
        case=case,
        limited=True,
        runs={"deepspeed": runs(30.0, 34.0), ours: runs(7.0, 9.0), planned: runs(16.0, 16.0)},
    )
    assert (beside.ratio(ours), beside.ratio(planned), beside.alone, beside.passed) == (4.0, 2.0, False, True)
    assert [row.split("|")[-2].strip() for row in beside.rows()] == ["", "**4.00x** (at least 3.0)", "**2.00x**"]
    slow = replace(beside, runs={**beside.runs, ours: runs(16.0, 16.0)})
    assert not slow.passed
    for compute, bound in ((None, 4.0), (3.5, 4.0), (5.0, 5.0)):  # 200 MB at 50 MB/s; the reads take 3 s beside it
        alone = replace(beside, runs={planned: runs(bound, 1.1 * bound, 2 * bound, compute=compute)})
        assert alone.bounds(planned) == [bound] * 3
        assert alone.of_bound(planned) == pytest.approx(1.1)
        assert (alone.alone, alone.passed) == (True, alone.of_bound(planned) <= 1.1)
