"""Chrome traces, as Perfetto and ``chrome://tracing`` open them: the array form of the "Trace Event Format".

One record on a line: slices (``ph`` X), counters (C), instants (i) and names (M). Times are microseconds there, seconds
here. Viewers load a file whose closing bracket is missing, so that what a killed process leaves can be read.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

BEGIN, END = "[\n", "\n]\n"

_PER_LANE = 16  # numbers of rows kept for one lane, so that its rows stay together where it has several
_MICRO = 1e6
_TOUCH = 2e-9  # seconds that slices which follow each other may seem to overlap by: files have whole nanoseconds
_dumps = json.JSONEncoder(separators=(",", ":")).encode


def free_row(until: Sequence[float], start: float) -> int:
    """The first row that is free at ``start``, of rows that are taken ``until`` some time; else one more.

    Ends and starts that are one number may differ in its last digits.
    """
    slack = max(_TOUCH, 1e-9 * abs(start))
    return next((row for row, end in enumerate(until) if end <= start + slack), len(until))


class Process:
    """The records of one process of a trace: a row for each of ``lanes``, in their order.

    A lane with several slices at once has a row for each (``read``, ``read 2``), because viewers draw slices of one row
    that overlap wrongly. Slices are given in the order of their starts.
    """

    def __init__(self, number: int, name: str, lanes: Sequence[str]) -> None:
        self._number = number
        self._name = name
        self._first = {lane: (place + 1) * _PER_LANE for place, lane in enumerate(lanes)}
        self._until: dict[str, list[float]] = {}

    def begin(self) -> Iterator[str]:
        """The process's name, and its place among the others."""
        yield self._named("process_name", 0, name=self._name)
        yield self._named("process_sort_index", 0, sort_index=self._number)

    def slice(self, lane: str, name: str, start: float, end: float, **args: Any) -> Iterator[str]:
        """Something that took time; before it, the row that it opens, if it does."""
        until = self._until.setdefault(lane, [])
        place = free_row(until, start)
        row = self._first[lane] + place
        if place == len(until):
            assert place < _PER_LANE, f"lane {lane} has more than {_PER_LANE} ops at once"
            until.append(end)
            yield self._named("thread_name", row, name=lane if place == 0 else f"{lane} {place + 1}")
            yield self._named("thread_sort_index", row, sort_index=row)
        until[place] = end
        yield (
            f'{{"ph":"X","pid":{self._number},"tid":{row},"name":{_dumps(name)},"cat":"{lane}",'
            f'"ts":{start * _MICRO:.3f},"dur":{(end - start) * _MICRO:.3f},"args":{_dumps(args)}}}'
        )

    def counter(self, name: str, time: float, amount: int) -> str:
        """An amount of something from ``time`` on."""
        return (
            f'{{"ph":"C","pid":{self._number},"name":{_dumps(name)},"ts":{time * _MICRO:.3f},'
            f'"args":{{"in use":{amount}}}}}'
        )

    def instant(self, name: str, time: float) -> str:
        """Something that took no time."""
        return f'{{"ph":"i","s":"p","pid":{self._number},"tid":0,"name":{_dumps(name)},"ts":{time * _MICRO:.3f}}}'

    def _named(self, kind: str, row: int, **args: str | int) -> str:
        return _dumps({"ph": "M", "pid": self._number, "tid": row, "name": kind, "args": args})


def lines(records: Iterable[str]) -> Iterator[str]:
    """A whole trace of some records, piece by piece."""
    separator = BEGIN
    for record in records:
        yield separator + record
        separator = ",\n"
    yield END if separator != BEGIN else BEGIN + END
