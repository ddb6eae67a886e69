"""What it costs that every step is a commit.

    python -m bench.commit

All state on a disk held to 200/100 MB/s, one plan, two engines in turn: one whose every step is durable and named by a
commit record (``durability="step"``), one that promises nothing until it is closed (``"none"``). Required: commits take
at most 1.03x the time, and the same bytes of state are written.
"""

import statistics
import sys

from bench import turns
from bench.harness import BenchError
from bench.turns import Measured, Taken, Variant

REQUIRED = 1.03
VARIANTS = tuple(
    Variant(name=durability, wrap={"delay": 0.0}, budget={"durability": durability}) for durability in ("step", "none")
)


def check(measured: Measured) -> None:
    """Raises:
    BenchError: the plans differ, or steps did not commit as they were told to.
    """
    plans = {name: plan.settings for name, plan in measured.plans.items()}
    if len(set(plans.values())) > 1:
        raise BenchError(f"the plans differ in more than the durability:\n{plans['step']}\n{plans['none']}")
    for name, commits in (("step", 1), ("none", 0)):
        found = {len(step.commits) for step in measured.steps[name]}
        if found != {commits}:
            raise BenchError(f"durability {name}: {sorted(found)} commits in a step, not {commits}")


def _drive_written(steps: tuple[Taken, ...]) -> str:
    written = [step.drive_written for step in steps if step.drive_written is not None]
    return f"{statistics.median(written):,.0f}" if written else "none"


def state_written(measured: Measured, name: str) -> set[int]:
    """Bytes of state that steps have written; one number if all wrote the same."""
    return {step.state_written for step in measured.steps[name]}


def describe(measured: Measured) -> str:
    """The table, and the verdict."""
    rows = []
    for name in ("step", "none"):
        steps = tuple(measured.steps[name])
        commits = [seconds for step in steps for seconds in step.commits]
        rows.append(
            (
                name,
                measured.spread(name),
                " or ".join(f"{nbytes:,}" for nbytes in sorted(state_written(measured, name))),
                f"{statistics.median(step.process_written for step in steps):,.0f}",
                _drive_written(steps),
                f"{1e3 * statistics.median(commits):.1f} ms (at most {1e3 * max(commits):.1f})" if commits else "none",
            )
        )
    header = (
        "durability",
        "step: median (fastest to slowest)",
        "bytes of state written",
        "by the process",
        "by the drive, for all",
        "one commit",
    )
    ratios = measured.ratios("step", "none")
    equal = state_written(measured, "step") == state_written(measured, "none")
    more = _more(measured)
    return "\n".join(
        [
            turns.table(header, rows),
            "",
            turns.verdict('"step" over "none"', measured.ratio("step", "none"), REQUIRED)
            + f", rounds {min(ratios):.3f} to {max(ratios):.3f}. Bytes of state written: "
            f"**{'equal' if equal else 'NOT EQUAL'}** (required: equal); the commit's own record and checksums are "
            f"{more:,.0f} bytes, {more / measured.steps['none'][-1].process_written:.3%} of what a step writes.",
        ]
    )


def _more(measured: Measured) -> float:
    """Bytes that the process writes with commits, and not without."""
    written = {
        name: statistics.median(step.process_written for step in measured.steps[name]) for name in measured.steps
    }
    return written["step"] - written["none"]


def main() -> int:
    arguments = turns.parser(__doc__, rounds=12).parse_args()
    try:
        with turns.disk(arguments) as (folder, group):
            work = turns.work(arguments, folder, micro_batches=2, batch=2, length=256)
            measured = turns.measure(turns.Job(work=work, variants=VARIANTS), group)
        check(measured)
    except BenchError as error:
        print(f"bench.commit: {error}", file=sys.stderr)
        return 2
    said = turns.setting(measured, arguments)
    turns.record(
        "commit", f"`python -m bench.commit`: {turns.size(measured)}; {said}\n\n{describe(measured)}", arguments
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
