"""TRL's ``SFTTrainer`` on the engine."""

from typing import Any

import torch
from torch import nn

from penstock.compat.trl import SFTTrainer as PlainSFTTrainer
from penstock.compat.trl import of_sft
from penstock.engine.labels import IGNORED
from penstock.hf.trl_trainer import TRLMixin


class SFTTrainer(TRLMixin, PlainSFTTrainer):
    """``trl.SFTTrainer`` on the engine; takes ``engine=EngineArguments(...)`` beside TRL's own arguments.

    Raises:
        ConfigError: an argument cannot be honoured; it is named, and what to do.
    """

    figures_of = of_sft

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
