"""Ops in time as a Chrome trace: prediction beside measurement, or the ranks of a simulation; a process for each."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from penstock.config import Tier
from penstock.documents.chrome import Process, lines
from penstock.report.causes import measured_bars
from penstock.report.prediction import Prediction, predicted_bars
from penstock.report.series import Bar, last_of_each_moment, simulated_bars
from penstock.report.trace_file import MeasuredStep
from penstock.schedule.ir.lanes import LANES
from penstock.sim.result import Simulation

Curves = Mapping[str, Sequence[tuple[float, int]]]


def chrome_trace(prediction: Prediction | None, step: MeasuredStep) -> str:
    """A run's step; both processes start at 0."""
    schedule = None if prediction is None else prediction.schedule
    measured = f"measured, step {step.step}", measured_bars(step.ops, schedule), _curves(step.memory, " bytes")
    sides: list[tuple[str, Sequence[Bar], Curves]] = [measured]
    if prediction is not None:
        sides.insert(0, ("predicted", predicted_bars(prediction), _curves(prediction.memory, " bytes")))
    return "".join(lines(record for i, side in enumerate(sides, start=1) for record in _process(i, *side)))


def write_simulation(simulation: Simulation, path: Path) -> None:
    """Write a simulation's trace; raises OSError. Where its unit is not a second, it is written as if it were."""
    ranks = range(len(simulation.world.ranks))
    several = len(ranks) > 1
    records = (
        record
        for rank in ranks
        for record in _process(
            rank,
            f"rank {rank}" if several else simulation.world.name,
            simulated_bars(simulation, rank),
            _curves(simulation.memory(rank)),
        )
    )
    with path.open("w", encoding="utf-8", buffering=1 << 20) as file:  # where the user has said, links and all
        file.writelines(lines(records))


def _curves(memory: Mapping[Tier, Sequence[tuple[float, int]]], unit: str = "") -> Curves:
    return {f"{tier}{unit}": curve for tier, curve in memory.items()}


def _process(number: int, name: str, bars: Iterable[Bar], memory: Curves) -> Iterator[str]:
    process = Process(number, name, LANES)
    yield from process.begin()
    for bar in sorted(bars, key=lambda bar: (bar.start, bar.end)):
        waited = {"waited": bar.waited, "for": str(bar.cause or "")} if bar.waited > 0 else {}
        yield from process.slice(bar.lane, bar.id, bar.start, bar.end, bytes=bar.nbytes, **waited)
    for tier, curve in memory.items():
        if any(amount for _, amount in curve):
            yield from (process.counter(tier, time, amount) for time, amount in last_of_each_moment(curve))
