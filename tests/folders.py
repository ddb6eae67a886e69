"""Small Hugging Face models as folders, as ``save_pretrained`` writes them, one for each way that names and layouts of
files differ from those of models in memory.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

VOCABULARY = 96

_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_WHISPER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 16,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 1,
}
_DEEPSEEK: dict[str, Any] = {
    **{key: value for key, value in _SMALL.items() if key != "head_dim"},
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_VIT: dict[str, Any] = {"num_attention_heads": 4, "num_hidden_layers": 2, "image_size": 16, "patch_size": 8}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SMALL)),
    "llama-300": lambda: LlamaForCausalLM(LlamaConfig(**{**_SMALL, "vocab_size": 300})),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**_SMALL, tie_word_embeddings=True)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**_SMALL, num_local_experts=4)),  # experts are one tensor each
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**_SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    ),
    "gpt-oss": lambda: GptOssForCausalLM(GptOssConfig(**_SMALL, num_local_experts=4, num_experts_per_tok=2)),
    "deepseek-v3": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**_DEEPSEEK)),  # persistent buffers
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**_SMALL, layer_types=["sliding_attention", "full_attention"], sliding_window=8)
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=1
        )
    ),
    "bert": lambda: BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
        )
    ),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    ),
    "whisper": lambda: WhisperForConditionalGeneration(WhisperConfig(**_WHISPER)),
    "vit": lambda: ViTForImageClassification(ViTConfig(hidden_size=32, intermediate_size=64, **_VIT)),
}


def model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model with values that differ everywhere, those of buffers too."""
    torch.manual_seed(0)
    made = MODELS[name]()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
        for module in made.modules():
            for key, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point() and key not in module._non_persistent_buffers_set:
                    buffer.normal_()
    return made.to(dtype)


def write(name: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """A folder that ``save_pretrained`` has written, in shards of 40 KB if nothing else is said."""
    model(name, dtype).save_pretrained(folder, **{"max_shard_size": "40KB", **options})
    return folder
