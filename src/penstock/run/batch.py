"""Micro-batches: checked, moved to the device, and weighted so that the loss is the mean over tokens."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.errors import ConfigError, ModelError

MicroBatch = Mapping[str, Any]
Shapes = tuple[tuple[str, tuple[int, ...], str], ...]
MOST_POSITION = 1 << 16
"""Bytes of JSON that a position in the data may take: every commit writes it."""

_IGNORED = -100
_SHIFTS = re.compile(r"CausalLM|LMHeadModel|ForConditionalGeneration")
UNSHIFTED = frozenset(
    {
        "BartForCausalLM",
        "BigBirdPegasusForCausalLM",
        "BlenderbotForCausalLM",
        "BlenderbotSmallForCausalLM",
        "CpmAntForCausalLM",
        "MarianForCausalLM",
        "MBartForCausalLM",
        "MusicgenForCausalLM",
        "MusicgenMelodyForCausalLM",
        "MvpForCausalLM",
        "PegasusForCausalLM",
        "PLBartForCausalLM",
        "ProphetNetForCausalLM",
        "TrOCRForCausalLM",
        "WhisperForCausalLM",
        "XLMWithLMHeadModel",
        "XLNetLMHeadModel",
    }
)
"""Classes of transformers named as causal language models whose loss compares position i with label i."""


def check(micro_batches: Sequence[MicroBatch]) -> None:
    """Raises ModelError for a list that is empty, or whose members are no mappings or differ in their keys."""
    if isinstance(micro_batches, Mapping) or not isinstance(micro_batches, Sequence):
        raise ModelError(
            f"step() takes a list of micro-batches (mappings of tensors), not {type(micro_batches).__name__}"
        )
    if not micro_batches:
        raise ModelError("step() was given no micro-batches: give a list of at least one mapping of tensors")
    for m, mb in enumerate(micro_batches):
        if not isinstance(mb, Mapping):
            raise ModelError(f"micro-batch {m} is a {type(mb).__name__}: it must be a mapping of names to tensors")
        if not any(isinstance(value, torch.Tensor) and value.numel() for value in mb.values()):
            raise ModelError(f"micro-batch {m} holds no tensor with elements")
        if set(mb) != set(micro_batches[0]):
            extra = sorted(set(mb) ^ set(micro_batches[0]))
            raise ModelError(f"micro-batch {m} differs from micro-batch 0 in {', '.join(map(repr, extra))}")


def as_json(position: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A copy of a position in the data as it will be read back.

    Raises:
        ConfigError: JSON does not hold it, or it is too large for every commit to have it.
    """
    if position is None:
        return None
    try:
        text = json.dumps(position, allow_nan=False)
        copy = json.loads(text)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"position={position!r}: a commit holds what JSON holds: {error}") from None
    if copy != position:
        raise ConfigError(f"position={position!r}: JSON would give back another one, {copy!r}: use lists and text keys")
    if len(text) > MOST_POSITION:
        raise ConfigError(f"position: {len(text):,} bytes of JSON, and a commit takes {MOST_POSITION:,} at most")
    assert isinstance(copy, dict)
    return copy


def to_device(micro_batch: MicroBatch, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Copy tensors to the device; floating-point ones (pixels, audio features) in the compute dtype."""

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device=device, dtype=dtype if value.is_floating_point() else None, non_blocking=True)

    return {name: move(value) for name, value in micro_batch.items()}


def shapes(micro_batch: MicroBatch) -> Shapes:
    """What a plan depends on: names, shapes and dtypes of the tensors.

    A mask that hides something is as one with another dimension: models drop masks that hide nothing, and what they
    make of the others takes memory.
    """
    tensors = ((n, v) for n, v in sorted(micro_batch.items()) if isinstance(v, torch.Tensor))
    return tuple((name, (*value.shape, *_hides(name, value)), str(value.dtype)) for name, value in tensors)


def _hides(name: str, value: torch.Tensor) -> tuple[int, ...]:
    return (int(not bool(value.all())),) if name.endswith("attention_mask") and not value.is_meta else ()


def covers(planned: Shapes, wanted: Shapes) -> bool:
    """Whether a plan made for one micro-batch has room for another: same tensors, no dimension larger."""
    return len(planned) == len(wanted) and all(
        a[0] == b[0]
        and a[2] == b[2]
        and len(a[1]) == len(b[1])
        and all(x >= y for x, y in zip(a[1], b[1], strict=True))
        for a, b in zip(planned, wanted, strict=True)
    )


def nbytes(micro_batch: MicroBatch) -> int:
    return sum(v.numel() * v.itemsize for v in micro_batch.values() if isinstance(v, torch.Tensor))


def items(model: nn.Module, micro_batch: MicroBatch) -> int | None:
    """How many items a micro-batch's mean loss is the mean over: labels that are not -100. None if it has no labels.

    Decoder-only language models compare position i with label i+1, so their first label does not count, but for those
    that are known to leave the shift to their caller.
    """
    labels = micro_batch.get("labels")
    if not isinstance(labels, torch.Tensor):
        return None
    inner = getattr(model, "get_base_model", None)  # of a model with adapters, whose own class says nothing
    model = inner() if callable(inner) else model
    config = getattr(model, "config", None)
    name = type(model).__name__
    shifted = labels.ndim >= 2 and bool(_SHIFTS.search(name)) and name not in UNSHIFTED
    if shifted and not getattr(config, "is_encoder_decoder", False):
        labels = labels[..., 1:]
    if labels.is_floating_point():
        return int(labels.shape[0]) if labels.ndim else 1
    return int((labels != _IGNORED).sum())


def loss_weights(
    model: nn.Module, micro_batches: Sequence[MicroBatch], given: Sequence[float] | None = None
) -> list[float]:
    """Each micro-batch's share of the step's items; equal shares where there are no labels to count.

    ``given``: the weights, where the caller knows better: they are only checked.

    Raises:
        ModelError: a micro-batch has labels and none of them counts, so that its mean is undefined; or the given
            weights are not one finite number for each micro-batch.
    """
    if given is not None:
        if len(given) != len(micro_batches) or not all(math.isfinite(weight) for weight in given):
            raise ModelError(f"loss_weights={given!r} for {len(micro_batches)} micro-batches: give a number for each")
        return [float(weight) for weight in given]
    counts = [items(model, mb) for mb in micro_batches]
    for m, count in enumerate(counts):
        if count == 0:
            raise ModelError(f"micro-batch {m} has no label that counts (all are -100): leave it out of the step")
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return [1.0 / len(counts)] * len(counts)
    return [count / sum(known) for count in known]


def tokens(micro_batch: MicroBatch) -> int:
    """Tokens of a micro-batch for throughput: positions of ``input_ids``, else examples of the first tensor."""
    ids = micro_batch.get("input_ids")
    if isinstance(ids, torch.Tensor):
        return ids.numel()
    first = next(v for v in micro_batch.values() if isinstance(v, torch.Tensor))
    return int(first.shape[0]) if first.ndim else 1
