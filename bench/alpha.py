"""What delaying a share of the optimizer's work into the next step's forward gains, and whether the plan finds it.

    python -m bench.alpha

All state on a disk held to 200/100 MB/s, so much compute that it takes about as long as the disk. The machine is
measured by ``penstock doctor`` under the same limit; engines with delays of 0 to 0.5 and one whose delay the plan
chooses take steps in turn. Required: the plan's own choice takes at most 1.03x the time of the best one.
"""

import statistics
import sys

from bench import turns
from bench.harness import BenchError, measure_machine
from bench.turns import Measured, Variant

REQUIRED = 1.03
CHOSEN = "chosen by the plan"
DELAYS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
VARIANTS = (
    *(Variant(name=f"{delay:g}", wrap={"delay": delay}) for delay in DELAYS),
    Variant(name=CHOSEN, wrap={"delay": None}),
)


def best(measured: Measured) -> str:
    """The fastest of the delays that were asked for."""
    return min((f"{delay:g}" for delay in DELAYS), key=measured.seconds)


def describe(measured: Measured) -> str:
    """The table, and the verdict."""
    rows = []
    for variant in VARIANTS:
        plan, steps = measured.plans[variant.name], measured.steps[variant.name]
        assert plan.predicted is not None
        busiest = max(plan.work, key=lambda lane: plan.work[lane])
        rows.append(
            (
                variant.name,
                f"{plan.delay:g}",
                measured.spread(variant.name),
                f"{1 / measured.ratio(variant.name, '0'):.3f}x",
                f"{plan.predicted:.3f} s ({plan.predicted / measured.seconds(variant.name) - 1:+.1%})",
                f"{plan.lower_bound:.3f} s ({busiest})",
                f"{statistics.median(step.busy['write'] / step.seconds for step in steps):.0%}",
            )
        )
    header = (
        "delay",
        "planned",
        "step: median (fastest to slowest)",
        "gain over 0",
        "predicted",
        "lower bound",
        "writes",
    )
    top = best(measured)
    return "\n".join(
        [
            turns.table(header, rows),
            "",
            turns.verdict(
                f"The plan's delay of {measured.plans[CHOSEN].delay:g} over the best measured, {top}",
                measured.ratio(CHOSEN, top),
                REQUIRED,
            )
            + f". It gains {1 / measured.ratio(CHOSEN, '0'):.3f}x over no delay, the best one "
            f"{1 / measured.ratio(top, '0'):.3f}x. Writes: share of the step in which the disk is written.",
        ]
    )


def main() -> int:
    arguments = turns.parser(__doc__, rounds=8).parse_args()
    try:
        with turns.disk(arguments) as (folder, group):
            profile = str(measure_machine(folder, group))
            work = turns.work(arguments, folder, micro_batches=4, batch=2, length=256)
            measured = turns.measure(turns.Job(work=work, variants=VARIANTS, profile=profile), group)
    except BenchError as error:
        print(f"bench.alpha: {error}", file=sys.stderr)
        return 2
    said = turns.setting(measured, arguments)
    turns.record("alpha", f"`python -m bench.alpha`: {turns.size(measured)}; {said}\n\n{describe(measured)}", arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
