"""What it saves to keep graphs of blocks on the device, so that blocks are not computed again for their backward.

    python -m bench.graphs

State in host memory, so that compute is the bound; three engines in turn: all blocks computed again
(``recompute=True``); a device with room for some graphs, which the plan keeps; and all graphs kept
(``recompute=False``). All have the same losses to the last bit. Required: all graphs kept take at most 0.85 of the
time of none, where a forward, a second one and a backward are four parts of which one is left out, with the optimizer
beside them; and every step takes as long as was predicted, to 10%.
"""

import sys

from bench import turns
from bench.harness import BenchError, measure_machine
from bench.turns import Measured, Variant
from penstock.config import format_size

REQUIRED, AS_PREDICTED = 0.85, 0.10
_ON_HOST = {"weights": "host", "state": "host", "durability": "none"}
_AGAIN, _SOME, _ALL = "computed again", "some kept", "all kept"

VARIANTS = (
    Variant(name=_AGAIN, wrap={"recompute": True}, budget=_ON_HOST),
    Variant(name=_SOME, budget=_ON_HOST | {"device": "320MiB"}),
    Variant(name=_ALL, wrap={"recompute": False}, budget=_ON_HOST),
)


def check(measured: Measured) -> None:
    """Raises:
    BenchError: the variants did not do what their names say.
    """
    again, some, everything = (measured.plans[name] for name in (_AGAIN, _SOME, _ALL))
    if again.graphs or not 0 < some.graphs < some.calls or everything.graphs != everything.calls:
        kept = [f"{name}: {plan.graphs} of {plan.calls}" for name, plan in measured.plans.items()]
        raise BenchError(f"graphs are not kept as variants are called: {', '.join(kept)}")


def describe(measured: Measured) -> str:
    """The table, and the verdict."""
    rows, worst = [], 0.0
    for name, plan in measured.plans.items():
        ratios = measured.ratios(name, _AGAIN)
        assert plan.predicted is not None
        error = plan.predicted / measured.seconds(name) - 1
        worst = max(worst, abs(error))
        rows.append(
            (
                f"{plan.graphs} of {plan.calls}",
                format_size(plan.device_bytes),
                measured.spread(name),
                f"{measured.ratio(name, _AGAIN):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
                f"{plan.predicted:.3f} s ({error:+.1%})",
            )
        )
    header = ("graphs kept", "device", "step: median (fastest to slowest)", "over none", "predicted")
    met = "met" if worst <= AS_PREDICTED else "NOT MET"
    return "\n".join(
        [
            turns.table(header, rows),
            "",
            turns.verdict("All graphs kept over none", measured.ratio(_ALL, _AGAIN), REQUIRED)
            + f". Predictions are within {worst:.1%} (required: {AS_PREDICTED:.0%}, {met}).",
        ]
    )


def main() -> int:
    arguments = turns.parser(__doc__, rounds=10).parse_args()
    try:
        with turns.disk(arguments) as (folder, group):
            profile = str(measure_machine(folder, group))
            work = turns.work(arguments, folder, micro_batches=4, batch=2, length=256)
            job = turns.Job(work=work, variants=VARIANTS, profile=profile, device="2GiB", host="2GiB")
            measured = turns.measure(job, group)
        check(measured)
    except BenchError as error:
        print(f"bench.graphs: {error}", file=sys.stderr)
        return 2
    said = turns.setting(measured, arguments).replace("all state on disk", "all state in host memory")
    turns.record(
        "graphs", f"`python -m bench.graphs`: {turns.size(measured)}; {said}\n\n{describe(measured)}", arguments
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
