"""TRL's trainers on the engine. Each takes ``engine=EngineArguments(...)`` beside TRL's own arguments."""

from typing import Any

import torch
from torch import nn

from penstock.compat import trl
from penstock.engine.labels import IGNORED
from penstock.hf.reference import PreferenceMixin
from penstock.hf.trl_trainer import TRLMixin


class SFTTrainer(TRLMixin, trl.SFTTrainer):
    """``trl.SFTTrainer`` on the engine; takes ``engine=EngineArguments(...)`` beside TRL's own arguments.

    Raises:
        ConfigError: an argument cannot be honoured; it is named, and what to do.
    """

    figures_of = trl.of_sft

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


class RewardTrainer(TRLMixin, trl.RewardTrainer):
    """``trl.RewardTrainer`` on the engine; takes ``engine=EngineArguments(...)`` beside TRL's own arguments.

    Raises:
        ConfigError: an argument cannot be honoured; it is named, and what to do.
    """

    figures_of = trl.of_reward
    exact_entries = ("margin",)


class DPOTrainer(PreferenceMixin, trl.DPOTrainer):
    """``trl.DPOTrainer`` on the engine; takes ``engine=EngineArguments(...)`` beside TRL's own arguments.

    The ``DPOConfig`` says ``precompute_ref_log_probs=True``: the engine computes what the model says of the data before
    its first step, and keeps it in ``output_dir``, as ``reference-HASH.safetensors``. With ``peft_config`` it need not.

    Raises:
        ConfigError: an argument cannot be honoured; it is named, and what to do.
    """

    figures_of = trl.of_dpo
    reference_columns = exact_entries = ("ref_chosen_logps", "ref_rejected_logps")


class KTOTrainer(PreferenceMixin, trl.KTOTrainer):
    """``trl.KTOTrainer`` on the engine, in one process; takes ``engine=EngineArguments(...)`` beside TRL's arguments.

    The ``KTOConfig`` says ``precompute_ref_log_probs=True``, as for ``DPOTrainer``.

    Raises:
        ConfigError: an argument cannot be honoured; it is named, and what to do.
    """

    reference_columns = exact_entries = ("ref_logps", "ref_KL_logps")
