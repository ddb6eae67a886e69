"""Documents to pieces: stretches of tokens that fit a sequence and have a label that counts."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.config.data import TooLong
from penstock.data.blocks import BlockArray
from penstock.data.token_files import TokenFile

Ints = NDArray[np.int64]
AT_ONCE = 1 << 24
"""Tokens that are looked at at a time."""


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """Counts of what became of the documents. ``labels``: tokens that count in the loss, of ``tokens`` in all pieces.

    ``too_long``: documents that did not fit a sequence. ``lost``: tokens cut off or dropped with them.
    ``without``: documents, or pieces of them, of which no token would count in the loss; they are left out.
    """

    documents: int = 0
    tokens: int = 0
    labels: int = 0
    too_long: int = 0
    lost: int = 0
    without: int = 0

    def __add__(self, other: "Cuts") -> "Cuts":
        return Cuts(**{name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Pieces of one corpus: ``first`` and ``end`` [pieces], in tokens of ``corpus.ids``."""

    corpus: TokenFile
    first: Ints
    end: Ints
    cuts: Cuts

    def __len__(self) -> int:
        return len(self.first)


def pieces_of(corpus: TokenFile, length: int, rule: TooLong | None) -> Pieces:
    """The pieces of at most ``length`` tokens of a corpus. ``rule`` None: by kind, see ``DataConfig.too_long``."""
    begins = np.concatenate([[0], corpus.ends[:-1]]).astype(np.int64) if len(corpus.ends) else corpus.ends
    sizes = corpus.ends - begins
    rule = rule or ("split" if corpus.answers is None else "cut")
    over = sizes > length
    lost = 0
    if rule == "split":
        counts = -(-sizes // length)
        number = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
        first = np.repeat(begins, counts) + number * length
        end = np.minimum(first + length, np.repeat(corpus.ends, counts))
    elif rule == "cut":
        first, end = begins, np.minimum(begins + length, corpus.ends)
        lost = int((sizes[over] - length).sum())
    else:
        first, end = begins[~over], corpus.ends[~over]
        lost = int(sizes[over].sum())
    cuts = Cuts(documents=corpus.documents, too_long=int(over.sum()), lost=lost)
    return _with_labels(corpus, first, end, cuts)


def continuous_pieces(corpus: TokenFile, length: int) -> Pieces:
    """All documents, one after the other, cut every ``length`` tokens. What is left over at the end is lost."""
    count, rest = divmod(len(corpus.ids), length)
    first = np.arange(count, dtype=np.int64) * length
    return _with_labels(corpus, first, first + length, Cuts(documents=corpus.documents, lost=rest))


def _with_labels(corpus: TokenFile, first: Ints, end: Ints, cuts: Cuts) -> Pieces:
    """Only the pieces that have a label that counts. A piece's first token is none: nothing in it comes before it."""
    whole = end - first >= 2
    labels = np.where(whole, end - first - 1, 0)
    if corpus.answers is not None and whole.any():
        labels[whole] = _counted(corpus.answers, first[whole] + 1, end[whole])
    keep = labels > 0
    first, end = first[keep], end[keep]
    tokens = int((end - first).sum())
    cuts = replace(cuts, tokens=tokens, labels=int(labels.sum()), without=int((~keep).sum()))
    return Pieces(corpus=corpus, first=first, end=end, cuts=cuts)


def _counted(answers: NDArray[np.uint8] | BlockArray, first: Ints, end: Ints) -> Ints:
    """The number of tokens that count in each stretch from ``first`` to ``end`` [stretches], which rise, some MB at a
    time.
    """
    counts = np.empty(len(first), dtype=np.int64)
    begin = 0
    while begin < len(first):
        stop = max(int(np.searchsorted(end, first[begin] + AT_ONCE, side="right")), begin + 1)
        low = int(first[begin])
        edges = np.stack([first[begin:stop], end[begin:stop]], axis=1).ravel() - low
        part = answers[low : int(end[stop - 1])]  # which ends where the last stretch does, as the last sum then does
        counts[begin:stop] = np.add.reduceat(part, edges[:-1], dtype=np.int64)[::2]
        begin = stop
    return counts
