"""Reads what a run has measured: its trace files, whole or cut off, and its metrics.

The writer (``engine.trace``) puts one record on a line, and after a step's ops and memory samples a marker ``step N``.
A run that is killed leaves a file that ends anywhere; what is there is read, and the step that the cut fell into says
that it is not whole.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from penstock import files
from penstock.config import TIERS, Tier
from penstock.documents.text import MalformedError, parse_json
from penstock.documents.typed import shown
from penstock.errors import ConfigError
from penstock.report.metrics_file import NO_RECORD, count_of, time_of
from penstock.schedule.ir.lanes import LANES, Lane

_MICRO = 1e-6
_STEP = re.compile(r"step (\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """One op as it ran; seconds since the step's first op began."""

    id: str
    lane: Lane
    start: float
    end: float
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """One step of a trace. ``memory``: (seconds, bytes taken from then on); none of a step that is not
    ``whole``, which the file was cut in: memory is written last, so a part of it would pass for all."""

    step: int
    ops: tuple[Ran, ...]
    memory: Mapping[Tier, tuple[tuple[float, int], ...]]
    whole: bool
    file: str

    @cached_property
    def time(self) -> float:
        """From the start of the first op to the end of the last; never 0, so that shares of it can be taken."""
        return max(1e-9, *(op.end for op in self.ops))

    @cached_property
    def bytes_per_lane(self) -> dict[Lane, int]:
        return {lane: sum(op.nbytes for op in self.ops if op.lane == lane) for lane in self.lanes}

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        present = {op.lane for op in self.ops}
        return tuple(lane for lane in LANES if lane in present)

    @cached_property
    def busy(self) -> dict[Lane, float]:
        """Seconds in which each lane has at least one op under way."""
        total, until = dict.fromkeys(self.lanes, 0.0), dict.fromkeys(self.lanes, float("-inf"))
        for op in sorted(self.ops, key=lambda op: op.start):
            total[op.lane] += max(0.0, op.end - max(op.start, until[op.lane]))
            until[op.lane] = max(until[op.lane], op.end)
        return total

    @cached_property
    def peak(self) -> dict[Tier, int]:
        return {tier: max(amount for _, amount in curve) for tier, curve in self.memory.items() if curve}


@dataclass(kw_only=True)
class _Open:
    """A step that is being read; times in the file's own seconds."""

    ops: list[tuple[str, Lane, float, float, int]] = field(default_factory=list)
    samples: list[tuple[float, Tier, int]] = field(default_factory=list)
    step: int = 0

    def close(self, *, whole: bool, file: str) -> MeasuredStep:
        origin = min(start for _, _, start, _, _ in self.ops)
        ops = [
            Ran(id=name, lane=lane, start=start - origin, end=end - origin, nbytes=n)
            for name, lane, start, end, n in self.ops
        ]
        memory: dict[Tier, list[tuple[float, int]]] = {}
        for time, tier, amount in self.samples if whole else ():
            memory.setdefault(tier, []).append((max(time - origin, 0.0), amount))
        return MeasuredStep(
            step=self.step,
            ops=tuple(sorted(ops, key=lambda op: op.start)),
            memory={tier: tuple(curve) for tier, curve in memory.items()},
            whole=whole,
            file=file,
        )


def read_trace(path: Path) -> list[MeasuredStep]:
    """The steps of one trace file, in its order; the last one is not ``whole`` if the file was cut off in it.

    Raises:
        ConfigError: the file cannot be read, or is not a trace that a run has written.
    """
    steps: list[MeasuredStep] = []
    step = _Open()
    for where, record in _records(path):
        try:
            if marker := _take(step, record):
                if step.ops:
                    step.step = marker
                    steps.append(step.close(whole=True, file=path.name))
                step = _Open()
        except NO_RECORD as error:
            raise ConfigError(
                f"{path}, {where}: not a record of a trace that penstock writes ({shown(error)})"
            ) from None
    if step.ops:
        steps.append(step.close(whole=False, file=path.name))
    return steps


