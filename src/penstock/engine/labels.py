"""Finds out how a model's loss counts the labels of a micro-batch, by looking at what the model compares.

The gradient of a step is the mean over all of its labels, so each micro-batch's mean loss counts by how many labels it
is the mean over. Language models differ in that: most compare position i with label i+1, so that the first label of a
row does not count; others leave the shift to their caller. In the first pass of the model, torch's loss functions are
watched for the targets that they are called with. Nothing is known by name.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from penstock.errors import ModelError
from penstock.ranks.group import ALONE, Ranks
from penstock.tape.losses import Compared

log = logging.getLogger("penstock")

IGNORED = -100
Counted = Literal["all", "but the first", "rows"]
"""Labels that a loss is the mean over: all that are not ignored; but the first of each row; or rows as such."""

_WORDS: Mapping[Counted, str] = {
    "all": "each position is compared with its own label",
    "but the first": "each position is compared with the next label, so the first of a row does not count",
    "rows": "each row counts the same",
}
_CLOSE = 1e-3


class LabelCount:
    """The way in which a model's loss counts labels, as far as it is known."""

    def __init__(self) -> None:
        self.known: Counted | None = None
        self._ignored = IGNORED  # by the loss, besides ``IGNORED``
        self._why = "no micro-batch with labels has been seen yet"

    def to_probe(self, micro_batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """A micro-batch to learn from: where no row's first label counts, or none does, both ways would be the same."""
        labels = _rows(micro_batch)
        if self.known is not None or labels is None:
            return micro_batch
        count = labels != IGNORED
        if bool(count[:, 0].any()):
            return micro_batch
        labels = labels.clone()
        if bool(count.any()):
            labels[:, 0] = labels[count][0]
        else:
            labels.zero_()
        return {**micro_batch, "labels": labels}

    def learn(self, micro_batch: Mapping[str, Any], seen: Sequence[Compared], loss: float | None) -> None:
        """Find out from what the loss of ``micro_batch`` was computed from. ``loss``: its value, where it has one."""
        labels = _rows(micro_batch)
        if self.known is not None or labels is None:
            return
        self.known = self._found(labels, seen, loss)
        if self.known is not None:
            log.info("labels: %s", _WORDS[self.known])

    def items(self, micro_batch: Mapping[str, Any]) -> int | None:
        """The number of items that a micro-batch's mean loss is the mean over. None: it has no labels.

        Raises:
            ModelError: that depends on the model, and was not found out.
        """
        labels = micro_batch.get("labels")
        if not isinstance(labels, torch.Tensor):
            return None
        if labels.is_floating_point() or self.known == "rows":
            return int(labels.shape[0]) if labels.ndim else 1
        count = _counts(labels, self._ignored)
        if labels.ndim < 2 or self.known == "all":
            return int(count.sum())
        if self.known == "but the first":
            return int(count[:, 1:].sum())
        raise ModelError(
            f"the number of labels that a micro-batch's loss is the mean of could not be found out: {self._why}. Say "
            "what each micro-batch's loss counts (step(..., loss_weights=[...]), 1 for each of a loss that is a sum), "
            "or give a loss_fn that computes a mean by torch.nn.functional.cross_entropy"
        )

    def weights(self, micro_batches: Sequence[Mapping[str, Any]], ranks: Ranks = ALONE) -> list[float]:
        """Each micro-batch's share of all items of the step, those of other ranks included; equal shares where there
        are no labels to count.

        Raises:
            ModelError: no label of a micro-batch counts, so that its mean is undefined; or see ``items``.
        """
        if ranks.size == len(micro_batches) == 1 and self.known is None:
            return [1.0]
        counts = [self.items(mb) for mb in micro_batches]
        for m, count in enumerate(counts):
            if count == 0:
                raise ModelError(f"micro-batch {m} has no label that counts: leave it out of the step")
        of_all = [count for by_rank in ranks.gather_objects("labels", counts) for count in by_rank]
        total, known = sum(count or 0 for count in of_all), [count for count in counts if count is not None]
        if None in of_all:
            return [1.0 / len(of_all)] * len(counts)
        return [count / total for count in known]

    def agree(self, ranks: Ranks) -> None:
        """Let all ranks know what any has found out; where several have, the lowest one's finding counts."""
        found = ranks.gather_objects("way of labels", (self.known, self._ignored))
        self.known, self._ignored = next((way for way in found if way[0] is not None), (None, IGNORED))

    def _found(self, labels: torch.Tensor, seen: Sequence[Compared], loss: float | None) -> Counted | None:
        known = [c for c in seen if c.targets is not None]
        for compared in known:
            assert compared.targets is not None
            targets = compared.targets.sort()[0]
            ways = _ways(labels, compared.ignored)
            fits = [way for way, wanted in ways.items() if torch.equal(targets, wanted.sort()[0])]
            if len(fits) > 1:
                self._why = (
                    f"no row's first label is one that its loss does not ignore (ignore_index={compared.ignored})"
                )
                return None
            if fits:
                self._ignored = compared.ignored
                return fits[0] if self._is_mean(compared, ways[fits[0]].numel(), loss) else None
        total = sum(c.targets.numel() for c in known if c.targets is not None)
        if {c.ignored for c in known} == {IGNORED} and all(c.mean for c in known):
            for way, wanted in _ways(labels, IGNORED).items():  # a loss for each of several streams of labels
                if total == wanted.numel():
                    return way
        connectionist = [c for c in seen if c.ctc]
        if connectionist and all(c.mean for c in connectionist):
            return "rows"
        if connectionist:
            self._why = "it is a sum over rows (ctc_loss_reduction)"
        elif not seen:
            self._why = "its code calls none of torch's losses for class ids"
        else:
            self._why = "the targets that torch's losses are called with are not the micro-batch's labels"
        return None

    def _is_mean(self, compared: Compared, count: int, loss: float | None) -> bool:
        """True if a loss is a mean: by what it was asked for, or by its value."""
        if compared.mean:
            return True
        if compared.total is not None and loss is not None and count:
            mean = compared.total / count
            if math.isclose(mean, loss, rel_tol=_CLOSE):
                return True
        self._why = "it is made of a sum over labels, and is not their mean (num_items_in_batch?)"
        return False


def _counts(labels: torch.Tensor, ignored: int) -> torch.Tensor:
    """True for each label that is not ignored. ``ignored``: by the loss, besides ``IGNORED``."""
    return (labels != IGNORED) & (labels != ignored)


def _ways(labels: torch.Tensor, ignored: int) -> dict[Counted, torch.Tensor]:
    """The labels that count, each way, int64 [n] on the CPU."""
    count = _counts(labels, ignored)
    return {
        "all": labels[count].long().cpu(),
        "but the first": labels[:, 1:][count[:, 1:]].long().cpu(),
    }


def _rows(micro_batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Labels that are rows of class ids, so that it has to be known which of them count."""
    labels = micro_batch.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.ndim < 2 or labels.is_floating_point():
        return None
    return labels
