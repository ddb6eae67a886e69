"""Tensors inside nested arguments: found, replaced, and compared before and after a call.

A block receives and returns any nesting of tuples, lists, mappings (``dict``, ``UserDict``, model outputs) and
dataclasses. Other objects are passed on as they are, and so are mappings whose copies may have no entries of their own.
Traversal order is the order of the containers, so two runs of the same code meet the same tensors in the same order.
"""

import copy
import dataclasses
import inspect
import operator
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from penstock.compat.torch import is_view

Replace = Callable[[torch.Tensor], torch.Tensor]
Place = tuple[Hashable, ...]
"""A tensor's place in nested containers: the indices, keys and names of fields on the way to it."""

_Kind = Literal["tensor", "tuple", "container", "record", "other"]
"""A value, by what is done with it. ``container``: as of ``is_mutable_container``; ``record``: as of ``is_record``."""

PLAIN = frozenset({types.NoneType, bool, int, float, complex, str, torch.dtype, torch.device})
"""Types of most values that are no tensors and hold none."""

_KINDS: Mapping[type, _Kind] = {
    torch.Tensor: "tensor",
    nn.Parameter: "tensor",
    tuple: "tuple",
    list: "container",
    dict: "container",
    **dict.fromkeys(PLAIN, "other"),
}
"""Of the types of nearly all arguments: each block call looks at its own a dozen times."""

_MISSING = object()


def is_record(value: object) -> bool:
    """An instance of a dataclass that is not a mapping as well (model outputs are both, and count as mappings)."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def is_mutable_container(value: object) -> bool:
    """A list, or a mapping whose copy has entries of its own."""
    if isinstance(value, (list, dict)):
        return True
    return isinstance(value, MutableMapping) and hasattr(type(value), "__copy__")


def is_container(value: object) -> bool:
    """True of what is looked into: tuples, lists, mappings whose copies have entries of their own, and records."""
    return _kind_of(value) not in ("tensor", "other")


def _kind_of(value: object) -> _Kind:
    kind = _KINDS.get(type(value))
    if kind is not None:
        return kind
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, tuple):
        return "tuple"
    if is_mutable_container(value):
        return "container"
    return "record" if is_record(value) else "other"


def tensors(value: Any) -> list[torch.Tensor]:
    """Every distinct tensor in ``value``, in order of first sight."""
    return list(places(value).values())


def has_storage(tensor: torch.Tensor) -> bool:
    """True if a tensor is one piece of memory: sparse and nested ones are several, in tensors of their own."""
    return tensor.layout is torch.strided and not tensor.is_nested


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The order of dimensions in which a tensor is contiguous in memory; None if there is none."""
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    return order if tensor.permute(order).is_contiguous() else None


def is_movable(tensor: torch.Tensor, device: torch.device) -> bool:
    """True if a tensor is all that its storage holds, in some order of dimensions, so that memory of ``device`` is free
    once it is moved. A view's base would keep the storage alive, whatever becomes of the view.
    """
    return (
        tensor.device == device
        and tensor.layout == torch.strided
        and not is_view(tensor)
        and memory_order(tensor) is not None
        and 0 < tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    )


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of memory from a tensor's first one to its last."""
    return 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


def places(value: Any) -> dict[Place, torch.Tensor]:
    """Every distinct tensor in ``value`` under the place where it is first seen, in that order."""
    found: dict[int, tuple[Place, torch.Tensor]] = {}
    _find(value, (), found, set())
    return dict(found.values())


def to_collect_in(value: Any) -> list[tuple[Place, Any, int]]:
    """The containers in which a call that is handed a copy of ``value`` (``replace``) may collect tensors for others:
    lists, each with the number of tensors in it, at any depth, and the outermost containers that hold none.
    """
    empty = _walk(value, (), lambda item: is_mutable_container(item) and not tensors(item), set())
    found = [*empty, *_walk(value, (), lambda item: isinstance(item, list), set(), within=True)]
    return [(place, container, len(tensors(container))) for place, container in found]


def replace(value: Any, fn: Replace, *, keep: bool = False) -> Any:
    """A copy of ``value`` with new containers and ``fn(tensor)`` for every tensor.

    A container that occurs twice, or that contains itself, does so in the copy too. ``keep``: one that holds no tensor,
    at any depth, is not copied but handed on.
    """
    return _map(value, fn, {}, keep)


def snapshot(value: Any) -> Any:
    """A copy of the containers of ``value`` around the same tensors: of all into which something may be put."""
    return _map(value, _itself, {}, False)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _may_change(record: Any) -> bool:
    """True if fields of a record may be replaced. A module that is one is no argument's copy."""
    return not (type(record).__dataclass_params__.frozen or isinstance(record, nn.Module))


