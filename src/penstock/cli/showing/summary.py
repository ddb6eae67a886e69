"""Summaries of a run before its first step and after its last, and the memory that its process really took."""

import resource
import shlex
from contextlib import suppress
from pathlib import Path
from statistics import fmean

from penstock.cli.launch import how_to_start
from penstock.cli.showing.display import a_day, clock, counts
from penstock.cli.showing.meter import Meter
from penstock.config import TrainConfig, format_size
from penstock.config.sizes import format_flops, format_parameters
from penstock.report.sentence import format_time, share_of_life, time_of_step

_NO_MORE = 1.1
"""The most of a large product's rate that a model computes at, with room for noise."""
_ANEW = "penstock doctor measures it anew"


def opening(config: TrainConfig, data: str, parameters: int) -> str:
    """The task: what was read, model, steps."""
    step_tokens = config.sequences_per_step * config.data.sequence_length
    return (
        f"{data}\n{config.model.name} of "
        f"{format_parameters(parameters)}; {config.step_count:,} step{'s' * (config.step_count > 1)} of "
        f"{step_tokens:,} tokens, "
        "each compared with the next by the model's own loss"
    )


def closing(meter: Meter, *, own_bytes: int, folder: Path, trace: Path | None, stopped: bool, kept: bool = True) -> str:
    """The last words: how the loss went, what was trained in which memory, where to look.

    ``own_bytes``: resident before there was a model. ``stopped``: a signal ended the run early. ``kept``: whether its
    state is, so that it can go on.
    """
    given, outline, run = meter.outline.given, meter.outline, shlex.quote(str(folder))
    lines = []
    if stopped:
        then = f"{how_to_start(outline.ranks, outline.hosts)} resume {run} goes on."
        if not kept:
            then = "It is not kept (budget.durability: none, without budget.disk): there is nothing to go on from."
        elif meter.done >= outline.steps:
            then = "that was the last."
        said = f"Stopped after step {meter.done} of {outline.steps}, as asked."
        lines.append(f"{said} {'That step is whole and the state intact: ' if kept else ''}{then}")
    last = meter.losses[-max(len(meter.losses) // 10, 1) :]  # one micro-batch is noisy: the mean of the last tenth
    loss = f"loss     {meter.losses[0]:.4f} -> {fmean(last):.4f}" + (f", mean of {len(last)}" if len(last) > 1 else "")
    if meter.validation:
        loss += f", held-out text {meter.validation[-1]:.4f}"
    steps = f"{len(meter.losses)} step{'s' * (len(meter.losses) > 1)}"
    lines.append(f"{loss}, in {steps}, {meter.tokens:,} tokens, {clock(meter.seconds)}")
    if meter.truncated:
        lines.append(f"data     {meter.truncated:,} tokens left out, of documents longer than a sequence")
    lines.append(f"speed    {_speed(meter)}")
    ranks = "" if outline.ranks == 1 else f" to {outline.ranks} ranks; what follows is of the first"
    lines.append(
        f"state    {format_size(meter.state_bytes)}: weights, gradients and optimizer state of "
        f"{format_parameters(outline.parameters)}, "
        f"{meter.state_bytes / outline.ranks / outline.given_bytes:.1f}x the memory given{ranks}"
    )
    lines.append(
        f"memory   {format_size(outline.given_bytes)} given, {format_size(meter.peak_bytes)} taken at the peak: "
        + ", ".join(
            f"{tier} {format_size(meter.peak.get(tier, 0))} of {format_size(size)}" for tier, size in given.items()
        )
    )
    lines.append(
        f"process  {format_size(peak_resident_bytes())} resident at its peak; {format_size(own_bytes)} were there "
        "before the model (Python, PyTorch, the tokenizer)"
    )
    lines.append("moved    " + ", ".join(f"{lane} {format_size(n)}" for lane, n in meter.moved.items() if n))
    if meter.written:
        lines.append(f"drives   {_wear(meter)}")
    lines += _foretold(meter)
    if trace is not None:
        lines.append(f"trace    {trace} (open it in https://ui.perfetto.dev)")
        beside = "" if meter.predicted is None else ", beside what was predicted"
        lines.append(f"report   penstock report {run} draws it on one page{beside}")
    lines.append(f"metrics  {folder / 'metrics.jsonl'}")
    return "\n".join(["", *lines])


def _speed(meter: Meter) -> str:
    """Over the whole stretch, evaluations not counted."""
    seconds, yardstick = max(meter.seconds, 1e-9), meter.outline.yardstick
    rate, peak, product = meter.flops / seconds, yardstick.peak, yardstick.flops
    mfu = "" if peak is None else f", MFU {rate / peak:.0%} of the maker's {format_flops(peak)}"
    if product is not None and rate > _NO_MORE * product:
        mfu += f", above a large product's {format_flops(product)}: the machine was busy when it was measured ({_ANEW})"
    elif product is not None:
        mfu += f", {rate / product:.0%} of a large product's {format_flops(product)}"
    steps = "".join(f"; {what}" for what in counts(meter))
    return f"{meter.tokens / seconds:,.0f} tokens/s, {format_flops(rate)}{mfu}{steps}"


def _wear(meter: Meter) -> str:
    """Bytes that the run has written, and their share of the drives' life, in words."""
    yardstick, text = meter.outline.yardstick, f"{format_size(meter.written)} written{a_day(meter)}"
    if yardstick.rated is None:
        return text
    life = f"{format_size(yardstick.rated)} that they are {'assumed to bear' if yardstick.assumed else 'rated for'}"
    return f"{text}, {share_of_life(meter.written / yardstick.rated)} of the {life}"


def _foretold(meter: Meter) -> list[str]:
    """The prediction beside what was measured, where there was one; the bottleneck is that of the predicted step."""
    if meter.predicted is None or not meter.step_seconds:
        return []
    measured = time_of_step(meter.step_seconds, meter.step_runs)
    error = 100 * (meter.predicted / measured - 1)
    words = f"{format_time(measured)}, median of {len(meter.step_seconds)}; {format_time(meter.predicted)} predicted"
    return [f"step     {words} ({error:+z.0f}%)", f"forecast {meter.bottleneck}"]


def resident_bytes() -> int:
    """Bytes of this process that are in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak_resident_bytes() -> int:
    """The most that this process had in memory since ``reset_peak_resident``."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak_resident() -> None:
    """Forget the peak so far, that of the tokenizer's training. Kernels without this file keep the higher one."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
