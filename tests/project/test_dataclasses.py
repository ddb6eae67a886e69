"""Dataclasses are built by the names of their fields, so that two of one type cannot be taken for each other."""

import ast
from pathlib import Path

import penstock

SOURCES = Path(penstock.__file__).parent
IN_LOOPS = {"tape/graph.py: WeightView", "tape/graph.py: SavedTensor"}
"""Built for each tensor that a graph saves, where names cost time."""


def by_position(text: str) -> set[str]:
    """The dataclasses of a source whose fields may be given by their positions."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            for decorator in node.decorator_list:
                said = ast.unparse(decorator)
                if "dataclass" in said.partition("(")[0] and "kw_only=True" not in said:
                    found.add(node.name)
    return found


def test_dataclasses_are_keyword_only() -> None:
    found = {
        f"{path.relative_to(SOURCES).as_posix()}: {name}"
        for path in SOURCES.rglob("*.py")
        for name in by_position(path.read_text())
    }
    assert found == IN_LOOPS


def test_one_that_is_not_is_found() -> None:
    bare, frozen = "@dataclass\nclass A:\n    x: int", "@dataclasses.dataclass(frozen=True)\nclass B:\n    x: int"
    assert by_position(f"{bare}\n{frozen}\n@dataclass(kw_only=True)\nclass C:\n    x: int") == {"A", "B"}
