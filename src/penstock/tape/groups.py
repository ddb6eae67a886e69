"""Param groups on the torch side: which parameters share a flat buffer, and how they are attached to it.

A parameter of an unmodified model never owns memory here. While its group is on the device, its
``.data`` is a view into the group's flat buffer; otherwise it is a placeholder of the right shape, dtype and
device that costs one element and reads as NaN, so that a use without a load shows as a NaN loss.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from penstock.schedule.program import ALIGN, GroupSpec

_VIEW_ALIGN = 64  # elements; keeps every parameter's view aligned to cache lines


@dataclass(frozen=True, kw_only=True)
class ParamSlice:
    """One parameter's place in its group's flat buffer. ``offset`` and ``numel`` are elements."""

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    offset: int
    numel: int
    trainable: bool


@dataclass(frozen=True, kw_only=True)
class ParamGroup:
    """The parameters that move together, in the order of their place in the flat buffer."""

    spec: GroupSpec
    slices: tuple[ParamSlice, ...]

    def attach(self, flat: torch.Tensor) -> None:
        """Make every parameter a view into ``flat`` (``spec.numel`` elements, in the compute dtype)."""
        assert flat.numel() >= self.spec.numel
        for s in self.slices:
            s.parameter.data = flat[s.offset : s.offset + s.numel].view(s.shape)

    def detach(self, dtype: torch.dtype, device: torch.device) -> None:
        """Replace every parameter's data by a placeholder."""
        hole = torch.full((1,), float("nan"), dtype=dtype, device=device)
        for s in self.slices:
            s.parameter.data = hole.expand(s.shape)

    def views(self, flat: torch.Tensor) -> Iterator[tuple[ParamSlice, torch.Tensor]]:
        """Each trainable parameter with its view into a flat buffer of ``spec.trainable`` elements."""
        for s in self.slices:
            if s.trainable:
                yield s, flat[s.offset : s.offset + s.numel].view(s.shape)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def lay_out(index: int, name: str, parameters: Sequence[tuple[str, nn.Parameter]]) -> ParamGroup:
    """Place parameters in a flat buffer: trainable ones first, each part padded to ``ALIGN`` elements."""
    slices: list[ParamSlice] = []
    offset = 0
    sizes = {True: 0, False: 0}
    for trainable in (True, False):
        start = offset
        for param_name, p in parameters:
            if p.requires_grad is trainable:
                slices.append(
                    ParamSlice(
                        name=param_name, parameter=p, shape=p.shape, offset=offset, numel=p.numel(), trainable=trainable
                    )
                )
                offset += _round_up(p.numel(), _VIEW_ALIGN)
        offset = start + _round_up(offset - start, ALIGN)
        sizes[trainable] = offset - start
    spec = GroupSpec(index=index, name=name, trainable=sizes[True], frozen=sizes[False])
    return ParamGroup(spec=spec, slices=tuple(slices))
