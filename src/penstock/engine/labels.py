"""Finds out how a model's loss counts the labels of a micro-batch, by looking at what the model compares.

The gradient of a step is the mean over all of its labels, so each micro-batch's mean loss counts by how many labels it
is the mean over. Language models differ in that: most compare position i with label i+1, so that the first label of a
row does not count; others leave the shift to their caller. In the first pass of the model, torch's loss functions are
watched for the targets that they are called with. Nothing is known by name.

A loss that adds up itself what torch gives for each position (``reduction="none"``) may divide by its labels or by all
positions. Of a micro-batch that leaves no position out both are the same: then the finding is *unsure*, and the first
micro-batch that leaves some out is looked at before it counts.
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
_NEARER = 4  # times: by as much the loss has to be nearer to one of two means


def unlabelled(micro_batch: int, ranks: Ranks, why: str = "") -> ModelError:
    """The error for a micro-batch, by its number on this rank, of whose labels none counts. ``ranks``: that share the
    micro-batches of the step, as many on each."""
    others = ", and as many on every other rank" if ranks.size > 1 else ""
    return ModelError(f"micro-batch {micro_batch} has no label that counts{why}: leave it out of the step{others}")


class LabelCount:
    """The way in which a model's loss counts labels, as far as it is known."""

    def __init__(self) -> None:
        self.known: Counted | None = None
        self.unsure = False
        """True if nothing that was seen tells a mean over labels from one over positions. On all ranks alike."""
        self._refuted = False  # it is neither
        self._left_out: dict[str, float] = {}  # in what was seen, by the name of what leaves positions out
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
        if labels is None or (self.known is not None and not self.unsure):
            return
        if self.unsure and loss is not None and not math.isfinite(loss):
            return  # it shows nothing, and no step is taken with it
        before = self.known
        shares = self._shares(labels, micro_batch)
        self._left_out |= {name: max(share, self._left_out.get(name, 0.0)) for name, share in shares.items()}
        self.known, sure = self._found(labels, seen, loss)
        self._refuted |= self.known is None and before is not None
        if self._refuted and not sure:
            self.known = None
        self.unsure = self.known is not None and not sure
        if self.known not in (None, before):
            log.info("labels: %s", _WORDS[self.known])

    def telling(self, micro_batches: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """The micro-batch to look at where that is unsure: it leaves out more than any that was seen. None: none does,
        or all is known."""
        found, most = None, 0.0
        for micro_batch in micro_batches if self.unsure else ():
            labels = _rows(micro_batch)
            shares = {} if labels is None else self._shares(labels, micro_batch)
            for name, share in shares.items():  # twice as much: else small steps would make for many looks
                if share > max(2 * self._left_out.get(name, 0.0), most):
                    found, most = micro_batch, share
        return found

    def _shares(self, labels: torch.Tensor, micro_batch: Mapping[str, Any]) -> dict[str, float]:
        """The share of positions that labels leave out, and masks, by name."""
        counted = _counts(labels, self._ignored)
        left_out = {"labels": ~(counted[:, 1:] if self.known == "but the first" else counted)}
        for name, value in micro_batch.items():
            if isinstance(value, torch.Tensor) and value.shape == labels.shape and name != "labels":
                zero = value == 0
                if bool((zero | (value == 1)).all()):
                    left_out[name] = zero
        return {name: float(which.float().mean()) for name, which in left_out.items() if which.numel()}

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
                raise unlabelled(m, ranks)
        of_all = [count for by_rank in ranks.gather_objects("labels", counts) for count in by_rank]
        total, known = sum(count or 0 for count in of_all), [count for count in counts if count is not None]
        if None in of_all:
            return [1.0 / len(of_all)] * len(counts)
        return [count / total for count in known]

    def agree(self, ranks: Ranks) -> None:
        """Let all ranks know what any has found out; where several have, the lowest one's finding counts."""
        own = (self.known, self.unsure, self._refuted, self._ignored, self._why)
        found = ranks.gather_objects("way of labels", own)
        sure = [way for way in found if way[0] is not None and not way[1]]
        refuted = [way for way in found if way[0] is None and way[2]]
        unsure = [way for way in found if way[1]]
        best = (sure or refuted or unsure or [(None, False, False, IGNORED, self._why)])[0]
        self.known, self.unsure, self._refuted, self._ignored, self._why = best

    def _found(self, labels: torch.Tensor, seen: Sequence[Compared], loss: float | None) -> tuple[Counted | None, bool]:
        """The way in which labels are counted, and True if it is sure."""
        known = [c for c in seen if c.targets is not None]
        for compared in known:
            assert compared.targets is not None
            targets = compared.targets.sort()[0]
            ways = _ways(labels, compared.ignored)
            fits = [way for way, wanted in ways.items() if torch.equal(targets, wanted.sort()[0])]
            if len(fits) > 1 and self.known in fits:
                fits = [self.known]
            if len(fits) > 1:
                self._why = (
                    f"no row's first label is one that its loss does not ignore (ignore_index={compared.ignored})"
                )
                return None, False
            if not fits and (masked := _masked(labels, compared, loss)) is not None:
                self._ignored = compared.ignored
                return masked, True
            if fits:
                self._ignored = compared.ignored
                mean = self._is_mean(compared, ways[fits[0]].numel(), loss)
                return (None if mean is False else fits[0]), mean is True
        total = sum(c.targets.numel() for c in known if c.targets is not None)
        if {c.ignored for c in known} == {IGNORED} and all(c.mean for c in known):
            for way, wanted in _ways(labels, IGNORED).items():  # a loss for each of several streams of labels
                if total == wanted.numel():
                    return way, True
        connectionist = [c for c in seen if c.ctc]
        if connectionist and all(c.mean for c in connectionist):
            return "rows", True
        if connectionist:
            self._why = "it is a sum over rows (ctc_loss_reduction)"
        elif not seen:
            self._why = "its code calls none of torch's losses for class ids"
        else:
            self._why = "the targets that torch's losses are called with are not the micro-batch's labels"
        return None, False

    def _is_mean(self, compared: Compared, count: int, loss: float | None) -> bool | None:
        """True if a loss is a mean over labels: by what it was asked for, or by its value. None: a mean over positions
        would have that value, too."""
        if compared.mean:
            return True
        if compared.total is not None and loss is not None and count:
            off, off_positions = (abs(compared.total / n - loss) for n in (count, compared.positions))
            if math.isclose(compared.total / count, loss, rel_tol=_CLOSE) and off <= _NEARER * off_positions:
                return True if off_positions > _NEARER * off else None
        self._refuted = True
        self._why = "it is made of a sum over labels, and is not their mean (num_items_in_batch?)"
        return False


def _masked(labels: torch.Tensor, compared: Compared, loss: float | None) -> Counted | None:
    """The way in which labels are counted by a loss that gives one for each position, also for those that labels leave
    out, under any class id (``labels.clamp(min=0)``), and masks these: by its value. None: it does not, as far as that
    tells."""
    if compared.each is None or loss is None:
        return None
    targets, losses = compared.each
    parts: tuple[tuple[Counted, torch.Tensor], ...] = (("all", labels), ("but the first", labels[:, 1:]))
    for way, part in parts:
        counts = _counts(part, compared.ignored).flatten().cpu()
        wanted = part.flatten().long().cpu()
        if targets.numel() != wanted.numel() or not torch.equal(targets[counts], wanted[counts]):
            continue
        off, off_positions = abs(float(losses[counts].mean()) - loss), abs(float(losses.mean()) - loss)
        if off <= _CLOSE * abs(loss) and off_positions > _NEARER * off:
            return way
    return None


def _counts(labels: torch.Tensor, ignored: int) -> torch.Tensor:
    """True for each label that is not ignored. ``ignored``: by the loss, besides ``IGNORED``."""
    labels = labels.long()  # of uint8, too, where -100 would be 156
    return (labels != IGNORED) & (labels != ignored)


def _ways(labels: torch.Tensor, ignored: int) -> dict[Counted, torch.Tensor]:
    """The labels that count, each way, int64 [n] on the CPU."""
    count = _counts(labels, ignored)
    return {
        "all": labels[count].long().cpu(),
        "but the first": labels[:, 1:][count[:, 1:]].long().cpu(),
    }


def _rows(micro_batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Labels that are rows of class ids, so that it has to be known which of them count, int64."""
    labels = micro_batch.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.ndim < 2 or labels.is_floating_point():
        return None
    return labels.long()
