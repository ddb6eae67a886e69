"""Source files stay short enough to be read as a whole."""

from pathlib import Path

import penstock

SOURCES = Path(penstock.__file__).parent
MOST = 500
"""Lines of a file."""

LONGER = {"engine/planning.py": 600}
"""Files that are not yet split, each with the lines that it had when it was listed here: it can only shrink."""


def lengths() -> dict[str, int]:
    return {str(path.relative_to(SOURCES)): len(path.read_text().splitlines()) for path in SOURCES.rglob("*.py")}


def test_no_file_is_longer_than_the_most() -> None:
    found = {name: lines for name, lines in lengths().items() if lines > LONGER.get(name, MOST)}
    assert not found, f"split them along a seam that deserves a name: {found}"


def test_exceptions_are_longer() -> None:
    found = lengths()
    assert all(found.get(name, 0) > MOST for name in LONGER), "an exception that is none any more"
