"""Reads ``metrics.jsonl``: one line per step, the last of which a kill may have cut."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock import files
from penstock.config import TIERS, Tier
from penstock.documents.text import parse_json
from penstock.documents.typed import fits, shown
from penstock.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """The metrics of a step that the pictures need. None: not finite, or not evaluated after this step.

    ``norm``: of all gradients before clipping; ``mfu``, ``share_of_product``: as docs/training.md has them; ``peak``:
    bytes of memory taken at most; ``repeats``: runs of the step besides the one that counts; ``skipped``: true if it
    changed nothing, because a gradient was not finite.

    ``plan_change``: why its plan is another one than that of the step before; None: it is the same. ``predicted``: the
    seconds that were expected of it.
    """

    step: int
    loss: float | None
    validation: float | None
    seconds: float
    tokens: int
    written: int = 0
    repeats: int = 0
    skipped: bool = False
    lr: float | None = None
    norm: float | None = None
    mfu: float | None = None
    share_of_product: float | None = None
    peak: Mapping[Tier, int] = field(default_factory=dict)
    plan_change: str | None = None
    predicted: float | None = None


NO_RECORD = (KeyError, TypeError, AttributeError, ValueError, OverflowError)
"""The errors of reading a record's values where it is none."""


def read_metrics(path: Path) -> list[StepMetrics]:
    """The steps by number; of a step that was done again after a resumption, the later line. Empty without a file.

    Raises:
        ConfigError: a line that is not the last cannot be read.
    """
    lines = _lines(path)
    found: dict[int, StepMetrics] = {}
    for number, line in enumerate(lines, start=1):
        try:
            metrics = _metrics(parse_json(line))
        except NO_RECORD as error:
            if number == len(lines):
                break  # here the run was killed
            raise ConfigError(
                f"{path}, line {number}: not a step's metrics ({shown(error)}): remove the line, which was changed "
                "after it was written (a run that goes on drops it itself)"
            ) from None
        found[metrics.step] = metrics
    return [found[step] for step in sorted(found)]


def lines_until(path: Path, last: int) -> tuple[list[str], int]:
    """The lines of the steps up to ``last``, each once and in order, and how many lines could not be read.

    What a run that goes on after step ``last`` keeps: it does the later steps again. The torn last line that a kill
    leaves is not counted as unreadable. No lines without a file.

    Raises:
        ConfigError: the file cannot be read.
    """
    lines = _lines(path)
    found: dict[int, str] = {}
    unreadable = 0
    for number, line in enumerate(lines, start=1):
        try:
            step = _metrics(parse_json(line)).step
        except NO_RECORD:
            unreadable += number < len(lines)
            continue
        if step <= last:
            found[step] = line
    return [found[step] for step in sorted(found)], unreadable


def merged(lines: Sequence[str], others: Sequence[str], last: int) -> list[str]:
    """The lines of the steps up to ``last``, each once and in order: ``others`` has those that ``lines`` may lack.

    Raises:
        ConfigError: one of ``others`` is not a step's.
    """
    found = {parse_json(line)["step"]: line for line in lines}
    try:
        for line in others:
            step = _metrics(parse_json(line)).step
            if step <= last:
                found.setdefault(step, line)
    except NO_RECORD as error:
        raise ConfigError(f"the last commit has a line that is not a step's metrics ({error!r})") from None
    return [found[step] for step in sorted(found)]


def _lines(path: Path) -> list[str]:
    try:
        return files.read(path).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the metrics: {error.strerror}") from error


def _metrics(record: Any) -> StepMetrics:
    step, tokens = record["step"], record["tokens"]
    if not (fits(step, int) and fits(tokens, int) and min(step, tokens) >= 0):
        raise ValueError(f"step {shown(step)}, tokens {shown(tokens)}")
    return StepMetrics(
        step=step,
        loss=_finite(record["loss"]),
        validation=_finite(record.get("validation_loss")),
        seconds=time_of(record["seconds"]),
        tokens=tokens,
        written=count_of(record.get("bytes_written") or 0),
        repeats=count_of(record.get("repeats") or 0),
        skipped=bool(record.get("skipped")),
        lr=_finite(record.get("lr")),
        norm=_finite(record.get("grad_norm")),
        mfu=_finite(record.get("mfu")),
        share_of_product=_finite(record.get("share_of_product")),
        peak={tier: count_of(most) for tier, most in (record.get("peak_bytes") or {}).items() if tier in TIERS},
        plan_change=_text(record.get("plan_change")),
        predicted=_finite(record.get("predicted_seconds")),
    )


def count_of(value: Any) -> int:
    """A record's number of something; raises ValueError."""
    if not fits(value, int) or value < 0:
        raise ValueError(f"{shown(value)} is not a whole number that is not negative")
    return int(value)


def _text(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{shown(value)} is no text")
    return value


def time_of(value: Any) -> float:
    """A record's time; raises ValueError."""
    time = float(value)
    if not (math.isfinite(time) and time >= 0):
        raise ValueError(f"{value!r} is not a time")
    return time


def _finite(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
