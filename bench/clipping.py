"""What exact clipping of gradients costs where the disk bounds the step.

    python -m bench.clipping

All state on a disk held to 200/100 MB/s, one plan, four engines in turn: no clipping; a norm that no step exceeds,
with steps that begin before the norm is known (``speculate=True``) and with steps that wait for it
(``speculate=False``); and a norm that every step exceeds, so that every speculative step is run twice. Required:
clipping with speculation takes at most 1.03x the time of no clipping, where no step is clipped.
"""

import sys

from bench import turns
from bench.harness import BenchError
from bench.turns import Measured, Variant

REQUIRED = 1.03
NEVER, ALWAYS = 1e9, 1e-6

VARIANTS = (
    Variant(name="no clipping", wrap={"clip_grad_norm": None, "delay": 0.0}),
    Variant(name="speculating", wrap={"clip_grad_norm": NEVER, "delay": 0.0, "speculate": True}),
    Variant(name="waiting", wrap={"clip_grad_norm": NEVER, "delay": 0.0, "speculate": False}),
    Variant(name="repeating", wrap={"clip_grad_norm": ALWAYS, "delay": 0.0, "speculate": True}, same=False),
)
_WORDS = {
    "no clipping": "off",
    "speculating": "on, no step over the limit, steps begin before the norm is known",
    "waiting": "on, no step over the limit, steps wait for the norm",
    "repeating": "on, every step over the limit and repeated",
}


def check(measured: Measured) -> None:
    """Raises:
    BenchError: the variants did not do what their names say, or had other plans.
    """
    for name, repeats in (("no clipping", 0), ("speculating", 0), ("waiting", 0), ("repeating", 1)):
        found = {step.repeats for step in measured.steps[name]}
        if found != {repeats}:
            raise BenchError(f"{name}: steps were repeated {sorted(found)} times, not {repeats}")
        if measured.plans[name].speculates != (name in ("speculating", "repeating")):
            raise BenchError(f"{name}: its schedule speculates: {measured.plans[name].speculates}")
    for name in ("speculating", "repeating"):
        if measured.plans[name].settings != measured.plans["no clipping"].settings:
            plans = "\n".join(f"{each}: {measured.plans[each].settings}" for each in ("no clipping", name))
            raise BenchError(f"the plans differ in more than the waiting:\n{plans}")


def describe(measured: Measured) -> str:
    """The table, and the verdict."""
    rows = []
    for name, words in _WORDS.items():
        steps = measured.steps[name]
        ratios = measured.ratios(name, "no clipping")
        rows.append(
            (
                words,
                measured.spread(name),
                f"{measured.ratio(name, 'no clipping'):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
                f"{steps[-1].state_read / 1e9:.3f}, {steps[-1].state_written / 1e9:.3f}",
                str(steps[-1].repeats),
            )
        )
    header = ("clipping", "step: median (fastest to slowest)", "over no clipping", "GB read, written", "repeats")
    waiting = measured.ratio("waiting", "no clipping") / measured.ratio("speculating", "no clipping")
    return "\n".join(
        [
            turns.table(header, rows),
            "",
            turns.verdict("Clipping over none, no step clipped", measured.ratio("speculating", "no clipping"), REQUIRED)
            + f". Waiting for the norm takes {waiting:.3f}x the time of speculating.",
        ]
    )


def main() -> int:
    arguments = turns.parser(__doc__, rounds=10).parse_args()
    try:
        with turns.disk(arguments) as (folder, group):
            work = turns.work(arguments, folder, micro_batches=2, batch=2, length=256)
            measured = turns.measure(turns.Job(work=work, variants=VARIANTS), group)
        check(measured)
    except BenchError as error:
        print(f"bench.clipping: {error}", file=sys.stderr)
        return 2
    said = turns.setting(measured, arguments)
    turns.record(
        "clipping", f"`python -m bench.clipping`: {turns.size(measured)}; {said}\n\n{describe(measured)}", arguments
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
