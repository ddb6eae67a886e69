"""TRL's ``SFTTrainer`` on the engine: its data preparation, packing, losses and metrics, with the engine's steps."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from penstock.compat.accelerate import counted_values, note_metrics
from penstock.compat.trl import Bookkeeping, Books
from penstock.compat.trl import SFTTrainer as PlainSFTTrainer
from penstock.engine.labels import IGNORED
from penstock.errors import ConfigError, ModelError
from penstock.hf.engine_arguments import EngineArguments
from penstock.hf.pieces import Notes, current_notes
from penstock.hf.trainer import EngineMixin


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

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.args.world_size > 1:
            note_metrics(self.accelerator, self._note)

    def _note(self, gathered: Any) -> bool:
        """Keep what a forward would gather; processes tell each other after the step."""
        if self.is_in_forward():
            check_own(self.books.count(gathered))
        return self.is_in_forward()

    @property
    def books(self) -> Books:
        notes = current_notes()
        if notes is None:
            return self.__dict__.setdefault("_books_kept", Books())  # type: ignore[no-any-return]
        if notes.books is None:
            notes.books = Books()
        assert isinstance(notes.books, Books)
        return notes.books

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """TRL's own; of a span of sequences that ranks share, where TRL takes the mean of its labels, its part of the
        mean of all spans'."""
        found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[no-untyped-call]
        if self._engine_arguments.cp == 1 or num_items_in_batch is not None:
            return found
        return found * inputs["shift_labels"].ne(IGNORED).sum() / inputs["num_items_in_batch"].clamp(min=1)

    losses_of_spans = (compute_loss,)

    def _after_notes(self, notes: list[Notes], batches: Sequence[Any]) -> None:
        """Enter what each micro-batch has noted, in their order."""
        kept = self.books
        assert self.model is not None
        if self._engine_arguments.cp > 1 and self.model.training:
            for one, batch in zip(notes, batches, strict=True):
                one.books.count_tokens(batch)
        if self.args.world_size > 1:
            self._count_with_others(notes)
        for books in (one.books for one in notes):
            if books is None:
                continue
            kept.tokens += books.tokens
            for mode, metrics in books.metrics.items():
                for name, values in metrics.items():
                    # a count so far, and not one number for each micro-batch
                    kept.metrics[mode][name] = (
                        [kept.tokens] if name == "num_tokens" else kept.metrics[mode][name] + values
                    )

    def _count_with_others(self, notes: list[Notes]) -> None:
        """Make the notes of a micro-batch those of all that processes have at the same time."""
        assert self.model is not None
        mode = "train" if self.model.training else "eval"
        found = [None if one.books is None else one.books.counts for one in notes]
        with self._ranks.together():
            of_ranks = self._ranks.gather_objects("figures for logs", found)
            for one, counts in zip(notes, self.at_a_time(of_ranks), strict=True):
                if one.books is not None:
                    check_own(one.books.of_processes(mode, counts[: counted_values(self.accelerator)]))


def check_own(own: bool) -> None:
    """Refuse what ``compute_loss`` has gathered within a forward if it is not what TRL's ``own`` does."""
    if not own:
        raise ModelError(
            "compute_loss gathers more from other processes than TRL's own does, whose forwards do not run at the same "
            "time: let it use what this process has alone"
        )
