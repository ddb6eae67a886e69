"""What the README and the documents tell a reader to type: their fenced blocks, and the commands within their text."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
KINDS = ("sh", "python", "yaml", "json", "text", "mermaid")
"""What a block may be: ``text`` is to be looked at, ``mermaid`` is compared with the code
(``engine/test_fate``), and all others are run."""

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
_COMMAND = re.compile(r"`(penstock [^`]+)`")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block. ``place``: file and line."""

    page: str
    line: int
    kind: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The lines of a shell block, without what is said about them."""
        lines = (line.split(" #")[0].strip() for line in self.text.splitlines())
        return [line for line in lines if line]


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in _BLOCK.finditer(text):
            line = text[: found.start()].count("\n") + 2
            yield Block(page=str(page.relative_to(ROOT)), line=line, kind=found[1], text=found[2])


def commands_within_text() -> Iterator[tuple[str, str]]:
    """A page and a command that stands in one of its sentences."""
    for page in PAGES:
        text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
        for found in _COMMAND.finditer(text):
            yield str(page.relative_to(ROOT)), " ".join(found[1].split())
