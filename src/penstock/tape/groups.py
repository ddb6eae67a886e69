"""Param groups on the torch side: the parameters that share a flat buffer, and how they are attached to it.

A parameter of an unmodified model never owns memory here. While its group is on the device, its
``.data`` is a view into the group's flat buffer; otherwise it is a placeholder of the right shape, dtype and
device that costs one element and reads as NaN; in a step to read it is an error (``let_go``).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from penstock.compat.modules import drop_weak_references
from penstock.compat.torch import gradient_hooks
from penstock.errors import ModelError
from penstock.schedule.matrices import is_matrix, whole_of
from penstock.schedule.mesh import Mesh
from penstock.schedule.place import Format
from penstock.schedule.program import (
    COMPACT_FROM,
    ELEMENTWISE,
    EXACT,
    LARGE_END,
    OF_BLOCK,
    VIEW_ALIGN,
    GroupSpec,
    Whole,
    round_up,
)
from penstock.tape.blocks import Block
from penstock.tape.let_go import let_go, take_back


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
            take_back(s.parameter)
            _set_data(s.parameter, flat[s.offset : s.offset + s.numel].view(s.shape))

    def detach(self, dtype: torch.dtype, device: torch.device) -> None:
        """Replace every parameter's data by a placeholder."""
        hole = torch.full((), float("nan"), dtype=dtype, device=device)
        for s in self.slices:
            _set_data(s.parameter, hole.expand(s.shape))

    def let_go(self) -> None:
        """From now on to read a parameter, which is a placeholder, is an error that names it."""
        for s in self.slices:
            let_go(s.parameter, "parameter {!r}", s.name)

    def take_back(self) -> None:
        """Parameters can be read again."""
        for s in self.slices:
            take_back(s.parameter)

    def views(self, flat: torch.Tensor) -> Iterator[tuple[ParamSlice, torch.Tensor]]:
        """Each trainable parameter with its view into a flat buffer of ``spec.trainable`` elements."""
        for s in self.slices:
            if s.trainable:
                yield s, flat[s.offset : s.offset + s.numel].view(s.shape)


def groups_of(parameters: Collection[int], groups: Sequence[ParamGroup]) -> frozenset[int]:
    """The groups that have any of the given parameters (by ``id``)."""
    return frozenset(g.spec.index for g in groups if any(id(s.parameter) in parameters for s in g.slices))


