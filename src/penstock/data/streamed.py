"""Data that are read while training goes on: tokenised, shuffled and packed a window of documents at a time.

A window is the next so many documents of all sources, each source taken from when its share of the tokens is due. It
is a function of where it begins, so a position is that place and a row of the window: resuming makes the window anew.
With ``packing: continuous`` the tokens of a source that do not fill a sequence are the first of its next window.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, NotRequired, TypedDict, cast

import numpy as np

from penstock.config.data import MOST_HELD, TooLong
from penstock.data.ahead import ahead
from penstock.data.encode import Encoder
from penstock.data.mixture import shuffled
from penstock.data.pieces import Pieces, continuous_pieces, pieces_of
from penstock.data.rows import Packing, Row, Rows
from penstock.data.sources.reader import Cursor, Reader
from penstock.data.stream import Position
from penstock.data.token_files import Document, TokenFile
from penstock.errors import ConfigError

_A_FEW = 64  # documents


class Place(TypedDict):
    """The place in one source: the pass, the place within it, and the tokens that it has given so far.

    ``read``: so many documents behind it were read, too, as the last ``left`` of their tokens are still to be cut; none
    where these are not there.
    """

    turn: int
    at: Cursor
    tokens: int
    left: NotRequired[int]
    read: NotRequired[int]


class Start(TypedDict):
    """The beginning of a window: its number, the place of each source, and the tokens that were lost before it."""

    window: int
    lost: int
    sources: list[Place]


@dataclass(frozen=True, kw_only=True)
class StreamSource:
    """A source that is streamed. ``weight``: of its share of the tokens. ``encoder`` makes a new one for each pass."""

    name: str
    reader: Reader
    encoder: Callable[[], Encoder]
    weight: float


_Placed = tuple[Document, Place]
"""A document, or its last tokens, and the place before it."""


@dataclass(frozen=True, kw_only=True)
class _Window:
    start: Start
    rows: Rows
    lost: int


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """Rows of sources that are streamed. ``window``: documents in a window. ``rule``: for those that are too long."""

    sources: Sequence[StreamSource]
    window: int
    seed: int
    packing: Packing
    length: int
    rule: TooLong | None

    def rows(self, position: Position | None) -> Generator[tuple[Row, Position], None, None]:
        first = 0 if position is None else int(position["row"])
        with ahead(lambda: self._windows(position), 1) as windows:
            for window in windows:
                assert window is not None
                order = shuffled(len(window.rows), self.seed, window.start["window"])
                for place in range(first, len(order)):
                    behind = {**window.start, "lost": window.lost, "lost_before": window.start["lost"]}
                    yield window.rows.row(int(order[place])), {**behind, "row": place + 1}
                first = 0

    def sample(self) -> Row:
        with closing(replace(self, window=min(self.window, _A_FEW)).rows(None)) as rows:
            return next(rows)[0]

    def passes(self, position: Position) -> float:
        return float(max(place["turn"] for place in position["sources"]))

    def lost(self, position: Position) -> int:
        return int(position["lost"])

    def _windows(self, position: Position | None) -> Iterator[_Window | None]:
        """The windows; and None now and then, as a chance to stop."""
        if position is None:
            start = Start(window=0, lost=0, sources=[Place(turn=0, at=None, tokens=0) for _ in self.sources])
        else:
            sources = [cast(Place, dict(place)) for place in position["sources"]]
            start = Start(window=int(position["window"]), lost=int(position["lost_before"]), sources=sources)
        opened = [_from(source, place) for source, place in zip(self.sources, start["sources"], strict=True)]
        documents, left = [found for found, _, _ in opened], [rest for _, rest, _ in opened]
        places = [place for _, _, place in opened]
        fruitful, barren = max(place["turn"] for place in places), False
        while True:
            taken, places = yield from self._take(documents, places)
            pieces = []
            for number, found in enumerate(taken):
                whole, left[number] = self._whole([*left[number], *found])
                pieces.append(self._pieces(_corpus([document for document, _ in whole])))
            source = np.repeat(np.arange(len(pieces)), [len(p) for p in pieces])
            piece = np.concatenate([np.arange(len(p)) for p in pieces])
            rows = Rows.of(pieces, source, piece, packing=self.packing, length=self.length)
            lost = start["lost"] + sum(p.cuts.lost for p in pieces)
            turn = max(place["turn"] for place in places)
            barren |= self.packing != "continuous" or any(p.cuts.without for p in pieces)
            if len(rows):
                yield _Window(start=start, rows=rows, lost=lost)
                fruitful, barren = turn, False
            elif barren and turn > fruitful + 1:
                raise ConfigError("data: no document of the sources has a token that counts in the loss, and fits")
            sources = [_before(place, rest) for place, rest in zip(places, left, strict=True)]
            start = Start(window=start["window"] + 1, lost=lost, sources=sources)

    def _take(
        self, documents: Sequence[Iterator[tuple[Document, Place]]], places: Sequence[Place]
    ) -> Generator[None, None, tuple[list[list[_Placed]], list[Place]]]:
        """Returns the documents of a window by source, and where each source is behind them."""
        places = list(places)
        taken: list[list[_Placed]] = [[] for _ in documents]
        tokens = 0
        for count in range(self.window):
            if count % _A_FEW == 0:
                yield None
            due = min(range(len(places)), key=lambda i: places[i]["tokens"] / self.sources[i].weight)
            before = places[due]
            document, places[due] = next(documents[due])
            taken[due].append((document, before))
            tokens += len(document.ids)
            if tokens >= MOST_HELD:
                break
        return taken, places

    def _whole(self, found: Sequence[_Placed]) -> tuple[Sequence[_Placed], Sequence[_Placed]]:
        """Documents that are cut in this window, and those that wait for the next, as they do not fill a sequence."""
        if self.packing != "continuous":
            return found, ()
        return _divided(found, sum(len(document.ids) for document, _ in found) % self.length)

    def _pieces(self, corpus: TokenFile) -> Pieces:
        if self.packing == "continuous":
            return continuous_pieces(corpus, self.length)
        return pieces_of(corpus, self.length, self.rule)


def _from(source: StreamSource, place: Place) -> tuple[Iterator[tuple[Document, Place]], Sequence[_Placed], Place]:
    """(the documents of a source behind those that were read, what of these is still to be cut, the place of the
    first)"""
    documents, found = _endless(source, place), list[_Placed]()
    before = Place(turn=place["turn"], at=place["at"], tokens=place["tokens"])
    for _ in range(place.get("read", 0)):
        document, behind = next(documents)
        found.append((document, before))
        before = behind
    return documents, _divided(found, place.get("left", 0))[1], before


def _before(place: Place, rest: Sequence[_Placed]) -> Place:
    """The place from which a source goes on: in front of what is still to be cut."""
    if not rest:
        return place
    since, left = rest[0][1], sum(len(document.ids) for document, _ in rest)
    return Place(turn=since["turn"], at=since["at"], tokens=since["tokens"], left=left, read=len(rest))


def _divided(found: Sequence[_Placed], count: int) -> tuple[Sequence[_Placed], Sequence[_Placed]]:
    """Documents without their last ``count`` tokens, and these; one of them may be in both, in part."""
    place = len(found)
    while count > 0:
        place -= 1
        document, before = found[place]
        if (cut := len(document.ids) - count) > 0:
            first, rest = _stretch(document, 0, cut), _stretch(document, cut, len(document.ids))
            return [*found[:place], (first, before)], [(rest, before), *found[place + 1 :]]
        count = -cut
    return found[:place], found[place:]


def _stretch(document: Document, first: int, end: int) -> Document:
    answers = None if document.answers is None else document.answers[first:end]
    return replace(document, ids=document.ids[first:end], answers=answers)


def _endless(source: StreamSource, place: Place) -> Iterator[tuple[Document, Place]]:
    """A source's documents from a place on, pass after pass, each with the place behind it."""
    turn, at, tokens = place["turn"], place["at"], place["tokens"]
    while True:
        before = tokens
        for document, behind in source.encoder().documents(source.reader.read(at)):
            tokens += len(document.ids)
            yield document, Place(turn=turn, at=behind, tokens=tokens)
        if tokens == before and at is None:
            raise ConfigError(f"data: {source.name} has no documents")
        turn, at = turn + 1, None


def _corpus(documents: Sequence[Document]) -> TokenFile:
    """A window's documents of one source. What the window cuts through ends with it."""
    if not documents:
        return TokenFile(ids=np.empty(0, np.uint32), ends=np.empty(0, np.int64), answers=None)
    ends = np.cumsum([len(document.ids) for document in documents])
    last = [document.ends for document in documents]
    last[-1] = True
    parts = [_answers(document) for document in documents]
    any_answers = any(document.answers is not None for document in documents)
    return TokenFile(
        ids=np.concatenate([document.ids for document in documents]),
        ends=ends[np.asarray(last)].astype(np.int64),
        answers=np.concatenate(parts) if any_answers else None,
    )


def _answers(document: Document) -> Any:
    return np.ones(len(document.ids), np.uint8) if document.answers is None else document.answers
