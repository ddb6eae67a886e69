"""The line of ``metrics.jsonl`` for a step: docs/training.md says what each key is. Units are in the names."""

from collections.abc import Mapping
from typing import Any

from penstock.cli.showing.meter import LINKS, Meter
from penstock.schedule.ir.lanes import Lane
from penstock.state.stats import StepStats

VALIDATION = "validation_loss"


def metrics_of(stats: StepStats, validation: float | None) -> dict[str, Any]:
    """A line of ``metrics.jsonl``: the figures that a step itself reports, and the held-out loss after it."""
    line: dict[str, Any] = {
        "step": stats.step,
        "loss": stats.loss,
        "grad_norm": stats.grad_norm,
        "lr": stats.lr,
        "tokens": stats.tokens,
        "seconds": stats.seconds,
        "tokens_per_second": stats.tokens / max(stats.seconds, 1e-9),
        "tflops_per_second": stats.flops / max(stats.seconds, 1e-9) / 1e12,
        "flops": stats.flops,
        "bytes_written": stats.bytes_written,
        "bytes_moved": dict(stats.bytes_moved),
        "lane_seconds": dict(stats.lane_seconds),
        "peak_bytes": {tier: most for tier, most in stats.peak_bytes.items() if tier != "disk"},  # of memory
        "clipped": stats.clipped,
        "skipped": stats.skipped,
        "repeats": stats.repeats,
        "loss_scale": stats.loss_scale,
    }
    now_and_then = {VALIDATION: validation, "plan_change": stats.plan_change}
    return line | {key: value for key, value in now_and_then.items() if value is not None}


def with_figures(line: Mapping[str, Any], meter: Meter, held: Mapping[Lane, float]) -> dict[str, Any]:
    """The line of the meter's last step, with what the run and the machine say to it."""
    stats, yardstick = meter.last, meter.outline.yardstick
    seconds = max(stats.seconds, 1e-9)
    rates = {lane: moved / seconds for lane, moved in stats.bytes_moved.items() if lane in LINKS}
    rate = stats.flops / seconds
    return {
        **line,
        "mfu": None if yardstick.peak is None else rate / yardstick.peak,
        "share_of_product": None if yardstick.flops is None else rate / yardstick.flops,
        "gb_per_second": {lane: found / 1e9 for lane, found in rates.items()},
        "share_of_peak": {
            lane: found / yardstick.links[lane] for lane, found in rates.items() if lane in yardstick.links
        },
        "held_up_seconds": dict(held),
        "planned_peak_bytes": dict(meter.planned_peak),
        "disk_bytes": meter.disk_bytes,
        "predicted_seconds": meter.predicted,
        "seconds_left": meter.seconds_left,
        "drive_days": meter.drive_days,
        **counted(meter),
    }


def counted(meter: Meter) -> dict[str, int]:
    """The steps so far, of the whole run, that were clipped, skipped or run twice."""
    return {"steps_clipped": meter.clipped, "steps_skipped": meter.skipped, "steps_repeated": meter.repeated}
