"""The sources of Penstock as syntax trees. Whoever looks for a word parses the files alone that have it."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import penstock

SOURCES = Path(penstock.__file__).parent


@cache
def texts() -> dict[str, str]:
    """The text of each source, by its path within the package."""
    found = {path.relative_to(SOURCES).as_posix(): path for path in SOURCES.rglob("*.py")}
    return {name: path.read_text(encoding="utf-8") for name, path in sorted(found.items())}


@cache
def parsed(text: str) -> ast.Module:
    """The tree of a source, parsed once for all tests of a process: who reads it leaves it as it is."""
    return ast.parse(text)


def trees(*words: str) -> Iterator[tuple[str, ast.Module]]:
    """The path and the tree of each source in whose text there is one of the words: names in a tree are words of it."""
    for name, text in texts().items():
        if any(word in text for word in words):
            yield name, parsed(text)


def nodes(*words: str) -> Iterator[tuple[str, ast.AST]]:
    """The path of each source in which there is one of the words, with each node of its tree."""
    for name, tree in trees(*words):
        yield from ((name, node) for node in ast.walk(tree))