def _set_data(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """``parameter.data = data``, also off the meta device, which torch does not let a parameter leave that way."""
    if parameter.is_meta and not data.is_meta:
        assert not gradient_hooks(parameter), "the hooks of this parameter would be lost"
        # Of ``data`` itself it would share the count of changes in place, and so with all parameters of the group.
        real = nn.Parameter(data.data, requires_grad=parameter.requires_grad)
        real.__dict__.update(parameter.__dict__)
        torch.utils.swap_tensors(parameter, real)  # type: ignore[no-untyped-call]
    else:
        parameter.data = data


def lay_out(
    index: int,
    name: str,
    parameters: Sequence[tuple[str, nn.Parameter]],
    ranks: int = 1,
    *,
    compact: bool = False,
    whole: Whole | None = None,
) -> ParamGroup:
    """Place parameters in a flat buffer: trainable ones first, each part padded to ``ALIGN`` elements for each of the
    ``ranks`` that share it. Where no parameter has an element, there is frozen padding alone: every group has arrays.
    ``compact``, ``whole``: as in ``GroupSpec``."""
    slices: list[ParamSlice] = []
    ranks_group = Mesh(data=ranks).everyone()
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
                offset += round_up(p.numel(), VIEW_ALIGN)
        offset = start + ranks_group.padded(offset - start)
        sizes[trainable] = offset - start
    sizes[False] = sizes[False] or (0 if offset else ranks_group.padded(1))
    spec = GroupSpec(index=index, name=name, trainable=sizes[True], frozen=sizes[False], compact=compact, whole=whole)
    return ParamGroup(spec=spec, slices=tuple(slices))


def group_parameters(
    model: nn.Module, blocks: Sequence[Block], ranks: int = 1, form: Format | None = None
) -> tuple[ParamGroup, ...]:
    """Every parameter of the model in exactly one group: one per block, one per large end, one for the small ends.
    ``ranks``: that share each of them. ``form``: None: fp32 moments, and steps that go element by element. Where
    moments may take less, small trained parameters, which do not take part in that, have groups of their own; where
    steps take matrices whole, all that are none of a block's have.

    A parameter that several blocks use, or a block and the rest of the model, is an end. Tied parameters are one
    parameter, under the first of their names. Ends come first, blocks in their order.

    Raises:
        ModelError: a parameter is not of a floating-point type.
        ConfigError: a matrix cannot be split as it is asked for.
    """
    for module in model.modules():
        if any(p.is_meta for p in module.parameters(recurse=False)):
            drop_weak_references(module)  # it will leave the meta device
    homes = _homes(model, blocks)
    in_block: dict[int, list[tuple[str, nn.Parameter]]] = {b: [] for b in range(len(blocks))}
    in_module: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise ModelError(
                f"parameter {name!r} is {parameter.dtype}: only floating-point parameters can be trained or streamed; "
                + (
                    "keep its real and imaginary parts (torch.view_as_real), and let the forward put them together"
                    if parameter.is_complex()
                    else "load the model without quantisation"
                )
            )
        home = homes[id(parameter)]
        if len(home) == 1 and None not in home:
            in_block[next(b for b in home if b is not None)].append((name, parameter))
        else:
            in_module.setdefault(name.rpartition(".")[0] or "<root>", []).append((name, parameter))
    large = {m: ps for m, ps in in_module.items() if sum(p.numel() for _, p in ps) >= LARGE_END}
    small = [pair for m, ps in in_module.items() if m not in large for pair in ps]
    of_small = "small" if "small" not in large else "<small>"  # a module may have that name
    named = [(f"ends.{m}", ps) for m, ps in large.items()] + [(f"ends.{of_small}", small)]
    named += [(f"{OF_BLOCK}{blocks[b].name}", ps) for b, ps in in_block.items()]
    cut = [
        (name, kind, ps)
        for i, (name, all_of) in enumerate(named)
        for kind, ps in _by_kind(all_of, form, in_block=i >= len(named) - len(in_block))
    ]
    return tuple(
        lay_out(
            i,
            f"{name}{ELEMENTWISE * kind.elementwise}{EXACT * kind.exact}",
            ps,
            ranks,
            compact=form is not None and form.is_compact and not kind.exact,
            whole=None if form is None or not kind.matrices else _whole(ps, form),
        )
        for i, (name, kind, ps) in enumerate(cut)
    )


class _Kind(NamedTuple):
    """The kind of step that a parameter takes: as one of a block's matrices, or element by element in such a block;
    ``exact``: too small for a compact moment. Frozen parameters are of the first kind that there is."""

    matrices: bool
    elementwise: bool
    exact: bool


def _by_kind(
    parameters: Sequence[tuple[str, nn.Parameter]], form: Format | None, *, in_block: bool
) -> list[tuple[_Kind, list[tuple[str, nn.Parameter]]]]:
    """Parameters that are stepped alike, together."""
    rule = form.whole if form is not None and in_block else None
    compact = form is not None and form.is_compact
    found: dict[_Kind, list[tuple[str, nn.Parameter]]] = {
        _Kind(rule is not None and not elementwise, elementwise, exact): []
        for elementwise in ((False, True) if rule is not None else (False,))
        for exact in ((False, True) if compact else (False,))
    }
    first = next(iter(found))
    for name, p in parameters:
        elementwise = rule is not None and not is_matrix(name, p.shape, rule)
        own = _Kind(rule is not None and not elementwise, elementwise, compact and p.numel() < COMPACT_FROM)
        found[own if p.requires_grad else first].append((name, p))
    return [(kind, of_kind) for kind, of_kind in found.items() if of_kind]


def _whole(parameters: Sequence[tuple[str, nn.Parameter]], form: Format) -> Whole | None:
    """FLOP and temporary bytes of the steps of those of these matrices that are trained; None: none is, or steps go
    element by element."""
    trained = [(name, p.shape) for name, p in parameters if p.requires_grad]
    return whole_of(trained, form.whole) if trained and form.whole is not None else None


def _homes(model: nn.Module, blocks: Sequence[Block]) -> dict[int, set[int | None]]:
    """For each parameter (by identity) the blocks that hold it; None stands for the rest of the model."""
    block_of = {id(block.module): b for b, block in enumerate(blocks)}
    homes: dict[int, set[int | None]] = {}
    seen: set[tuple[int, int | None]] = set()

    def visit(module: nn.Module, home: int | None) -> None:
        home = block_of.get(id(module), home)
        if (id(module), home) in seen:
            return
        seen.add((id(module), home))
        for parameter in module.parameters(recurse=False):
            homes.setdefault(id(parameter), set()).add(home)
        for child in module.children():
            visit(child, home)

    visit(model, None)
    return homes
