"""The order of pieces, epoch after epoch: a function of the seed alone.

Each source is read in passes, every piece once per pass in a random order of that pass's own. Without weights an epoch
is one pass of every source. With weights it has as many tokens, and each source its share of them: the pieces
between two places in its endless row of passes, which follow from the number of the epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.data.pieces import Pieces

Ints = NDArray[np.int64]
_PASS, _EPOCH = 1, 2  # what random numbers are for


def permutation(count: int, *purpose: int) -> Ints:
    """A random order of ``count`` things; equal purposes give equal orders on any machine."""
    return np.random.Generator(np.random.PCG64(purpose)).permutation(count)


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The order of pieces of several sources. ``sources``: each with at least one piece. ``weights``: None, or one for
    each. ``seed`` None: as they stand."""

    sources: Sequence[Pieces]
    weights: Sequence[float] | None
    seed: int | None

    def per_epoch(self) -> list[float]:
        """Pieces of each source in an epoch, on average."""
        if self.weights is None:
            return [float(len(pieces)) for pieces in self.sources]
        tokens = sum(pieces.cuts.tokens for pieces in self.sources)
        share = tokens / sum(self.weights)
        return [
            weight * share * len(pieces) / pieces.cuts.tokens
            for weight, pieces in zip(self.weights, self.sources, strict=True)
        ]

    def passes(self, epochs: float) -> list[float]:
        """The times that each source has been read after so many epochs."""
        return [n * epochs / len(pieces) for n, pieces in zip(self.per_epoch(), self.sources, strict=True)]

    def epoch(self, number: int) -> tuple[Ints, Ints]:
        """The pieces of an epoch in order: of which source, and which of its pieces."""
        parts = [
            self._stretch(source, int(number * n), int((number + 1) * n)) for source, n in enumerate(self.per_epoch())
        ]
        source = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        piece = np.concatenate(parts)
        if self.seed is None:
            return source, piece
        order = permutation(len(piece), self.seed, _EPOCH, number)
        return source[order], piece[order]

    def _stretch(self, source: int, first: int, end: int) -> Ints:
        """Pieces ``first`` to ``end`` of the endless row of passes of a source."""
        count = len(self.sources[source])
        found = []
        for number in range(first // count, -(-end // count)):
            order = np.arange(count) if self.seed is None else permutation(count, self.seed, _PASS, source, number)
            begin = number * count
            found.append(order[max(first - begin, 0) : max(end - begin, 0)])
        return np.concatenate(found) if found else np.empty(0, np.int64)


def shuffled(count: int, seed: int, *purpose: int) -> Ints:
    """An order of ``count`` rows, as random as any other."""
    return permutation(count, seed, 3, *purpose)
