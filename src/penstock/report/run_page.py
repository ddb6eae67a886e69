"""The page of a run: one step as predicted above the same step as measured, and the run around it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from statistics import fmean, median

from penstock.config import TIERS, Tier, format_size
from penstock.report.causes import sides_of
from penstock.report.columns import Columns, Names
from penstock.report.curves import Curve, Run, curves_of
from penstock.report.html import Figure, Page, table
from penstock.report.metrics_file import StepMetrics
from penstock.report.prediction import Prediction
from penstock.report.sentence import format_time, measured_bottleneck, time_of_step, verdict
from penstock.report.series import series
from penstock.report.trace_file import MeasuredStep
from penstock.schedule.ir.lanes import LANES, Lane

_DAY = 86400.0
_CHANGES = 10
"""Changes of plan that a page tells, the last ones."""
_SKIPPED = 5
"""Steps that were skipped that a page names, the last ones."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of the page. ``shown``: whether it is open when the page is."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    shown: bool = False


@dataclass(frozen=True, kw_only=True)
class Report:
    """The facts about a run that its page shows. ``foretold_from``: the step from which on there is a prediction, where
    the one shown is before that. ``budget``: bytes that tiers were given. ``allowed``: bytes a day
    that its drives may be written; None: any. ``others``: runs whose curves are drawn over its own. ``tables``: more
    tables, below all else.
    """

    name: str
    description: str
    step: MeasuredStep
    metrics: Sequence[StepMetrics]
    prediction: Prediction | None
    foretold_from: int | None = None
    budget: Mapping[Tier, int]
    allowed: float | None = None
    others: Sequence[Run] = ()
    tables: Sequence[Table] = ()

    @cached_property
    def curves(self) -> Sequence[Curve]:
        return curves_of([(self.name, self.metrics), *self.others])

    @property
    def settled(self) -> Sequence[StepMetrics]:
        """The steps that times are taken from: all but the first, which plans and warms up."""
        return self.metrics[1:]

    @property
    def compared(self) -> Prediction | None:
        """The prediction, if the step shown is whole: a part of one has nothing that it could be compared with."""
        return self.prediction if self.step.whole else None


def run_page(report: Report) -> str:
    """The whole page as text."""
    step, prediction = report.step, report.prediction
    put, names = Columns(), Names()
    facts = {
        "kind": "run",
        "unit": "s",
        "amounts": "bytes",
        "lanes": LANES,
        "end": max(step.time, 0.0 if prediction is None else prediction.time),
        "explained": prediction is not None,
        "sides": [series(side, put, names) for side in sides_of(prediction, step)],
        "names": names.texts,
        "budget": dict(report.budget),
        "curves": [curve.to_json() for curve in report.curves],
    }
    page = Page(
        eyebrow=f"Run report · {report.description}" if report.description else "Run report",
        heading=report.name,
        sentence=_sentence(report),
        notes=_notes(report),
        figures=_figures(report),
        timeline=f"Step {step.step}, op by op",
        hint="Wheel: zoom. Drag, Shift + wheel or arrow keys: pan. Double click or 0: the whole step. "
        "Point at an op to see what it did and what it waited for.",
        sections=_sections(report),
        facts=facts,
        columns=put,
    )
    return page.html()


def _sentence(report: Report) -> str:
    step, prediction = report.step, report.compared
    if not step.whole:
        return f"Step {step.step} was cut: this is its beginning, from which nothing follows for the whole of it."
    if prediction is None:
        return measured_bottleneck(step.time, step.busy, None)
    said = measured_bottleneck(step.time, step.busy, prediction.lower_bound)
    return f"{said} {verdict(step.time, prediction.time)}"


def _notes(report: Report) -> list[str]:
    notes = []
    if report.foretold_from is not None:
        notes.append(
            f"The prediction in this run's folder is of steps from {report.foretold_from} on, by a plan or rates that "
            f"step {report.step.step} did not have: the page shows the measurement alone."
        )
    elif report.prediction is None:
        notes.append("There is no prediction.json in this run's folder: the page shows the measurement alone.")
    if not report.step.whole:
        notes.append(
            f"{report.step.file} was cut off in step {report.step.step}: what is shown ends at the cut, so its times "
            "and sums are those of a part of the step. Memory is written after a step's ops, so there is none."
        )
    elif report.compared is not None and (strange := _strangers(report.step, report.compared)):
        notes.append(f"The prediction is of another schedule than the step ran: {strange}.")
    changed = [m for m in report.metrics if m.plan_change is not None]
    notes += [f"The plan changed before step {m.step}: {m.plan_change}." for m in changed[-_CHANGES:]]
    if len(changed) > _CHANGES:
        notes.append(f"It changed {len(changed) - _CHANGES} times before; metrics.jsonl has all changes.")
    return notes


