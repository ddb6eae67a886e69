"""TRL's ``SFTTrainer`` on the engine: its data preparation, packing, losses and metrics, with the engine's steps."""

from typing import Any

from penstock.compat.trl import Bookkeeping, Books
from penstock.compat.trl import SFTTrainer as PlainSFTTrainer
from penstock.errors import ConfigError
from penstock.hf.engine_arguments import EngineArguments
from penstock.hf.trainer import EngineMixin, Piece, current_notes


class SFTTrainer(Bookkeeping, EngineMixin, PlainSFTTrainer):
    """``trl.SFTTrainer`` on the engine; takes ``engine=EngineArguments(...)`` beside TRL's own arguments.

    TRL's ``compute_loss`` keeps books on ``self``. Here each micro-batch's forward has books of its own, since forwards
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

    def check_args(self, args: Any) -> None:
        super().check_args(args)
        if args.world_size > 1:
            raise ConfigError(
                f"this is one process of {args.world_size}, and TRL's losses gather figures from all of them within "
                "each forward, which is not there yet: start it in one process, or use penstock.hf.Trainer"
            )

    @property
    def books(self) -> Books:
        notes = current_notes()
        if notes is None:
            return self.__dict__.setdefault("_books_kept", Books())  # type: ignore[no-any-return]
        if notes.books is None:
            notes.books = Books()
        assert isinstance(notes.books, Books)
        return notes.books

    def _after_pieces(self, pieces: list[Piece]) -> None:
        """Enter what each micro-batch has noted, in their order."""
        kept = self.books
        for books in (piece.notes.books for piece in pieces):
            if books is None:
                continue
            kept.tokens += books.tokens
            for mode, metrics in books.metrics.items():
                for name, values in metrics.items():
                    # a count so far, and not one number for each micro-batch
                    kept.metrics[mode][name] = (
                        [kept.tokens] if name == "num_tokens" else kept.metrics[mode][name] + values
                    )