def _take(step: _Open, record: Mapping[str, Any]) -> int:
    """Add a record to the step that is open; the step's number if the record ends it, else 0."""
    match record["ph"]:
        case "X":
            lane = next((lane for lane in LANES if lane == record["cat"]), None)
            if lane is None:
                raise ValueError(f"no lane {record['cat']!r}")
            start, duration = time_of(record["ts"]) * _MICRO, time_of(record["dur"]) * _MICRO
            args = record["args"]
            step.step = count_of(args["step"])
            step.ops.append((str(record["name"]), lane, start, start + duration, count_of(args["bytes"])))
        case "C":
            tier = next((tier for tier in TIERS if record["name"] == f"{tier} bytes"), None)
            if tier is not None:
                step.samples.append((time_of(record["ts"]) * _MICRO, tier, count_of(record["args"]["in use"])))
        case "i":
            if match := _STEP.fullmatch(record["name"]):
                return int(match[1])
    return 0


def _records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A place and a record, for each record up to the end or the cut."""
    try:
        text = files.read(path).decode(errors="replace")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the trace: {error.strerror}") from error
    lines = text.splitlines()
    if lines and lines[0].strip() != "[":
        raise ConfigError(f"{path} is not a trace that penstock writes: its first line is not '['")
    for number, line in enumerate(lines[1:], start=2):
        bare = line.strip().removesuffix(",")
        if bare in ("", "]"):
            continue
        try:
            record = parse_json(bare)
        except MalformedError:
            if number == len(lines):
                return  # here the run was killed
            raise ConfigError(f"{path}, line {number}: not JSON, and not at the file's end: it is damaged") from None
        if not isinstance(record, dict):
            raise ConfigError(f"{path}, line {number}: not a record of a trace that penstock writes")
        yield f"line {number}", record


def read_traces(folder: Path) -> list[MeasuredStep]:
    """The steps of all trace files of a run, by number; of a step that a resumed run has done again, the later one. Of
    several ranks those of the first.

    Raises:
        ConfigError: there is no trace, none has an op in it, or a file is damaged.
    """
    found = (path for path in folder.glob("trace*.json") if not path.stem.startswith("trace-rank-"))
    paths = sorted(found, key=_first_step)
    steps = {step.step: step for path in paths for step in read_trace(path)}
    if not steps:
        if paths:
            raise ConfigError(
                f"{folder} holds {paths[0].name}, but it was cut off before its first op: train until a step is done"
            )
        raise ConfigError(
            f"{folder} holds no trace: no step has ended there, or trace_steps was 0. Train a step with it above 0, or "
            "leave it out"
        )
    return [steps[number] for number in sorted(steps)]


def _first_step(path: Path) -> int:
    match = re.fullmatch(r"trace-from-(\d+)", path.stem)
    return int(match[1]) if match else 0


def choose_step(steps: Sequence[MeasuredStep], asked: int | None) -> MeasuredStep:
    """The step asked for, or the one whose time is the median of the whole ones.

    Raises:
        ConfigError: there is no such step.
    """
    if asked is not None:
        found = next((step for step in steps if step.step == asked), None)
        if found is None:
            raise ConfigError(
                f"--step {asked}: the trace has {_span(steps)}. A run's trace_steps says how many it keeps"
            )
        return found
    whole = [step for step in steps if step.whole] or list(steps)
    middle = median(step.time for step in whole)
    return min(whole, key=lambda step: (abs(step.time - middle), step.step))


def _span(steps: Sequence[MeasuredStep]) -> str:
    numbers = [step.step for step in steps]
    if len(numbers) == 1:
        return f"step {numbers[0]} only"
    whole = numbers[-1] - numbers[0] + 1 == len(numbers)
    return f"steps {numbers[0]} to {numbers[-1]}{'' if whole else f', {len(numbers)} of them'}"
