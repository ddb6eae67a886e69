"""No room but ``compat/`` uses a private name of another library: an attribute, a module or a method of its classes."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import penstock
from tests.project.by_text import is_own, keys_of_attributes, names_of_getters
from tests.project.sources import parsed

SOURCES = Path(penstock.__file__).parent
LIBRARIES = ("torch", "transformers", "accelerate", "trl", "peft", "lightning_fabric", "datasets")

DOCUMENTED = {
    *LIBRARIES,
    *("torch.nn", "torch.nn.functional", "torch.nn.init", "torch.overrides", "torch.autograd.graph", "torch.func"),
    *("torch.optim.lr_scheduler", "torch.utils.checkpoint", "torch.utils.data", "torch.utils.tensorboard"),
    *("torch.distributed", "torch.distributed.device_mesh", "torch.utils.deterministic"),
    *("accelerate.utils", "datasets.fingerprint", "transformers.utils.logging"),
}
"""Modules that a library documents: what they have is public."""

ALLOWED = {
    "_exit": "of os: the end of a process without unwinding it",
    "_HANDLER": "of signal: the only name that a handler's type has",
    **dict.fromkeys(("_fields", "_replace", "_asdict"), "of named tuples, whose fields would clash with other names"),
}
"""Names that Python documents though they begin with an underscore, and why they do."""

TEXTS = {
    "config/lr_schedule.py": {"_steps", "_share"},  # ends of names of settings
    "errors.py": {"_STATUS_ALLOC_FAILED"},  # the end of a word in messages of CUDA's libraries
    "hf/reference.py": {"_name_or_path"},  # a key of config.json
    "shape/decoders.py": {"_name_or_path"},
    "tape/waits.py": {"_on_op"},  # our own, of another file: a function's name on the stack
}
"""Texts that look like private names and are none, by file."""
_OURS = "_penstock_"
"""The beginning of names of our own on somebody else's objects."""

_PRIVATE = re.compile(r"_[A-Za-z]\w*")
_ASKING = {"getattr", "setattr", "hasattr", "delattr"}


@cache
def _nodes(text: str) -> tuple[ast.AST, ...]:
    """All that a source is made of."""
    return tuple(ast.walk(parsed(text)))


@cache
def _members(text: str) -> frozenset[str]:
    """Names that classes of a file have of their own: methods, fields, slots, what ``self`` is given."""
    found: set[str] = set()
    for node in _nodes(text):
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef | ast.ClassDef):
                    found.add(part.name)
                targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
                if isinstance(part, ast.Assign) and found & {"__slots__"}:
                    found |= {str(c.value) for c in ast.walk(part.value) if isinstance(c, ast.Constant)}
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            found.add(node.attr)
    return frozenset(found)


def _imported_from_libraries(text: str) -> set[str]:
    """The names under which a file has something of another library: what is set on one is set for everybody."""
    found: set[str] = set()
    for node in _nodes(text):
        if isinstance(node, ast.Import):
            found |= {(a.asname or a.name).partition(".")[0] for a in node.names if _of_library(a.name)}
        elif isinstance(node, ast.ImportFrom) and node.module and _of_library(node.module):
            found |= {a.asname or a.name for a in node.names}
    return found


def _texts(text: str) -> dict[str, str]:
    """What is written in a source's constants, by name."""
    return {
        target.id: str(node.value.value)
        for node in _nodes(text)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _name(node: ast.AST) -> str:
    """The first name of a chain of attributes."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _name(node.func) == "super"


def _defined(text: str) -> set[str]:
    """Names of a file's own classes and functions, which annotations may have as texts."""
    return {node.name for node in _nodes(text) if isinstance(node, ast.ClassDef | ast.FunctionDef)}


def _private_texts(text: str, constants: dict[str, str]) -> Iterator[tuple[int, str, str]]:
    """(line, what, name) of each private name that is written as a text, wherever: somebody looks for it."""
    of_self: set[ast.AST] = set()
    has_keys, has_getters = "vars(" in text or "__dict__" in text, "attrgetter" in text or "methodcaller" in text
    for node in _nodes(text):  # from the outside in
        for owner, key in keys_of_attributes(node) if has_keys else ():
            if is_own(owner):
                of_self.add(key)
            elif isinstance(key, ast.Name) and _PRIVATE.fullmatch(name := constants.get(key.id, "")):
                yield key.lineno, f"{ast.unparse(owner)}.{name}", name
        dotted = [name for name in names_of_getters(node) if _PRIVATE.fullmatch(name)] if has_getters else []
        yield from ((getattr(node, "lineno", 0), ast.unparse(node), name) for name in dotted)
        name = node.value if isinstance(node, ast.Constant) else None
        if isinstance(name, str) and _PRIVATE.fullmatch(name) and node not in of_self:
            yield getattr(node, "lineno", 0), f"{name!r} as a text", name


def private_uses(text: str, everywhere: frozenset[str] = frozenset()) -> Iterator[tuple[int, str]]:
    """(line, what) of each private name of somebody else's that a source uses.

    A private attribute is a class's own if the class is in this file; of ``self`` it may be from a base elsewhere in
    the sources, ``everywhere``. It is found by its text, too.
    """
    own, foreign, constants = _members(text), _imported_from_libraries(text), _texts(text)

    known_texts = own | _defined(text) | ALLOWED.keys()

    def is_foreign(name: str) -> bool:
        return not name.startswith(_OURS) and name not in known_texts

    yield from ((line, what) for line, what, name in _private_texts(text, constants) if is_foreign(name))
    for node in _nodes(text):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _name(node.value) in foreign:
            yield node.lineno, f"{ast.unparse(node)} = ..."
        if isinstance(node, ast.Attribute) and _PRIVATE.fullmatch(node.attr):
            known = node.attr in own or node.attr in ALLOWED or (is_own(node.value) and node.attr in everywhere)
            if _is_super(node.value) or not known:
                yield node.lineno, f"{ast.unparse(node.value)}.{node.attr}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ASKING:
            for value in node.args[1:2]:
                name = constants.get(ast.unparse(value), str(value.value) if isinstance(value, ast.Constant) else "")
                if _PRIVATE.fullmatch(name) and is_foreign(name):
                    yield node.lineno, f"{node.func.id}(..., {name!r})"
        elif isinstance(node, ast.Call | ast.Subscript):
            if not _is_documented(looked_up := _looked_up(node)):
                yield node.lineno, looked_up
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if not _is_documented(a.name))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                private = _of_library(node.module) and _PRIVATE.fullmatch(alias.name)
                if private or not _is_documented(node.module) or (_is_module(inner) and not _is_documented(inner)):
                    yield node.lineno, inner


