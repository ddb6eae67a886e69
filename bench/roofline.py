"""How near a step is to the lower bound of its plan: the work of its busiest lane.

    python -m bench.roofline

All state on a disk held to 200/100 MB/s, and so few tokens that the disk bounds the step, so many that compute does,
and as many as balance them. The machine is measured by ``penstock doctor`` under the same limit. Two bounds: the one
predicted from that profile, which says how good the whole is; and the time that the busiest lane was busy in that very
step, which says how good the overlap is, whatever the machine did. Required: at most 1.10x the first where the disk or
compute is the bound.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench import turns
from bench.harness import BenchError, measure_machine
from bench.turns import Measured, Planned, Taken, Variant

REQUIRED = 1.10
_NAME = "planned"
_CAUSES = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is meant to bound the step, and so many micro-batches of so many sequences of so many tokens."""

    bound: str
    micro_batches: int
    batch: int
    length: int
    required: float | None


CASES = (
    Case(bound="disk", micro_batches=2, batch=1, length=64, required=REQUIRED),
    Case(bound="balanced", micro_batches=6, batch=2, length=256, required=None),
    Case(bound="compute", micro_batches=8, batch=2, length=512, required=REQUIRED),
)


def over_plan(plan: Planned, steps: Sequence[Taken]) -> float:
    """Median step time over the predicted lower bound."""
    return statistics.median(step.seconds for step in steps) / plan.lower_bound


def over_busy(steps: Sequence[Taken]) -> float:
    """Step time over what the busiest lane took in that step; the median."""
    return statistics.median(step.seconds / max(step.busy.values()) for step in steps)


def row(case: Case, measured: Measured) -> tuple[str, ...]:
    """A case's line of the table."""
    plan, steps, work = measured.plans[_NAME], measured.steps[_NAME], measured.job.work
    assert plan.predicted is not None
    busy = {lane: statistics.median(step.busy.get(lane, 0.0) for step in steps) for lane in plan.work}
    bounding = max(plan.work, key=lambda lane: plan.work[lane])
    busiest = max(busy, key=lambda lane: busy[lane])
    ratio = over_plan(plan, steps)
    met = "" if case.required is None else f", {'met' if ratio <= case.required else 'NOT MET'}"
    return (
        case.bound,
        f"{work.micro_batches} x {work.batch}x{work.length}",
        f"{plan.delay:g}",
        measured.spread(_NAME),
        f"{plan.predicted:.3f} s",
        f"{plan.lower_bound:.3f} s ({bounding})",
        f"**{ratio:.3f}**{met}",
        f"{busy[busiest]:.3f} s ({busiest})",
        f"{over_busy(steps):.3f}",
    )


HEADER = (
    "bound by",
    "micro-batches",
    "delay",
    "step: median (fastest to slowest)",
    "predicted",
    "bound of the plan",
    f"step over it (required {REQUIRED:.2f})",
    "busiest lane, measured",
    "step over it",
)


def waits(case: Case, measured: Measured) -> str:
    """What the busiest lane waited for, in a sentence."""
    steps = measured.steps[_NAME]
    outside = statistics.median(step.seconds - step.in_lanes for step in steps)
    causes = {cause for step in steps for cause in step.idle}
    mean = {cause: statistics.fmean(step.idle.get(cause, 0.0) for step in steps) for cause in causes}
    longest = sorted(causes, key=lambda cause: mean[cause], reverse=True)[:_CAUSES]
    said = ", ".join(f"{1e3 * mean[cause]:.0f} ms for {cause}" for cause in longest)
    lanes = _shares(measured.plans[_NAME].work, steps)
    return (
        f"- {case.bound}: its busiest lane was idle {said}; {1e3 * outside:.0f} ms are before the first op or after "
        f"the last one (the commit). Lanes, seconds of work planned / busy measured: {lanes}."
    )


def _shares(work: Mapping[str, float], steps: Sequence[Taken]) -> str:
    busy = {lane: statistics.median(step.busy.get(lane, 0.0) for step in steps) for lane in work}
    return ", ".join(f"{lane} {work[lane]:.2f} / {busy[lane]:.2f}" for lane in work)


def describe(found: Sequence[tuple[Case, Measured]]) -> str:
    """The table, and what the steps waited for."""
    lines = [turns.table(HEADER, [row(case, measured) for case, measured in found]), ""]
    lines += ["Waits are named by the op that ended them, as in `penstock.schedule.ir.ops`; means over the steps.", ""]
    return "\n".join(lines + [waits(case, measured) for case, measured in found])


def main() -> int:
    arguments = turns.parser(__doc__, rounds=6).parse_args()
    found: list[tuple[Case, Measured]] = []
    try:
        with turns.disk(arguments) as (folder, group):
            profile = str(measure_machine(folder, group))
            for case in CASES:
                print(f"bound by {case.bound}:", file=sys.stderr)
                work = turns.work(
                    arguments, folder, micro_batches=case.micro_batches, batch=case.batch, length=case.length
                )
                job = turns.Job(work=work, variants=(Variant(name=_NAME),), profile=profile)
                found.append((case, turns.measure(job, group)))
    except BenchError as error:
        print(f"bench.roofline: {error}", file=sys.stderr)
        return 2
    said = turns.setting(found[0][1], arguments)
    turns.record("roofline", f"`python -m bench.roofline`: {said}\n\n{describe(found)}", arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
