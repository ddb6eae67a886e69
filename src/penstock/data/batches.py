"""Rows to micro-batches: the tensors of a step, and the position in the data behind it."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from penstock.data.ahead import ahead
from penstock.data.identity import require_place
from penstock.data.rows import IGNORED, Packing, Row
from penstock.data.stream import Position, Prepared, Stream
from penstock.errors import ConfigError

MicroBatch = Mapping[str, torch.Tensor]

_AHEAD = 2
"""Steps whose micro-batches wait for the engine."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """The micro-batches of one step. ``position``: the place in the data behind it, for ``Engine.step``.

    ``tokens``: without padding. ``labels``: tokens that count in the loss. ``passes``: how often the data have been
    gone through by then. ``lost``: tokens cut off or dropped so far, because documents were longer than a sequence.
    """

    micro_batches: Sequence[MicroBatch]
    position: Position
    tokens: int
    labels: int
    passes: float
    lost: int

    def metrics(self) -> dict[str, Any]:
        """The fields that the step adds to its line of ``metrics.jsonl``."""
        return {
            "data_tokens": self.tokens,
            "loss_tokens": self.labels,
            "data_passes": round(self.passes, 6),
            "truncated_tokens": self.lost,
        }


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Steps of ``sequences_per_step`` rows in micro-batches of ``micro_batch_size``, the last one perhaps smaller.

    ``length``: tokens in a sequence. ``pad``: the id that fills up. ``fingerprint``: of the data, see ``Identity``.
    ``rank``, of ``ranks``: whose part of each step's micro-batches this is, as many as the others', in order. Positions
    and counts are those of the whole step.

    Raises:
        ConfigError: the data have fewer sequences than a micro-batch.
    """

    stream: Stream
    packing: Packing
    length: int
    pad: int
    sequences_per_step: int
    micro_batch_size: int
    fingerprint: str
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        assert self.sequences_per_step // self.micro_batch_size % self.ranks == 0, "each rank has as many"
        if isinstance(self.stream, Prepared) and (found := len(self.stream.epoch(0))) < self.micro_batch_size:
            raise ConfigError(
                f"the data are {found:,} sequences of {self.length} tokens ({self.stream.cuts.tokens:,} tokens): too "
                f"few for one micro-batch of {self.micro_batch_size}. Give more data, shorter sequences "
                "(data.sequence_length) or a smaller micro_batch_size"
            )

    def steps(self, position: Position | None = None) -> Generator[Step, None, None]:
        """The steps from a position on, without end; ``position`` None: from the beginning.

        The next ones are made in a thread while the engine works. Close the iterator when no more are wanted.

        Raises:
            ConfigError: ``position`` is one in other data, or another loop's; or a document that is streamed is not
                what it should be.
        """
        if position is not None:
            require_place(position, self.fingerprint)
        return self._ahead(position)

    def _ahead(self, position: Position | None) -> Generator[Step, None, None]:
        with ahead(lambda: self._steps(position), _AHEAD) as steps:
            yield from steps

    def largest(self) -> list[MicroBatch]:
        """Micro-batches as large as this rank's of a step may be, of the shapes that they have; for whoever plans for
        them."""
        longest = self.length
        if self.packing is False and isinstance(self.stream, Prepared):
            longest = self.stream.longest
        first = self.stream.sample()
        ids, labels = np.resize(first.ids, longest), np.resize(first.labels, longest)
        row = Row(ids=ids, labels=labels, positions=np.arange(longest))
        size, count = self.micro_batch_size, self.sequences_per_step // self.ranks
        many = [[row] * min(size, count - begun) for begun in range(0, count, size)]
        if self.packing is False:  # padding takes a mask, which takes memory
            padded = Row(ids=ids[:-1], labels=labels[:-1], positions=np.arange(longest - 1))
            many = [[*rows[:-1], padded] if len(rows) > 1 else rows for rows in many]
        return [self._micro_batch(rows) for rows in many]

    def _steps(self, position: Position | None) -> Iterator[Step]:
        rows = self.stream.rows(position)
        while True:
            yield self._step(list(islice(rows, self.sequences_per_step)))

    def _step(self, taken: Sequence[tuple[Row, Position]]) -> Step:
        rows, position = [row for row, _ in taken], taken[-1][1]
        size = self.micro_batch_size
        return Step(
            micro_batches=[self._micro_batch(rows[i : i + size]) for i in self._own(range(0, len(rows), size))],
            position={"data": self.fingerprint, **position},
            tokens=sum(len(row.ids) for row in rows),
            labels=sum(int((row.labels[1:] != IGNORED).sum()) for row in rows),
            passes=self.stream.passes(position),
            lost=self.stream.lost(position),
        )

    def _own(self, micro_batches: range) -> range:
        """This rank's; what cannot be dealt out evenly, as the last held-out rows, is for each to go through."""
        each, rest = divmod(len(micro_batches), self.ranks)
        return micro_batches if rest else micro_batches[self.rank * each : (self.rank + 1) * each]

    def _micro_batch(self, rows: Sequence[Row]) -> MicroBatch:
        """int64 [rows, tokens] each: ``input_ids``, ``labels``, and what keeps documents and padding apart.

        Hugging Face's causal models shift the labels themselves. Packed rows have ``position_ids`` that begin anew with
        each document and with the padding, from which these models know that no token attends beyond its own
        document; others have an ``attention_mask``, 0 on padding, where they are padded.
        """
        if self.packing is True:
            filled = [_filled(row, self.length, self.pad) for row in rows]
            names = ("input_ids", "labels", "position_ids")
            return {name: _tensor([row[i] for row in filled]) for i, name in enumerate(names)}
        length = max(len(row.ids) for row in rows)
        tensors = {
            "input_ids": _tensor([_fill(row.ids, length, self.pad) for row in rows]),
            "labels": _tensor([_fill(row.labels, length, IGNORED) for row in rows]),
        }
        if self.packing is False:
            tensors["attention_mask"] = _tensor([_fill(np.ones_like(row.ids), length, 0) for row in rows])
        return tensors


@dataclass(frozen=True, kw_only=True)
class HeldOut(Batches):
    """The held-out rows, for evaluation; fewer of them than a micro-batch has will do."""

    def __post_init__(self) -> None:
        assert isinstance(self.stream, Prepared)

    def once(self) -> Iterator[Step]:
        """All rows, once, in the order of the documents; the last step may be a smaller one.

        The mean loss over them is that of each step, weighted with its ``labels``.
        """
        assert isinstance(self.stream, Prepared)
        rows = islice(self.stream.rows(None), len(self.stream.epoch(0)))
        while taken := list(islice(rows, self.sequences_per_step)):
            yield self._step(taken)


def _filled(row: Row, length: int, pad: int) -> tuple[Any, Any, Any]:
    """A packed row of ``length``: ids, labels, positions.

    A row that is one document as long as the row would look as if it were not packed, and the model would take another
    way through its attention than with other rows. So its last token, which predicts nothing, stands alone.
    """
    missing = length - len(row.ids)
    positions = np.concatenate([row.positions, np.arange(missing)])
    if int(positions[-1]) == length - 1:
        positions[-1] = 0
    return _fill(row.ids, length, pad), _fill(row.labels, length, IGNORED), positions


def _fill(values: "np.ndarray[Any, np.dtype[np.int64]]", length: int, value: int) -> Any:
    return np.concatenate([values, np.full(length - len(values), value, dtype=np.int64)])


def _tensor(rows: Sequence[Any]) -> torch.Tensor:
    return torch.from_numpy(np.stack(rows))
