"""Streams of rows for training: without end from any position, each row with the position behind it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.data.mixture import Mixture, shuffled
from penstock.data.pieces import Cuts
from penstock.data.rows import Packing, Row, Rows

Position = Mapping[str, Any]
"""A run's place in its data, as JSON holds it. It counts sequences, whatever the batch they were used in."""


class Stream(Protocol):
    """Rows of training data."""

    def rows(self, position: Position | None) -> Iterator[tuple[Row, Position]]:
        """Each row from ``position`` on (None: the beginning), with the position behind it. There is no end.

        Raises:
            ConfigError: what a stream reads is not what it should be.
        """
        ...

    def sample(self) -> Row:
        """Any row, at little cost."""
        ...

    def passes(self, position: Position) -> float:
        """The times that the data have been gone through at a position; of several sources, the most."""
        ...

    def lost(self, position: Position) -> int:
        """Tokens cut off or dropped so far because documents were too long."""
        ...


@dataclass(kw_only=True)
class Prepared:
    """Rows of data that are tokenised: a position is an epoch and a row of it, and any can be gone to at once."""

    mixture: Mixture
    packing: Packing
    length: int
    _last: tuple[int, Rows] | None = field(default=None, init=False, repr=False)

    @property
    def cuts(self) -> Cuts:
        return sum((pieces.cuts for pieces in self.mixture.sources), Cuts())

    @property
    def longest(self) -> int:
        """Tokens in the longest piece of all: by weight, an epoch may be without it."""
        return max(int((pieces.end - pieces.first).max()) for pieces in self.mixture.sources)

    @property
    def largest(self) -> int:
        """The largest id of all. They are read for that."""
        return max(pieces.corpus.largest() for pieces in self.mixture.sources)

    def epoch(self, number: int) -> Rows:
        """The rows of an epoch, as they were packed."""
        last = self._last
        if last is None or last[0] != number:
            source, piece = self.mixture.epoch(number)
            rows = Rows.of(self.mixture.sources, source, piece, packing=self.packing, length=self.length)
            self._last = last = (number, rows)
        return last[1]  # and not of ``_last``, where another thread may have put another epoch

    def rows(self, position: Position | None) -> Iterator[tuple[Row, Position]]:
        epoch, first = (0, 0) if position is None else (int(position["epoch"]), int(position["row"]))
        while True:
            rows, seed = self.epoch(epoch), self.mixture.seed
            order = range(len(rows)) if seed is None else shuffled(len(rows), seed, epoch)
            for place in range(first, len(rows)):
                yield rows.row(int(order[place])), {"epoch": epoch, "row": place + 1}
            epoch, first = epoch + 1, 0

    def sample(self) -> Row:
        return self.epoch(0).row(0)

    def passes(self, position: Position) -> float:
        epochs = position["epoch"] + position["row"] / max(len(self.epoch(int(position["epoch"]))), 1)
        return max(self.mixture.passes(epochs))

    def lost(self, position: Position) -> int:
        return self.cuts.lost
