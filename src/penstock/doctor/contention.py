"""Measures how lanes slow each other, in the numbers of ``penstock.sim.costs.Costs.contention``.

Each pair of lanes is measured side by side, and each of the two alone just before or just after, so that a slow spell
of the machine meets both. The pairs (h2d, d2h) and (read, write) are left out, because the rates say them. With a GPU
those with ``compute`` are left out as well: its arithmetic and its memory are the GPU's own.
"""

import itertools
from collections.abc import Mapping

from penstock.doctor.pace import Load, Span, medians, rate, rates
from penstock.schedule.ir.lanes import Lane

LEAST = 0.03
"""Slow-downs below this are left out: repeated measurements differ by as much."""
_BY_THE_RATES = ({"h2d", "d2h"}, {"read", "write"})
"""Pairs whose slow-down the rates say: those of both directions at once."""


def pairs(lanes: Mapping[Lane, Load], *, gpu: bool) -> list[tuple[Lane, Lane]]:
    """The pairs to measure, each once."""
    return [
        (a, b)
        for a, b in itertools.combinations(lanes, 2)
        if {a, b} not in _BY_THE_RATES and not (gpu and "compute" in (a, b))
    ]


def measure(lanes: Mapping[Lane, Load], span: Span, rounds: int, *, gpu: bool) -> dict[str, float]:
    """``{"a+b": slow-down of a beside b, less 1}`` for both orders of every pair that affects each other.

    Medians over the rounds, each of which goes through all pairs.
    """

    def slower() -> dict[str, float]:
        found: dict[str, float] = {}
        for a, b in pairs(lanes, gpu=gpu):
            before = rate(lanes[a], span)
            both = rates([lanes[a], lanes[b]], span)
            after = rate(lanes[b], span)
            found |= {f"{a}+{b}": before / both[a] - 1, f"{b}+{a}": after / both[b] - 1}
        return found

    return {pair: round(value, 3) for pair, value in medians(rounds, slower).items() if value >= LEAST}
