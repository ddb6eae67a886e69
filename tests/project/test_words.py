"""Words that mean something else to most readers, and docstrings that go on from a name, stay out of the sources."""

import re
from pathlib import Path

import penstock

SOURCES = {path: path.read_text(encoding="utf-8") for path in Path(penstock.__file__).parent.rglob("*.py")}
ENGINE = {"planner", "schedule", "runtime", "state", "engine", "shape", "sim", "report", "store"}
"""Rooms that save activations, and that know no library's checkpoints, which are saved models."""
_ASKS = "whether|what|that|which|who|where|how|why|when"
_GOES_ON = rf"of|(In|Into|By|From|At|On|Of) (?:{_ASKS})|Those|Its|Their|The same,?(?: (?:of|in|for|from|with))"
_ELLIPSIS = re.compile(rf'"""(?:((?i:{_ASKS})|{_GOES_ON}) |\.\.\.).*')


def test_a_saved_activation_is_not_called_a_checkpoint() -> None:
    for path, text in SOURCES.items():
        if ENGINE & set(path.parts[path.parts.index("penstock") + 1 :]):
            found = re.findall(r".*checkpoint(?!ing).*", text, re.IGNORECASE)
            assert not found, f"{path.name}: {found}: say saved activation"


def test_docstrings_say_what_the_thing_is() -> None:
    for path, text in SOURCES.items():
        found = _ELLIPSIS.search(text)
        assert not found, f"{path.name}: {found[0]}: say what it is, or True if"


def test_docstrings_of_tests_do_not_go_on_from_a_name() -> None:
    for path in Path(__file__).parent.parent.rglob("*.py"):
        assert not re.search(r'"""\.\.\.', path.read_text(encoding="utf-8")), path.name
