"""The events of a simulation in native code: ``_simulate.so``, which CMake builds from ``native/``."""

import ctypes
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, ScheduleError
from penstock.native import HOW_TO_BUILD, address, load
from penstock.schedule.ir.lanes import LANES
from penstock.schedule.ir.worlds import World
from penstock.sim.costs import Costs
from penstock.sim.result import Columns
from penstock.sim.template import Rank, Template

ABI = 1  # penstock_abi() in native/simulate.cpp
PATH = Path(__file__).with_name("_simulate.so")
_MOST = 1 << 30
"""The largest number that native code counts to."""
Numbers = npt.NDArray[np.int32] | npt.NDArray[np.float64]


_Kind = type[ctypes.c_int64] | type[ctypes.c_void_p]


def _fields(*names: str, kind: _Kind = ctypes.c_void_p) -> list[tuple[str, _Kind]]:
    return [(name, kind) for name in names]


class _Schedule(ctypes.Structure):
    """``struct Schedule`` of ``native/simulate.cpp``; of each of its lists where they begin, and their values."""

    _fields_ = [
        *_fields("ops", "lanes", "pools", kind=ctypes.c_int64),
        *_fields("lane", "missing", "collective", "channel", "micro_batch", "free", "seconds"),
        *_fields("queues_at", "queues", "dependents_at", "dependents", "takes_at", "takes", "gives_at", "gives"),
        *_fields("recvs_at", "recvs"),
    ]


class _Costs(ctypes.Structure):
    """``struct Costs``."""

    _fields_ = [*_fields("sharing", kind=ctypes.c_int64), *_fields("widths", "slows")]


class _Place(ctypes.Structure):
    """``struct Place``."""

    _fields_ = [*_fields("schedule", "costs", kind=ctypes.c_int64), *_fields("to")]


class _World(ctypes.Structure):
    """``struct World``."""

    _fields_ = [
        *_fields("schedule_count", "cost_count", "rank_count", "collective_count", kind=ctypes.c_int64),
        *_fields("schedules", "costs", "ranks", "members"),
        *_fields("starts", "takes", "ends", "waits", "causes"),
    ]


class _Kept:
    """Arrays and tables whose addresses native code has, kept as long as this is."""

    def __init__(self) -> None:
        self._kept: list[Numbers | ctypes.Array[Any]] = []

    def numbers(self, values: Sequence[int]) -> int:
        """Raises:
        ScheduleError: one of them is larger than ``_MOST``.
        """
        found = np.array(values, dtype=np.int64)
        if found.size and not -_MOST <= found.min() <= found.max() <= _MOST:
            raise ScheduleError(f"a step of more than {_MOST:,} ops or micro-batches cannot be simulated")
        return self._address(found.astype(np.int32))

    def floats(self, values: Sequence[float]) -> int:
        return self._address(np.array(values, dtype=np.float64))

    def lists(self, lists: Sequence[Iterable[int]]) -> tuple[int, int]:
        values = [value for one in lists for value in one]
        begins = [0, *np.cumsum([len(tuple(one)) for one in lists], dtype=np.int64).tolist()]
        return self.numbers(begins), self.numbers(values)

    def table(self, rows: Sequence[ctypes.Structure], kind: type[ctypes.Structure]) -> int:
        self._kept.append(made := (kind * len(rows))(*rows))
        return ctypes.addressof(made)

    def _address(self, array: Numbers) -> int:
        self._kept.append(array)
        return address(array)


class Library:
    """The library of this installation."""

    def __init__(self, path: Path) -> None:
        """Raises:
        OSError: there is none, or another version's.
        """
        self._calls = load(path, ABI)
        self._calls.penstock_simulate.argtypes = (ctypes.POINTER(_World),)
        self._calls.penstock_simulate.restype = ctypes.c_int64

    def run(self, world: World, ranks: Sequence[Rank]) -> Columns | None:
        """One step of every rank. None: no rank can go on, or a message is lost.

        Raises:
            ScheduleError: it is too large to be counted.
            MemoryError: there is no memory for it.
        """
        kept, columns = _Kept(), Columns.empty(sum(len(rank.template.ops) for rank in ranks))
        asked = _world(kept, world, ranks, columns)
        done = self._calls.penstock_simulate(ctypes.byref(asked))
        if done < 0:
            raise MemoryError
        return columns if done else None


def _world(kept: _Kept, world: World, ranks: Sequence[Rank], columns: Columns) -> _World:
    schedules = {id(rank.template): rank.template for rank in ranks}
    costs = {id(rank.costs): rank.costs for rank in ranks}
    met: dict[tuple[str, str], int] = {}
    for template in schedules.values():
        for key in template.collectives:
            met.setdefault(key, len(met))
    numbers = {key: n for n, key in enumerate(schedules)}, {key: n for n, key in enumerate(costs)}
    places = [
        _Place(
            numbers[0][id(rank.template)],
            numbers[1][id(rank.costs)],
            kept.numbers([number for to in rank.to for number in to or (-1, -1)]),
        )
        for rank in ranks
    ]
    made = [_schedule(kept, template, met) for template in schedules.values()]
    paces = [_costs(kept, one) for one in costs.values()]
    return _World(
        *(len(made), len(paces), len(places), len(met)),
        *(kept.table(made, _Schedule), kept.table(paces, _Costs), kept.table(places, _Place)),
        kept.numbers([len(world.groups[group]) for group, _ in met]),
        *(address(column) for column in columns),
    )


def _schedule(kept: _Kept, t: Template, met: Mapping[tuple[str, str], int]) -> _Schedule:
    own = [met[key] for key in t.collectives]
    recvs = [[i for _, i in sorted(channel.items())] for channel in t.recvs]
    most = sum(map(len, t.takes))  # buffers of a pool: more are as many
    return _Schedule(
        *(len(t.ops), len(t.queues), len(t.free)),
        kept.numbers(t.lane),
        kept.numbers(t.missing),
        kept.numbers([-1 if n < 0 else own[n] for n in t.collective]),
        kept.numbers(t.channel),
        kept.numbers([op.id.micro_batch if op.peer >= 0 else 0 for op in t.ops]),
        kept.numbers([min(free, most) for free in t.free]),
        kept.floats(t.seconds),
        *(part for lists in (t.queues, t.dependents, t.takes, t.gives, recvs) for part in kept.lists(lists)),
    )


def _costs(kept: _Kept, costs: Costs) -> _Costs:
    slows = [costs.contention.get((a, b), 0.0) for a in LANES for b in LANES]
    return _Costs(costs.sharing, kept.numbers(costs.in_flight), kept.floats(slows))


@functools.cache
def library() -> Library:
    """The library of this installation.

    Raises:
        ConfigError: it is not there; says how to build it.
    """
    try:
        return Library(PATH)
    except OSError as error:
        raise ConfigError(f"steps cannot be simulated: {error}; {HOW_TO_BUILD}") from None


@functools.cache
def why_none() -> str | None:
    """The reason why nothing can be simulated here; None: it can."""
    try:
        library()
    except ConfigError as error:
        return str(error)
    return None
