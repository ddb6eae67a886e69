"""The table of docs/migration.md, of the names that errors answer: ``python -m tests.migration`` writes it."""

from collections import defaultdict

from penstock.config.elsewhere import HERE
from tests.documented import ROOT

PAGE = ROOT / "docs" / "migration.md"
HEAD = "| elsewhere | here | what differs |\n|---|---|---|\n"


def table() -> str:
    """A row for each counterpart, with all the names that it stands for."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, said in HERE.items():
        names[said].append(name)
    rows = (f"| {_code(theirs)} | {' | '.join(_in_two(said))} |" for said, theirs in names.items())
    return HEAD + "\n".join(row.replace("|  |", "| |") for row in rows) + "\n"


def _in_two(said: str) -> tuple[str, str]:
    """The settings here, and what differs."""
    if said.startswith("drop it: "):
        return "nothing", said.removeprefix("drop it: ")
    keys, _, differs = said.partition(" (")
    return _code(keys.split(" and ")), differs.removesuffix(")")


def _code(words: list[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text.partition(HEAD)[0] + table(), encoding="utf-8")
