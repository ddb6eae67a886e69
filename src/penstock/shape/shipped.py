"""Models that ship by name, as the Hugging Face configurations that they have.

``gpt-*``: GPT-3's architecture (learned positions, tied head, 4 h wide MLP; Brown et al. 2020, table 2.1) in GPT-2's
code, in the sizes that work on offloading reports. The others are the makers' published configurations; gpt-oss, a
mixture of experts, has no formula and needs transformers to be installed.
"""

from collections.abc import Mapping
from typing import Any


def _gpt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_positions": 2048,
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def _decoder(model_type: str, layers: int, hidden: int, intermediate: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        **more,
    }


CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "gpt-13b": _gpt(40, 5120, 40),
    "gpt-30b": _gpt(48, 7168, 56),
    "gpt-65b": _gpt(80, 8192, 64),
    "gpt-175b": _gpt(96, 12288, 96),
    "llama-8b": _decoder("llama", 32, 4096, 14336, 32, vocab_size=128256, max_position_embeddings=131072),
    "llama-70b": _decoder("llama", 80, 8192, 28672, 64, vocab_size=128256, max_position_embeddings=131072),
    "qwen3-8b": _decoder("qwen3", 36, 4096, 12288, 32, vocab_size=151936, max_position_embeddings=40960),
    "qwen3-14b": _decoder("qwen3", 40, 5120, 17408, 40, vocab_size=151936, max_position_embeddings=40960),
    "gpt-oss-20b": _decoder(
        "gpt_oss",
        24,
        2880,
        2880,
        64,
        vocab_size=201088,
        max_position_embeddings=131072,
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        sliding_window=128,
    ),
}


_REPOSITORIES: Mapping[str, tuple[str, ...]] = {
    "llama-8b": ("Llama-3.1-8B", "Llama-3.1-8B-Instruct", "Meta-Llama-3.1-8B", "Meta-Llama-3.1-8B-Instruct"),
    "llama-70b": (
        *("Llama-3.1-70B", "Llama-3.1-70B-Instruct", "Meta-Llama-3.1-70B", "Meta-Llama-3.1-70B-Instruct"),
        "Llama-3.3-70B-Instruct",
    ),
    "qwen3-8b": ("Qwen3-8B",),
    "qwen3-14b": ("Qwen3-14B",),
}
_OWNERS = {"llama": "meta-llama", "qwen3": "Qwen"}
ON_THE_HUB: Mapping[str, str] = {
    f"{_OWNERS[name.partition('-')[0]]}/{repository}": name
    for name, repositories in _REPOSITORIES.items()
    for repository in repositories
}
"""Repositories of Hugging Face's hub whose published configuration ships under a name: planning them needs no hub."""


def shipped_name(name: str) -> str | None:
    """The name that a model ships by, of that name or of its repository on the hub; None: it does not ship."""
    return name if name in CONFIGS else ON_THE_HUB.get(name)
