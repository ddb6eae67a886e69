"""Finds the submodules that are run as the blocks of a schedule."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from penstock.compat.modules import entries_of
from penstock.errors import ModelError
from penstock.tape.refusals import refuse

_SHARE_OF_LARGEST = 0.1
"""A list of modules with less than this share of the largest list's parameters is not worth a schedule."""

_HOW_TO_NAME = "name them: blocks=[...], a list of submodules of the model, for example list(model.layers)"


@dataclass(frozen=True, kw_only=True)
class Block:
    """A submodule whose calls are the steps of a schedule. ``name`` is its dotted name in the model."""

    name: str
    module: nn.Module


def find_blocks(model: nn.Module, blocks: Sequence[nn.Module] | None = None) -> tuple[Block, ...]:
    """The blocks of a model: the ones given, or the members of its large outermost lists, see ``_members``.

    Raises:
        ModelError: none is found; a given one is no submodule, is given twice, or is inside another; or the model
            is one that ``refusals`` refuses.
    """
    refuse(model)
    return _check_given(model, blocks) if blocks is not None else _find(model)


def _parameter_count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


Members = list[tuple[str, nn.Module]]


def _outermost_lists(module: nn.Module, prefix: str) -> Iterator[Members]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        members = _members(path, child)
        if len(members) >= 2:
            yield members
        else:
            yield from _outermost_lists(child, f"{path}.")


def _members(path: str, module: nn.Module) -> Members:
    """The blocks that a module holds as a list does: (dotted name, block) in order; none if it is no list of blocks.

    A ``ModuleList``: all members with parameters. It cannot be called, so where it holds other lists their members are
    taken in its place; of those, norms and the like between them are none. A ``Sequential`` is many things, and so is a
    ``ModuleDict``: only members of a class that is there more than once, and that has modules of its own, are blocks.
    """
    entries = _entries(path, module)
    if isinstance(module, nn.ModuleList):
        if not any(isinstance(m, nn.ModuleList | nn.ModuleDict) or _members("", m) for _, m in entries):
            return entries
        flat = [found for name, m in entries for found in _flat(name, m)]
        return [(name, m) for name, m in flat if _is_composite(m)] or flat
    if isinstance(module, nn.Sequential | nn.ModuleDict):
        kinds = Counter(type(m) for _, m in entries if _is_composite(m))
        repeated = [(name, m) for name, m in entries if kinds[type(m)] > 1]
        return [found for name, m in repeated for found in (_members(name, m) or [(name, m)])]
    return []


def _entries(path: str, module: nn.Module) -> Members:
    """The modules that a module holds, but for those without parameters (and for None, which lists may have)."""
    named = [(f"{path}.{name}" if path else name, m) for name, m in entries_of(module).items() if m is not None]
    return [(name, m) for name, m in named if _parameter_count(m) > 0]


def _flat(path: str, module: nn.Module) -> Members:
    """A member of a list, or what it holds in its place."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return [found for name, m in _entries(path, module) for found in _flat(name, m)]
    return _members(path, module) or [(path, module)]


def _is_composite(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _find(model: nn.Module) -> tuple[Block, ...]:
    own = _members("", model)
    lists = [own] if len(own) >= 2 else list(_outermost_lists(model, ""))
    if isinstance(model, nn.ModuleList | nn.ModuleDict) or not lists:
        raise ModelError(
            f"no repeated blocks were found in {type(model).__name__}: it has no ModuleList of two or more modules "
            "with parameters, and no Sequential or ModuleDict with two or more of one class that have modules of their "
            f"own; {_HOW_TO_NAME}"
        )
    counts = [sum(_parameter_count(m) for _, m in members) for members in lists]
    found: dict[int, Block] = {}
    for members, count in zip(lists, counts, strict=True):
        if count < _SHARE_OF_LARGEST * max(counts):
            continue
        for name, member in members:
            found.setdefault(id(member), Block(name=name, module=member))
    return tuple(found.values())


def _check_given(model: nn.Module, blocks: Sequence[nn.Module]) -> tuple[Block, ...]:
    names = {id(module): name for name, module in model.named_modules()}
    found: list[Block] = []
    for position, module in enumerate(blocks):
        name = names.get(id(module))
        if not name:
            raise ModelError(
                f"blocks[{position}] ({type(module).__name__}) is not a submodule of the model: {_HOW_TO_NAME}"
            )
        found.append(Block(name=name, module=module))
    if not found:
        raise ModelError(f"blocks is an empty list: {_HOW_TO_NAME}")
    inner = {id(m): b.name for b in found for m in b.module.modules() if m is not b.module}
    for block in found:
        if id(block.module) in inner:
            raise ModelError(f"block {block.name!r} is inside block {inner[id(block.module)]!r}: give only one of them")
    if len({id(b.module) for b in found}) < len(found):
        raise ModelError("blocks names a submodule twice: give each block once, however often the model calls it")
    return tuple(found)
