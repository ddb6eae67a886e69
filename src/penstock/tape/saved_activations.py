"""Saved activations of a step: tensors that a stage made and only the next one reads, which may leave in between."""

import gc
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from penstock.compat.torch import without_subclasses
from penstock.errors import ModelError
from penstock.tape import trees
from penstock.tape.let_go import let_go, take_back


@dataclass(frozen=True, kw_only=True)
class _Movable:
    """A tensor of a saved activation. ``order``: its dimensions in the order of memory, by which its strides come back.

    Kernels may sum in another order for other strides, so a saved activation must return with the strides that it had.
    """

    tensor: torch.Tensor
    order: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Movable":
        order = trees.memory_order(tensor)
        assert order is not None
        return cls(tensor=tensor, order=order)

    def contiguous(self) -> torch.Tensor:
        with without_subclasses():  # of what has been let go of the shape is asked for
            return self.tensor.detach().permute(self.order)

    def put(self, data: torch.Tensor) -> None:
        assert data.dtype == self.tensor.dtype
        assert data.shape == self.contiguous().shape
        assert data.is_contiguous()
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        self.tensor.data = data.detach().permute(back)
        take_back(self.tensor)


class SavedActivations:
    """The saved activations of each stage and micro-batch, from the forward that makes them to their backward.

    They share memory with what the model holds until ``drop``.
    """

    def __init__(self) -> None:
        self._movables: dict[tuple[int, int], list[_Movable]] = {}
        self._holes: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def note(self, stage: int, mb: int, tensors: Iterable[torch.Tensor]) -> None:
        """``tensors``: what a stage has made, or another rank for it."""
        self._movables[stage, mb] = [_Movable.of(tensor) for tensor in tensors]

    def of(self, stage: int, mb: int) -> list[torch.Tensor]:
        """The tensors that ``stage`` made and only stage + 1 reads.

        Contiguous tensors without a graph, of the same shapes and dtypes and in the same order for every micro-batch of
        the same shape.
        """
        return [movable.contiguous() for movable in self._movables.get((stage, mb), ())]

    def drop(self, stage: int, mb: int) -> None:
        """Let go of the data: to read them is an error until they are back, or forgotten.

        At no time they read as NaN: another thread may be running the stage behind, which may read what it did not in
        the probe.
        """
        for movable in self._movables.get((stage, mb), ()):
            let_go(movable.tensor, "an output of stage {}, of shape {}", stage, tuple(movable.tensor.shape))
            movable.tensor.data = self._hole(movable.tensor).expand(movable.tensor.shape)

    def restore(self, stage: int, mb: int, tensors: Sequence[torch.Tensor]) -> None:
        """Give what was dropped its data again: ``tensors`` in the order of ``of``."""
        for movable, data in zip(self._movables.get((stage, mb), ()), tensors, strict=True):
            movable.put(data)

    def forget(self, stage: int, mb: int) -> None:
        """The backward that reads them is done. What has been let go of reads as NaN, or nothing."""
        for movable in self._movables.pop((stage, mb), ()):
            take_back(movable.tensor)

    def clear(self) -> None:
        for stage, mb in [*self._movables]:
            self.forget(stage, mb)

    def references(self) -> "list[weakref.ref[torch.Tensor]]":
        """References to all tensors, which hold none of them."""
        return [weakref.ref(movable.tensor) for found in self._movables.values() for movable in found]

    def _hole(self, tensor: torch.Tensor) -> torch.Tensor:
        key = (tensor.dtype, tensor.device)
        if key not in self._holes:
            value = float("nan") if tensor.is_floating_point() else 0
            self._holes[key] = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
        return self._holes[key]


def refuse_kept(let_go: Sequence["weakref.ref[torch.Tensor]"]) -> None:
    """Refuse an evaluation whose outputs somebody keeps: he will read them, and they would read as NaN."""
    if any(ref() is not None for ref in let_go):
        gc.collect()  # or they are only part of a cycle
    for kept in (ref() for ref in let_go):
        if kept is not None:
            raise ModelError(
                f"a tensor of shape {tuple(kept.shape)} that one block hands to the next was kept after the evaluation "
                "(as hidden states are, in a model's output), and its memory is given to others when the next has run: "
                "in loss_fn, keep copies (output.hidden_states[1].clone()), or nothing of that kind"
            )
