"""Ops in time as a Chrome trace: prediction beside measurement, or the ranks of a simulation; a process for each."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from penstock.documents.chrome import Process, lines
from penstock.report.causes import sides_of
from penstock.report.prediction import Prediction
from penstock.report.series import Side, last_of_each_moment
from penstock.report.trace_file import MeasuredStep
from penstock.schedule.ir.lanes import LANES
from penstock.sim.result import Simulation


def chrome_trace(prediction: Prediction | None, step: MeasuredStep) -> str:
    """A run's step; both processes start at 0."""
    *sides, measured = sides_of(prediction, step)
    sides.append(replace(measured, name=f"measured, step {step.step}"))
    return "".join(lines(record for i, side in enumerate(sides, start=1) for record in _process(i, side, " bytes")))


def write_simulation(simulation: Simulation, path: Path) -> None:
    """Write a simulation's trace; raises OSError. Where its unit is not a second, it is written as if it were."""
    count = len(simulation.world.ranks)
    names = [f"rank {rank}" for rank in range(count)] if count > 1 else [simulation.world.name]
    sides = (Prediction.of(simulation, rank).side(name) for rank, name in enumerate(names))
    records = (record for rank, side in enumerate(sides) for record in _process(rank, side))
    with path.open("w", encoding="utf-8", buffering=1 << 20) as file:  # where the user has said, links and all
        file.writelines(lines(records))


def _process(number: int, side: Side, unit: str = "") -> Iterator[str]:
    process = Process(number, side.name, LANES)
    yield from process.begin()
    for bar in sorted(side.bars, key=lambda bar: (bar.start, bar.end)):
        waited = {"waited": bar.waited, "for": str(bar.cause or "")} if bar.waited > 0 else {}
        yield from process.slice(bar.lane, bar.id, bar.start, bar.end, bytes=bar.nbytes, **waited)
    for tier, curve in side.memory.items():
        if any(amount for _, amount in curve):
            yield from (process.counter(f"{tier}{unit}", time, amount) for time, amount in last_of_each_moment(curve))
