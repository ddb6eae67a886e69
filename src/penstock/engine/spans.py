"""Micro-batches cut for the ranks that share each sequence (``cp``): each has a span of the tokens of every row.

All of them are given the same micro-batches. A rank has, of [b, T] tokens padded to a multiple of ``cp``, the span
[b, T / cp] that is its own: token ids, places in their document, labels. Labels are those of the next token, and so are
moved by one before they are cut: ``shift_labels``. The loss of a span is the sum over its labels, divided by those of
the whole micro-batch (``num_items_in_batch``), so that the losses of all spans add up to that of the micro-batch, and
a span may have no label at all. Both are arguments of transformers' loss functions; ``engine.mixing`` tries whether a
model's loss heeds them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn import functional

from penstock.engine.labels import IGNORED, LabelCount, unlabelled
from penstock.errors import ConfigError, ModelError
from penstock.ranks.group import ALONE, Ranks
from penstock.tape.losses import Compared
from penstock.tape.suspended import LossFn
from penstock.tape.ulysses import WHOLE, Ulysses, Whole

_OF_TOKENS = ("input_ids", "labels", "position_ids", "attention_mask")
_OF_DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Keys that say where packed documents begin, for kernels without masks, as ``position_ids`` does, too."""
_POSITIONS, _ATTENDS = "whole position_ids", "whole attention_mask"
"""The keys of what masks are made of, each [b, T], of which there is one at most."""


class Beside:
    """A value of a micro-batch that is of none of its tokens: for the loss function, whichever span that is handed.
    ``way``: that to compute which it asks the loss function for, with a plan of its own; empty: the usual one.
    ``exact``: names of entries of the micro-batch that only the loss reads, and in their own precision."""

    way: str = ""
    exact: Sequence[str] = ()


