"""Private names of TRL: where its ``SFTTrainer`` keeps books."""

from collections import defaultdict
from dataclasses import dataclass, field

from trl.trainer.sft_trainer import SFTTrainer

__all__ = ["Bookkeeping", "Books", "SFTTrainer"]

Metrics = dict[str, defaultdict[str, list[float]]]


def _empty() -> Metrics:
    return {"train": defaultdict(list), "eval": defaultdict(list)}


@dataclass(kw_only=True)
class Books:
    """The notes that ``compute_loss`` makes beside the loss: entropy, accuracy of tokens and the like, and tokens
    trained on.
    """

    metrics: Metrics = field(default_factory=_empty)
    tokens: int = 0


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
