"""Functions and classes that a model's code refers to, be it through others, and the globals that these may read.

Code of libraries is not followed: a model keeps its own values in code of its own.
"""

import builtins
import functools
import sys
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import nn

Code = types.FunctionType | type

_CACHED = type(functools.cache(lambda: None))
_MOST = 5_000
"""Functions and classes that are followed, the nearest first."""

_LIBRARIES = sys.stdlib_module_names | {
    *(__name__.partition(".")[0], "torch", "torchvision", "torchaudio", "numpy", "scipy", "pandas", "einops", "triton"),
    *("transformers", "peft", "trl", "accelerate", "datasets", "tokenizers", "safetensors", "huggingface_hub"),
    *("lightning", "pytorch_lightning", "lightning_fabric", "wandb", "pytest", "pluggy"),
}
"""Packages that keep nothing of a model's in their own functions and classes."""


def is_of_a_model(module: object) -> bool:
    """True if code of a module of this name may be a model's own, rather than a library's. What a library has in a
    package of its name behind an underscore, as pytest has all that it is, is its own, too."""
    if not isinstance(module, str):
        return False
    package = module.partition(".")[0]
    return package not in _LIBRARIES and package.lstrip("_") not in _LIBRARIES


def reached(kinds: Collection[type], values: Iterable[Any]) -> tuple[list[types.FunctionType], list[type]]:
    """The functions and classes of a model's own that ``kinds`` refer to, or that are behind ``values``; ``kinds`` and
    their functions are among them, also if they are a library's."""
    found: dict[int, Code] = {}
    members = [code for kind in kinds for part in vars(kind).values() for code in _code_of(part, objects=False)]
    queue: deque[Code] = deque([*kinds, *members, *(code for value in values for code in _code_of(value))])
    first = {id(code) for code in (*kinds, *members)}
    while queue and len(found) < _MOST:
        code = queue.popleft()
        if id(code) in found or not (id(code) in first or is_of_a_model(code.__module__)):
            continue
        found[id(code)] = code
        if isinstance(code, type):
            parts: Iterable[Any] = (*vars(code).values(), *code.__bases__)
        else:
            cells = (cell.cell_contents for cell in code.__closure__ or () if _is_full(cell))
            parts = (*(of.get(name) for of, name in globals_of(code)), *cells)
        queue += (inner for part in parts for inner in _code_of(part, objects=False))
    functions = [code for code in found.values() if isinstance(code, types.FunctionType)]
    return functions, [code for code in found.values() if isinstance(code, type)]


def _is_full(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  it raises
    except ValueError:
        return False
    return True


def _code_of(value: Any, *, objects: bool = True) -> Iterator[Code]:
    """The functions that a value calls; of a class, or with ``objects`` of any other object, the class."""
    if isinstance(value, types.FunctionType | type):
        if value is not nn.Module and value is not object:  # a metaclass may have an __eq__ of its own
            yield value
    elif isinstance(value, property):
        yield from (part for part in (value.fget, value.fset, value.fdel) if isinstance(part, types.FunctionType))
    elif isinstance(value, types.MethodType | staticmethod | classmethod):
        yield from _code_of(value.__func__, objects=False)
    elif isinstance(value, functools.partial | functools.cached_property):
        yield from _code_of(value.func, objects=False)
    elif isinstance(value, _CACHED):
        yield from _code_of(value.__wrapped__, objects=False)
    elif objects or is_of_a_model(type(value).__module__):
        yield type(value)


def globals_of(function: types.FunctionType) -> Iterator[tuple[dict[str, Any], str]]:
    """The globals that a function may refer to, each by the dict it is in and its name: its own module's, and those of
    modules that are there."""
    names = _names(function.__code__)
    seen: set[int] = set()
    queue = [function.__globals__]
    while queue:
        known = queue.pop()
        if id(known) in seen:
            continue
        seen.add(id(known))
        for name in names:
            yield known, name
            value = known.get(name)
            if isinstance(value, types.ModuleType) and is_of_a_model(value.__name__):
                queue.append(vars(value))


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    """The names that code refers to, of globals and of attributes, but for those of Python itself."""
    inner = (_names(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return frozenset(code.co_names).union(*inner) - vars(builtins).keys()
