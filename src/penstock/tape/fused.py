"""The ops that a device would run: on the meta device, torch takes the plain path of those that are fused elsewhere.

The ops themselves have meta kernels; mostly, only torch's choice between them looks at the device. So the choice is
made here as torch makes it for that kind of device: memory and FLOP of a dry run are those of what will run.
"""

from typing import Any, Literal

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from penstock.compat import torch as private

Kind = Literal["cpu", "cuda"]

_PLAIN = functional.scaled_dot_product_attention


class Fused(TorchFunctionMode):
    """Runs attention (and on GPUs dropout) of meta tensors by the op that ``kind`` of device would choose."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self._kind = kind

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _PLAIN:
            return self._attend(*args, **kwargs)
        if func is functional.multi_head_attention_forward:  # calls attention inside, where this mode is off
            with private.attention_by(self._attend):
                return func(*args, **kwargs)
        if func is functional.dropout and self._kind == "cuda":
            return _dropout_cuda(*args, **kwargs)
        return func(*args, **kwargs)

    def _attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        attend = _attention_cpu if self._kind == "cpu" else _attention_cuda
        fused = attend(*args, **kwargs)
        return _PLAIN(*args, **kwargs) if fused is None else fused


def run_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: Kind) -> Any:
    """An op (below autograd) on the meta device, with the results that ``kind`` of device gives."""
    aten = torch.ops.aten
    if func is private.GROUPED_MM.default and args[0].dtype != torch.bfloat16:
        # Its meta kernel knows bf16 alone; devices know more. The shapes are the same.
        result = func(*(t.to(torch.bfloat16) for t in args[:2]), *args[2:], **kwargs)
        return torch.empty_strided(result.shape, result.stride(), dtype=args[0].dtype, device="meta")
    if func is aten.native_layer_norm.default and kind == "cpu":
        # Mean and deviation are in the weights' type on the CPU, and in fp32 elsewhere.
        out, mean, deviation = func(*args, **kwargs)
        dtype = args[0].dtype if args[2] is None else args[2].dtype
        return out, mean.to(dtype), deviation.to(dtype)
    return func(*args, **kwargs)


def _attention_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """The flash kernel of the CPU, where torch chooses it; None where it takes the plain path."""
    with private.unwatched():  # memory that is never touched costs nothing
        q, k, v = (_on_cpu(t) for t in (query, key, value))
        mask = None if attn_mask is None else _on_cpu(attn_mask)
        if not private.takes_flash(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa):
            return None
    result: torch.Tensor = private.FLASH_CPU(
        query, key, value, dropout_p, is_causal, attn_mask=_additive(attn_mask, query.dtype), scale=scale
    )[0]
    return result


def _attention_cuda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """Flash attention for 16 bits without a mask, else the memory-efficient kernel; None where neither will do.

    The rules are those of torch's ``sdp_utils.cpp`` for GPUs from Ampere on.
    """
    dims = {t.shape[-1] for t in (query, key, value)}
    if query.dim() != 4 or (max(dims) > 256 and query.element_size() == 2):
        return None
    result: torch.Tensor
    if query.element_size() == 2 and attn_mask is None and len(dims) == 1:
        result = private.FLASH(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return result
    if enable_gqa:
        return None
    bias = _additive(attn_mask, query.dtype)
    if bias is not None:
        bias = bias.expand(*query.shape[:2], query.shape[2], key.shape[2])
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    result = private.EFFICIENT(query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale)[0]
    return result


def _dropout_cuda(
    input: torch.Tensor,  # noqa: A002 -- it may be given by torch's name for it
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> torch.Tensor:
    """GPUs keep a mask of one byte per element, where the plain path keeps one of the input's type."""
    if inplace or not training or p == 0.0:
        return functional.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, training)[0]


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A boolean mask as what is added to the scores, made as torch makes it."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    shown = torch.scalar_tensor(0.0, dtype=dtype, device=mask.device)
    hidden = torch.scalar_tensor(-torch.inf, dtype=dtype, device=mask.device)
    return torch.where(mask, shown, hidden)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    stand_in = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return stand_in.requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else stand_in
