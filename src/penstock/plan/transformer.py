"""Decoder-only transformers whose program follows from a few numbers by formula: in microseconds, without torch.

Known are the Hugging Face types gpt2, llama, mistral and qwen3, with fused (flash) attention and without dropout. The
param groups, the stages, what they read, checkpoints, their gradients and the FLOP equal those of a dry run of the
model (``meta``) exactly. The temporaries of a stage (its peaks) are a formula too, above a dry run's by little.

T tokens in a micro-batch of sequences of length s, width h, q = heads x head_dim, k = kv_heads x head_dim, f the MLP's
width, V the vocabulary, all matrices of a block W elements: a block's forward is 2·T·W + 4·T·s·q FLOP (for GPT,
24·T·h² + 4·T·s·h), its backward the recomputed forward, and twice the products (2.5 times attention's, whose scores
are not kept).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from penstock.errors import ConfigError
from penstock.plan.model import ModelProfile
from penstock.schedule.place import FP32, Format
from penstock.schedule.program import LARGE_END, GroupSpec, Program, Stage, flat_numel


@dataclass(frozen=True, kw_only=True)
class End:
    """A module outside the blocks: the elements of its parameters, and where its weights are used."""

    name: str
    sizes: tuple[int, ...]
    first: bool
    """in the prologue"""
    last: bool
    """in the epilogue"""


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """The numbers that a decoder's program follows from. A ``ModelShape``.

    ``positions``: of learned position embeddings, 0 where they are rotary. ``longest``: the longest sequence whose
    attention mask is plain causal. ``gated``: an MLP of three matrices (SwiGLU), else of two.
    """

    name: str
    path: str
    """name of the list of blocks in the model"""
    ends: tuple[End, ...]
    block: tuple[int, ...]
    """elements of each parameter of a block"""
    matrices: int
    """elements of a block's weight matrices"""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    gated: bool
    longest: int

    def profile(self, micro_batch_size: int, sequence_length: int, form: Format) -> ModelProfile:
        """See ``ModelShape.profile``. Weights of 2 bytes are bf16.

        Raises:
            ConfigError: sequences longer than the model takes.
        """
        if sequence_length > self.longest:
            raise ConfigError(
                f"sequence_length={sequence_length}: {self.name} takes at most {self.longest} tokens at a time. Lower "
                "it, or plan for a model with more positions"
            )
        sizes = _Sizes(shape=self, rows=micro_batch_size, length=sequence_length, weight_bytes=form.weight_bytes)
        stages = (sizes.prologue(), *(sizes.call(i) for i in range(self.layers)), sizes.epilogue())
        block, head = sizes.block_flops(), 2 * sizes.tokens * self.hidden * self.vocabulary
        attention = 4 * sizes.tokens * sequence_length * self.heads * self.head_dim
        backward = block + 2 * block + attention / 2
        return ModelProfile(
            program=Program(groups=self.groups, stages=stages),
            forward_flops=(0.0, *(float(block),) * self.layers, 3.0 * head),
            backward_flops=(0.0, *(float(backward),) * self.layers, 0.0),
            tokens=sizes.tokens,
            parameters=sum(n for end in self.ends for n in end.sizes) + self.layers * sum(self.block),
        )

    @cached_property
    def groups(self) -> tuple[GroupSpec, ...]:
        """As ``tape.groups.group_parameters`` makes them: large ends, small ends, blocks."""
        small = [n for end in self.ends if not _large(end) for n in end.sizes]
        named = [(f"ends.{end.name}", end.sizes) for end in self.ends if _large(end)]
        named += [("ends.small", tuple(small))] if small else []
        named += [(f"blocks.{self.path}.{i}", self.block) for i in range(self.layers)]
        return tuple(
            GroupSpec(index=i, name=name, trainable=flat_numel(sizes), frozen=0)
            for i, (name, sizes) in enumerate(named)
        )

    def readers(self, *, first: bool) -> tuple[int, ...]:
        """The groups of ends that the prologue (``first``) or the epilogue reads."""
        index = {g.name: g.index for g in self.groups}
        ends = (end for end in self.ends if (end.first if first else end.last))
        return tuple(sorted({index[f"ends.{end.name}" if _large(end) else "ends.small"] for end in ends}))


