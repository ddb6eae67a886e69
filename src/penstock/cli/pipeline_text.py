"""An expected step of a pipeline, in words and as plain data."""

from collections.abc import Iterator
from typing import Any

from penstock.cli.plan_text import NORM
from penstock.config import TrainConfig, format_size
from penstock.config.sizes import format_parameters
from penstock.hardware.machine import Machine
from penstock.planner.dealt import Pipeline
from penstock.planner.update_mode import steps_early
from penstock.report.sentence import bottleneck, format_long_time


def describe(found: Pipeline, config: TrainConfig, machine: Machine, steps: int | None) -> Iterator[str]:
    """The lines of a report. ``steps``: of the whole run; None: that depends on how much data there are."""
    step, plans, simulation = found.step, found.step.plans, found.step.simulation
    precision = config.precision_on(machine.device.kind)
    yield f"{config.model.name}, {format_parameters(found.profile.parameters)}, {precision}"
    if found.beside == 1:
        yield f"on {machine.name}, a pipeline of {len(plans)} ranks, each with blocks of its own"
    else:
        shared = f", which share each sequence {config.cp} by {config.cp}" if config.cp > 1 else ""
        yield f"on {machine.name}, {found.beside} pipelines of {len(plans)} ranks beside each other{shared}"
    norm = NORM[any(steps_early(plans[rank].program, plans[rank].settings) for rank in plans.firsts)]
    yield ", ".join(
        (
            f"It fits. {found.count} micro-batches of {found.size} x {config.data.sequence_length:,} tokens"
            + (" in each pipeline" if found.beside > 1 else ""),
            *((norm,) if config.needs_norm else ()),
            *((f"delay {plans[0].settings.delay:g}",) if plans[0].settings.delay else ()),
        )
    )
    yield ""
    yield (
        f"step        {format_long_time(simulation.time)} for {found.tokens:,} tokens: "
        f"{found.tokens / step.seconds:,.0f} tokens/s"
        + (f"; {step.repeats:.0%} of the steps run twice" if step.repeats else "")
    )
    if steps is not None:
        yield f"the run     {steps:,} steps: {format_long_time(steps * step.seconds)} without a break"
    yield ""
    heads = ("state", "device", "host", "disk", "sent")
    who = "rank" if found.beside == 1 else "ranks"
    yield f"{who:<8}{'blocks':>6}" + "".join(f"{head:>12}" for head in heads) + f"{'compute':>10}"
    for rank in range(len(plans)):
        plan = plans.figures(rank)
        busy = simulation.busy(rank).get("compute", 0.0)
        sizes = (plan.state_bytes, plan.device_bytes, plan.host_bytes, found.disk_bytes[rank], _sent(found, rank))
        cells = "".join(f"{format_size(size):>12}" for size in sizes)
        yield f"{_ranks(found, rank):<8}{found.blocks[rank]:>6}{cells}{busy / simulation.time:>10.0%}"
    worst = max(range(len(plans)), key=lambda rank: max(simulation.work(rank).values()))
    words = bottleneck(simulation.time, simulation.work(worst), simulation.busy(worst))
    if found.beside == 1:
        yield f"rank {worst} has the most to do: {words}"
    else:
        yield "ranks of one line share what it has of the state; all else is what each of them has"
        yield f"ranks {_ranks(found, worst)} have the most to do: {words}"
    yield "masks and position embeddings, which rank 0 sends once for each micro-batch, are not counted"


def as_json(found: Pipeline, config: TrainConfig, machine: Machine, steps: int | None) -> dict[str, Any]:
    """Seconds, bytes, tokens, sequences."""
    step, simulation = found.step, found.step.simulation
    return {
        "model": {"name": config.model.name, "parameters": found.profile.parameters},
        "machine": machine.name,
        "pipeline": len(found.step.plans),
        "pipelines": found.beside,
        "cp": config.cp,
        "micro_batches": found.count,
        "micro_batch_size": found.size,
        "delay": step.plans[0].settings.delay,
        "step": {
            "seconds": simulation.time,
            "expected_seconds": step.seconds,
            "repeats": step.repeats,
            "tokens": found.tokens,
            "tokens_per_second": found.tokens / step.seconds,
            "limit_seconds": simulation.lower_bound,
        },
        "steps": steps,
        "ranks": [
            {
                "blocks": found.blocks[rank],
                "state": plan.state_bytes,
                "memory": {"device": plan.device_bytes, "host": plan.host_bytes, "disk": found.disk_bytes[rank]},
                "bytes": dict(plan.schedule.bytes_per_lane()),
                "work_seconds": simulation.work(rank),
                "busy_seconds": simulation.busy(rank),
            }
            for rank, plan in ((rank, step.plans.figures(rank)) for rank in range(len(step.plans)))
        ],
    }


def _ranks(found: Pipeline, place: int) -> str:
    """The numbers of the ranks that have one place."""
    first = place * found.beside
    return str(first) if found.beside == 1 else f"{first}-{first + found.beside - 1}"


def _sent(found: Pipeline, rank: int) -> int:
    return found.step.plans.figures(rank).schedule.bytes_per_lane().get("send", 0)
