"""Small Hugging Face models as folders, as ``save_pretrained`` writes them, one for each way that names and layouts of
files differ from those of models in memory.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests import models

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: models.llama(num_hidden_layers=2),
    "llama-300": lambda: models.llama(num_hidden_layers=2, vocab_size=300),
    "llama-tied": lambda: models.llama(num_hidden_layers=2, tie_word_embeddings=True),
    "mixtral": lambda: models.mixtral(num_hidden_layers=2),  # experts are one tensor each
    "qwen3-moe": lambda: models.qwen3_moe(num_hidden_layers=2),
    "gpt-oss": lambda: models.gpt_oss(num_hidden_layers=2),
    "deepseek-v3": lambda: models.deepseek_v3(num_hidden_layers=2),  # persistent buffers
    "gemma3": lambda: models.gemma3(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]),
    "gpt2": lambda: models.gpt2(n_layer=2),
    "bert": lambda: models.bert(num_hidden_layers=2),
    "t5": lambda: models.t5(num_decoder_layers=2),
    "whisper": models.whisper,
    "vit": lambda: models.vit(num_hidden_layers=2),
}


def model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model with values that differ everywhere, those of buffers too."""
    torch.manual_seed(0)
    made: Any = MODELS[name]()
    if hasattr(made.config, "use_cache"):
        made.config.use_cache = True  # as folders have it
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
        kept = made.state_dict().keys()
        for name, buffer in made.named_buffers():
            if buffer.is_floating_point() and name in kept:
                buffer.normal_()
    return made.to(dtype)


def write(name: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """A folder that ``save_pretrained`` has written, in shards of 40 KB if nothing else is said."""
    model(name, dtype).save_pretrained(folder, **{"max_shard_size": "40KB", **options})
    return folder
