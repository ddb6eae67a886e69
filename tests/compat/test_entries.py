"""Entries of ``compat`` that use a private name, or set something of a library's, say what breaks without it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from tests.project.test_private_names import DOCUMENTED, LIBRARIES, private_uses

FILES = {path.stem: path.read_text() for path in (Path(penstock.__file__).parent / "compat").glob("*.py")}
Definition = ast.FunctionDef | ast.ClassDef | ast.Assign

_SAYS_IT = re.compile(r"\bWithout( \w+)?:\s+\S")
_PRIVATE = re.compile(r"_[A-Za-z]\w*")
_UNDOCUMENTED = re.compile(rf"({'|'.join(LIBRARIES)})(\.\w+)+")


def definitions(tree: ast.Module) -> dict[str, Definition]:
    """Functions, classes and constants of a file, by name."""
    found: dict[str, Definition] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    return found


def undocumented(tree: ast.Module) -> set[str]:
    """The names under which a file has something that its library does not document."""
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in LIBRARIES
        for alias in node.names
        if node.module not in DOCUMENTED or _PRIVATE.fullmatch(alias.name)
    }


def _is_of_another(target: ast.AST) -> bool:
    """True if what is set is an attribute, or an entry of the attributes, of something that is not ``self``."""
    match target:
        case ast.Attribute(ctx=ast.Store(), value=ast.Name(id="self" | "cls")):
            return False
        case ast.Attribute(ctx=ast.Store()):
            return True
        case ast.Subscript(value=ast.Call(func=ast.Name(id="vars")) | ast.Attribute(attr="__dict__")):
            return True
        case _:
            return False


def _uses(definition: Definition, foreign: set[str]) -> Iterator[str]:
    for node in ast.walk(definition):
        match node:
            case ast.Name(id=name) if name in foreign:
                yield name
            case ast.Constant(value=str(text)) if _UNDOCUMENTED.fullmatch(text) and text not in DOCUMENTED:
                yield text
        if _is_of_another(node):
            yield f"{ast.unparse(node)} = ..."
    for part in definition.body if isinstance(definition, ast.ClassDef) else ():
        target = part.targets[0] if isinstance(part, ast.Assign) else part
        name = str(getattr(target, "id", getattr(target, "name", "")))
        if _PRIVATE.fullmatch(name):
            yield f"{definition.name}.{name}"


def uses(text: str) -> dict[str, set[str]]:
    """What each public function and class of a file uses that its library may change: itself, or by what of the file
    it uses."""
    tree = ast.parse(text)
    known, foreign, lines = definitions(tree), undocumented(tree), list(private_uses(text))
    found: dict[str, set[str]] = {}
    for name, entry in known.items():
        if name.startswith("_") or isinstance(entry, ast.Assign):
            continue
        reached, waiting = set[str](), [name]
        found[name] = set()
        while waiting:
            one = waiting.pop()
            if one in reached or one not in known:
                continue
            reached.add(one)
            part = known[one]
            found[name] |= {*_uses(part, foreign)}
            found[name] |= {what for line, what in lines if part.lineno <= line <= (part.end_lineno or 0)}
            waiting += [node.id for node in ast.walk(part) if isinstance(node, ast.Name) and node.id.startswith("_")]
    return found


def says_it(text: str, name: str) -> bool:
    entry = definitions(ast.parse(text))[name]
    assert isinstance(entry, ast.FunctionDef | ast.ClassDef)
    return _SAYS_IT.search(ast.get_docstring(entry) or "") is not None


@pytest.mark.parametrize("file", sorted(FILES))
def test_an_entry_that_uses_what_a_library_may_change_says_what_breaks_without_it(file: str) -> None:
    silent = {name: what for name, what in uses(FILES[file]).items() if what and not says_it(FILES[file], name)}
    assert not silent, "say what it is for: Without: ..."


def test_entries_of_every_library_are_looked_at() -> None:
    found = {file: {name for name, what in uses(text).items() if what} for file, text in FILES.items()}
    assert {file for file, names in found.items() if names} == FILES.keys() - {"__init__"}
    assert found["trl"] == {"Bookkeeping", "ReferenceSteps", "hashed_by"}, "the books are our own"
    assert found["fabric"] == {"OneDevice", "drop_by", "note_compiled", "resolve_first"}
    assert {"set_rules", "noticed", "take_back", "mask_of", "TrainerSteps"} <= found["transformers"]
    assert "ReachedError" not in found["transformers"]
    assert {"note_gathered", "deal_neighbours", "Neighbours", "keep_processes"} <= found["accelerate"]
    assert {"is_moved", "set_initialised", "has_adapters"} <= found["marks"]
    assert {"store_of", "compilations", "placeholder", "attention_by"} <= found["torch"]


@pytest.mark.parametrize(
    "line",
    [
        "return model._private",
        "return getattr(model, '_private', None)",
        "model.__dict__['_private'] = 1",
        "model.forward = other",
        "vars(torch)['nn'] = other",
        "return hidden()",
        "from torch.utils._pytree import tree_map",
        "return sys.modules['peft.tuners.lora.layer']",
        "return _own()",
    ],
)
def test_what_may_change_is_seen(line: str) -> None:
    text = "import sys, torch\nfrom torch.inner import hidden\n\ndef _own():\n    return torch.nn._hidden\n\n"
    assert uses(f"{text}def entry(model, other):\n    {line}\n")["entry"]


def test_what_is_ones_own_or_documented_needs_no_word() -> None:
    text = """
from torch import nn

class Notes:
    def __init__(self, module: nn.Module):
        self._seen = module.training

    def count(self):
        return self._seen
"""
    assert uses(text) == {"Notes": set()}


def test_a_word_that_says_nothing_is_none() -> None:
    assert says_it('def entry():\n    """A thing. Without: as ``other``."""', "entry")
    assert not says_it('def entry():\n    """A thing. Without:"""', "entry")
    assert not says_it('def entry():\n    """A thing, without a word on it."""', "entry")
