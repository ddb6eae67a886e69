"""The rooms' directions: which room may import which, by what the sources say, imports within functions included."""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import penstock
from tests.project.sources import parsed

SOURCES = Path(penstock.__file__).parent
DESIGN = SOURCES.parent.parent / "docs" / "design.md"

_STATE = {"accelerator", "compat", "config", "documents", "errors", "files", "optim", "ranks", "schedule", "store"}
_ENGINE = _STATE | {"doctor", "hardware", "loss", "planner", "runtime", "shape", "sim", "state", "tape"}
_LOOPS = _ENGINE - {"accelerator", "doctor", "planner", "ranks", "runtime", "shape", "sim"} | {"data", "engine"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "files": set(),
    "native": set(),
    "documents": set(),
    "compat": set(),
    "accelerator": set(),
    "config": {"documents", "errors"},
    "schedule": {"config", "errors"},
    "sim": {"config", "errors", "native", "schedule"},
    "hardware": {"config", "documents", "errors", "schedule"},
    "ranks": {"accelerator", "compat", "errors", "schedule"},
    "loss": {"compat", "errors"},
    "tape": {"compat", "errors", "schedule"},
    "shape": {"config", "documents", "errors", "hardware", "loss", "schedule", "tape"},
    "planner": {"config", "errors", "hardware", "schedule", "shape", "sim"},
    "report": {"config", "documents", "errors", "files", "schedule", "sim"},
    "store": {"config", "documents", "errors", "files", "native"},
    "optim": {"compat", "config", "errors", "native", "schedule"},
    "data": {"compat", "config", "documents", "errors", "files", "tape"},
    "state": _STATE,
    "runtime": {"accelerator", "compat", "config", "errors", "optim", "ranks", "schedule", "state", "store", "tape"},
    "engine": _ENGINE,
    "doctor": {
        "accelerator",
        "config",
        "errors",
        "hardware",
        "optim",
        "ranks",
        "runtime",
        "schedule",
        "state",
        "store",
        "tape",
    },
    "fabric": _LOOPS | {"ranks"},
    "hf": _LOOPS | {"ranks"},
    "cli": _LOOPS - {"compat", "tape"} | {"doctor", "hf", "planner", "ranks", "report", "shape", "sim"},
}
"""Room -> the rooms that it may import. Everybody may import what ``penstock/__init__.py`` exports but no room does."""

WITHOUT_TORCH = {"config", "documents", "errors", "files", "hardware", "planner", "report", "schedule", "shape", "sim"}
"""Rooms that import no torch, nor anything built on it, when they are imported: planning needs no tensors."""

BARE = ("penstock", "penstock.doctor", "penstock.fabric", "penstock.hf", "penstock.cli")
"""Packages of which the same holds, though not of all that is in them."""

