"""A Trainer's evaluation by the engine: where only losses are asked for, of as many batches at a time as a step has, so
that a model that does not fit on the device streams by once for all of them, and not once for each."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from penstock.compat.accelerate import Ahead
from penstock.compat.transformers import TrainerSteps
from penstock.errors import BudgetError, ConfigError
from penstock.hf import changes, joint
from penstock.hf.engine_arguments import EngineArguments
from penstock.hf.pieces import Loss, Notes, current_notes
from penstock.hf.training_arguments import refuse_logits
from penstock.ranks.group import Ranks
from penstock.tape import trees

INSTEAD = (
    "use evaluate and predict (in a prediction_step of your own super().prediction_step, which runs compute_loss), or "
    "load what save_model has written"
)
"""The ways to use a model that the engine has, for who calls it."""


@dataclass(kw_only=True)
class Evaluation:
    """State of an evaluation. ``ahead``: its data; ``known``: batches that wait there, with their results; ``most``:
    the number of batches that fit at once, where not all of a step's do, by the way to compute."""

    ahead: Ahead | None = None
    known: list[tuple[Any, Any]] = field(default_factory=list)
    most: dict[str, int] = field(default_factory=dict)


class EvaluationSteps(TrainerSteps):
    """The part of ``EngineMixin`` that evaluates."""

    _engine_arguments: EngineArguments
    _ranks: Ranks
    _evaluation: Evaluation
    tiles: Callable[[nn.Module], AbstractContextManager[None]]
    """Within, losses of a model are computed in tiles, if that was asked for."""
    _take_losses: Callable[[Sequence[Any], Sequence[Loss], str], list[Notes]]
    """Have the engine evaluate batches by their losses, which compute in this way; the notes of each."""

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """The library's own, on data of which several batches are known ahead, unless a subclass looks at each."""
        before = self._evaluation
        now = self._evaluation = Evaluation(most=before.most)
        if Ahead.can(dataloader) and type(self).prediction_step is EvaluationSteps.prediction_step:
            dataloader = now.ahead = Ahead(dataloader, self.args.gradient_accumulation_steps)
        try:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            self._evaluation = before

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """The library's own step of evaluation, run by the engine: its outputs, logits too, are whole on the device.

        Raises:
            ConfigError: the batch is no mapping, or ranks share each sequence, and more than the loss is asked for; or
                the model is not the engine's.
        """
        assert self.model is not None
        changes.check_model(model, self.model)
        if self._engine_arguments.cp > 1 and not prediction_loss_only:
            refuse_logits(self._engine_arguments.cp)
        if not isinstance(inputs, Mapping):
            raise ConfigError(
                f"data_collator returns a {type(inputs).__name__}, in which the library's evaluation finds no labels "
                "by name: let it return a dict"
            )
        above = super().prediction_step

        def step(of: nn.Module, prepared: Any) -> Any:
            with self.tiles(of) if prediction_loss_only else nullcontext():
                return above(of, prepared, prediction_loss_only, ignore_keys=ignore_keys)

        found: tuple[Any, Any, Any]
        now, together = self._evaluation, [inputs]
        if prediction_loss_only and now.ahead is not None and now.ahead.waiting and now.ahead.waiting[0] is inputs:
            together = list(takewhile(lambda batch: batch.keys() == inputs.keys(), now.ahead.waiting))
        if not (now.known and now.known[0][0] is inputs):
            # As many on each: who had more would wait for items that no other counts.
            with self._ranks.together("evaluate"):
                count = min(self._ranks.gather_objects("batches that are evaluated at once", len(together)))
            together = together[:count]
            results = self.evaluated(together, step, "" if prediction_loss_only else "outputs")
            now.known = list(zip(together, results, strict=True))
        _, found = now.known.pop(0)
        return found

    def evaluated(self, batches: Sequence[Any], compute: Callable[[nn.Module, Any], Any], way: str) -> list[Any]:
        """The results of ``compute(model, batch)`` of each batch, whose forwards the engine runs, in evaluation mode:
        all at once, or as many as fit. ``way``: that to compute, with a plan of its own, as of ``Beside``.

        Raises:
            BudgetError: not even one fits.
        """
        most = min(self._evaluation.most.get(way, len(batches)), len(batches))
        try:
            found = self._evaluated(batches[:most], compute, way)
        except BudgetError:
            if most == 1:
                raise
            self._evaluation.most[way] = (most + 1) // 2
            return self.evaluated(batches, compute, way)
        return found + (self.evaluated(batches[most:], compute, way) if most < len(batches) else [])

    def _evaluated(self, batches: Sequence[Any], compute: Callable[[nn.Module, Any], Any], way: str) -> list[Any]:
        def loss(of: nn.Module, prepared: Any, items: Any) -> torch.Tensor:
            notes = current_notes()
            assert notes is not None
            notes.items = items
            # Copied here, within the forward: so the engine sees that these are read, and keeps them until now.
            result = compute(of, prepared)
            together = joint.take_together(self._ranks)
            notes.result = joint.to_tell(result) if together else trees.replace(result, torch.Tensor.clone)
            return torch.zeros((), device=self.args.device)  # the library has the loss, which may be no number

        losses = [partial(loss, items=self.items_of([batch])) for batch in batches]
        return [notes.result for notes in self._take_losses(batches, losses, way)]

    def is_in_forward(self) -> bool:
        return current_notes() is not None

    def items_of_evaluation(self) -> Any:
        notes = current_notes()
        assert notes is not None
        return notes.items