class Spans:
    """The cut of micro-batches for ranks that share each sequence, and the model's attention among them."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        """Raises:
        ModelError: as ``Ulysses``.
        """
        self.cp, self._place = ranks.cp, ranks.rank % ranks.cp
        self.ulysses = Ulysses(model, ranks.cp, ranks.of_sequence.exchange)
        """the model's attention from now on"""

    def loss_fn(self, loss_fn: LossFn) -> LossFn:
        """A loss function of micro-batches that are cut."""

        def of_span(model: nn.Module, micro_batch: Mapping[str, Any]) -> torch.Tensor:
            given = dict(micro_batch)
            token = WHOLE.set(Whole(positions=given.pop(_POSITIONS, None), attends=given.pop(_ATTENDS, None)))
            try:
                return loss_fn(model, given)
            finally:
                WHOLE.reset(token)

        return of_span

    def cut(self, micro_batches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """This rank's spans of micro-batches.

        Raises:
            ModelError: one has tensors besides those of its tokens, or no ``labels``.
        """
        return [self._cut(m, micro_batch) for m, micro_batch in enumerate(micro_batches)]

    def _cut(self, m: int, micro_batch: Mapping[str, Any]) -> dict[str, Any]:
        ids, labels = self._checked(m, micro_batch)
        labels = labels.long()  # of uint8, too, where -100 would be 156
        rows, length = ids.shape
        more = -length % self.cp
        start, size = self._place * ((length + more) // self.cp), (length + more) // self.cp

        def own(tensor: torch.Tensor, padding: int) -> torch.Tensor:
            padded = functional.pad(tensor, (0, more), value=padding) if more else tensor
            return padded[:, start : start + size].contiguous()

        given = micro_batch.get("position_ids")
        places = torch.arange(length, device=ids.device)[None] if given is None else given.long()
        places = places.expand(rows, length)
        beyond = torch.arange(1, more + 1, device=ids.device)
        positions = None if given is None else torch.cat([places, places[:, -1:] + beyond], dim=1)
        attends = micro_batch.get("attention_mask")
        if attends is not None and given is None and not bool(attends[:, 0].all()):
            self._refuse(m, "its rows are padded at their beginning, and it has no position_ids")
        shifted = functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        count = int((shifted != IGNORED).sum())
        found = {name: value for name, value in micro_batch.items() if name not in _OF_TOKENS + _OF_DOCUMENTS}
        last = torch.cat([places, places[:, -1:].expand(rows, more)], dim=1)  # padding needs no place of its own
        found |= {
            "input_ids": own(ids, 0),
            "position_ids": last[:, start : start + size].contiguous(),
            # With a mask models take packed documents for one: they are told apart where all tokens are known.
            "attention_mask": torch.ones(rows, size, dtype=torch.int64, device=ids.device),
            "labels": own(labels, IGNORED),
            "shift_labels": own(shifted, IGNORED),
            "num_items_in_batch": torch.tensor(count, device=ids.device),
        }
        if attends is not None:  # then transformers takes packed documents for one, too
            found[_ATTENDS] = functional.pad(attends.bool(), (0, more), value=True)
        elif positions is not None:
            found[_POSITIONS] = positions
        return found

    def _checked(self, m: int, micro_batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        ids, labels = micro_batch.get("input_ids"), micro_batch.get("labels")
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not isinstance(labels, torch.Tensor):
            self._refuse(m, "it has no input_ids [rows, tokens] with labels")
        for name, value in micro_batch.items():
            if name in _OF_DOCUMENTS:
                self._check_documents(m, name, value, ids, micro_batch.get("position_ids"))
            elif isinstance(value, torch.Tensor):
                if name not in _OF_TOKENS:
                    self._refuse(m, f"nobody knows which of {name!r} is of which token")
                fits = value.dim() == 2 and value.shape[1] == ids.shape[1] and value.shape[0] in (1, ids.shape[0])
                if not fits or (name != "position_ids" and value.shape != ids.shape) or value.is_floating_point():
                    self._refuse(m, f"{name!r} has the shape {tuple(value.shape)}, and input_ids {tuple(ids.shape)}")
            elif not isinstance(value, str | int | float | bool | Beside | None):
                self._refuse(m, f"nobody knows which of {name!r} is of which token")
        return ids, labels

    def _check_documents(self, m: int, name: str, value: Any, ids: torch.Tensor, positions: Any) -> None:
        """Refuse lengths of documents that ``position_ids`` does not have: masks are made of those."""
        if not isinstance(positions, torch.Tensor):
            self._refuse(m, f"{name!r} says where documents end, and it has no position_ids")
        begins = (positions.flatten() == 0).nonzero().flatten()
        if name.startswith("cu_seq_lens") and value.tolist() != [*begins.tolist(), ids.numel()]:
            self._refuse(m, f"documents begin elsewhere by {name!r} than by position_ids")

    def _refuse(self, m: int, why: str) -> NoReturn:
        known = ", ".join(_OF_TOKENS)
        raise ModelError(
            f"cp={self.cp}: micro-batch {m} cannot be cut for the ranks that share its sequences, as {why}. Give "
            f"integers [rows, tokens] named {known}"
        )


class SpanLabels(LabelCount):
    """``LabelCount`` of micro-batches that ``Spans`` has cut: their labels have been counted."""

    def __init__(self, cp: int) -> None:
        super().__init__()
        self.known = "but the first"
        self._cp = cp

    def to_probe(self, micro_batch: Mapping[str, Any]) -> Mapping[str, Any]:
        return micro_batch

    def learn(self, micro_batch: Mapping[str, Any], seen: Sequence[Compared], loss: float | None) -> None:
        """Nothing: ``engine.mixing`` has looked at how the loss counts."""

    def weights(self, micro_batches: Sequence[Mapping[str, Any]], ranks: Ranks = ALONE) -> list[float]:
        """Each micro-batch's share of all labels of the step.

        Raises:
            ModelError: one has no label that counts, so that its mean is undefined.
        """
        counts = [int(mb["num_items_in_batch"]) for mb in micro_batches]
        if 0 in counts:
            raise unlabelled(counts.index(0), ranks)
        of_all = [count for by_rank in ranks.gather_objects("labels", counts) for count in by_rank]
        return [count * self._cp / sum(of_all) for count in counts]


def check_same(digests: Sequence[str], ranks: Ranks) -> None:
    """``digests``: of all ranks' micro-batches, by rank.

    Raises:
        ConfigError: ranks that share each sequence have not been given the same micro-batches; on all ranks.
    """
    for first in range(0, len(digests), ranks.cp):
        if len(set(digests[first : first + ranks.cp])) > 1:
            raise ranks.of_all(
                ConfigError(
                    f"cp={ranks.cp}: ranks {first} to {first + ranks.cp - 1} share each sequence, and were not given "
                    "the same micro-batches: give all of them the same ones, whole"
                )
            )
