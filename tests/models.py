"""Small models of every shape that the tape must cope with, built from unmodified classes.

``MODELS[name]`` builds the model and makes micro-batches for it. Configurations are the smallest that still exercise
what makes the architecture special: tied embeddings, router losses, cross attention, position biases handed from block
to block, skips over all blocks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

MicroBatch = dict[str, torch.Tensor]

VOCABULARY = 96


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its micro-batches. ``build`` makes a new model in fp32."""

    build: Callable[[], nn.Module]
    micro_batch: Callable[[torch.Generator, int, int], MicroBatch]
    blocks: int
    loss_fn: Callable[[nn.Module, Mapping[str, Any]], torch.Tensor] = field(default=lambda m, mb: m(**mb).loss)

    def model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.build().train()

    def micro_batches(
        self, count: int, *, seed: int = 0, rows: int = 2, length: int = 12, dtype: torch.dtype = torch.float32
    ) -> list[MicroBatch]:
        """``count`` micro-batches of ``rows`` x ``length`` tokens; tensors that are not integers in ``dtype``."""
        generator = torch.Generator().manual_seed(seed)
        drawn = [self.micro_batch(generator, rows, length) for _ in range(count)]
        return [{k: t.to(dtype) if t.is_floating_point() else t for k, t in mb.items()} for mb in drawn]


def draw_tokens(generator: torch.Generator, rows: int, length: int, low: int = 2) -> torch.Tensor:
    return torch.randint(low, VOCABULARY, (rows, length), generator=generator)


def causal_lm(generator: torch.Generator, rows: int, length: int) -> MicroBatch:
    tokens = draw_tokens(generator, rows, length)
    return {"input_ids": tokens, "labels": tokens.clone()}


def masked_lm(generator: torch.Generator, rows: int, length: int) -> MicroBatch:
    tokens = draw_tokens(generator, rows, length)
    hidden = torch.rand(rows, length, generator=generator) < 0.3
    hidden[:, 0] = True
    padded = torch.ones(rows, length, dtype=torch.long)
    padded[0, -2:] = 0
    return {
        "input_ids": tokens.masked_fill(hidden, 1),
        "attention_mask": padded,
        "labels": tokens.masked_fill(~hidden, -100),
    }


def sequence_to_sequence(generator: torch.Generator, rows: int, length: int) -> MicroBatch:
    return {"input_ids": draw_tokens(generator, rows, length), "labels": draw_tokens(generator, rows, length // 2)}


def speech(generator: torch.Generator, rows: int, length: int) -> MicroBatch:
    sound = torch.randn(rows, 8, 2 * length, generator=generator)
    return {"input_features": sound, "labels": draw_tokens(generator, rows, length // 2)}


def images(generator: torch.Generator, rows: int, length: int) -> MicroBatch:
    pixels = torch.randn(rows, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 2, (rows,), generator=generator)}


def decoder(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "use_cache": False,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "attn_implementation": "eager",
        "experts_implementation": "eager",  # the grouped product has no float64
    }
    return base | changes


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**decoder(tie_word_embeddings=False) | changes))


def qwen3(**changes: Any) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**decoder(tie_word_embeddings=True) | changes))


def mistral(**changes: Any) -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**decoder(sliding_window=4) | changes))


def phi(**changes: Any) -> nn.Module:
    from transformers import PhiConfig, PhiForCausalLM

    settings = decoder(num_key_value_heads=4)
    settings.pop("head_dim")
    return PhiForCausalLM(PhiConfig(**settings | changes))


def phi3(**changes: Any) -> nn.Module:
    from transformers import Phi3Config, Phi3ForCausalLM

    settings = decoder()
    settings.pop("head_dim")
    return Phi3ForCausalLM(Phi3Config(**settings | changes))


def gpt2(**changes: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = {
        "vocab_size": VOCABULARY,
        "n_positions": 64,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "use_cache": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "attn_implementation": "eager",
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
    }
    return GPT2LMHeadModel(GPT2Config(**settings | changes))


def mixtral(**changes: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    settings = decoder(num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.1)
    return MixtralForCausalLM(MixtralConfig(**settings | changes))


def qwen3_moe(**changes: Any) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    settings = decoder(
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
        mlp_only_layers=[1],
    )
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings | changes))


def gpt_oss(**changes: Any) -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    settings = decoder(
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
    )
    return GptOssForCausalLM(GptOssConfig(**settings | changes))


