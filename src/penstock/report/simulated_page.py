"""The page of a simulated schedule: one row per rank, time above and memory below."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from penstock.config import TIERS, Tier, format_size
from penstock.report.columns import Columns, Names
from penstock.report.html import Figure, Page, table
from penstock.report.sentence import bottleneck, format_time
from penstock.report.series import series, simulated_bars
from penstock.schedule.op import LANES
from penstock.sim.result import Simulation

_ROWS = 64
"""Ranks that the table lists at most."""


def simulated_page(simulation: Simulation, *, title: str, unit: str) -> str:
    """The whole page as text. ``unit``: of times; ``"s"`` also means that amounts of memory are bytes.

    Ranks whose ops, times and causes are the same share their data, so that a page of 1,024 ranks stays small.
    """
    put, names = Columns(), Names()
    shared, of_rank = _shared(simulation)
    entries = [_series(simulation, rank, put, names) for rank in shared]
    count = len(of_rank)
    facts: dict[str, Any] = {
        "kind": "simulated",
        "unit": unit,
        "amounts": "bytes" if unit == "s" else "",
        "lanes": LANES,
        "end": simulation.time,
        "sides": entries,
        "ranks": of_rank,
        "names": names.texts,
        "budget": {},
    }
    slowest = max(range(count), key=lambda rank: max(simulation.work(rank).values(), default=0.0)) if count else 0
    page = Page(
        eyebrow=f"Simulated schedule · {count:,} rank{'s' * (count != 1)}",
        heading=title,
        sentence=bottleneck(simulation.time, simulation.work(slowest), simulation.busy(slowest), unit),
        notes=(),
        figures=_figures(simulation, shared, unit),
        timeline="Ranks over time",
        hint="Wheel: zoom. Drag or arrow keys: pan; Shift + wheel: pan in time. Double click or 0: the whole step. "
        "Click a rank's name for a row per lane. Point at an op to see what it waited for.",
        sections=f"<section><h2>Ranks</h2>{_rank_table(simulation, shared, of_rank, unit)}</section>",
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


def _series(simulation: Simulation, rank: int, put: Columns, names: Names) -> Any:
    return {"name": f"rank {rank}", **series(simulated_bars(simulation, rank), _used(simulation, rank), put, names)}


def _used(simulation: Simulation, rank: int) -> dict[Tier, list[tuple[float, int]]]:
    """The memory curves of the tiers that hold anything."""
    curves = simulation.memory(rank)
    return {tier: curves[tier] for tier in TIERS if any(amount for _, amount in curves[tier])}


def _amount(number: float, unit: str) -> str:
    return format_size(number) if unit == "s" else f"{number:,.6g}"


def _figures(simulation: Simulation, shared: Sequence[int], unit: str) -> list[Figure]:
    time = simulation.time
    figures = [
        Figure(name="time", value=format_time(time, unit)),
        Figure(name="lower bound", value=format_time(simulation.lower_bound, unit), remark="busiest lane alone"),
    ]
    idle = [1 - simulation.busy(rank).get("compute", 0.0) / time for rank in shared] if time > 0 else []
    if idle:
        remark = f"{min(idle):.0%} to {max(idle):.0%}" if max(idle) - min(idle) > 0.005 else "on every rank"
        figures.append(Figure(name="compute idle", value=f"{max(idle):.0%}", remark=remark))
    peaks = [simulation.peak(rank) for rank in shared]
    for tier in TIERS:
        most = max((peak[tier] for peak in peaks), default=0)
        if most:
            figures.append(Figure(name=f"{tier} memory, peak", value=_amount(most, unit), remark="highest of any rank"))
    return figures


def _rank_table(simulation: Simulation, shared: Sequence[int], of_rank: Sequence[int], unit: str) -> str:
    facts = {rank: (simulation.end(rank), simulation.busy(rank), simulation.peak(rank)) for rank in shared}
    tiers = [tier for tier in TIERS if any(peak[tier] for _, _, peak in facts.values())]

    def row(name: str, end: float, busy: float, peak: dict[Tier, float]) -> list[str]:
        idle = f"{1 - busy / simulation.time:.0%}" if simulation.time > 0 else "–"
        amounts = [_amount(peak[tier], unit) for tier in tiers]
        return [name, format_time(end, unit), format_time(busy, unit), idle, *amounts]

    every = [facts[shared[kind]] for kind in of_rank]
    rows = []
    if len(every) <= _ROWS:
        for rank, (end, busy, peak) in enumerate(every):
            rows.append(row(f"rank {rank}", end, busy.get("compute", 0.0), dict(peak)))
    else:
        for name, of in (("lowest", min), ("median", median), ("highest", max)):
            rows.append(
                row(
                    f"{name} of {len(every):,}",
                    float(of([end for end, _, _ in every])),
                    float(of([busy.get("compute", 0.0) for _, busy, _ in every])),
                    {tier: float(of([peak[tier] for _, _, peak in every])) for tier in tiers},
                )
            )
    heads = ["rank", "last op ends", "compute busy", "compute idle", *(f"{tier} peak" for tier in tiers)]
    return table(heads, rows, caption="When each rank ends, how long it computes, and the most memory that it holds")
