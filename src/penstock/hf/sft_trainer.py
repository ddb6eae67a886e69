"""TRL's ``SFTTrainer`` on the engine: its data preparation, packing, losses and metrics, with the engine's steps."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from trl.trainer.sft_trainer import SFTTrainer as PlainSFTTrainer

from penstock.errors import ConfigError
from penstock.hf.engine_arguments import EngineArguments
from penstock.hf.trainer import EngineMixin, Piece, current_piece

Metrics = dict[str, defaultdict[str, list[float]]]


def _empty() -> Metrics:
    return {"train": defaultdict(list), "eval": defaultdict(list)}


@dataclass(kw_only=True)
class Books:
    """What ``compute_loss`` notes beside the loss: entropy, accuracy of tokens and the like, and tokens trained on."""

    metrics: Metrics = field(default_factory=_empty)
    tokens: int = 0


class SFTTrainer(EngineMixin, PlainSFTTrainer):
    """``trl.SFTTrainer`` on the engine; takes ``engine=EngineArguments(...)`` beside TRL's own arguments.

    TRL's ``compute_loss`` keeps books on ``self``. Here each micro-batch's passage has books of its own, since passages
    take turns, and one that only taught the engine the model's shapes, or was run again, must not count.

    Raises:
        ConfigError: an argument cannot be honoured; it is named, and what to do.
    """

    def __init__(self, *args: Any, engine: EngineArguments, **kwargs: Any) -> None:
        if engine.loss_tile is not None:
            raise ConfigError(
                f"loss_tile={engine.loss_tile} would have no effect, as TRL's head never holds all logits. Leave it out"
            )
        super().__init__(*args, engine=engine, **kwargs)

    @property
    def _books(self) -> Books:
        piece = current_piece()
        if piece is None:
            return self.__dict__.setdefault("_books_kept", Books())  # type: ignore[no-any-return]
        if piece.notes is None:
            piece.notes = Books()
        assert isinstance(piece.notes, Books)
        return piece.notes

    @property
    def _metrics(self) -> Metrics:
        return self._books.metrics

    @_metrics.setter
    def _metrics(self, metrics: Metrics) -> None:
        self._books.metrics = metrics

    @property
    def _total_train_tokens(self) -> int:
        return self._books.tokens

    @_total_train_tokens.setter
    def _total_train_tokens(self, tokens: int) -> None:
        self._books.tokens = tokens

    def _after_pieces(self, pieces: list[Piece]) -> None:
        """Enter what each micro-batch has noted, in their order."""
        kept = self._books
        for books in (piece.notes for piece in pieces):
            if books is None:
                continue
            kept.tokens += books.tokens
            for mode, metrics in books.metrics.items():
                for name, values in metrics.items():
                    # a count so far, and not one number for each micro-batch
                    kept.metrics[mode][name] = (
                        [kept.tokens] if name == "num_tokens" else kept.metrics[mode][name] + values
                    )
