"""The prediction of a step, op by op, as a file beside its measurement: ``prediction.json`` in a run's folder."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from penstock.config import TIERS, Tier
from penstock.documents.text import MalformedError, parse_json, read_text
from penstock.errors import ConfigError, ScheduleError
from penstock.report.sentence import bottleneck
from penstock.report.series import Bar, Curve, Side
from penstock.schedule.check.late import late_moves
from penstock.schedule.ir.lanes import LANES, Lane
from penstock.schedule.ir.ops import Op, Schedule
from penstock.schedule.ir.text import parse_schedule
from penstock.sim.cause import Cause, parse_cause
from penstock.sim.result import Simulation

K = TypeVar("K", bound=str)
V = TypeVar("V")

VERSION = 2
_LARGEST = 1 << 30  # bytes; some hundred for each op


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One rank's step as simulated. Seconds and bytes, or the units that its costs are in; ``starts`` and the others
    follow the order of ``schedule.ops``.

    ``first``: the first step that it is of; those before had another plan, or were expected to take another time.
    ``waits``: seconds that the op's lane stood idle before it; ``causes``: what for, None if it did not.
    ``work``: seconds of each lane's ops one after another, alone. ``busy``: seconds in which the lane has an op under
    way. ``lower_bound``: no order of the same ops is faster. ``budget``: bytes that each tier was given.
    """

    schedule: Schedule
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    waits: tuple[float, ...]
    causes: tuple[Cause | None, ...]
    time: float
    work: Mapping[Lane, float]
    busy: Mapping[Lane, float]
    lower_bound: float
    peak: Mapping[Tier, int]
    memory: Mapping[Tier, Curve]
    budget: Mapping[Tier, int]
    first: int = 1

    @staticmethod
    def of(
        simulation: Simulation, rank: int = 0, budget: Mapping[Tier, int] | None = None, first: int = 1
    ) -> "Prediction":
        """The prediction for one rank of a simulation; ``budget``: bytes of the tiers that have a limit."""
        work, memory = simulation.work(rank), simulation.memory(rank)
        return Prediction(
            schedule=simulation.world.ranks[rank],
            starts=tuple(simulation.starts[rank]),
            ends=tuple(simulation.ends[rank]),
            waits=tuple(simulation.waits[rank]),
            causes=tuple(simulation.causes[rank]),
            time=simulation.end(rank),
            work=work,
            busy=simulation.busy(rank),
            lower_bound=max(work.values(), default=0.0),
            peak={tier: max(amount for _, amount in curve) for tier, curve in memory.items()},
            memory={tier: tuple(curve) for tier, curve in memory.items()},
            budget=dict(budget or {}),
            first=first,
        )

    def side(self, name: str = "predicted") -> Side:
        """The step as a report draws it."""
        rows = zip(self.schedule.ops, self.starts, self.ends, self.waits, self.causes, strict=True)
        bars = [
            Bar(id=op.id, lane=op.lane, start=start, end=end, nbytes=op.nbytes, waited=waited, cause=cause)
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
    def bottleneck(self) -> str:
        """A sentence on the lane that bounds the step, and how far the step is from that bound."""
        return bottleneck(self.time, self.work, self.busy)

    def to_json(self) -> str:
        """The text of a ``prediction.json``, which ``parse_prediction`` reads back."""
        record = {
            "version": VERSION,
            "first": self.first,
            "time": self.time,
            "lower_bound": self.lower_bound,
            "bottleneck": self.bottleneck,
            "bytes": self.bytes_per_lane,
            "work": dict(self.work),
            "busy": dict(self.busy),
            "peak": dict(self.peak),
            "budget": dict(self.budget),
            "ops": {
                "start": list(self.starts),
                "end": list(self.ends),
                "waited": list(self.waits),
                "cause": [str(cause or "") for cause in self.causes],
            },
            "memory": {tier: [list(point) for point in curve] for tier, curve in self.memory.items()},
            "schedule": str(self.schedule),
        }
        return json.dumps(record, allow_nan=False) + "\n"


_KEYS = (
    *("first", "time", "lower_bound", "bottleneck", "bytes", "work", "busy"),
    *("peak", "budget", "ops", "memory", "schedule"),
)


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
    if strange := set(record).symmetric_difference({"version", *_KEYS}):
        raise ConfigError(f"{where}: key {sorted(strange)[0]!r} is missing or unknown. {_REMEDY}")
    try:
        found = _Reader(where=where).read(record)
        found.late_moves  # noqa: B018 - worked out here: what is wrong with the schedule is so with the file
    except ScheduleError as error:
        raise ConfigError(f"{where}: schedule: {error}. {_REMEDY}") from None
    return found


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


@dataclass(frozen=True, kw_only=True)
class _Reader:
    """Reads a record's values strictly; every error names the file and the key."""

    where: str

    def read(self, record: Mapping[str, Any]) -> Prediction:
        if not isinstance(record["schedule"], str):
            raise self.wrong("schedule", "the text of a schedule")
        schedule = self.consistent(parse_schedule(record["schedule"]))
        ops = record["ops"]
        if not isinstance(ops, dict) or set(ops) != {"start", "end", "waited", "cause"}:
            raise self.wrong("ops", "an object of start, end, waited and cause")
        count = len(schedule.ops)
        causes = self.items("ops.cause", ops["cause"], count)
        if not all(isinstance(cause, str) for cause in causes):
            raise self.wrong("ops.cause", "a list of texts")
        starts, ends, waits = (
            tuple(self.number(f"ops.{key}", n) for n in self.items(f"ops.{key}", ops[key], count))
            for key in ("start", "end", "waited")
        )
        if any(end < start for start, end in zip(starts, ends, strict=True)):
            raise self.wrong("ops.end", "no earlier than ops.start")
        return Prediction(
            schedule=schedule,
            starts=starts,
            ends=ends,
            waits=waits,
            causes=tuple(map(parse_cause, causes)),
            first=self.whole("first", record["first"]),
            time=self.number("time", record["time"]),
            work=self.each("work", record["work"], LANES, self.number),
            busy=self.each("busy", record["busy"], LANES, self.number),
            lower_bound=self.number("lower_bound", record["lower_bound"]),
            peak=self.each("peak", record["peak"], TIERS, self.whole),
            memory=self.each("memory", record["memory"], TIERS, self.curve),
            budget=self.each("budget", record["budget"], TIERS, self.whole),
        )

    def consistent(self, schedule: Schedule) -> Schedule:
        """The schedule, if every buffer that it gives back is one that it takes, from a pool that it has."""
        pools = {pool.name for pool in schedule.pools}
        taken = [take for op in schedule.ops for take in op.takes]
        taken += [(name, pool) for name, _, pool in schedule.carried]
        names = {name for name, _ in taken}
        for op in schedule.ops:
            if strange := [name for name in op.gives if name not in names]:
                raise self.wrong("schedule", f"one in which {op.id} gives only what is taken, not {strange[0]}")
        if missing := [pool for _, pool in taken if pool not in pools]:
            raise self.wrong("schedule", f"one that has the pool {missing[0]}")
        if len(schedule.by_id) < len(schedule.ops):
            raise self.wrong("schedule", "one in which no two ops share an id")
        return schedule

    def wrong(self, key: str, wanted: str) -> ConfigError:
        return ConfigError(f"{self.where}: {key} must be {wanted}. {_REMEDY}")

    def items(self, key: str, value: Any, count: int | None = None) -> list[Any]:
        if not isinstance(value, list) or (count is not None and len(value) != count):
            raise self.wrong(key, "a list" if count is None else f"a list of {count}, one for each op of the schedule")
        return value

    def number(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise self.wrong(key, f"a number that is not negative, not {value!r}")
        return float(value)

    def whole(self, key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.wrong(key, f"a whole number that is not negative, not {value!r}")
        return value

    def each(self, key: str, value: Any, names: Sequence[K], read: Callable[[str, Any], V]) -> dict[K, V]:
        if not isinstance(value, dict) or set(value) - set(names):
            raise self.wrong(key, f"an object with keys of {', '.join(names)}")
        return {name: read(f"{key}.{name}", value[name]) for name in names if name in value}

    def curve(self, key: str, value: Any) -> Curve:
        points = self.items(key, value)
        if not all(isinstance(point, list) and len(point) == 2 for point in points):
            raise self.wrong(key, "a list of pairs, of a time and an amount each")
        return tuple((self.number(key, time), self.whole(key, amount)) for time, amount in points)
