"""Decoders by their Hugging Face configurations: the numbers of a ``Transformer``, where its formulas are exact.

For each type, what it takes where a setting is missing, and the shapes of its parameters.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import ConfigError
from penstock.shape.transformer import End, Transformer

_WITHOUT_EFFECT = frozenset(
    {
        *("architectures", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "torch_dtype", "dtype"),
        *("transformers_version", "use_cache", "rms_norm_eps", "layer_norm_epsilon", "rope_theta", "rope_scaling"),
        *("rope_parameters", "pretraining_tp", "summary_type", "summary_use_proj", "summary_activation"),
        *("summary_proj_to_labels", "summary_first_dropout", "task_specific_params", "max_window_layers"),
        "_name_or_path",
    }
)
"""Settings that change neither sizes nor FLOP."""

_ENDLESS = 1 << 62


def from_config(config: Mapping[str, Any], *, name: str) -> Transformer | None:
    """The shape of a Hugging Face configuration; None where no formula is exact for it (``meta.from_config`` then).

    That is: another ``model_type``, a setting that is not known here, dropout, or another attention than fused.

    Raises:
        ConfigError: a size is no positive number.
    """
    build = {"gpt2": _gpt2, "llama": _llama, "mistral": _mistral, "qwen3": _qwen3}.get(str(config.get("model_type")))
    if build is None:
        return None
    given = {k: v for k, v in config.items() if k not in _WITHOUT_EFFECT and k != "model_type"}
    return build(_Given(given), name)


class _Given:
    """The settings of a configuration, each taken once; what is left over is unknown."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._left = dict(settings)

    def size(self, key: str, default: int, *, null: int | None = None) -> int:
        """A positive number. ``default`` is what the type takes where the key is missing, ``null`` where it is null."""
        value = self._left.pop(key, default)
        if value is None and null is not None:
            return null
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"model.config.{key}={value!r} must be a positive whole number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._left.pop(key, default))

    def are(self, **wanted: object) -> bool:
        """True if these settings, where they are given at all, have the only values that the formulas are for."""
        return all(self._left.pop(key, value) == value for key, value in wanted.items())

    def without(self, *dropouts: str) -> bool:
        """True if these settings, which are on by default, are all switched off."""
        return all(self._left.pop(key, 0.1) == 0.0 for key in dropouts)

    @property
    def all_taken(self) -> bool:
        return not self._left


def _gpt2(given: _Given, name: str) -> Transformer | None:
    h, layers, heads = given.size("n_embd", 768), given.size("n_layer", 12), given.size("n_head", 12)
    positions, vocabulary = given.size("n_positions", 1024), given.size("vocab_size", 50257)
    f = given.size("n_inner", 4 * h, null=4 * h)
    tied = given.flag("tie_word_embeddings", True)
    plain = given.are(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, reorder_and_upcast_attn=False)
    plain &= given.are(add_cross_attention=False, activation_function="gelu_new", attn_implementation="sdpa")
    plain &= given.without("resid_pdrop", "embd_pdrop", "attn_pdrop")
    if not (plain and given.all_taken) or h % heads:
        return None
    return Transformer(
        name=name,
        path="transformer.h",
        ends=(
            End(name="transformer.wte", sizes=(vocabulary * h,), first=True, last=tied),
            End(name="transformer.wpe", sizes=(positions * h,), first=True, last=False),
            End(name="transformer.ln_f", sizes=(h, h), first=False, last=True),
            *_head(h, vocabulary, tied),
        ),
        block=((h,), (h,), (h, 3 * h), (3 * h,), (h, h), (h,), (h,), (h,), (h, f), (f,), (f, h), (h,)),
        matrices=4 * h * h + 2 * h * f,
        layers=layers,
        hidden=h,
        heads=heads,
        kv_heads=heads,
        head_dim=h // heads,
        intermediate=f,
        vocabulary=vocabulary,
        gated=False,
        qk_norm=False,
        positions=positions,
        window=_ENDLESS,
    )


def _llama(given: _Given, name: str) -> Transformer | None:
    attention_bias, mlp_bias = given.flag("attention_bias", False), given.flag("mlp_bias", False)
    return _decoder(given, name, head_dim=None, intermediate=11008, attention_bias=attention_bias, mlp_bias=mlp_bias)


def _mistral(given: _Given, name: str) -> Transformer | None:
    window = given.size("sliding_window", 4096, null=_ENDLESS) - 1  # a sequence as long already has a mask made
    return _decoder(given, name, head_dim=None, intermediate=14336, kv_heads=8, positions=131072, window=window)


def _qwen3(given: _Given, name: str) -> Transformer | None:
    if not given.are(use_sliding_window=False):
        return None
    given.flag("sliding_window", False)  # has no effect then
    given.are(layer_types=None)  # nor has this
    attention_bias = given.flag("attention_bias", False)
    return _decoder(
        given,
        name,
        head_dim=128,
        intermediate=22016,
        vocabulary=151936,
        kv_heads=32,
        positions=32768,
        attention_bias=attention_bias,
        qk_norm=True,
    )


def _decoder(
    given: _Given,
    name: str,
    *,
    head_dim: int | None,
    intermediate: int,
    vocabulary: int = 32000,
    kv_heads: int | None = None,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    positions: int = 2048,
    window: int = _ENDLESS,
) -> Transformer | None:
    """The Llama family: RMS norms, rotary positions, grouped queries, SwiGLU. The keywords are a type's defaults."""
    h, layers, heads = (
        given.size("hidden_size", 4096),
        given.size("num_hidden_layers", 32),
        given.size("num_attention_heads", 32),
    )
    kv_heads = given.size("num_key_value_heads", kv_heads or heads, null=None if kv_heads else heads)
    each = max(h // heads, 1)
    d = given.size("head_dim", head_dim or each, null=each if head_dim is None else None)
    f, vocabulary = given.size("intermediate_size", intermediate), given.size("vocab_size", vocabulary)
    longest = given.size("max_position_embeddings", positions)
    tied = given.flag("tie_word_embeddings", False)
    plain = given.are(hidden_act="silu", attention_dropout=0.0, attn_implementation="sdpa")
    uneven = heads % kv_heads or (h % heads and head_dim is None) or d % 2  # Hugging Face refuses most of these
    if not (plain and given.all_taken) or uneven:
        return None
    q, k = heads * d, kv_heads * d
    attention = ((q, h), (k, h), (k, h), (h, q), *(((q,), (k,), (k,), (h,)) if attention_bias else ()))
    mlp = ((f, h), (f, h), (h, f), *(((f,), (f,), (h,)) if mlp_bias else ()))
    return Transformer(
        name=name,
        path="model.layers",
        ends=(
            End(name="model.embed_tokens", sizes=(vocabulary * h,), first=True, last=tied),
            End(name="model.norm", sizes=(h,), first=False, last=True),
            *_head(h, vocabulary, tied),
        ),
        block=(*attention, *(((d,), (d,)) if qk_norm else ()), *mlp, (h,), (h,)),
        matrices=2 * q * h + 2 * k * h + 3 * f * h,
        layers=layers,
        hidden=h,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=d,
        intermediate=f,
        vocabulary=vocabulary,
        gated=True,
        qk_norm=qk_norm,
        positions=longest,
        window=window,
    )


def _head(hidden: int, vocabulary: int, tied: bool) -> Sequence[End]:
    return () if tied else (End(name="lm_head", sizes=(vocabulary * hidden,), first=False, last=True),)
