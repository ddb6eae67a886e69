"""Private names of TRL: where its ``SFTTrainer`` keeps books."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from trl.trainer.sft_trainer import SFTTrainer

__all__ = ["Bookkeeping", "Books", "SFTTrainer"]
# SFTTrainer: from the module that has it, as ``trl`` imports lazily. Without: the same class, as ``trl.SFTTrainer``.

Metrics = dict[str, defaultdict[str, list[float]]]


def _empty() -> Metrics:
    return {"train": defaultdict(list), "eval": defaultdict(list)}


@dataclass(kw_only=True)
class Books:
    """The notes that ``compute_loss`` makes beside the loss: entropy, accuracy of tokens and the like, and tokens
    trained on. ``counts``: what it has gathered from all processes to make them of, as this one has it.
    """

    metrics: Metrics = field(default_factory=_empty)
    tokens: int = 0
    counts: list[float] = field(default_factory=list)

    def count(self, gathered: Any) -> bool:
        """Keep what ``compute_loss`` gathers. False: it is something that TRL's own does not gather."""
        is_count = isinstance(gathered, torch.Tensor) and gathered.dim() == 0
        if is_count:
            self.counts.append(gathered.item())
        return is_count

    def add_span(self, other: "Books") -> None:
        """Count what those of another span of the same sequences have counted, too."""
        self.counts = [own + theirs for own, theirs in zip(self.counts, other.counts, strict=True)]

    def count_tokens(self, batch: Mapping[str, Any]) -> None:
        """Count the tokens of a whole batch as TRL does in training, in the place of those of its spans and padding."""
        mask, positions = batch.get("attention_mask"), batch.get("position_ids")
        if mask is not None:
            self.counts[3] = float(mask.sum())
        elif positions is not None:
            self.counts[3] = positions.size(1)

    def of_processes(self, mode: str, counts: Sequence[Sequence[float]]) -> bool:
        """Make the notes of one micro-batch those of several: what each of their processes has counted. False: it has
        counted something else than TRL does.

        TRL gathers the labels, the sum of their entropies, those that were predicted, in training the tokens, and the
        balance loss of experts where a model has one. It adds them up, and takes the mean of the last.
        """
        training, balanced = mode == "train", "aux_loss" in self.metrics[mode]
        if any(len(row) != 3 + training + balanced for row in counts):
            return False
        labels, entropy, predicted, *more = (sum(column) for column in zip(*counts, strict=True))
        self.metrics[mode]["entropy"] = [entropy / labels if labels else 0.0]
        self.metrics[mode]["mean_token_accuracy"] = [predicted / labels if labels else 0.0]
        if training:
            self.tokens = int(more[0])
        if balanced:
            self.metrics[mode]["aux_loss"] = [more[-1] / len(counts)]
        return True


class Bookkeeping:
    """Sends ``SFTTrainer``'s books, which are attributes of its own, to ``books``.

    Without: forwards that take turns, or are run again, would count in each other's books.
    """

    @property
    def books(self) -> Books:
        """The books to write to now."""
        raise NotImplementedError

    @property
    def _metrics(self) -> Metrics:
        return self.books.metrics

    @_metrics.setter
    def _metrics(self, metrics: Metrics) -> None:
        self.books.metrics = metrics

    @property
    def _total_train_tokens(self) -> int:
        return self.books.tokens

    @_total_train_tokens.setter
    def _total_train_tokens(self, tokens: int) -> None:
        self.books.tokens = tokens
