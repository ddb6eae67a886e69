"""A plan's report for people."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

from penstock.cli.disk_summary import cost_of_a_kill, gain_of_none, reason
from penstock.config import Tier, ZeroStage, format_size
from penstock.config.sizes import format_flops, three_digits
from penstock.hardware.drives import used_rates
from penstock.hardware.machine import Machine
from penstock.planner.as_json import shares
from penstock.planner.ask import PlanReport
from penstock.planner.batches import Point
from penstock.planner.durability import kill_seconds
from penstock.planner.forecast import Forecast, WholeRun
from penstock.planner.longest import SHORTEST, Longest
from penstock.planner.plan import Plan
from penstock.planner.task import Task
from penstock.planner.update_mode import steps_early
from penstock.report.sentence import LANE_NAMES, format_long_time, format_time, share_of_life
from penstock.schedule.place import FP32, Settings
from penstock.shape.model import EFFICIENCY

_BAR = 24
_PHASES = ("train", "load", "probe", "place", "save", "resume")
NORM = {
    True: "optimizer steps before the gradient norm is known",
    False: "optimizer waits for the gradient norm",
}
"""Update modes in words, by whether steps begin before the norm is known."""
_STAGES: dict[ZeroStage, str] = {
    0: "that each have all of its state (stage 0)",
    1: "that share its state (stage 1: they gather weights once a step)",
    2: "that share its state (stage 2: they gather weights once a step)",
    3: "that share its state (stage 3: they gather weights for each use)",
}
_CROSSING_ONCE = "that share its state (stage 3: they gather weights for each use, between hosts once a step)"


def describe(report: PlanReport, *, wide: bool) -> str:
    """Several paragraphs of text. ``wide``: whether the terminal knows more than ASCII."""
    f = report.forecast
    parts = [
        list(_head(f)),
        list(_step(f)),
        list(_table(f)),
        list(_memory(f)),
        list(_disk(report)),
        [*_kill(report)],
        list(_batches(report, wide=wide)),
        list(_advice(report)),
        [f"note: {note}" for note in report.notes],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def describe_longest(found: Longest | None) -> str:
    """A line on the longest sequences that fit."""
    if found is None:
        return f"longest     not even sequences of {SHORTEST} tokens fit"
    why = "and the model takes no more" if found.all else "in micro-batches of one sequence"
    return f"longest     sequences of {found.tokens:,} tokens fit, {why}"


def _head(f: Forecast) -> Iterator[str]:
    task, settings = f.task, f.choice.plan.settings
    moments = f" with moments in {task.moments}" if task.is_compact else ""
    yield f"{task.shape.name}, {_count(f.parameters)} parameters, {task.precision}, {task.optimizer}{moments}"
    yield f"on {task.machine.name}" + (f", {_ranks(task, settings)}" if task.size > 1 else "")
    yield f"profile     {_profile(task.machine)}"
    each = "each rank " if task.ranks > 1 else ""
    fits = "It fits" if f.beyond_machine is None else "It fits into the budget, but not into the machine"
    yield (
        f"{fits}. {f.choice.request.family} schedule, {each}{f.micro_batches} "
        f"micro-batch{'es' * (f.micro_batches > 1)} of {f.micro_batch_size} x {task.sequence_length:,} tokens"
        + (f", {NORM[steps_early(f.choice.plan.program, settings)]}" if task.needs_norm else "")
        + (f", delay {settings.delay:g}" if settings.delay else "")
    )


def _ranks(task: Task, settings: Settings) -> str:
    how = _CROSSING_ONCE if settings.secondary else _STAGES[settings.stage]
    if task.copies == 1:
        return f"{task.ranks} ranks {how}"
    return f"{task.copies} times {task.ranks} ranks, each with a copy of the state, {how}"


def _step(f: Forecast) -> Iterator[str]:
    yield (
        f"step        {format_long_time(f.step_seconds)} for {f.tokens:,} tokens: "
        f"{three_digits(f.tokens_per_second)} tokens/s"
        + (f"; {100 * f.repeats:.3g}% of the steps run twice" if f.repeats else "")
    )
    yield f"compute     {format_flops(f.model_flops)} of the model: {_utilisation(f)}"
    over = f.step_seconds / f.limit_seconds - 1
    yield (
        f"bottleneck  {LANE_NAMES[f.bottleneck]}: its work alone takes {format_long_time(f.limit_seconds)}; "
        + (f"the step takes {over:.0%} longer" if over >= 0.005 else "the step takes no longer")
    )
    long = {phase: found for phase, found in f.phases.items() if found[1] >= 0.01 * f.step_seconds}
    phases = (f"{phase} by {LANE_NAMES[lane]} ({format_long_time(seconds)})" for phase, (lane, seconds) in long.items())
    yield f"bound       {', '.join(phases)}"
    device = f.task.machine.device
    yield (
        f"assumed     ops reach {EFFICIENCY[device.kind]:.0%} of the rate of a large product or copy; "
        f"{f.choice.considered} plans considered, {f.choice.simulated} of them simulated"
    )
    if device.kind == "cuda" and (name := f.task.rate_name) not in device.optimizer:
        yield (
            f"            steps of {name} on {device.name} take as long as on the host: the profile has no rate for "
            "them, penstock doctor measures it"
        )


def _of_blocks(f: Forecast) -> str:
    """The blocks whose state lives on the device, in words."""
    there = f.blocks_on_device
    names = [stage.name for stage in f.choice.request.program.stages if stage.kind == "call"]
    count = f"{len(there)} block{'s' * (len(there) > 1)}"
    if len(there) == len(names):
        return "state of all blocks on the device, stepped there"
    where = f"the last {count}" if there == tuple(names[-len(there) :]) else count
    return f"state of {where} on the device, stepped there"


def _table(f: Forecast) -> Iterator[str]:
    if f.task.ranks > 1:
        yield "of each rank:"
    yield f"{'lane':<16}{'per step':>12}{'work':>12}{'busy':>8}"
    for lane, x in f.lanes.items():
        moved = format_size(x.nbytes) if x.nbytes and lane != "cpu" else ""
        yield f"{LANE_NAMES[lane]:<16}{moved:>12}{format_time(x.work):>12}{x.busy / f.step_seconds:>8.0%}"


def _memory(f: Forecast) -> Iterator[str]:
    place, settings = f.choice.plan.settings.place, f.choice.plan.settings
    stay = "; in host memory from their last read to their step" if settings.keep else ""
    yield f"weights     {_shares(shares(f, place.weights, frozen=True))}{stay}"
    yield f"optimizer   {_shares(shares(f, place.state, frozen=False))}"
    if "device" in place.state and (words := f.task.machine.device.differs(f.task.name_of_bits)) is not None:
        yield f"bits        {words}"
    if f.blocks_on_device:
        yield f"            {_of_blocks(f)}"
    waits = f"; gradients wait on {place.gradients}" if f.gradients_wait else ""
    yield f"saved activations on {place.activations}{waits}"
    if (kept := f.choice.plan.graphs_kept) and f.choice.plan.settings.train:
        yield f"blocks      graphs of {kept} of {f.choice.plan.calls} calls stay on the device{_again(f.choice.plan)}"
    if settings.grad_dtype == "bf16":
        where = "on the device" if settings.cast == "device" else "as the optimizer reads them"
        yield f"gradients   in bf16, rounded {where}"
    yield f"chunks      of {format_size(settings.chunk * FP32)} in fp32, {len(f.choice.plan.schedule.ops):,} ops a step"
    yield ""
    if f.task.ranks > 1:
        yield "of each rank:"
    yield f"{'memory':<12}{'given':>10}" + "".join(f"{phase:>10}" for phase in _PHASES)
    given: Mapping[Tier, int] = {
        "device": f.task.budget.device_bytes,
        "host": f.task.budget.host_bytes,
        "disk": f.task.disk_free,
    }
    for tier, size in given.items():
        if tier == "disk" and not f.task.budget.disk_paths:
            continue
        cells = [size, *(f.memory[phase][tier] for phase in _PHASES)]
        yield f"{tier:<12}" + "".join(f"{format_size(cell):>10}" for cell in cells)


def _again(plan: Plan) -> str:
    left = plan.calls - plan.graphs_kept
    return f", {left} {'is' if left == 1 else 'are'} computed again" if left else ": none is computed again"


def _disk(report: PlanReport) -> Iterator[str]:
    f = report.forecast
    if f.task.ranks == 1:
        yield from _saves(f)
    if (run := report.run) is not None:
        yield f"the run     {_whole(run)}"
    wear = f.wear
    if not f.written_per_day:
        return
    yield f"drives      {used_rates(f.task.machine.drives)}"
    by = "rank and step" if f.task.ranks > 1 else "step"
    text = f"disk wear   {format_size(wear.written_bytes)} written per {by}, {wear.per_parameter:.1f} B per parameter"
    if wear.days is None or wear.steps is None or wear.tbw is None:
        yield f"{text}; --tbw N, the rating of a drive in terabytes, tells how long it lasts"
    else:
        yield (
            f"{text}: at {three_digits(wear.tbw)} TBW a drive, {format_long_time(86400 * wear.days)} of training "
            f"without a break, {wear.steps:,.0f} steps"
        )
    if (allowed := f.choice.question.allowance) is not None:
        yield f"endurance   {format_size(f.written_per_day)} written a day, {format_size(allowed)} allowed"


def _saves(f: Forecast) -> Iterator[str]:
    twice = f"{format_size(2 * f.snapshot_bytes)} while it replaces another"
    yield f"a snapshot  takes {format_size(f.snapshot_bytes)} wherever it is saved, {twice}"
    if f.kept_snapshots is not None:
        yield f"            the run's folder has the newest one, and so takes {format_size(f.kept_snapshots)} at most"
    if f.export_bytes is not None:
        yield f"an export   of the model takes {format_size(f.export_bytes)}"


def _whole(run: WholeRun) -> str:
    text = f"{run.steps:,} steps, {_count(run.tokens)} tokens: {format_long_time(run.seconds)} without a break"
    if run.written:
        text += f", {format_size(run.written)} written"
        text += "" if run.life is None else f", {share_of_life(run.life)} of the drives' life"
    return text


def _kill(report: PlanReport) -> Iterator[str]:
    """The durability, the cost of a kill, and the gain of letting a kill cost more."""
    f, budget = report.forecast, report.forecast.task.budget
    words = cost_of_a_kill(budget, f.choice.plan)
    seconds = kill_seconds(f.task, f.choice)
    if budget.durability is not None:
        yield f"durability  {budget.durability}"
    yield f"kill        {words}" + ("" if seconds is None else f" ({format_long_time(seconds)})")
    if report.weighed is None or budget.durability is None:
        return
    if budget.durability == "interval" and report.weighed.default == "interval":
        yield f"            {reason(report.weighed)}"
    if (gain := gain_of_none(report.weighed, budget.durability)) is not None:
        yield f"            {gain}"


def _batches(report: PlanReport, *, wide: bool) -> Iterator[str]:
    if not report.curve:
        return
    f, roof = report.forecast, report.roofline
    most = max(roof.compute_tokens_per_second, 1e-9)
    mark = "█" if wide else "#"
    yield f"tokens/s by sequences in a step, micro-batches of {f.micro_batch_size} (estimated by the linear program)"
    columns = "".join(f"{name:<{_BAR + 10}}" for name in ("vertical", "horizontal"))
    yield f"{'sequences':>10}{'tokens':>11}  {columns}bound with all state on disk"
    now = f.micro_batches * f.micro_batch_size
    for point in report.curve:
        yield _point(point, report, most, mark) + ("  <- this plan" if point.batch == now else "")
    yield f"compute allows {three_digits(most)} tokens/s at most"
    if roof.disk_tokens is not None and roof.disk_seconds is not None:
        yield (
            f"with all state on disk its reads and writes take {format_long_time(roof.disk_seconds)} a step: compute "
            f"takes as long from {roof.disk_tokens:,.0f} tokens a step on"
            + (
                f" (T* = {roof.balance_tokens:,.0f} if the disk reads and writes in turns)"
                if roof.balance_tokens
                else ""
            )
        )


def _point(point: Point, report: PlanReport, most: float, mark: str) -> str:
    bars = [_bar(rate, most, mark) for rate in point.tokens_per_second.values()]
    roof = report.roofline
    bound = f"<= {three_digits(roof.tokens_per_second(point.tokens))} ({roof.bound_by(point.tokens)})"
    return f"{point.batch:>10,}{point.tokens:>11,}  " + "".join(bars) + bound


def _bar(rate: float | None, most: float, mark: str) -> str:
    if rate is None:
        return f"{'does not fit':<{_BAR + 10}}"
    return f"{three_digits(rate):>8} {mark * max(round(rate / most * _BAR), 1):<{_BAR + 1}}"


def _advice(report: PlanReport) -> Iterator[str]:
    f = report.forecast
    if f.task.ranks > 1:
        return
    if not report.advice:
        yield "Nothing that was tried would make it 2% faster: memory, drives, link, compute, batch."
        return
    yield (
        "What would help (tokens/s" + (")" if all(a.simulated for a in report.advice) else "; ~: not simulated)") + ":"
    )
    for advice in report.advice:
        gain = f"{'' if advice.simulated else '~'}{advice.gain:.2f}x"
        yield f"  {gain:>7}  {advice.change}"


# ---- numbers for people


def _shares(found: Mapping[Tier, float]) -> str:
    return ", ".join(f"{share:.0%} on {tier}" if share >= 0.005 else f"<1% on {tier}" for tier, share in found.items())


def _count(n: float) -> str:
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if n >= 0.9995 * unit:
            return f"{n / unit:.3g}{letter}"
    return f"{n:,.0f}"


def _profile(machine: Machine) -> str:
    """The source and the time of a machine's figures, and the load beside which they were measured."""
    where = f": {machine.file}" if machine.file else ""
    if machine.measured is None:
        return (machine.source or "does not tell when it was measured") + where
    at = datetime.fromisoformat(machine.measured.at).astimezone(UTC)
    return (
        f"measured {at:%Y-%m-%d %H:%M} UTC, while other programs kept {machine.measured.load:.1f} of "
        f"{machine.host.cores} core{'s' * (machine.host.cores != 1)} busy{where}"
    )


def _utilisation(f: Forecast) -> str:
    """MFU, and beside it the share of what the device does in a large product."""
    product = f"{f.of_product:.0%} of a large matrix product's {format_flops(f.product_flops)} here"
    if f.mfu is None or f.peak_flops is None:
        return f"{product}; no MFU, as the profile has no maker's peak"
    return f"MFU {f.mfu:.0%} of the maker's {format_flops(f.peak_flops)}, {product}"