def _looked_up(node: ast.AST) -> str:
    """The module that is looked up among those that are loaded, or imported by its name's text."""
    match node:
        case ast.Call(func=ast.Attribute(value=modules, attr="get"), args=[ast.Constant(value=str(name)), *_]) | (
            ast.Subscript(value=modules, slice=ast.Constant(value=str(name)))
        ) if ast.unparse(modules) == "sys.modules":
            return name
        case ast.Call(func=called, args=[ast.Constant(value=str(name)), *_]) if "import_module" in ast.unparse(called):
            return name
        case _:
            return ""


def _of_library(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES


@cache
def _is_module(name: str) -> bool:
    """True if that is a module of an installed library, by its files: nothing is imported."""
    first, *parts = name.split(".")
    if not _of_library(name) or (spec := importlib.util.find_spec(first)) is None:
        return False
    places = [Path(place).joinpath(*parts) for place in spec.submodule_search_locations or ()]
    return any(place.with_suffix(".py").is_file() or (place / "__init__.py").is_file() for place in places)


def _is_documented(module: str) -> bool:
    return not _of_library(module) or module in DOCUMENTED


def test_private_names_of_libraries_are_in_compat_alone() -> None:
    texts = {p: p.read_text() for p in SOURCES.rglob("*.py") if p.parent != SOURCES / "compat"}
    everywhere = frozenset().union(*map(_members, texts.values()))
    found = [
        f"{path.relative_to(SOURCES)}:{line}: {what}"
        for path, text in sorted(texts.items())
        for line, what in private_uses(text, everywhere)
        if what not in _as_texts(path.relative_to(SOURCES).as_posix())
    ]
    assert found == []


def _as_texts(file: str) -> set[str]:
    return {f"{name!r} as a text" for name in TEXTS.get(file, ())}


@pytest.mark.parametrize("file", TEXTS)
def test_a_text_that_is_no_private_name_is_there(file: str) -> None:
    assert _as_texts(file) <= {what for _, what in private_uses((SOURCES / file).read_text())}


@pytest.mark.parametrize(
    "line",
    [
        "x.untyped_storage()._cdata",
        "tensor._version",
        "super()._save()",
        "self._prepare_inputs(inputs)",
        "from torch.utils._pytree import tree_map",
        "from transformers.core_model_loading import WeightConverter",
        "import torch._dynamo",
        "from torch import _C",
        "import torch; torch.nn.functional.relu = other",
        "getattr(parameter, '_post_accumulate_grad_hooks', None)",
        "name = '_is_stateful'; setattr(model, name, True)",
        "sys.modules.get('transformers.cache_utils')",
        "sys.modules['torch._dynamo']",
        "importlib.import_module('torch._dynamo')",
        "vars(other)['_version']",
        "other.__dict__['_version']",
        "vars(other).get('_version')",
        "name = '_version'; '_version' in vars(other)",
        "attrgetter('_version')(other)",
        "attrgetter('grad._version')(other)",
        "methodcaller('_is_view')(other)",
        "NAMES = frozenset(('dim', '_is_view'))",
        "from torch.distributed import distributed_c10d",
        "from torch.nn import modules",
        "from datasets.arrow_dataset import Dataset",
    ],
)
def test_a_private_name_is_found(line: str) -> None:
    assert [what for _, what in private_uses(f"class A:\n    _own = 1\n    def f(self, other):\n        {line}\n")]


def test_what_is_ones_own_is_not() -> None:
    text = """
from torch import distributed, nn
from torch.nn import functional

class A:
    def __init__(self):
        self._x = 1
        vars(self)["_y"] = 2
        setattr(other, "_penstock_x", 1)

    def equals(self, other):
        return other._x == self._x
"""
    assert not list(private_uses(text))
