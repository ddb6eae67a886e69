"""A run's folder as ``penstock train`` leaves it, made from two simulations of one schedule."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from penstock.cli.settings import dump
from penstock.config import Budget, Tier
from penstock.engine.trace import MemorySample, TraceEvent, TraceWriter
from penstock.report.prediction import Prediction
from penstock.report.trace_file import Ran
from penstock.schedule.check.late import late_moves
from penstock.schedule.ir.ops import Op, Schedule
from penstock.schedule.ir.worlds import World
from penstock.schedule.lower.visits import lower_step
from penstock.schedule.place import Depths, Format, Placement, Settings
from penstock.schedule.program import ALIGN
from penstock.sim.costs import Costs
from penstock.sim.result import Simulation
from penstock.sim.simulate import simulate
from tests.programs import transformer
from tests.runs import settings_for

BUDGET: Mapping[Tier, int] = {"device": 1 << 20, "host": 2 << 20}


def offload_schedule(layers: int = 3, micro_batches: int = 2, delay: float = 0.0) -> Schedule:
    """A vertical schedule with everything on disk."""
    program = transformer(layers)
    everywhere = ("disk",) * len(program.groups)
    place = Placement(weights=everywhere, state=everywhere, gradients="host", activations="host")
    return lower_step(
        "vertical",
        program,
        Settings(
            micro_batches=micro_batches,
            chunk=5 * ALIGN,
            form=Format.of("fp32", 2),
            place=place,
            depths=Depths(),
            wait=False,
            delay=delay,
        ),
        (("device", "working", 9000),),
    )


def costs(seed: int, *, scale: float = 1.0) -> Costs:
    """Costs of a machine that takes ``scale`` times as long, with a noise of its own for each seed."""
    rng = Random(seed)
    noise: dict[str, float] = {}

    def seconds(op: Op) -> float:
        base = 0.004 if op.lane == "compute" else 2e-4 + op.nbytes / 1e9
        return base * scale * noise.setdefault(op.id, rng.uniform(0.9, 1.1))

    return Costs(name="noisy", seconds=seconds, widths={"read": 2, "write": 2})


def simulated(schedule: Schedule, seed: int, *, scale: float = 1.0) -> Simulation:
    return simulate(World.of(schedule), costs(seed, scale=scale))


def ran_as(simulation: Simulation) -> list[Ran]:
    """A run that follows a simulation to the microsecond."""
    return [Ran(id=t.op.id, lane=t.op.lane, start=t.start, end=t.end, nbytes=t.op.nbytes) for t in simulation.timed(0)]


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_step(writer: TraceWriter, simulation: Simulation, step: int, *, at: float) -> None:
    """A simulated step as if it had been run ``at`` seconds into the run; the first one finds nothing left to it."""
    idle = {op.id for op in late_moves(simulation.world.ranks[0])} if step == 1 else set()
    events = [
        TraceEvent(
            step=step,
            op=t.op.id,
            lane=t.op.lane,
            start=at + t.start,
            end=at + t.end,
            bytes=0 if t.op.id in idle else t.op.nbytes,
        )
        for t in simulation.timed(0)
    ]
    samples = [
        MemorySample(time=at + time, tier=tier, bytes=amount)
        for tier, curve in simulation.memory(0).items()
        for time, amount in curve
        if amount
    ]
    writer.step(events, samples)


def write_run(folder: Path, *, steps: int = 3, predict: bool = True, schedule: Schedule | None = None) -> Prediction:
    """Fill ``folder``: settings, metrics, a trace of ``steps`` steps, and the prediction unless it is not wanted."""
    schedule = schedule or offload_schedule()
    folder.mkdir(parents=True, exist_ok=True)
    settings = settings_for(folder, budget=Budget(**BUDGET, disk=folder / "store"), steps=3)
    (folder / "config.yaml").write_text(dump(settings), encoding="utf-8")
    prediction = Prediction.of(simulated(schedule, 0), budget=BUDGET)
    if predict:
        (folder / "prediction.json").write_text(prediction.to_json(), encoding="utf-8")
    at = 2.0
    with TraceWriter(folder / "trace.json") as trace, (folder / "metrics.jsonl").open("w") as metrics:
        for step in range(1, steps + 1):
            ran = simulated(schedule, step, scale=1.0 + 0.05 * step)
            write_step(trace, ran, step, at=at)
            at += ran.time + 0.01
            line = {"step": step, "loss": 8.0 / step, "seconds": ran.time, "tokens": 512}
            if predict:
                line["predicted_seconds"] = prediction.time
            metrics.write(json.dumps(line | ({"validation_loss": 3.5} if step == steps else {})) + "\n")
    return prediction
