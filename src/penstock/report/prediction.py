"""The prediction of a step, op by op, as a file beside its measurement: ``prediction.json`` in a run's folder."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain
from pathlib import Path

from penstock.config import TIERS, Tier
from penstock.documents.text import MalformedError, parse_json, read_text
from penstock.documents.typed import decode
from penstock.errors import ConfigError, ScheduleError
from penstock.report.sentence import bottleneck
from penstock.report.series import Bar, Side
from penstock.schedule.check.late import late_moves
from penstock.schedule.check.rules import check_names
from penstock.schedule.ir.lanes import LANES, Lane
from penstock.schedule.ir.ops import Op, Schedule
from penstock.schedule.ir.text import parse_schedule
from penstock.sim.cause import parse_cause
from penstock.sim.result import Simulation

VERSION = 2
_LARGEST = 1 << 30  # bytes; some hundred for each op


@dataclass(frozen=True, kw_only=True)
class Ops:
    """The times of ops in the order of a schedule's. ``waited``: seconds that the op's lane stood idle before it;
    ``cause``: what for, as a ``Cause``'s text, empty if it did not."""

    start: tuple[float, ...]
    end: tuple[float, ...]
    waited: tuple[float, ...]
    cause: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Figures:
    """``first``: the first step that it is of; those before had another plan, or were expected to take another time.
    ``work``: seconds of each lane's ops one after another, alone. ``busy``: seconds in which the lane has an op under
    way. ``budget``: bytes that each tier was given.
    """

    ops: Ops
    time: float
    work: Mapping[Lane, float]
    busy: Mapping[Lane, float]
    memory: Mapping[Tier, tuple[tuple[float, int], ...]]
    budget: Mapping[Tier, int]
    first: int = 1


@dataclass(frozen=True, kw_only=True)
class Prediction(_Figures):
    """One rank's step as simulated. Seconds and bytes, or the units that its costs are in."""

    schedule: Schedule

    @staticmethod
    def of(
        simulation: Simulation, rank: int = 0, budget: Mapping[Tier, int] | None = None, first: int = 1
    ) -> "Prediction":
        """The prediction for one rank of a simulation; ``budget``: bytes of the tiers that have a limit."""
        return Prediction(
            schedule=simulation.world.ranks[rank],
            ops=Ops(
                start=tuple(simulation.starts[rank]),
                end=tuple(simulation.ends[rank]),
                waited=tuple(simulation.waits[rank]),
                cause=tuple(str(cause or "") for cause in simulation.causes[rank]),
            ),
            time=simulation.end(rank),
            work=simulation.work(rank),
            busy=simulation.busy(rank),
            memory={tier: (*curve,) for tier, curve in simulation.memory(rank).items()},
            budget=dict(budget or {}),
            first=first,
        )

    def side(self, name: str = "predicted") -> Side:
        """The step as a report draws it."""
        rows = zip(self.schedule.ops, *vars(self.ops).values(), strict=True)
        bars = [
            Bar(id=op.id, lane=op.lane, start=start, end=end, nbytes=op.nbytes, waited=waited, cause=parse_cause(cause))
            for op, start, end, waited, cause in rows
        ]
        return Side(name=name, bars=bars, memory=self.memory)

    @cached_property
    def bytes_per_lane(self) -> dict[Lane, int]:
        return self.schedule.bytes_per_lane()

    @cached_property
    def late_moves(self) -> tuple[Op, ...]:
        """The ops that move nothing in a step that found nothing left to it."""
        return late_moves(self.schedule)

    @property
    def lower_bound(self) -> float:
        """No order of the same ops is faster."""
        return max(self.work.values(), default=0.0)

    @cached_property
    def peak(self) -> dict[Tier, int]:
        return {tier: max((amount for _, amount in curve), default=0) for tier, curve in self.memory.items()}

    @property
    def bottleneck(self) -> str:
        """A sentence on the lane that bounds the step, and how far the step is from that bound."""
        return bottleneck(self.time, self.work, self.busy)

    def to_json(self) -> str:
        """The text of a ``prediction.json``, which ``parse_prediction`` reads back."""
        record = {
            "version": VERSION,
            **{field.name: getattr(self, field.name) for field in fields(_Figures)},
            "lower_bound": self.lower_bound,
            "bottleneck": self.bottleneck,
            "bytes": self.bytes_per_lane,
            "peak": self.peak,
            "ops": vars(self.ops),
            "schedule": str(self.schedule),
        }
        return json.dumps(record, allow_nan=False) + "\n"


