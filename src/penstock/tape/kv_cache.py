"""Key-value caches of transformers: kept out of a model's blocks while it is trained.

A cache is written in the forward and would be written again in the recomputation, and it outlives both. So the setting
that makes one is switched off for as long as a tape runs the model, wherever the model has it. Some models make one in
any case (XLM): an empty one is left out of the calls of blocks that can do without, by their own signature. What they
would have written to it is missing then, so whoever reads it afterwards is refused (PI0: its second model attends to
what the first one has left in a cache).
"""

import copy
import inspect
import logging
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from penstock.compat import marks
from penstock.errors import ModelError
from penstock.tape import trees

log = logging.getLogger("penstock")

_SETTING = "use_cache"
_NO_CACHE = frozenset((torch.Tensor, nn.Parameter, types.NoneType, bool, int, float, str))
"""Types of most arguments of blocks."""

_OFF: dict[int, Any] = {}
"""Configurations that are switched off now, by their identity: transformers' own have no hash."""


class CachesOff:
    """A model's caches, switched off until ``restore``."""

    def __init__(self, model: nn.Module) -> None:
        self._configs = [config for config in _configs(model) if _switch(config, False)]
        _OFF.update({id(config): config for config in self._configs})
        if self._configs:
            log.info("%s: config.use_cache is off while it is trained, as nothing is generated", type(model).__name__)

    def restore(self) -> None:
        for config in self._configs:
            _switch(config, True)
            _OFF.pop(id(config), None)
        self._configs = []


def as_given(config: Any) -> Any:
    """A copy of a model's configuration as it was before its caches were switched off."""
    copies: dict[int, Any] = {}
    copied = copy.deepcopy(config, copies)
    for identity in _OFF:
        if identity in copies:
            _switch(copies[identity], True)
    return copied


def _configs(model: nn.Module) -> Iterator[Any]:
    """The configurations that a model's modules go by, and those within. Nothing else of them is looked at."""
    seen: set[int] = set()
    waiting = [vars(module).get("config") for module in model.modules()]
    while waiting:
        config = waiting.pop(0)
        if config is None or id(config) in seen:
            continue
        seen.add(id(config))
        yield config
        names = getattr(type(config), "sub_configs", None)
        if isinstance(names, Mapping):
            waiting.extend(value for name in names if (value := _attribute(config, name)) is not None)


def _attribute(config: Any, name: str) -> Any:
    """An attribute of a configuration, None where it has none: reading one may run code of its own that refuses."""
    try:
        return getattr(config, name, None)
    except Exception:  # noqa: BLE001
        return None


def _switch(config: Any, on: bool) -> bool:
    """Set ``use_cache`` to ``on`` where it is the opposite. True if it was."""
    if _attribute(config, _SETTING) is not (not on):
        return False
    try:
        setattr(config, _SETTING, on)
    except Exception:  # noqa: BLE001  it is frozen: then an empty cache is left out of calls, and others are refused
        return False
    return True


def without_caches(
    name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block's call, with None for empty caches where the block's signature has that for a default.

    Raises:
        ModelError: it was handed a cache that holds something, or that it cannot do without.
    """
    cache = marks.class_of_caches()
    if cache is None or not any(_has_cache(value, cache) for value in (*args, *kwargs.values())):
        return args, kwargs
    optional, others = _optional(forward)
    positional = list(optional)

    def left_out(value: Any, parameter: str | None) -> Any:
        if not _has_cache(value, cache):
            return value
        if isinstance(value, _LeftOut):
            return None
        if not isinstance(value, cache) or not _is_empty(value):
            raise ModelError(
                f"block {name!r} was handed a key-value cache that holds values (as peft's prefix tuning makes for "
                "its prompts): the block would write to it, and again when it is recomputed. Pass no cache with "
                "micro-batches; of peft's methods use another one, such as LoRA; where the model makes the cache "
                "itself, name blocks that it is not handed to, such as the layers' feed-forward parts: blocks=[...]"
            )
        if parameter is None or not optional.get(parameter, others):
            raise ModelError(
                f"block {name!r} was handed a key-value cache, and by its signature it cannot do without: set "
                "model.config.use_cache = False, or pass use_cache=False with every micro-batch, or name other blocks "
                "(blocks=[...]) that take no cache"
            )
        _leave_out(value)
        return None

    named = [positional[i] if i < len(positional) else None for i in range(len(args))]
    return (
        tuple(left_out(value, parameter) for value, parameter in zip(args, named, strict=True)),
        {key: left_out(value, key) for key, value in kwargs.items()},
    )


def _unread(*_: object) -> NoReturn:
    raise ModelError(
        "the model's own code reads a key-value cache after blocks that would write to it. Blocks are run again for "
        "their gradients, and hand on what they return alone: what such a model reads there would be missing. Pass no "
        "cache with micro-batches; where the model makes it itself, name blocks that it is not handed to, such as the "
        "layers' feed-forward parts: blocks=[...]"
    )


class _LeftOut:
    """A cache that blocks were not handed, so that it lacks what they would have written: nobody may look at it."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        _unread()

    __len__ = __getitem__ = __iter__ = _unread


def _leave_out(cache: Any) -> None:
    """From here on each look at a cache is an error. It is what the model has made it, but for that."""
    kind = type(cache)
    cache.__class__ = type(kind.__name__, (_LeftOut, kind), {"__module__": kind.__module__})


def _optional(forward: Callable[..., Any]) -> tuple[dict[str, bool], bool]:
    """The parameters of a forward, in order: True where None is the default. And True if it also hands on what it does
    not name: layers of transformers hand their attention the cache so. A decorated one is looked into."""
    parameters = inspect.signature(forward).parameters.values()
    named = {p.name: p.default is None for p in parameters if p.kind is not p.VAR_KEYWORD}
    return named, len(named) < len(parameters)


def _has_cache(value: Any, kind: type) -> bool:
    return type(value) not in _NO_CACHE and any(isinstance(leaf, kind) for leaf in _leaves(value))


def _is_empty(cache: Any) -> bool:
    """True if a cache holds nothing yet."""
    try:
        parts = [
            getattr(cache, key) for key in ("self_attention_cache", "cross_attention_cache") if hasattr(cache, key)
        ]
        if parts:
            return all(_is_empty(part) for part in parts)
        return not any(trees.tensors(vars(layer)) for layer in cache.layers)
    except Exception:  # noqa: BLE001  a cache of another making
        return False


def _leaves(value: object) -> Iterator[object]:
    """The items of nested tuples, lists and dicts, which may contain themselves."""
    waiting, seen = [value], set[int]()
    while waiting:
        item = waiting.pop()
        if isinstance(item, tuple | list | dict):
            if id(item) not in seen:
                seen.add(id(item))
                waiting += item.values() if isinstance(item, dict) else item
        elif not trees.is_record(item):
            yield item
