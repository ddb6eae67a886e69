"""The output of ``penstock simulate``: tables for people, JSON for programs."""

import json
import math
from collections.abc import Sequence
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from penstock.cli.showing.console import console as console_for
from penstock.cli.simulate_case import Case
from penstock.config import TIERS, format_size
from penstock.config.sizes import three_digits
from penstock.schedule.ir.lanes import LANES
from penstock.sim.figures import RankFigures, longest_stalls, rank_figures
from penstock.sim.result import Simulation

_ROWS = 8
"""Ranks that the table has at most; beyond, the first few and those that stand out."""
_FIRST = 4
_STALLS = 5


def figures_of(case: Case, simulation: Simulation) -> list[RankFigures]:
    """All ranks in numbers."""
    ranks = range(len(case.world.ranks))
    return [rank_figures(simulation, rank, stage_ops=case.stage_ops) for rank in ranks]


# ---- for programs


def as_json(case: Case, simulation: Simulation, ranks: Sequence[RankFigures]) -> str:
    """One object; times in the costs' unit, amounts in the schedule's."""
    return json.dumps(
        {
            "schedule": case.world.name,
            "costs": case.costs.name,
            "time": _exact(simulation.time),
            "ranks": [_rank(figures) for figures in ranks],
            "bytes": simulation.bytes_per_lane(),
            "lower_bound": _exact(simulation.lower_bound),
            "bubble": _bubble(simulation, ranks),
            "stalls": [
                {
                    "rank": stall.rank,
                    "op": stall.op.id,
                    "waited": _exact(stall.waited),
                    "for": [str(cause) for cause in stall.causes],
                }
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
    share = 1 - math.fsum(figures.busy for figures in ranks) / total if total else 0.0
    return max(round(share, 9), 0.0)


# ---- for people


def show(case: Case, simulation: Simulation, ranks: Sequence[RankFigures], out: TextIO) -> None:
    """A readable account, coloured on a terminal."""
    console = console_for(out, soft_wrap=True)
    console.print(case.title, style="bold", markup=False)
    console.print(case.costs_in_words, markup=False)
    console.print(f"\ntime         [bold]{case.time(simulation.time)}[/]")
    console.print(f"lower bound  {_bound(case, simulation)}")
    whose = "the time" if len(ranks) == 1 else "all ranks' time"
    which = "idle" if case.costs.serial else "without compute"
    console.print(f"bubble       {_bubble(simulation, ranks):.1%} of {whose} is {which}\n")
    console.print(_rank_table(case, ranks))
    _show_misfits(case, ranks, console)
    _show_stalls(case, simulation, console)
    _show_bytes(case, simulation, console)


def _bound(case: Case, simulation: Simulation) -> str:
    bound = simulation.lower_bound
    if not bound:
        return "0: there is no work in it"
    several = len(case.world.ranks) > 1
    if case.costs.serial:
        rank = max(range(len(case.world.ranks)), key=lambda rank: sum(simulation.work(rank).values()))
        what = f"all that rank {rank} does" if several else "all that there is to do, one after another"
    else:
        works = [(t, -r, lane) for r in range(len(case.world.ranks)) for lane, t in simulation.work(r).items()]
        _, rank, lane = max(works)
        what = f"all ops of lane {lane}" + (f" on rank {-rank}" if several else "")
    return f"{case.time(bound)}, {what}; the step takes {three_digits(simulation.time / bound)} times that"


def _rank_table(case: Case, ranks: Sequence[RankFigures]) -> Table:
    in_flight = case.amounts == "micro-batches"  # then that is all that is held
    tiers = [tier for tier in TIERS if not in_flight and any(figures.peak[tier] for figures in ranks)]
    table = _plain_table("rank", "end", "busy", *(f"{tier} peak" for tier in tiers), "in flight")
    marks = _chosen(ranks)
    for rank, mark in marks.items():
        figures = ranks[rank]
        share = figures.busy / figures.end if figures.end else 0.0
        table.add_row(
            f"{rank}{mark and f' ({mark})'}",
            case.time(figures.end),
            f"{share:.1%}",
            *(case.amount(figures.peak[tier]) for tier in tiers),
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
    for why, values in (
        ("most memory", [figures.peak["device"] for figures in ranks]),
        ("least busy", [-figures.busy for figures in ranks]),
        ("latest end", [figures.end for figures in ranks]),
    ):
        if min(values) < max(values):
            rank = max(every, key=values.__getitem__)
            chosen[rank] = ", ".join(filter(None, (chosen.get(rank, ""), why)))
    chosen.setdefault(len(ranks) - 1, "last")
    return dict(sorted(chosen.items()))


def _show_misfits(case: Case, ranks: Sequence[RankFigures], console: Console) -> None:
    """The tiers of the machine that are too small for the schedule."""
    machine = case.costs.name.partition(":")[0]
    for tier, memory in case.memory.items():
        peak = max(figures.peak[tier] for figures in ranks)
        if peak > memory:
            line = f"does not fit: {format_size(peak)} on the {tier}, and {machine} has {format_size(memory)}"
            console.print(f"\n{line}", style="yellow", markup=False)


def _show_stalls(case: Case, simulation: Simulation, console: Console) -> None:
    stalls = longest_stalls(simulation, _STALLS)
    if not stalls:
        return
    whose = "ranks" if case.costs.serial else "compute lane"
    console.print(f"\nlongest stalls of the {whose}", style="dim")
    several = len(case.world.ranks) > 1
    for stall in stalls:
        where = f"rank {stall.rank}: " if several else ""
        why = f", waiting for {', for '.join(map(str, stall.causes))}" if stall.causes else ""
        console.print(f"  {where}{case.time(stall.waited)} before {stall.op.id}{why}", markup=False)


def _show_bytes(case: Case, simulation: Simulation, console: Console) -> None:
    """Print the bytes that moved: of several ranks in all; of one by lane, with the time that the lane was busy."""
    moved = {lane: n for lane, n in simulation.bytes_per_lane().items() if n}
    if not moved:
        return
    if len(case.world.ranks) > 1:
        line = ", ".join(f"{lane} {case.amount(n)}" for lane, n in moved.items())
        console.print(f"\nmoved        {line}", markup=False)
        return
    table = _plain_table("lane", "busy", "of the time", "moved")
    for lane, busy in sorted(simulation.busy(0).items(), key=lambda item: LANES.index(item[0])):
        share = busy / simulation.time if simulation.time else 0.0
        table.add_row(lane, case.time(busy), f"{share:.1%}", case.amount(moved[lane]) if lane in moved else "")
    console.print()
    console.print(table)


def _plain_table(first: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(first)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table
