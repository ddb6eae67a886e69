"""Benchmarks whose variants take turns: each step is counted for who took it, and what is printed is what was seen."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from bench.harness import BenchError
from bench.turns import Job, Measured, Planned, Taken, Variant
from bench.workload import Work

from bench import alpha, clipping, commit, roofline, turns, turns_run
from tests.engine.test_prediction import machine

pytestmark = pytest.mark.usefixtures("one_thread")


def _job(folder: Path, variants: Sequence[Variant], *, profile: bool = False, measured: int = 2) -> Job:
    """Measured steps of a model with four small blocks, after one that is not."""
    if profile:
        (folder / "machine.json").write_text(machine(folder).to_json())
    work = Work(
        model="llama-tiny",
        micro_batches=2,
        batch=1,
        length=16,
        steps=1 + measured,
        threads=1,
        scratch=str(folder),
    )
    return Job(work=work, variants=tuple(variants), profile=str(folder / "machine.json") if profile else None)


def _taken(seconds: float, **changes: object) -> Taken:
    step = Taken(
        seconds=seconds,
        loss=1.0,
        grad_norm=1.0,
        repeats=0,
        in_lanes=seconds,
        busy={"write": seconds / 2, "compute": seconds / 4},
        idle={"UW": seconds / 2},
        state_read=2,
        state_written=1,
        process_written=1,
        drive_written=None,
        commits=(),
    )
    return replace(step, **changes)  # type: ignore[arg-type]


def _measured(**steps: Sequence[Taken]) -> Measured:
    """Steps that nobody has taken."""
    work = Work(model="llama-tiny", micro_batches=1, batch=1, length=1, steps=3, threads=1, scratch="/none")
    variants = tuple(Variant(name=name) for name in steps)
    return Measured(job=Job(work=work, variants=variants), parameters=1, plans={}, steps=steps)


def test_variants_take_turns_and_each_round_begins_with_another_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = _job(tmp_path, commit.VARIANTS)
    measured = turns_run.run(job)
    assert [line.split()[2] for line in capsys.readouterr().err.splitlines() if line.startswith("  step")] == [
        *("step", "none"),
        *("none", "step"),
        *("step", "none"),
    ]
    assert all(len(steps) == job.rounds == 2 for steps in measured.steps.values())  # the step that plans is left out
    assert Measured.from_json(measured.to_json()).job == job
    turns.check_same(measured)
    commit.check(measured)
    assert commit.state_written(measured, "step") == commit.state_written(measured, "none")
    assert len(commit.state_written(measured, "step")) == 1
    assert "Bytes of state written: **equal**" in commit.describe(measured)
    first, second = measured.steps["none"]
    other = measured.steps | {"none": (first, replace(second, commits=(0.1,)))}
    with pytest.raises(BenchError, match=r"durability none: \[0, 1\] commits in a step, not 0"):
        commit.check(replace(measured, steps=other))


def test_the_busiest_lane_is_either_busy_or_idle_for_a_named_reason(tmp_path: Path) -> None:
    measured = turns_run.run(_job(tmp_path, commit.VARIANTS[:1]))
    for step in measured.steps["step"]:
        assert max(step.busy.values()) + sum(step.idle.values()) == pytest.approx(step.in_lanes)
        assert 0 < step.in_lanes < step.seconds
        assert 0 < sum(step.commits) < step.seconds - step.in_lanes
        assert step.process_written >= step.state_written > 0


def test_clipping_variants_do_what_their_names_say_with_one_plan(tmp_path: Path) -> None:
    measured = turns_run.run(_job(tmp_path, clipping.VARIANTS))
    turns.check_same(measured)
    clipping.check(measured)
    once, twice = (measured.steps[name][-1] for name in ("speculating", "repeating"))
    assert (twice.state_read, twice.state_written) == (2 * once.state_read, 2 * once.state_written)
    assert clipping.describe(measured).count("\n| on") == 3
    waits = measured.plans | {"speculating": measured.plans["waiting"]}
    with pytest.raises(BenchError, match="speculating: its schedule speculates: False"):
        clipping.check(replace(measured, plans=waits))
    other = replace(measured.plans["speculating"], settings="others")
    with pytest.raises(BenchError, match="the plans differ"):
        clipping.check(replace(measured, plans=measured.plans | {"speculating": other}))


@pytest.mark.usefixtures("one_simulation")
def test_alpha_prints_each_delay_as_it_was_planned_and_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two of its delays, and of the one that the plan chooses."""
    monkeypatch.setattr(alpha, "DELAYS", (0.0, 0.3))
    monkeypatch.setattr(alpha, "VARIANTS", [v for v in alpha.VARIANTS if v.name in ("0", "0.3", alpha.CHOSEN)])
    measured = turns_run.run(_job(tmp_path, alpha.VARIANTS, profile=True, measured=1))
    turns.check_same(measured)
    assert [measured.plans[f"{delay:g}"].delay for delay in alpha.DELAYS] == list(alpha.DELAYS)
    rows = [line for line in alpha.describe(measured).splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + len(alpha.DELAYS) + 1
    for variant in alpha.VARIANTS:
        predicted = measured.plans[variant.name].predicted
        assert predicted is not None
        assert any(row.startswith(f"| {variant.name} |") and f"{predicted:.3f} s" in row for row in rows)


def test_roofline_prints_both_bounds_and_what_was_waited_for(tmp_path: Path) -> None:
    measured = turns_run.run(_job(tmp_path, [Variant(name="planned")], profile=True))
    plan, steps = measured.plans["planned"], measured.steps["planned"]
    text = roofline.describe([(roofline.CASES[0], measured)])
    bound, *_ = sorted(plan.work.values(), reverse=True)
    assert plan.lower_bound == bound
    ratio = statistics.median(step.seconds for step in steps) / bound
    assert f"**{ratio:.3f}**, {'met' if ratio <= roofline.REQUIRED else 'NOT MET'}" in text
    longest = max(steps[0].idle | steps[1].idle, key=lambda cause: sum(step.idle.get(cause, 0.0) for step in steps))
    assert f"ms for {longest}" in text


def test_a_ratio_is_the_median_over_rounds_and_not_the_ratio_of_medians() -> None:
    measured = _measured(a=[_taken(2.0), _taken(30.0), _taken(9.0)], b=[_taken(1.0), _taken(10.0), _taken(9.0)])
    assert measured.ratios("a", "b") == [2.0, 3.0, 1.0]
    assert measured.ratio("a", "b") == 2.0
    assert measured.seconds("a") / measured.seconds("b") == 1.0


def test_over_busy_compares_each_step_with_its_own_busiest_lane() -> None:
    steps = [_taken(2.0), _taken(9.0, busy={"write": 3.0, "read": 8.0}), _taken(4.0, busy={"write": 1.0})]
    assert roofline.over_busy(steps) == 2.0
    plan = Planned(
        settings="", described="", delay=0.0, speculates=False, predicted=2.0, work={"read": 1.0, "cpu": 0.5},
        graphs=0, calls=8, device_bytes=1,
    )  # fmt: skip
    assert roofline.over_plan(plan, steps) == 4.0


def test_variants_that_compute_other_losses_are_not_compared() -> None:
    measured = _measured(a=[_taken(1.0)], b=[_taken(1.0, loss=1.0 + 2**-52)])
    with pytest.raises(BenchError, match=r"step 2: loss 1\.0 of a, but 1\.0000000000000002 of b"):
        turns.check_same(measured)
    a, b = measured.job.variants
    turns.check_same(replace(measured, job=replace(measured.job, variants=(a, replace(b, same=False)))))
