"""The table of docs/migration.md, of the names that errors answer: ``python -m tests.migration`` writes it."""

from collections import defaultdict

from penstock.config.elsewhere import ELSEWHERE, Counterpart
from tests.documented import ROOT

PAGE = ROOT / "docs" / "migration.md"
HEAD = "| elsewhere | here | what differs |\n|---|---|---|\n"


def table() -> str:
    """A row for each counterpart, with all the names that it stands for."""
    names: dict[Counterpart, list[str]] = defaultdict(list)
    for name, found in ELSEWHERE.items():
        names[found].append(name)
    rows = (
        f"| {_code(theirs)} | {_code(found.keys) or 'nothing'} | {found.differs} |" for found, theirs in names.items()
    )
    return HEAD + "\n".join(row.replace("|  |", "| |") for row in rows) + "\n"


def _code(words: list[str] | tuple[str, ...]) -> str:
    return ", ".join(f"`{word}`" for word in words)


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text.partition(HEAD)[0] + table(), encoding="utf-8")
