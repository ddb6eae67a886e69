"""Dataclasses are built by the names of their fields, so that two of one type cannot be taken for each other."""

import ast

from tests.project.sources import trees

IN_LOOPS = {"tape/graph.py: WeightView", "tape/graph.py: SavedTensor"}
"""Built for each tensor that a graph saves, where names cost time."""


def by_position(tree: ast.AST) -> set[str]:
    """The dataclasses of a source whose fields may be given by their positions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for decorator in node.decorator_list:
                said = ast.unparse(decorator)
                if "dataclass" in said.partition("(")[0] and "kw_only=True" not in said:
                    found.add(node.name)
    return found


def test_dataclasses_are_keyword_only() -> None:
    found = {f"{file}: {name}" for file, tree in trees("dataclass") for name in by_position(tree)}
    assert found == IN_LOOPS


def test_one_that_is_not_is_found() -> None:
    bare, frozen = "@dataclass\nclass A:\n    x: int", "@dataclasses.dataclass(frozen=True)\nclass B:\n    x: int"
    assert by_position(ast.parse(f"{bare}\n{frozen}\n@dataclass(kw_only=True)\nclass C:\n    x: int")) == {"A", "B"}
