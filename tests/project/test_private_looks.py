"""Tests look at Penstock from outside: at what is public, or through ``Engine.inside``."""

import ast
from pathlib import Path

TESTS = Path(__file__).parent.parent
OF_OTHERS = {"torch", "os", "sys", "threading", "atexit"}
"""Libraries whose own private names tests may need to know."""

OF_LIBRARIES = {
    "engine/test_compile.py": {"_COMPILER_FNS"},  # torch: to take a compiler's registration back
    "schedule/test_pipelines.py": {  # torch's own pipelines, as the reference
        *("_calculate_single_rank_operations", "_n_microbatches", "_num_stages", "_stages"),
    },
    "sweep/trial.py": {"_BatchNorm", "_DropoutNd"},  # torch: what all of these have in common
}
"""Private names of libraries that no public one stands for, by file."""


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def looks(tree: ast.AST) -> set[str]:
    """Private names of other files that a file looks at: attributes, and what it imports."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(value=value, attr=name) if _private(name):
                if ast.unparse(value).partition(".")[0] not in OF_OTHERS:
                    found.add(name)
            case ast.ImportFrom(module=str(module), names=names) if module.startswith(("penstock", "tests")):
                found |= {alias.name for alias in names if _private(alias.name)}
    return found


def test_files_of_tests_look_at_what_is_public() -> None:
    files = {str(path.relative_to(TESTS)): path for path in TESTS.rglob("*.py")}
    seen = {name: looks(ast.parse(path.read_text())) for name, path in sorted(files.items())}
    new = {name: names - OF_LIBRARIES.get(name, set()) for name, names in seen.items()}
    found = {name: names for name, names in new.items() if names}
    assert not found, "give it a public look, or look through Engine.inside"


def test_private_looks_are_seen() -> None:
    assert looks(ast.parse("engine._arrays.x; self._own; a.__class__; torch._C; f()._y")) == {"_arrays", "_y"}
    assert looks(ast.parse("from penstock.a import _b, c\nfrom torch import _d")) == {"_b"}
