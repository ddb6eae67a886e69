"""What ``penstock simulate`` says: a table for people, JSON for programs."""

import json
import math
from collections.abc import Sequence
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from penstock.cli.simulate_case import Case
from penstock.config import TIERS, format_size
from penstock.report.sentence import format_time
from penstock.sim.figures import RankFigures, longest_stalls, rank_figures
from penstock.sim.result import Simulation

_ROWS = 8
"""Ranks that the table has at most; beyond, the first few and those that stand out."""
_FIRST = 4
_STALLS = 5
_PLAIN_WIDTH = 120
"""Columns without a terminal, whose width is not known."""


def figures_of(case: Case, simulation: Simulation) -> list[RankFigures]:
    """All ranks in numbers."""
    ranks = range(len(case.world.ranks))
    return [rank_figures(simulation, rank, serial=case.costs.serial, stage_ops=case.stage_ops) for rank in ranks]


# ---- for programs


def as_json(case: Case, simulation: Simulation, ranks: Sequence[RankFigures]) -> str:
    """One object; times in the costs' unit, amounts in the schedule's."""
    return json.dumps(
        {
            "schedule": case.name,
            "costs": case.costs.name,
            "time": _exact(simulation.time),
            "ranks": [_rank(figures) for figures in ranks],
            "bytes": simulation.bytes_per_lane(),
            "lower_bound": _exact(simulation.lower_bound),
            "bubble": _exact(_bubble(simulation, ranks)),
            "stalls": [
                {"rank": stall.rank, "op": stall.op.id, "waited": _exact(stall.waited), "for": stall.cause}
                for stall in longest_stalls(simulation, _STALLS)
            ],
            "violations": [],
        },
        indent=1,
    )


def _rank(figures: RankFigures) -> dict[str, Any]:
    return {
        "end": _exact(figures.end),
        "busy": _exact(figures.busy),
        "peak": dict(figures.peak),
        "in_flight_peak": figures.in_flight_peak,
        "puzzle_time": _exact(figures.puzzle_time),
        "puzzle_peak": figures.puzzle_peak,
    }


def _exact(number: float) -> float:
    """Without what adding up binary fractions has left behind: 20.4 is written 20.4. Small times keep 12 digits."""
    if number == 0 or not math.isfinite(number):
        return number
    return round(number, max(9, 11 - math.floor(math.log10(abs(number)))))


def _bubble(simulation: Simulation, ranks: Sequence[RankFigures]) -> float:
    """Share of all ranks' time in which they do not compute."""
    total = simulation.time * len(ranks)
    return 1 - math.fsum(figures.busy for figures in ranks) / total if total else 0.0


# ---- for people


def show(case: Case, simulation: Simulation, ranks: Sequence[RankFigures], out: TextIO) -> None:
    """A readable account, coloured on a terminal."""
    console = Console(file=out, highlight=False, soft_wrap=True)
    console.print(f"[bold]{case.title}[/]", markup=True)
    console.print(case.costs_in_words, markup=False)
    console.print()
    bound = simulation.lower_bound
    over = f", {simulation.time / bound:.3g} times that" if bound else ""
    console.print(f"time         [bold]{_time(case, simulation.time)}[/]")
    console.print(
        f"lower bound  {_time(case, bound)}: the busiest lane's work; the step takes{over[1:] if over else ' no time'}"
    )
    console.print(f"bubble       {_bubble(simulation, ranks):.1%} of all ranks' time is not compute")
    console.print()
    console.print(_table(case, ranks))
    _show_stalls(case, simulation, console)
    _show_bytes(case, simulation, console)


def _table(case: Case, ranks: Sequence[RankFigures]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    tiers = [tier for tier in TIERS if any(figures.peak[tier] for figures in ranks)]
    table.add_column("rank")
    for name in ("end", "busy", *(f"{tier} peak" for tier in tiers), "in flight"):
        table.add_column(name, justify="right", no_wrap=True)
    marks = _chosen(ranks)
    for rank, mark in marks.items():
        figures = ranks[rank]
        share = figures.busy / figures.end if figures.end else 0.0
        table.add_row(
            f"{rank}{mark and f' ({mark})'}",
            _time(case, figures.end),
            f"{share:.1%}",
            *(_amount(case, figures.peak[tier]) for tier in tiers),
            f"{figures.in_flight_peak:,}",
        )
    if len(marks) < len(ranks):
        table.caption = f"{len(marks)} of {len(ranks):,} ranks; --json has all"
        table.caption_justify = "left"
    return table


def _chosen(ranks: Sequence[RankFigures]) -> dict[int, str]:
    """The ranks to show, and why."""
    every = range(len(ranks))
    if len(ranks) <= _ROWS:
        return dict.fromkeys(every, "")
    chosen = dict.fromkeys(range(_FIRST), "")
    for rank, why in (
        (max(every, key=lambda r: ranks[r].peak["device"]), "most memory"),
        (min(every, key=lambda r: ranks[r].busy), "least busy"),
        (max(every, key=lambda r: ranks[r].end), "latest end"),
        (len(ranks) - 1, "last"),
    ):
        chosen[rank] = ", ".join(filter(None, (chosen.get(rank, ""), why)))
    return dict(sorted(chosen.items()))


def _show_stalls(case: Case, simulation: Simulation, console: Console) -> None:
    stalls = longest_stalls(simulation, _STALLS)
    if not stalls:
        return
    console.print("\n[dim]longest stalls of the compute lane[/]")
    several = len(case.world.ranks) > 1
    for stall in stalls:
        where = f"rank {stall.rank}: " if several else ""
        why = f" for {stall.cause}" if stall.cause else ""
        console.print(f"  {where}{_time(case, stall.waited)} before {stall.op.id}{why}", markup=False)


def _show_bytes(case: Case, simulation: Simulation, console: Console) -> None:
    moved = {lane: n for lane, n in simulation.bytes_per_lane().items() if n}
    if moved:
        told = ", ".join(f"{lane} {_amount(case, n)}" for lane, n in moved.items())
        console.print(f"\nmoved        {told}", markup=False)


def _time(case: Case, seconds: float) -> str:
    return format_time(seconds, case.unit)


def _amount(case: Case, number: int) -> str:
    return format_size(number) if case.amounts == "bytes" else f"{number:,}"