def _strangers(step: MeasuredStep, prediction: Prediction) -> str:
    """The differences between the ops that ran and those that were predicted, in words; empty if there are none."""
    ran, planned = {op.id for op in step.ops}, set(prediction.schedule.by_id)
    parts = [
        f"{len(missing)} ops {what}, such as {min(missing)}"
        for missing, what in ((ran - planned, "ran that it does not have"), (planned - ran, "of it did not run"))
        if missing
    ]
    return " and ".join(parts)


def _figures(report: Report) -> list[Figure]:
    return [*_times(report), *_rate_of_all(report), *_peaks(report), *_wear(report), *_skipped(report)]


def _skipped(report: Report) -> list[Figure]:
    found = [m.step for m in report.metrics if m.skipped]
    if not found:
        return []
    last = ", ".join(f"{step:,}" for step in found[-_SKIPPED:])
    which = f"{'the last were ' if len(found) > _SKIPPED else ''}{last}"
    return [Figure(name="steps skipped", value=f"{len(found):,}", remark=f"a gradient was not finite: {which}")]


def _wear(report: Report) -> list[Figure]:
    written, seconds = sum(m.written for m in report.settled), sum(m.seconds for m in report.settled)
    if not written or seconds <= 0:
        return []
    remark = "" if report.allowed is None else f"of {format_size(report.allowed)} that budget.endurance allows"
    return [Figure(name="written per day", value=format_size(written / seconds * _DAY), remark=remark)]


def _times(report: Report) -> list[Figure]:
    """All steps first, with what a run's last words compare with the prediction; then the one shown."""
    step, figures = report.step, []
    if report.settled:
        figures.append(
            Figure(
                name="time of a step",
                value=format_time(_middle(report.settled)),
                remark=f"median of {len(report.settled)} after the first{_foretold_of_all(report)}",
            )
        )
    if not step.whole:
        return [*figures, Figure(name=f"step {step.step}, up to the cut", value=format_time(step.time))]
    span = "from first op to last" + _foretold(report.compared, step.time)
    figures.append(Figure(name=f"step {step.step}, op by op", value=format_time(step.time), remark=span))
    if report.compared is not None:
        bound = format_time(report.compared.lower_bound)
        figures.append(Figure(name="lower bound", value=bound, remark="busiest lane alone"))
    return figures


def _middle(steps: Sequence[StepMetrics]) -> float:
    return time_of_step([m.seconds for m in steps], [1 + m.repeats for m in steps])


def _foretold_of_all(report: Report) -> str:
    """Words on the prediction of all steps that it is of, but for the first of these, which planned and warmed up."""
    prediction = report.prediction
    if prediction is None:
        return ""
    steps = [m for m in report.settled if m.step > prediction.first]
    if not steps:
        return ""
    words = _foretold(prediction, _middle(steps), fmean(1 + m.repeats for m in steps))
    if len(steps) == len(report.settled):
        return words
    return (
        f"; {format_time(_middle(steps))} of the {len(steps)} since step {prediction.first}{words.replace(';', ',', 1)}"
    )


def _foretold(prediction: Prediction | None, seconds: float, runs: float = 1.0) -> str:
    """Words on the time that was predicted, to follow those on the measured one of so many runs."""
    if prediction is None:
        return ""
    predicted = prediction.time * runs
    again = "" if runs == 1 else f" for {runs:.3g} runs"
    return f"; {format_time(predicted)} predicted{again} ({_error(predicted, seconds)})"


def _rate_of_all(report: Report) -> list[Figure]:
    rates = [m.tokens / m.seconds for m in report.settled if m.seconds > 0]
    return (
        [Figure(name="tokens per second", value=f"{median(rates):,.0f}", remark="median of the same steps")]
        if rates
        else []
    )