def settle(value: Any, before: Any, fn: Replace) -> Any:
    """Apply ``fn`` to the tensors of ``value`` that are not at the same place in ``before``, its earlier snapshot.

    Lists, mappings and dataclasses are changed in place; what is returned is ``value``, or a new tuple where a tuple
    had to change.
    """
    return _settle(value, before, fn, set())


def _find(value: Any, place: Place, found: dict[int, tuple[Place, torch.Tensor]], seen: set[int]) -> None:
    """Note the tensors in a value. A container is looked into once."""
    kind = _kind_of(value)
    if kind == "tensor":
        found.setdefault(id(value), (place, value))
    elif kind == "tuple" or (kind != "other" and id(value) not in seen):
        seen.add(id(value))
        for key, item in entries(value):
            _find(item, (*place, key), found, seen)


def _walk(
    value: Any, place: Place, wanted: Callable[[Any], bool], seen: set[int], *, within: bool = False
) -> Iterator[tuple[Place, Any]]:
    """The outermost items that are ``wanted``, in order; with ``within`` those inside of them as well. A container is
    looked into once."""
    found = wanted(value)
    if found:
        yield place, value
    if found and not within:
        return
    if isinstance(value, tuple) or (is_container(value) and id(value) not in seen):
        seen.add(id(value))
        for key, item in entries(value):
            yield from _walk(item, (*place, key), wanted, seen, within=within)


def _map(value: Any, fn: Replace, memo: dict[int, Any], keep: bool) -> Any:
    kind = _kind_of(value)
    if kind == "other":
        return value
    if kind == "tensor":
        return fn(value)
    if kind == "tuple":
        return _rebuild(value, [_map(item, fn, memo, keep) for item in value])
    if kind == "record":
        return _map_record(value, fn, memo, keep)
    if keep and not tensors(value):
        return value
    if id(value) in memo:
        return memo[id(value)]
    new = memo[id(value)] = copy.copy(value)
    for key, item in entries(value):
        _store(new, key, _map(item, fn, memo, keep))
    return new


def _map_record(value: Any, fn: Replace, memo: dict[int, Any], keep: bool) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    has_tensors = not isinstance(value, nn.Module) and bool(tensors(value))
    copied = has_tensors or (fn is _itself and _may_change(value))
    memo[id(value)] = copy.copy(value) if copied else value  # before what it holds, which may hold it
    items = [(name, item, _map(item, fn, memo, keep)) for name, item in entries(value)]
    if any(new is not old for _, old, new in items):  # a record without tensors (a config) is nobody's business
        if not copied:
            memo[id(value)] = copy.copy(value)
        for name, _, new in items:
            _store(memo[id(value)], name, new)
    return memo[id(value)]


def _settle(value: Any, before: Any, fn: Replace, seen: set[int]) -> Any:
    kind = _kind_of(value)
    if kind == "tensor":
        return value if value is before else fn(value)
    if kind == "tuple":
        old = before if isinstance(before, tuple) else ()
        items = [_settle(v, old[i] if i < len(old) else _MISSING, fn, seen) for i, v in enumerate(value)]
        return _rebuild(value, items)
    if kind == "other" or id(value) in seen:
        return value
    seen.add(id(value))
    old_entries = dict(entries(before)) if type(before) is type(value) else {}
    for key, item in list(entries(value)):
        new = _settle(item, old_entries.get(key, _MISSING), fn, seen)
        if new is not item:
            _store(value, key, new)
    return value


def entries(value: Any) -> Iterator[tuple[Any, Any]]:
    """The items of a container, with their indices, keys or names."""
    if isinstance(value, tuple | list):
        return iter(enumerate(value))
    if type(value) is dict:
        return iter([*value.items()])
    if is_mutable_container(value):
        return iter([(key, value[key]) for key in value])
    return iter([(f.name, item) for f in dataclasses.fields(value) if (item := _field(value, f.name)) is not _MISSING])


def _field(record: Any, name: str) -> Any:
    """The value of a record's field. Its class's own ``__getattr__`` is not asked: it may do anything."""
    attributes = getattr(record, "__dict__", {})
    if name in attributes:
        return attributes[name]
    slot = inspect.getattr_static(type(record), name, None)
    if not isinstance(slot, types.MemberDescriptorType):
        return _MISSING
    try:
        return slot.__get__(record)
    except AttributeError:  # not set
        return _MISSING


def _store(value: Any, key: Any, item: Any) -> None:
    if type(value) is dict or is_mutable_container(value):
        value[key] = item
    else:
        object.__setattr__(value, key, item)


def _rebuild(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    if all(map(operator.is_, items, value)):
        return value
    kind = type(value)
    # A class of one's own may be called with other arguments. Those in C (``torch.return_types``) are made by a call.
    new = kind(items) if hasattr(kind, "n_fields") else tuple.__new__(kind, items)
    if attributes := getattr(value, "__dict__", None):
        vars(new).update(attributes)
    return new
