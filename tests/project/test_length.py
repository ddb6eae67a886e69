"""Source files stay short enough to be read as a whole."""

from pathlib import Path

import penstock

SOURCES = Path(penstock.__file__).parent
MOST = 500
"""Lines of a file."""


def test_no_file_is_longer_than_the_most() -> None:
    lengths = {str(path.relative_to(SOURCES)): len(path.read_text().splitlines()) for path in SOURCES.rglob("*.py")}
    found = {name: lines for name, lines in lengths.items() if lines > MOST}
    assert not found, f"split them along a seam that deserves a name: {found}"