def _large(end: End) -> bool:
    return sum(end.sizes) >= LARGE_END


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Bytes and FLOP of one micro-batch."""

    shape: Transformer
    rows: int
    length: int
    weight_bytes: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def states(self) -> int:
        """Bytes of the hidden states of all tokens."""
        return self.tokens * self.shape.hidden * self.weight_bytes

    def block_flops(self) -> int:
        shape = self.shape
        return 2 * self.tokens * shape.matrices + 4 * self.tokens * self.length * shape.heads * shape.head_dim

    def prologue(self) -> Stage:
        reads = self.shape.readers(first=True)
        return Stage(
            index=0,
            kind="segment",
            name="prologue",
            forward_reads=reads,
            backward_reads=(),
            gradients=reads,
            checkpoint=self.states,
            gradient=self.states,
            kept=self.tokens * 8,
            forward_peak=self.states,
            backward_peak=max((g.numel for g in self.shape.groups[: reads[-1] + 1]), default=0) * self.weight_bytes,
        )

    def call(self, layer: int) -> Stage:
        shape = self.shape
        group = len(shape.groups) - shape.layers + layer
        e, h, f = self.weight_bytes, shape.hidden, shape.intermediate
        qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        wide = (3 if shape.gated else 2) * f
        forward = self.tokens * e * (h + max(wide, 2 * qkv))
        saved = self.tokens * (e * (4 * h + 2 * qkv + (4 if shape.gated else 2) * f) + (e == 2) * FP32 * 4 * h)
        return Stage(
            index=1 + layer,
            kind="call",
            name=f"{shape.path}.{layer}",
            forward_reads=(group,),
            backward_reads=(group,),
            gradients=(group,),
            checkpoint=self.states,
            gradient=self.states,
            kept=0,
            forward_peak=forward,
            backward_peak=saved + self.tokens * e * (h + 2 * f),
        )

    def epilogue(self) -> Stage:
        shape = self.shape
        reads = shape.readers(first=False)
        logits = self.tokens * shape.vocabulary * FP32
        return Stage(
            index=1 + shape.layers,
            kind="segment",
            name="epilogue",
            forward_reads=reads,
            backward_reads=(),
            gradients=reads,
            checkpoint=0,
            gradient=0,
            kept=0,
            forward_peak=3 * logits + 4 * self.states + shape.hidden * shape.vocabulary * self.weight_bytes,
            backward_peak=0,
        )


# ---- from a Hugging Face configuration

_WITHOUT_EFFECT = frozenset(
    {
        *("architectures", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "torch_dtype", "dtype"),
        *("transformers_version", "use_cache", "rms_norm_eps", "layer_norm_epsilon", "rope_theta", "rope_scaling"),
        *(
            "rope_parameters",
            "pretraining_tp",
            "summary_type",
            "summary_use_proj",
            "summary_activation",
            "_name_or_path",
        ),
        *("summary_proj_to_labels", "summary_first_dropout", "task_specific_params", "max_window_layers"),
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
        """Whether these settings, where they are given at all, have the only values that the formulas are for."""
        return all(self._left.pop(key, value) == value for key, value in wanted.items())

    def without(self, *dropouts: str) -> bool:
        """Whether these settings, which are on by default, are all switched off."""
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
        block=(h, h, 3 * h * h, 3 * h, h * h, h, h, h, h * f, f, f * h, h),
        matrices=4 * h * h + 2 * h * f,
        layers=layers,
        hidden=h,
        heads=heads,
        kv_heads=heads,
        head_dim=h // heads,
        intermediate=f,
        vocabulary=vocabulary,
        gated=False,
        longest=positions,
    )


def _llama(given: _Given, name: str) -> Transformer | None:
    attention_bias, mlp_bias = given.flag("attention_bias", False), given.flag("mlp_bias", False)
    return _decoder(given, name, head_dim=None, intermediate=11008, attention_bias=attention_bias, mlp_bias=mlp_bias)


def _mistral(given: _Given, name: str) -> Transformer | None:
    window = given.size("sliding_window", 4096, null=_ENDLESS)
    return _decoder(given, name, head_dim=None, intermediate=14336, kv_heads=8, window=window)


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
    window: int = _ENDLESS,
) -> Transformer | None:
    """The Llama family: RMS norms, rotary positions, grouped queries, SwiGLU. The keywords are a type's defaults."""
    h, layers, heads = (
        given.size("hidden_size", 4096),
        given.size("num_hidden_layers", 32),
        given.size("num_attention_heads", 32),
    )
    kv_heads = given.size("num_key_value_heads", kv_heads or heads)
    d = given.size("head_dim", head_dim or max(h // heads, 1))
    f, vocabulary = given.size("intermediate_size", intermediate), given.size("vocab_size", 32000)
    given.size("max_position_embeddings", 2048)  # rotary: a recommendation, not a table
    tied = given.flag("tie_word_embeddings", False)
    plain = given.are(hidden_act="silu", attention_dropout=0.0, attn_implementation="sdpa")
    if not (plain and given.all_taken) or heads % kv_heads:
        return None
    q, k = heads * d, kv_heads * d
    attention = (q * h, k * h, k * h, h * q, *((q, k, k, h) if attention_bias else ()))
    mlp = (f * h, f * h, h * f, *((f, f, h) if mlp_bias else ()))
    return Transformer(
        name=name,
        path="model.layers",
        ends=(
            End(name="model.embed_tokens", sizes=(vocabulary * h,), first=True, last=tied),
            End(name="model.norm", sizes=(h,), first=False, last=True),
            *_head(h, vocabulary, tied),
        ),
        block=(*attention, *((d, d) if qk_norm else ()), *mlp, h, h),
        matrices=2 * q * h + 2 * k * h + 3 * f * h,
        layers=layers,
        hidden=h,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=d,
        intermediate=f,
        vocabulary=vocabulary,
        gated=True,
        longest=window,
    )


def _head(hidden: int, vocabulary: int, tied: bool) -> Sequence[End]:
    return () if tied else (End(name="lm_head", sizes=(vocabulary * hidden,), first=False, last=True),)
