"""The settings of a run that nobody trains, for tests of what surrounds it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.config import (
    BatchConfig,
    Budget,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TokenizerConfig,
    TokenizerTrainingConfig,
    TrainConfig,
)


def settings_for(run: Path, **changes: Any) -> TrainConfig:
    """Of a run whose folder is ``run`` and whose store is in it."""
    config = TrainConfig(
        run=str(run),
        model=ModelConfig(init=True, config={"model_type": "llama"}),
        data=DataConfig(
            sources="stdlib",
            tokenizer=TokenizerConfig(train=TokenizerTrainingConfig(vocabulary=512)),
            sequence_length=64,
        ),
        optimizer=OptimizerConfig(lr=1e-3),
        batch=BatchConfig(sequences=4),
        micro_batch_size=2,
        budget=Budget(device="1MiB", host="1MiB", disk=str(run / "store")),
        steps=5,
    )
    return replace(config, **changes)