_HEAVY = {"torch", "transformers", "accelerate", "peft", "trl", "lightning_fabric", "datasets"}


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in SOURCES.rglob("*.py"):
        parts = path.relative_to(SOURCES.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Every module that these parts of a source import."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert not node.level, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules() else node.module
        elif isinstance(node, ast.Call) and node.args and _imports_by_text(node):
            yield from _texts(node.args[0])


_BY_TEXT = {"import_module", "__import__"}


def _imports_by_text(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in _BY_TEXT
        case _:
            return False


def _texts(node: ast.AST) -> Iterator[str]:
    """The name that is imported where it is a text; of one that is put together its first part, which says the room."""
    match node:
        case ast.Constant(value=str(text)) | ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
            yield text.removesuffix(".")


def by_table(tree: ast.AST) -> Iterator[str]:
    """Modules that a source has the names of, if it imports any by a text that it looks up."""
    nodes = [*ast.walk(tree)]
    if any(_imports_by_text(node) for node in nodes):
        yield from (text for node in nodes for text in _texts(node) if text in modules() and room_of(text))


@dataclass(frozen=True, kw_only=True)
class Imports:
    """The modules that a source imports: wherever that stands, and whoever it is for (``TYPE_CHECKING`` too); when it
    is imported; by names that it looks up."""

    ever: tuple[str, ...]
    at_top: tuple[str, ...]
    by_table: tuple[str, ...]

    @staticmethod
    def of(text: str) -> "Imports":
        tree = parsed(text)
        ever, at_top = tuple(imports(ast.walk(tree))), tuple(imports(_at_top(tree)))
        return Imports(ever=ever, at_top=at_top, by_table=tuple(by_table(tree)))


@cache
def imports_of(module: str) -> Imports:
    """Every source is parsed once."""
    return Imports.of(modules()[module].read_text())


def wrong_ways(room: str, found: Imports) -> list[str]:
    """What a source in ``room`` imports that the room may not."""
    inside = (name for name in dict.fromkeys((*found.ever, *found.by_table)) if name.split(".")[0] == "penstock")
    return [name for name in inside if room_of(name) not in {room, *MAY_IMPORT[room]}]


def at_import(module: str) -> set[str]:
    """The modules that importing ``module`` imports: at its top, not in functions, and not for types alone."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        if name in modules():
            waiting += [name.rpartition(".")[0]] if "." in name else []
            waiting += imports_of(name).at_top
    return found


def _at_top(tree: ast.AST) -> Iterator[ast.AST]:
    """What runs when a module is imported. Bodies of functions do not, nor what stands under ``TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.FunctionDef():
                continue
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=others):
                node = ast.Module(body=others, type_ignores=[])
        yield node
        yield from _at_top(node)


def test_every_folder_is_a_room() -> None:
    rooms = {path.name for path in SOURCES.iterdir() if (path / "__init__.py").exists()}
    files = {path.stem for path in SOURCES.glob("*.py")} - {"__init__", "__main__"}
    assert rooms | files == set(MAY_IMPORT)


def test_rooms_have_an_order() -> None:
    done: set[str] = set()
    while ready := {room for room, below in MAY_IMPORT.items() if room not in done and below <= done}:
        done |= ready
    assert done == set(MAY_IMPORT)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_what_it_may(room: str) -> None:
    found = {
        f"{path.relative_to(SOURCES)}: {wrong}"
        for name, path in modules().items()
        if room_of(name) == room
        for wrong in wrong_ways(room, imports_of(name))
    }
    assert found == set()


def test_an_import_the_wrong_way_is_found() -> None:
    lazy = "def f():\n    from penstock.planner import search\n"
    for_types = "if TYPE_CHECKING:\n    import penstock.planner.search\n"
    assert written("runtime", lazy) == written("runtime", for_types) == ["penstock.planner.search"]
    assert not written("engine", lazy)


def written(room: str, text: str) -> list[str]:
    return wrong_ways(room, Imports.of(text))


@pytest.mark.parametrize(
    "text",
    [
        'import_module("penstock.planner.search")',
        'importlib.import_module("penstock.planner.search")',
        'found = __import__("penstock.planner.search")',
        'MODULES = {"search": "penstock.planner.search"}\ndef f(name):\n    return import_module(MODULES[name])',
    ],
)
def test_an_import_by_its_names_text_is_found(text: str) -> None:
    assert written("runtime", text) == ["penstock.planner.search"]
    assert not written("engine", text)
    assert written("runtime", 'import_module(f"penstock.planner.{name}")') == ["penstock.planner"]
    assert not written("runtime", 'NOTE = "penstock.planner.search"')


def rooms_that_import(package: str) -> set[str]:
    """Rooms with a source that imports a module of a package."""
    return {
        room_of(name) for name in modules() for other in imports_of(name).ever if f"{other}.".startswith(f"{package}.")
    }


def reached_from(room: str) -> set[str]:
    """Modules that a room's sources import, and those that these do, at any time."""
    sources = modules()
    found, left = set[str](), [name for name in sources if room_of(name) == room]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            known = imports_of(name)
            left += [other for other in (*known.ever, *known.by_table) if other in sources]
    return found


def test_the_runtime_imports_nothing_that_makes_schedules() -> None:
    """It runs a schedule as it stands: ``schedule.ir`` answers what it asks about ops. Nor does what it imports."""
    found = rooms_that_import("penstock.schedule.lower")
    assert "runtime" not in found
    assert {"schedule", "planner"} <= found
    assert not {name for name in reached_from("runtime") if name.startswith("penstock.schedule.lower")}
    assert "penstock.schedule.lower.build" in reached_from("planner")


def test_the_runtime_knows_no_settings() -> None:
    """A schedule has all of them that count in it."""
    trees = [ast.parse(path.read_text()) for name, path in modules().items() if room_of(name) == "runtime"]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in nodes for alias in node.names}
    assert "Chunk" in names
    assert not names & {"Settings", "Placement", "Plan", "Request", "WrapArguments", "Budget", "StepConfig"}


def test_only_the_engine_imports_both_the_planner_and_the_runtime() -> None:
    assert {room for room, below in MAY_IMPORT.items() if {"planner", "runtime"} <= below} == {"engine"}


@pytest.mark.parametrize("room", sorted(WITHOUT_TORCH))
def test_planning_imports_no_torch(room: str) -> None:
    for name in modules():
        if room_of(name) == room:
            heavy = {other for other in at_import(name) if other.split(".")[0] in _HEAVY}
            assert not heavy, f"importing {name} imports {heavy}"


@pytest.mark.parametrize("name", BARE)
def test_packages_import_no_torch(name: str) -> None:
    assert not {other for other in at_import(name) if other.split(".")[0] in _HEAVY}


def test_an_import_of_torch_is_found() -> None:
    assert "torch" in at_import("penstock.tape.trees")
    assert "torch" not in at_import("penstock.shape.meta")


def test_the_design_says_the_same() -> None:
    text = DESIGN.read_text().partition("## Rooms")[2].partition("\n## ")[0]
    said: dict[str, set[str]] = {}
    for rooms, below in re.findall(r"^\| ([a-z`, ]+) \| ([a-z`, ]+) \|$", text, re.MULTILINE):
        for room in re.findall(r"`(\w+)`", rooms):
            said[room] = set(re.findall(r"`(\w+)`", below))
    assert said == MAY_IMPORT


@pytest.mark.parametrize("room", [room for room in MAY_IMPORT if (SOURCES / room).is_dir()])
def test_a_rooms_own_words_say_the_same(room: str) -> None:
    words = ast.get_docstring(ast.parse((SOURCES / room / "__init__.py").read_text())) or ""
    may = re.search(r"May\s+import:\s+([^.]*)\.", words)
    assert may is not None, "its __init__ ends with: May import: ``config``, ``errors``."
    assert set(re.findall(r"``(\w+)``", may[1])) == MAY_IMPORT[room]
