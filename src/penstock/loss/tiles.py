"""The cross-entropy of a linear head, tile by tile: no more logits are alive at once than those of ``tile`` tokens.

For hidden states H [T, h], weights W [V, h] and labels, with f what the model does to each logit (mostly nothing):

    forward     by tokens:      z = H[t] Wᵀ + b,  y = f(z),  lse[t] = logsumexp(y),  loss = lse[t] - y[t, label]
    backward    by vocabulary:  z = H W[v]ᵀ + b,  dy = g (exp(f(z) - lse) - onehot)[:, v],  dz = dy f'(z)
                                dW[v] = dzᵀ H,  dH += dz W[v]

A slice of the vocabulary is as wide as makes it as large as a tile of tokens. The backward goes by slices of the
vocabulary and not by tokens so that each row of dW is one product over all tokens, written once: sums over tiles would
need dW in fp32 beside it, which is larger than the logits. dH is summed over slices in fp32. Logits are computed twice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

Elementwise = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Entropy:
    """The settings of a cross-entropy. ``after``: functions that the model applies to each logit, in order."""

    tile: int
    after: tuple[Elementwise, ...]
    ignore_index: int
    smoothing: float

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for function in self.after:
            logits = function(logits)
        return logits


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, entropy: Entropy
) -> torch.Tensor:
    """The sum over tokens of the cross-entropy of ``hidden @ weight.T + bias``, in fp32 (fp64 for fp64 logits).

    ``hidden``: [T, h]; ``weight``: [V, h]; ``bias``: [V]; ``labels``: int64 [T], where ``ignore_index`` counts nothing.
    """
    result = _LinearCrossEntropy.apply(hidden, weight, bias, labels, entropy)  # type: ignore[no-untyped-call]
    assert isinstance(result, torch.Tensor)
    return result


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        entropy: Entropy,
    ) -> torch.Tensor:
        rows, s = hidden.shape[0], entropy.smoothing
        sums, losses = [], []
        for start in range(0, max(rows, 1), entropy.tile):  # none at all are a tile, too
            tile = slice(start, start + entropy.tile)
            logits = entropy.apply(functional.linear(hidden[tile], weight, bias))
            logits = logits.to(_wide(logits.dtype))
            top = logits.amax(-1, keepdim=True)
            sums.append((logits - top).exp_().sum(-1).log_().add_(top.squeeze(-1)))
            valid = labels[tile] != entropy.ignore_index
            target = logits.gather(1, labels[tile].where(valid, 0).unsqueeze(1)).squeeze(1)
            loss = (sums[-1] - target) if s == 0 else sums[-1] - (1 - s) * target - s * logits.mean(-1)
            losses.append(loss.where(valid, 0))
            del logits, top
        log_sums = torch.cat(sums)
        ctx.save_for_backward(hidden, weight, bias, labels, log_sums)
        ctx.entropy = entropy
        return torch.cat(losses).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, labels, log_sums = ctx.saved_tensors
        entropy: Entropy = ctx.entropy
        rows, vocabulary = hidden.shape[0], weight.shape[0]
        width = max(1, entropy.tile * vocabulary // max(rows, entropy.tile))
        valid = labels != entropy.ignore_index
        factor = (gradient * valid).to(log_sums.dtype).unsqueeze(1)
        on_hidden = torch.zeros_like(hidden, dtype=log_sums.dtype) if ctx.needs_input_grad[0] else None
        on_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        on_bias = torch.empty_like(bias) if ctx.needs_input_grad[2] else None
        for start in range(0, vocabulary, width):
            part = slice(start, start + width)
            logits = functional.linear(hidden, weight[part], None if bias is None else bias[part])
            slope = _slope(logits, labels.where(valid, -1) - start, log_sums, factor, entropy, vocabulary)
            del logits
            if on_hidden is not None:
                on_hidden += slope @ weight[part]
            if on_weight is not None:
                torch.mm(slope.t(), hidden, out=on_weight[part])
            if on_bias is not None:
                on_bias[part] = slope.sum(0)
            del slope
        on_hidden = None if on_hidden is None else on_hidden.to(hidden.dtype)
        return on_hidden, on_weight, on_bias, None, None


def _slope(
    logits: torch.Tensor,
    labels: torch.Tensor,
    log_sums: torch.Tensor,
    factor: torch.Tensor,
    entropy: Entropy,
    vocabulary: int,
) -> torch.Tensor:
    """The gradient with respect to a slice of the head's output. ``labels`` count from the slice's start."""
    width = logits.shape[1]
    with torch.enable_grad():
        head = logits.requires_grad_()
        after = entropy.apply(head)
    slope = (after.detach().to(log_sums.dtype) - log_sums.unsqueeze(1)).exp_()
    if entropy.smoothing:
        slope.sub_(entropy.smoothing / vocabulary)
    inside = (labels >= 0) & (labels < width)
    at = labels.clamp(0, width - 1).unsqueeze(1)
    there = slope.gather(1, at) - (1 - entropy.smoothing) * inside.unsqueeze(1).to(slope.dtype)
    slope.scatter_(1, at, there)
    slope.mul_(factor)
    if after is head:
        return slope.to(logits.dtype)
    slope = slope.to(after.dtype)
    return torch.autograd.grad(after, head, slope)[0]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
