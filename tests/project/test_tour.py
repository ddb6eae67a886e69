"""The pages that lead through the source name what is there."""

import ast
import re
from pathlib import Path

import pytest

from tests.documented import ROOT

TOUR = ROOT / "docs" / "tour.md"
PLACES = re.findall(r"`([\w/]+\.py)`(?: `(\w+)`)?", TOUR.read_text())


def names_of(path: Path) -> set[str]:
    """What a file defines at its top and in its classes, and the names that it assigns; not what it imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def test_the_tour_names_places() -> None:
    assert len(PLACES) > 30


@pytest.mark.parametrize(("file", "name"), sorted(set(PLACES)), ids=lambda value: value.replace("/", "-"))
def test_what_the_tour_names_is_there(file: str, name: str) -> None:
    path = ROOT / "src" / "penstock" / file
    assert path.is_file()
    assert not name or name in names_of(path)