def gemma3(**changes: Any) -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    settings = decoder(sliding_window=4, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    return Gemma3ForCausalLM(Gemma3TextConfig(**settings | changes))


def deepseek_v3(**changes: Any) -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    settings = decoder(
        num_key_value_heads=4,
        head_dim=None,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    )
    settings.pop("head_dim")
    return DeepseekV3ForCausalLM(DeepseekV3Config(**settings | changes))


def bert(**changes: Any) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "attn_implementation": "eager",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
    }
    return BertForMaskedLM(BertConfig(**settings | changes))


def t5(**changes: Any) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    settings = {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_decoder_layers": 3,
        "num_heads": 4,
        "use_cache": False,
        "decoder_start_token_id": 0,
        "dropout_rate": 0.1,
    }
    return T5ForConditionalGeneration(T5Config(**settings | changes))


def whisper(**changes: Any) -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    settings = {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_source_positions": 12,
        "max_target_positions": 16,
        "num_mel_bins": 8,
        "use_cache": False,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return WhisperForConditionalGeneration(WhisperConfig(**settings | changes))


def vit(**changes: Any) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    settings = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 4,
    }
    return ViTForImageClassification(ViTConfig(**settings | changes))


class Skips(nn.Module):
    """Down and up again: skips over all blocks, batch norm, a scale between blocks, and a head tied to the input."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.down = nn.ModuleList(_Residual(width) for _ in range(2))
        self.up = nn.ModuleList(_Residual(width) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = first = torch.tanh(self.embed(tokens))
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
        x = x * self.scale
        for block in self.up:
            x = block(x + skips.pop().sin(), again=first)
        return nn.functional.cross_entropy(self.head(x + first).flatten(0, 1), tokens.flatten())


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.linear = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, again: torch.Tensor | None = None) -> torch.Tensor:
        y = self.drop(torch.relu(self.linear(self.norm(x.flatten(0, 1)).view_as(x))))
        return x + y if again is None else x + y * again


class Plain(nn.Module):
    """Three layers with dropout between an embedding and a head, which may be tied."""

    def __init__(self, *, tied: bool = False, width: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(_Widened(width, dropout) for _ in range(3))
        self.head = nn.Linear(width, VOCABULARY)
        if tied:
            nn.init.normal_(self.embed.weight, std=0.02)  # else each token is told from the others already
            self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class _Widened(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.relu(self.up(x))))


PLAIN = Case(build=Plain, micro_batch=causal_lm, blocks=3, loss_fn=lambda m, mb: m(**mb))
"""For tests that are about no model: an engine on it costs a third of one on a transformer."""
TIED = replace(PLAIN, build=lambda: Plain(tied=True))
SURE = replace(PLAIN, build=lambda: Plain(dropout=0.0))
"""Without dropout: what a step does depends on no step number."""


MODELS: dict[str, Case] = {
    "llama": Case(build=llama, micro_batch=causal_lm, blocks=3),
    "llama_sdpa": Case(build=lambda: llama(attn_implementation="sdpa"), micro_batch=causal_lm, blocks=3),
    "qwen3": Case(build=qwen3, micro_batch=causal_lm, blocks=3),
    "gpt2": Case(build=gpt2, micro_batch=causal_lm, blocks=3),
    "mixtral": Case(build=mixtral, micro_batch=causal_lm, blocks=3),
    "qwen3_moe": Case(build=qwen3_moe, micro_batch=causal_lm, blocks=3),
    "gpt_oss": Case(build=gpt_oss, micro_batch=causal_lm, blocks=3),
    "gemma3": Case(build=gemma3, micro_batch=causal_lm, blocks=3),
    "deepseek_v3": Case(build=deepseek_v3, micro_batch=causal_lm, blocks=3),
    "bert": Case(build=bert, micro_batch=masked_lm, blocks=3),
    "t5": Case(build=t5, micro_batch=sequence_to_sequence, blocks=5),
    "whisper": Case(build=whisper, micro_batch=speech, blocks=4),
    "vit": Case(build=vit, micro_batch=images, blocks=3),
    "skips": Case(
        build=Skips,
        micro_batch=lambda g, rows, length: {"tokens": draw_tokens(g, rows, length)},
        blocks=4,
        loss_fn=lambda m, mb: m(**mb),
    ),
}
COLLECTING = replace(MODELS["llama_sdpa"], loss_fn=lambda m, mb: m(**mb, output_hidden_states=True).loss)
"""The library collects what each block puts out, in a list that later blocks are called with."""
