"""TRL's trainers of preferences on the engine: ``DPOTrainer`` and ``KTOTrainer``, whose loss has a reference."""

from penstock.compat.trl import DPOTrainer as PlainDPOTrainer
from penstock.compat.trl import KTOTrainer as PlainKTOTrainer
from penstock.compat.trl import of_dpo
from penstock.hf.reference import PreferenceMixin


class DPOTrainer(PreferenceMixin, PlainDPOTrainer):
    """``trl.DPOTrainer`` on the engine; takes ``engine=EngineArguments(...)`` beside TRL's own arguments.

    The ``DPOConfig`` says ``precompute_ref_log_probs=True``: the engine computes what the model says of the data before
    its first step, and keeps it in ``output_dir``, as ``reference-HASH.safetensors``. With ``peft_config`` it need not.

    Raises:
        ConfigError: an argument cannot be honoured; it is named, and what to do.
    """

    figures_of = of_dpo
    reference_columns = exact_entries = ("ref_chosen_logps", "ref_rejected_logps")


class KTOTrainer(PreferenceMixin, PlainKTOTrainer):
    """``trl.KTOTrainer`` on the engine, in one process; takes ``engine=EngineArguments(...)`` beside TRL's arguments.

    The ``KTOConfig`` says ``precompute_ref_log_probs=True``, as for ``DPOTrainer``.

    Raises:
        ConfigError: an argument cannot be honoured; it is named, and what to do.
    """

    reference_columns = exact_entries = ("ref_logps", "ref_KL_logps")
