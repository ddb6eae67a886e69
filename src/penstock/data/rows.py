"""Rows, of which each is one sequence: packed, one document each, or cut from the text as it comes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.data.packing import best_fit_decreasing
from penstock.data.pieces import Pieces

Ints = NDArray[np.int64]
Packing = bool | Literal["continuous"]

IGNORED = -100
"""The label of a token that does not count in the loss."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sequence, without padding: int64 [tokens] each.

    ``labels``: the ids again, -100 where one does not count. Models compare position i with label i + 1, so the first
    label of each document is -100, or it would be predicted from the document before.
    ``positions``: from 0 within each document.
    """

    ids: Ints
    labels: Ints
    positions: Ints


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows that a list of pieces makes, in order. Each is put together when it is asked for."""

    sources: Sequence[Pieces]
    source: Ints
    piece: Ints
    ends: Ints

    @classmethod
    def of(cls, sources: Sequence[Pieces], source: Ints, piece: Ints, *, packing: Packing, length: int) -> "Rows":
        """Put pieces (``source`` and ``piece`` [pieces], in order) into rows of ``length``."""
        if packing is not True:
            return cls(sources=sources, source=source, piece=piece, ends=np.arange(1, len(piece) + 1))
        order, ends = best_fit_decreasing(_sizes(sources, source, piece), length)
        return cls(sources=sources, source=source[order], piece=piece[order], ends=ends)

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def tokens(self) -> int:
        return int(_sizes(self.sources, self.source, self.piece).sum())

    @property
    def longest(self) -> int:
        """Tokens in the longest piece."""
        return int(_sizes(self.sources, self.source, self.piece).max())

    def row(self, number: int) -> Row:
        first = int(self.ends[number - 1]) if number else 0
        parts = [self._part(i) for i in range(first, int(self.ends[number]))]
        return Row(
            ids=np.concatenate([ids for ids, _ in parts]),
            labels=np.concatenate([labels for _, labels in parts]),
            positions=np.concatenate([np.arange(len(ids)) for ids, _ in parts]),
        )

    def _part(self, place: int) -> tuple[Ints, Ints]:
        """Ids and labels of a piece."""
        pieces = self.sources[int(self.source[place])]
        number = int(self.piece[place])
        stretch = slice(int(pieces.first[number]), int(pieces.end[number]))
        ids = pieces.corpus.ids[stretch].astype(np.int64)
        labels = ids.copy()
        if pieces.corpus.answers is not None:
            labels[pieces.corpus.answers[stretch] == 0] = IGNORED
        labels[0] = IGNORED
        return ids, labels


def _sizes(sources: Sequence[Pieces], source: Ints, piece: Ints) -> Ints:
    sizes = np.empty(len(piece), dtype=np.int64)
    for number, pieces in enumerate(sources):
        mine = source == number
        sizes[mine] = (pieces.end - pieces.first)[piece[mine]]
    return sizes
