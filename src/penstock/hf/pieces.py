"""A trainer's micro-batches on their way through the engine: mappings that also carry a ``Piece``, which says what to
compute, and has what came of it. A batch that is no mapping is one entry of such a mapping.
"""

import contextvars
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.engine.spans import Beside

Loss = Callable[[nn.Module, Any], torch.Tensor]

_PIECE, _BATCH = "penstock_piece", "penstock_batch"


class Notes:
    """Notes of one forward of a micro-batch, for the trainer: ``books``: figures for logs, if the trainer has any;
    ``result``: what was to be evaluated, (loss, logits, labels) of a step of evaluation; ``items``: the number of items
    that an evaluation's loss is divided by; ``dealt``: the number of micro-batches that were dealt out with it."""

    books: Any = None
    result: Any = None
    items: Any = None
    dealt: int | None = None


class Piece(Beside):
    """A micro-batch on its way through the engine, no container to it. ``notes``: those of its latest forward.
    ``kind``: the type that its batch had. ``way``, ``exact``: as of ``Beside``."""

    def __init__(self, loss: Loss, kind: type, way: str, exact: Sequence[str]) -> None:
        self.loss = loss
        self.way, self.exact = way, exact
        self.kind: Any = kind
        self.notes = Notes()


# Not the piece: its loss reaches the trainer and all of its data, and a probe looks for tensors in context variables.
NOTES: contextvars.ContextVar[Notes | None] = contextvars.ContextVar("penstock_notes", default=None)


def current_notes() -> Notes | None:
    """The notes of the forward that is running, None outside of one.

    Forwards take turns within a step: each is suspended while others run, and has a context of its own.
    """
    return NOTES.get()


def as_micro_batch(batch: Any, loss: Loss, way: str = "", exact: Sequence[str] = ()) -> dict[str, Any]:
    """A batch as the engine takes it. ``way``, ``exact``: as of ``Beside``."""
    return {**(batch if isinstance(batch, Mapping) else {_BATCH: batch}), _PIECE: Piece(loss, type(batch), way, exact)}


def notes_of(micro_batch: Mapping[str, Any]) -> Notes:
    """The notes of a micro-batch's latest forward."""
    piece = micro_batch[_PIECE]
    assert isinstance(piece, Piece)
    return piece.notes


def loss_of_piece(model: nn.Module, micro_batch: Mapping[str, Any]) -> torch.Tensor:
    """The engine's ``loss_fn``: whatever the micro-batch's piece computes, on a batch that it may change. One without
    is the engine's own, with which it tries the model's loss (``engine.mixing``).
    """
    inputs = dict(micro_batch)
    piece = inputs.pop(_PIECE, None)
    loss: torch.Tensor
    if piece is None:
        loss = model(**inputs).loss
    else:
        piece.notes = Notes()
        NOTES.set(piece.notes)
        loss = piece.loss(model, inputs[_BATCH] if _BATCH in inputs else piece.kind(inputs))
    return loss


def of_spans(found: Sequence[Notes]) -> Notes:
    """The notes of a batch, of those of each span of its sequences: losses add up, and so does what books count."""
    first, *others = found
    for other in others:
        if first.result is not None and other.result is not None:
            first.result = (first.result[0] + other.result[0], None, None)
        if first.books is not None and other.books is not None:
            first.books.add_span(other.books)
    return first