_OTHERS = ("version", "lower_bound", "bottleneck", "bytes", "peak", "schedule")
"""Keys beside a prediction's own: the schedule, and what follows from the rest."""


def parse_prediction(text: str, where: str = "prediction.json") -> Prediction:
    """The inverse of ``Prediction.to_json``; ``where`` names the file in errors.

    Raises:
        ConfigError: the text is not a prediction, is cut off, or is of another version.
    """
    try:
        record = parse_json(text)
    except MalformedError as error:
        raise ConfigError(f"{where} is not JSON ({error}): it is cut off or was changed by hand. {_REMEDY}") from None
    if not isinstance(record, dict) or record.get("version") != VERSION:
        raise ConfigError(f"{where} is not a prediction of version {VERSION}. {_REMEDY}")
    try:
        figures = decode(_Figures, {key: value for key, value in record.items() if key not in _OTHERS})
        if not isinstance(record.get("schedule"), str):
            raise MalformedError("schedule must be the text of a schedule")
        schedule = parse_schedule(record["schedule"])
        check_names(schedule)
        _check(figures, len(schedule.ops))
        found = Prediction(schedule=schedule, **vars(figures))
        found.late_moves  # noqa: B018 - worked out here: what is wrong with the schedule is so with the file
    except MalformedError as error:
        raise ConfigError(f"{where}: {error}. {_REMEDY}") from None
    except ScheduleError as error:
        raise ConfigError(f"{where}: schedule: {error}. {_REMEDY}") from None
    return found


def _check(figures: _Figures, count: int) -> None:
    """Raises MalformedError: a key or a number cannot be; or there are no ``count`` ops."""
    for key, names in {"work": LANES, "busy": LANES, "budget": TIERS, "memory": TIERS}.items():
        if not set(names).issuperset(getattr(figures, key)):
            raise MalformedError(f"{key} must be an object with keys of {', '.join(names)}")
    ops = vars(figures.ops)
    for key, items in ops.items():
        if len(items) != count:
            raise MalformedError(f"ops.{key} must be a list of {count}, one for each op of the schedule")
    numbers: dict[str, Iterable[float]] = {
        **{key: [getattr(figures, key)] for key in ("first", "time")},
        **{key: getattr(figures, key).values() for key in ("work", "busy", "budget")},
        **{f"ops.{key}": ops[key] for key in ("start", "end", "waited")},
        **{f"memory.{tier}": chain.from_iterable(curve) for tier, curve in figures.memory.items()},
    }
    for key, found in numbers.items():
        if (least := min(found, default=0)) < 0:
            raise MalformedError(f"{key} must be at least 0, not {least}")
    if any(end < start for start, end in zip(figures.ops.start, figures.ops.end, strict=True)):
        raise MalformedError("ops.end must be no earlier than ops.start")


def read_prediction(path: Path) -> Prediction | None:
    """The prediction in a file; None if there is no such file.

    Raises:
        ConfigError: the file cannot be read, or holds no prediction.
    """
    try:
        text = read_text(path, _LARGEST)
    except FileNotFoundError:
        return None
    except (OSError, MalformedError) as error:
        raise ConfigError(f"{path}: cannot read the prediction: {error}") from error
    return parse_prediction(text, str(path))


_REMEDY = "Remove it to see the measurement alone, or train again to have it written anew"
