"""TRL's trainers on the engine: their data preparation, losses and metrics, with the engine's steps.

TRL's ``compute_loss`` keeps books on ``self``. Here each micro-batch's forward has books of its own, since forwards
take turns, and one that only taught the engine the model's shapes, or was run again, must not count.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from penstock.compat.accelerate import counted_values
from penstock.compat.trl import Bookkeeping, Books, FiguresOf
from penstock.errors import ConfigError, ModelError
from penstock.hf.engine_arguments import EngineArguments
from penstock.hf.pieces import Notes, current_notes
from penstock.hf.trainer import EngineMixin


class TRLMixin(Bookkeeping, EngineMixin):
    """``EngineMixin`` for TRL's trainers, whose ``compute_loss`` keeps books.

    Raises:
        ConfigError: an argument cannot be honoured; it is named, and what to do.
    """

    keeps_books = True
    figures_of: ClassVar[FiguresOf | None] = None
    """function that makes the figures of several processes of what ``compute_loss`` gathers; None: the trainer is for
    one process, as its loss itself is made of what is gathered"""

    def __init__(self, *args: Any, engine: EngineArguments, **kwargs: Any) -> None:
        if engine.loss_tile is not None:
            raise ConfigError(
                f"loss_tile={engine.loss_tile} would have no effect: TRL's losses never hold all logits. Leave it out"
            )
        super().__init__(*args, engine=engine, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.args.world_size > 1 and type(self).figures_of is None:
            raise ConfigError(
                f"{type(self).__name__} in {self.args.world_size} processes cannot be honoured: its loss is made of "
                "what all of them gather within a forward, and their forwards do not run at the same time. Start one"
            )

    def _keep_gathered(self, gathered: Any, counted: bool) -> bool:
        """Keep what a forward would gather; processes tell each other after the step."""
        kept = self.args.world_size > 1 and self.is_in_forward()
        if kept:
            check_own(self.books.note(gathered, counted=counted))
        return kept

    @property
    def books(self) -> Books:
        notes = current_notes()
        if notes is None:
            return self.__dict__.setdefault("_books_kept", Books())  # type: ignore[no-any-return]
        if notes.books is None:
            notes.books = Books()
        assert isinstance(notes.books, Books)
        return notes.books

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
        found = [None if one.books is None else one.books.gathered for one in notes]
        figures = type(self).figures_of
        assert figures is not None, "its loss gathers, which is refused"
        with self._ranks.together("log"):
            of_ranks = self._ranks.gather_objects("figures for logs", found)
            at_a_time = self.at_a_time(of_ranks) if mode == "train" else list(zip(*of_ranks, strict=True))
            for one, rows in zip(notes, at_a_time, strict=True):
                if one.books is not None:
                    check_own(one.books.of_processes(mode, rows, counted_values(self.accelerator), figures))


def check_own(own: bool) -> None:
    """Refuse what ``compute_loss`` has gathered within a forward if it is not what TRL's ``own`` does."""
    if not own:
        raise ModelError(
            "compute_loss gathers more from other processes than TRL's own does, whose forwards do not run at the same "
            "time: let it use what this process has alone"
        )
