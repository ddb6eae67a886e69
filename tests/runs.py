"""Small runs of ``penstock train``: their settings, as a file and as an object, and the text that they train on."""

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
    """The settings of a run whose folder is ``run`` and whose store is in it."""
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


FROM_NOTHING = """\
run: {run}
model:
  init: true
  config: {{model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2}}
data:
  sources: "{text}"
  tokenizer: {{train: {{vocabulary: 300}}}}
  sequence_length: 32
  packing: continuous
  validation: {{share: 0.1}}
optimizer: {{lr: 3e-3, overrides: [{{match: norm, weight_decay: 0.0}}]}}
lr_schedule: {{warmup_steps: 2}}
budget: {{device: 8MiB, host: 12MiB, disk: "{{run}}/store", weights: disk, state: disk}}
evaluate: {{every: 2, batches: 1}}
batch: {{sequences: 4}}
micro_batch_size: 2
clip_grad_norm: 2.43  # less than the norm of one step of the four
device: cpu
steps: 4
plan: null
"""
OF_THREE_BLOCKS = FROM_NOTHING.replace("num_hidden_layers: 2", "num_hidden_layers: 3").replace("2.43", "2.6")
"""For ranks, which may have unequal numbers of them."""
FROM_A_FOLDER = """\
run: {run}
model: {model}
data: {{sources: "{text}", sequence_length: 32}}
optimizer: {{lr: 1e-3}}
budget: {{device: 8MiB, host: 12MiB, disk: "{{run}}/store", weights: disk, state: disk}}
batch: {{sequences: 2}}
micro_batch_size: 1
clip_grad_norm: null
device: cpu
steps: 2
plan: null
"""


def write_text(path: Path, lines: int = 1500) -> Path:
    """A file of text. Under 1000 lines are one document, of which none can be held out."""
    path.write_text("".join(f"the {i * i} penstocks of {i % 11} turbines carry water\n" for i in range(lines)))
    return path


def write_run(
    folder: Path, *, settings: str = FROM_NOTHING, run: Path | None = None, lines: int = 1500, **more: object
) -> Path:
    """A settings file in ``folder``, beside its text.

    ``run``: the run's folder, if it is not one in ``folder``. ``more``: what else ``settings`` names in braces.
    """
    path = folder / "config.yaml"
    path.write_text(settings.format(run=run or folder / "run", text=write_text(folder / "text.txt", lines), **more))
    return path


def write_run_of_three_blocks(folder: Path, **more: Any) -> Path:
    """``write_run`` of a model with a block more."""
    return write_run(folder, settings=OF_THREE_BLOCKS, **more)