def _peaks(report: Report) -> list[Figure]:
    figures = []
    for tier, peak in ((tier, report.step.peak.get(tier, 0)) for tier in TIERS):
        if not peak:
            continue
        given = report.budget.get(tier)
        remark = f"of {format_size(given)}" if given else ""
        if report.compared is not None and tier in report.compared.peak:
            remark = f"{remark}, predicted {format_size(report.compared.peak[tier])}".removeprefix(", ")
        figures.append(Figure(name=f"{tier} memory taken, peak", value=format_size(peak), remark=remark))
    return figures


def _sections(report: Report) -> str:
    parts = [f"<section><h2>Lanes in step {report.step.step}</h2>{_lane_table(report)}</section>"]
    if report.curves:
        figures = (
            f'<figure><h2>{escape(curve.title)}</h2><div id="{curve.key}" class="curve"></div></figure>'
            for curve in report.curves
        )
        parts.insert(0, f'<section class="pair">{"".join(figures)}</section>')
    for one in report.tables:
        head = f"<summary><h2>{escape(one.caption)}</h2></summary>"
        body = table(one.heads, one.rows, caption=one.caption)
        parts.append(f"<section><details{' open' * one.shown}>{head}{body}</details></section>")
    return "\n".join(parts)


def _lane_table(report: Report) -> str:
    step, prediction = report.step, report.compared
    if prediction is None:
        rows = [_measured(step, lane) for lane in step.lanes]
        heads = ["lane", "bytes", "rate while busy", "busy", *(["share of the step"] if step.whole else [])]
        until = "as measured" if step.whole else "as measured up to the cut"
        return table(heads, rows, caption=f"Bytes moved and time busy per lane, {until}")
    lanes = [lane for lane in LANES if lane in step.busy or prediction.busy.get(lane, 0.0)]
    moves = _moves_of(step, prediction)
    rows = [_compared(step, prediction, moves, lane) for lane in lanes]
    heads = [
        "lane",
        "bytes predicted",
        "bytes measured",
        "error",
        "busy predicted",
        "busy measured",
        "error",
        "rate while busy",
        "share of the step",
    ]
    return table(heads, rows, caption="Bytes moved and time busy per lane; errors are relative to the measurement")


def _measured(step: MeasuredStep, lane: Lane) -> list[str]:
    cells = [lane, _size(step.bytes_per_lane[lane]), _rate(step, lane), format_time(step.busy[lane])]
    return [*cells, _share(step, lane)] if step.whole else cells


def _moves_of(step: MeasuredStep, prediction: Prediction) -> Mapping[Lane, int]:
    """Bytes that each lane was to move in this step: less than in others if it has found nothing left to it."""
    found, ran = dict(prediction.bytes_per_lane), {op.id: op.nbytes for op in step.ops}
    if not any(ran.get(op.id) for op in prediction.late_moves):
        for op in prediction.late_moves:
            found[op.lane] -= op.nbytes
    return found


def _compared(step: MeasuredStep, prediction: Prediction, moves: Mapping[Lane, int], lane: Lane) -> list[str]:
    said, did = moves.get(lane, 0), step.bytes_per_lane.get(lane, 0)
    said_busy, did_busy = prediction.busy.get(lane, 0.0), step.busy.get(lane, 0.0)
    return [
        lane,
        _size(said),
        _size(did),
        "–" if not said and not did else "exact" if said == did else _error(said, did),
        format_time(said_busy),
        format_time(did_busy),
        _error(said_busy, did_busy),
        _rate(step, lane),
        _share(step, lane),
    ]


def _error(said: float, did: float) -> str:
    return "–" if not did else f"{said / did - 1:+z.1%}"


def _size(nbytes: int) -> str:
    return format_size(nbytes) if nbytes else "–"


def _rate(step: MeasuredStep, lane: Lane) -> str:
    moved, busy = step.bytes_per_lane.get(lane, 0), step.busy.get(lane, 0.0)
    return f"{moved / busy / 1e9:.3g} GB/s" if moved and busy else "–"


def _share(step: MeasuredStep, lane: Lane) -> str:
    return f"{step.busy.get(lane, 0.0) / step.time:.0%}"
