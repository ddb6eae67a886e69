"""Tests look at Penstock from outside: at what is public, or through ``Engine.inside``."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.project.by_text import is_own, keys_of_attributes, names_of_getters

TESTS = Path(__file__).parent.parent
OF_OTHERS = {"torch", "os", "sys", "threading", "atexit"}
"""Libraries whose own private names tests may need to know."""

OF_LIBRARIES = {
    "accelerator/elsewhere.py": {"_setupstate"},  # pytest: to end what a test has set up before its process ends
    "engine/test_compile.py": {"_COMPILER_FNS"},  # torch: to take a compiler's registration back
    "schedule/test_pipelines.py": {  # torch's own pipelines, as the reference
        *("_calculate_single_rank_operations", "_n_microbatches", "_num_stages", "_stages"),
    },
    "sweep/trial.py": {"_BatchNorm", "_DropoutNd"},  # torch: what all of these have in common
}
"""Private names of libraries that no public one stands for, by file."""

_BY_TEXT = {"getattr", "setattr", "hasattr", "delattr", "patch", "object"}
"""Functions that find an attribute by its name: Python's, ``monkeypatch``'s, and ``patch`` and ``patch.object`` of
``unittest.mock``."""

_PRIVATE = re.compile(r"_[A-Za-z]\w*")
_ANY = re.compile(
    r"(?<!\bself)(?<!\bcls)\._[A-Za-z]|['\"]_[A-Za-z]|\bimport\b.*\b_[A-Za-z]|^ +_\w+(?: as \w+)?,?$", re.MULTILINE
)
"""A look in a text: an attribute, a name's text, an import. Files without any need not be parsed."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def _private(name: str) -> bool:
    return _PRIVATE.fullmatch(name) is not None


def _is_of_others(value: ast.AST) -> bool:
    return ast.unparse(value).partition(".")[0] in OF_OTHERS


def _texts(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def _by_text(call: ast.Call, within: ast.AST) -> Iterator[str]:
    """Private names that a call finds by their text. Where the text is a variable, any of the texts ``within`` the
    function around it may be one."""
    match call.args:
        case [ast.Constant(value=str(path)), *_]:
            names = path.split(".")
            yield from () if names[0] in OF_OTHERS else filter(_private, names)
        case [owner, *_] if is_own(owner) or _is_of_others(owner):
            pass
        case [_, name, *_]:
            yield from filter(_private, _possible(name, within))


def _possible(name: ast.AST, within: ast.AST) -> Iterator[str]:
    """The texts that a name may be: its own, or any ``within`` the function around it, of a variable."""
    match name:
        case ast.Constant(value=str(text)):
            yield text
        case ast.Name():
            yield from _texts(within)


def looks(tree: ast.AST) -> set[str]:
    """Private names of other files that a file looks at: attributes, by name or by its text, and what it imports."""
    found: set[str] = set()
    within: dict[ast.AST, ast.AST] = {}
    for function in ast.walk(tree):
        if isinstance(function, Function):
            within = dict.fromkeys(ast.walk(function), function) | within  # the outermost, which comes first
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name) if _private(name) and not is_own(value):
                found |= set() if _is_of_others(value) else {name}
            case ast.ImportFrom(module=str(module), names=names) if module.startswith(("penstock", "tests")):
                found |= {alias.name for alias in names if _private(alias.name)}
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in _BY_TEXT:
                found |= {*_by_text(node, within.get(node, tree))}
        found |= set(filter(_private, names_of_getters(node)))
        for owner, key in keys_of_attributes(node):
            if not is_own(owner) and not _is_of_others(owner):
                found |= set(filter(_private, _possible(key, within.get(node, tree))))
    return found


def looks_in(text: str) -> set[str]:
    return looks(ast.parse(text)) if _ANY.search(text) else set()


def test_files_of_tests_look_at_what_is_public() -> None:
    files = {str(path.relative_to(TESTS)): path for path in TESTS.rglob("*.py")}
    texts = {name: path.read_text() for name, path in sorted(files.items())}
    seen = {name: looks_in(text) for name, text in texts.items()}
    new = {name: names - OF_LIBRARIES.get(name, set()) for name, names in seen.items()}
    found = {name: names for name, names in new.items() if names}
    assert not found, "give it a public look, or look through Engine.inside"


def test_exceptions_are_needed() -> None:
    for name, names in OF_LIBRARIES.items():
        assert names <= looks_in((TESTS / name).read_text()), name


def test_private_looks_are_seen() -> None:
    assert looks_in("engine._arrays.x; self._own; a.__class__; torch._C; f()._y") == {"_arrays", "_y"}
    assert looks_in("from penstock.a import _b, c\nfrom torch import _d") == {"_b"}
    assert looks_in("def f():\n    from tests.a import (\n        _b,\n        c,\n    )") == {"_b"}
    assert looks_in("from tests.a import (_b as c)") == {"_b"}
    assert looks_in("itself._c") == {"_c"}


def test_private_names_are_seen_by_their_texts() -> None:
    by_path = "monkeypatch.setattr('penstock.a._B', 1); patch('penstock._c.d'); patch.setattr('torch._C.x', f)"
    assert looks_in(by_path) == {"_B", "_c"}
    by_owner = "patch.setattr(fit, '_D', 1); getattr(a, '_e', None); patch.object(A, '_f'); vars(a)['_g'] = 1"
    assert looks_in(by_owner) == {"_D", "_e", "_f", "_g"}
    by_dict = "a.__dict__['_p']; vars(a).get('_q'); '_r' in vars(a); attrgetter('b._s', '_t')(a); methodcaller('_u')"
    assert looks_in(by_dict) == {"_p", "_q", "_r", "_s", "_t", "_u"}
    of_others = "patch.setattr(torch, '_h', 1); getattr(self, '_i'); vars(self)['_j']; patch.setattr(a, 'b', self._k)"
    assert not looks_in(of_others)
    by_variable = "def f():\n    for n in ('_l', 'm'):\n        patch.setattr(a, n, 1)\ndef g():\n    print('_o')"
    assert looks_in(by_variable) == {"_l"}
