"""The page of a simulated schedule: one row per rank, time above and memory below."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from penstock.config import TIERS, format_size
from penstock.report.columns import Columns, Names
from penstock.report.html import Figure, Page, table
from penstock.report.prediction import Prediction
from penstock.report.sentence import bottleneck, format_time
from penstock.report.series import series
from penstock.schedule.ir.lanes import LANES
from penstock.sim.result import Simulation

_ROWS = 64
"""Ranks that the table lists at most."""


def simulated_page(simulation: Simulation, *, title: str, unit: str, costs: str) -> str:
    """The whole page as text. ``unit``: of times; ``"s"`` also means that amounts of memory are bytes. ``costs``: in
    words, on what machine and in what units the schedule was simulated.

    Ranks whose ops, times and causes are the same share their data, so that a page of 1,024 ranks stays small.
    """
    put, names = Columns(), Names()
    shared, of_rank = _shared(simulation)
    kinds = [Prediction.of(simulation, rank) for rank in shared]
    facts: dict[str, Any] = {
        "kind": "simulated",
        "unit": unit,
        "amounts": "bytes" if unit == "s" else "",
        "lanes": LANES,
        "end": simulation.time,
        "sides": [series(kind.side(f"rank {rank}"), put, names) for rank, kind in zip(shared, kinds, strict=True)],
        "ranks": of_rank,
        "names": names.texts,
        "budget": {},
    }
    slowest = max(kinds, key=lambda kind: kind.lower_bound)
    count = len(of_rank)
    page = Page(
        eyebrow=f"Simulated schedule · {count:,} rank{'s' * (count != 1)} · {costs}",
        heading=title,
        sentence=bottleneck(simulation.time, slowest.work, slowest.busy, unit),
        notes=(),
        figures=_figures(simulation.time, kinds, unit, several=count > 1),
        timeline="Ranks over time" if count > 1 else "Lanes over time",
        hint="Wheel: zoom. Drag or arrow keys: pan; Shift + wheel: pan in time. Double click or 0: the whole step. "
        + ("Click a rank's name for a row per lane. " if count > 1 else "")
        + "Point at an op to see what it waited for.",
        sections=f"<section><h2>Lanes</h2>{_lane_table(kinds[0], unit)}</section>"
        if count == 1
        else f"<section><h2>Ranks</h2>{_rank_table(simulation.time, kinds, of_rank, unit)}</section>",
        facts=facts,
        columns=put,
    )
    return page.html()


def _shared(simulation: Simulation) -> tuple[list[int], list[int]]:
    """One rank of each kind, and for every rank the number of its kind."""
    kinds: dict[Any, int] = {}
    shared: list[int] = []
    of_rank = []
    for rank, schedule in enumerate(simulation.world.ranks):
        lists = (simulation.starts, simulation.ends, simulation.waits, simulation.causes)
        key = (id(schedule), *(hash(tuple(column[rank])) for column in lists))
        kind = kinds.setdefault(key, len(shared))
        if kind == len(shared):
            shared.append(rank)
        of_rank.append(kind)
    return shared, of_rank


def _amount(number: float, unit: str) -> str:
    return format_size(number) if unit == "s" else f"{number:,.6g}" if number < 1e6 else f"{number:,.0f}"


def _figures(time: float, kinds: Sequence[Prediction], unit: str, *, several: bool) -> list[Figure]:
    bound = max(kind.lower_bound for kind in kinds)
    figures = [
        Figure(name="time", value=format_time(time, unit)),
        Figure(name="lower bound", value=format_time(bound, unit), remark="busiest lane alone"),
    ]
    if time > 0:
        idle = [1 - _compute(kind) / time for kind in kinds]
        same = "on every rank" if several else "of the step"
        remark = f"{min(idle):.0%} to {max(idle):.0%}" if max(idle) - min(idle) > 0.005 else same
        figures.append(Figure(name="compute idle", value=f"{max(idle):.0%}", remark=remark))
    peaks = {tier: max(kind.peak[tier] for kind in kinds) for tier in TIERS}
    return figures + [
        Figure(
            name=f"{tier} memory taken, peak",
            value=_amount(most, unit),
            remark="highest of any rank" if several else "",
        )
        for tier, most in peaks.items()
        if most
    ]


def _compute(kind: Prediction) -> float:
    return kind.busy.get("compute", 0.0)


def _lane_table(only: Prediction, unit: str) -> str:
    moved = only.bytes_per_lane
    rows = [
        [
            lane,
            _amount(moved[lane], unit) if moved.get(lane) else "–",
            format_time(only.busy[lane], unit),
            f"{only.busy[lane] / only.time:.0%}" if only.time > 0 else "–",
        ]
        for lane in LANES
        if lane in only.busy
    ]
    return table(
        ["lane", "moved", "busy", "of the step"], rows, caption="What each lane moves, and how long it is busy"
    )


def _rank_table(time: float, kinds: Sequence[Prediction], of_rank: Sequence[int], unit: str) -> str:
    tiers = [tier for tier in TIERS if any(kind.peak[tier] for kind in kinds)]

    def row(name: str, end: float, compute: float, *peaks: float) -> list[str]:
        idle = f"{1 - compute / time:.0%}" if time > 0 else "–"
        return [name, format_time(end, unit), format_time(compute, unit), idle, *(_amount(p, unit) for p in peaks)]

    figures = [(kind.time, _compute(kind), *(kind.peak[tier] for tier in tiers)) for kind in kinds]
    every = [figures[kind] for kind in of_rank]
    if len(every) <= _ROWS:
        rows = [row(f"rank {i}", *found) for i, found in enumerate(every)]
    else:
        of_all: Mapping[str, Callable[[Sequence[float]], float]] = {"lowest": min, "median": median, "highest": max}
        columns = list(zip(*every, strict=True))
        rows = [row(f"{name} of {len(every):,}", *map(of, columns)) for name, of in of_all.items()]
    heads = ["rank", "last op ends", "compute busy", "compute idle", *(f"{tier} peak" for tier in tiers)]
    return table(heads, rows, caption="When each rank ends, how long it computes, and the most memory that it takes")
