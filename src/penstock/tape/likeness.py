"""Compares what a recomputed block returned with what its forward did."""

import ctypes
from collections.abc import Sequence

import torch
import xxhash

from penstock.compat.torch import unwatched, without_functions
from penstock.errors import ModelError
from penstock.tape import trees

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SAMPLE = 4096
_ROUNDING = 16
"""Units of rounding by which a recomputation may differ in the L2 norm: kernels may sum in any order."""


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Up to a few thousand of a tensor's numbers, in fp64, unseen by whoever watches ops; none of a nested one."""
    if tensor.is_nested:
        return torch.zeros(0, dtype=torch.float64)
    with torch.no_grad(), unwatched():
        numbers = tensor.detach() if trees.has_storage(tensor) else tensor.detach().to_sparse().coalesce().values()
        flat = (torch.view_as_real(numbers.resolve_conj()) if numbers.is_complex() else numbers).flatten()
        part = flat[:: max(1, flat.numel() // _SAMPLE)][:_SAMPLE]
        return part.to(torch.float64, copy=True)  # the tensor may be changed in place


def fingerprint(tensor: torch.Tensor) -> int:
    """A number that tensors of other bits hardly ever share; 0 where there are none to look at, as on the meta device,
    or in a subclass that wraps others. Unseen by whoever watches ops."""
    with without_functions():
        if type(tensor) in _PLAIN and _is_one_piece(tensor):
            if not tensor.nbytes or not tensor.untyped_storage().nbytes():  # it may have been given back
                return 0
            return xxhash.xxh3_64_intdigest((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
    wraps = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if tensor.is_meta or wraps or not trees.has_storage(tensor) or not tensor.numel():
        return 0
    with torch.no_grad(), unwatched():
        if not tensor.untyped_storage().nbytes():
            return 0
        for dim in reversed(range(tensor.dim())):
            if tensor.shape[dim] == 1 or not tensor.stride(dim):  # it is expanded: the same numbers, many times
                tensor = tensor.select(dim, 0)
        there = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu().flatten().view(torch.uint8)
        return xxhash.xxh3_64_intdigest(there.numpy().data)


def _is_one_piece(tensor: torch.Tensor) -> bool:
    """True if a tensor's numbers lie in the processor's memory as they are, one after the other."""
    in_memory = tensor.device.type == "cpu" and tensor.layout == torch.strided and trees.has_storage(tensor)
    return in_memory and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def alike(before: torch.Tensor, tensor: torch.Tensor, *, within: float = 0.0) -> bool:
    """True if a tensor is, but for rounding, the one that ``before`` is a sample of, or if that cannot be told.
    ``within``: the share of its norm by which rounding may make it differ, where that is more."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
        return True
    after = sample(tensor)
    if after.shape != before.shape:
        return False
    with torch.no_grad(), unwatched():
        largest = max(_ROUNDING * torch.finfo(tensor.dtype).eps, within) * before.norm()
        return not bool(before.isfinite().all()) or bool((after - before).norm() <= largest)


class FirstOutputs:
    """Outputs of the calls of a probe's forward, by stage, until they are compared with those of the recomputation."""

    def __init__(self, *, bits: bool) -> None:
        """``bits``: ``are_same`` will be asked."""
        self._samples: dict[int, list[torch.Tensor]] = {}
        self._prints: dict[int, list[int]] | None = {} if bits else None

    def note(self, stage: int, outputs: Sequence[torch.Tensor]) -> None:
        self._samples[stage] = [sample(t) for t in outputs]
        if self._prints is not None:
            self._prints[stage] = [fingerprint(t) for t in outputs]

    def compare(self, stage: int, block: str, made: Sequence[torch.Tensor]) -> None:
        """Raises:
        ModelError: the recomputed outputs are not those of the forward, but for rounding.
        """
        for before, tensor in zip(self._samples.pop(stage), made, strict=True):
            if not alike(before, tensor):
                raise ModelError(
                    f"block {block!r} returned other numbers when it was recomputed from the same inputs: it keeps "
                    "something from one call to the next that is no buffer, draws random numbers from other "
                    "generators than the global ones of torch, numpy and Python, or asks if a graph is made "
                    "(torch.is_grad_enabled(), x.requires_grad, x.is_leaf). A block must do the same on the same "
                    "inputs"
                )

    def are_alike(self, stage: int, made: Sequence[torch.Tensor]) -> bool:
        """True if outputs are those of the forward, but for rounding."""
        before = self._samples[stage]
        return len(before) == len(made) and all(map(alike, before, made))

    def are_same(self, stage: int, made: Sequence[torch.Tensor]) -> bool:
        """True if the recomputed outputs have the bits of the forward's."""
        assert self._prints is not None
        return self._prints.pop(stage) == [fingerprint(t) for t in made]
