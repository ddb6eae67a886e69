"""Tensors in objects that cannot be looked into, in which a block could take or return them without a gradient.

Containers that ``trees`` knows can be copied around other tensors, which cutting a graph and recomputing a block need.
Of any other object only its attributes are searched, so that a tensor in it is an error and not a missing gradient.
"""

import enum
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn

from penstock.errors import ModelError
from penstock.tape import trees
from penstock.tape.holders import parts

_MOST = 10_000
"""Objects that are looked at in one search."""

_PLAIN = (
    *(str, bytes, bytearray, int, float, complex, type, types.ModuleType, types.NoneType, enum.Enum, range, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator, nn.Module),
)
"""Types that hold no tensors, or (modules) such as are found elsewhere."""

_CONTAINERS = frozenset({tuple, list, dict})
"""Types of containers that have nothing but their items, of most arguments of blocks."""

_INSTEAD = "hand tensors on in tuples, lists, dicts or dataclasses"

Found = dict[int, tuple[str, torch.Tensor | None]]
"""By identity: the class of the object that a tensor was found in, and the tensor. None: an iterator, which can only be
looked into by using it up.
"""


def hidden(value: Any) -> Found:
    """The tensors in ``value`` that ``trees`` does not see."""
    hiding = [(holder, item) for holder, item in _search(value) if holder is not None]
    if not hiding:
        return {}
    seen = {id(t) for t in trees.tensors(value)}
    found: Found = {}
    for holder, item in hiding:
        if id(item) not in seen and not isinstance(item, nn.Parameter):
            name = f"{holder.__module__}.{holder.__qualname__}"
            found.setdefault(id(item), (name, item if isinstance(item, torch.Tensor) else None))
    return found


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors that ``hidden`` finds."""
    return [tensor for _, tensor in hidden(value).values() if tensor is not None]


def refuse_inputs(block: str, found: Found) -> None:
    """Raise ModelError if what a block is handed hides a tensor that has a gradient."""
    for holder, tensor in found.values():
        if tensor is None or tensor.requires_grad:
            raise ModelError(
                f"block {block!r} is handed a tensor with a gradient inside of a {holder}, which Penstock cannot look "
                f"into, so the gradient would be lost: {_INSTEAD}"
            )


def refuse_outputs(block: str, output: Any, live: Any, before: Found) -> None:
    """Raise ModelError if what a block returns, or has left in its inputs since ``before``, hides a tensor that could
    have a gradient.
    """
    for key, (holder, tensor) in {**hidden(output), **hidden(live)}.items():
        if key not in before and (tensor is None or tensor.is_floating_point()):
            raise ModelError(
                f"block {block!r} returns (or leaves in its arguments) a tensor inside of a {holder}, which Penstock "
                f"cannot look into, so its gradient would be lost: {_INSTEAD}"
            )


def _search(value: Any) -> Iterator[tuple[type | None, Any]]:
    """Each tensor with the class of the outermost object on the way to it that ``trees`` does not know; None: there is
    none. Iterators are named too, where they are not within another such object.
    """
    stack: list[tuple[Any, type | None]] = [(value, None)]
    seen: set[int] = set()
    while stack and len(seen) < _MOST:
        item, holder = stack.pop()
        kind = type(item)
        if kind in trees.PLAIN:
            continue
        if kind in _CONTAINERS:
            if id(item) not in seen:
                seen.add(id(item))
                stack += [(part, holder) for part in (item.values() if kind is dict else item)]
        elif isinstance(item, torch.Tensor):
            yield holder, item
        elif isinstance(item, Iterator):
            if holder is None:
                yield type(item), item
        elif not isinstance(item, _PLAIN) and id(item) not in seen:
            seen.add(id(item))
            # What a known container has besides its entries is as unknown. They come first: what is in both is known.
            stack += [(part, holder or kind) for part in (*_elements(item), *(part for _, part in parts(item)))]
            if trees.is_container(item):
                stack += [(part, holder) for _, part in trees.entries(item)]


def _elements(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return [item[key] for key in list(item)]
    return list(item) if isinstance(item, Sequence | Set) else []
