"""Compares what a recomputed block returned with what its forward did."""

import torch
import xxhash

from penstock.compat.torch import unwatched
from penstock.tape import trees

_SAMPLE = 4096
_ROUNDING = 16
"""Units of rounding by which a recomputation may differ in the L2 norm: kernels may sum in any order."""


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Up to a few thousand of a tensor's elements, in fp64, unseen by whoever watches ops; none without a storage."""
    if not trees.has_storage(tensor):
        return torch.zeros(0, dtype=torch.float64)
    with torch.no_grad(), unwatched():
        flat = tensor.detach().flatten()
        part = flat[:: max(1, flat.numel() // _SAMPLE)][:_SAMPLE]
        return part.to(torch.float64, copy=True)  # the tensor may be changed in place


def fingerprint(tensor: torch.Tensor) -> int:
    """A number that tensors of other bits hardly ever share; 0 where there are none to look at, as on the meta device.
    Unseen by whoever watches ops."""
    if tensor.is_meta or not trees.has_storage(tensor) or not tensor.numel():
        return 0
    with torch.no_grad(), unwatched():
        there = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu().flatten().view(torch.uint8)
        return xxhash.xxh3_64_intdigest(there.numpy().data)


def alike(before: torch.Tensor, tensor: torch.Tensor, *, within: float = 0.0) -> bool:
    """True if a tensor is, but for rounding, the one that ``before`` is a sample of, or if that cannot be told.
    ``within``: the share of its norm by which rounding may make it differ, where that is more."""
    if not tensor.is_floating_point() or tensor.is_meta or not trees.has_storage(tensor):
        return True
    after = sample(tensor)
    with torch.no_grad(), unwatched():
        largest = max(_ROUNDING * torch.finfo(tensor.dtype).eps, within) * before.norm()
        return not bool(before.isfinite().all()) or bool((after - before).norm() <= largest)
