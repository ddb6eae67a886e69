"""Tests look at Penstock from outside: at what is public, or through ``Engine.inside``."""

import ast
from pathlib import Path

TESTS = Path(__file__).parent.parent
OF_OTHERS = {"torch", "os", "sys", "threading", "atexit"}
"""Libraries whose own private names tests may need to know."""

LEFT = {
    "campaigns/test_flips.py": {"_commits"},
    "cli/test_cli.py": {"_console"},
    "cli/test_help.py": {"_COMMANDS"},
    "cli/test_run_snapshots.py": {"_write"},
    "cli/test_trackers.py": {"_ADAPTERS"},
    "doctor/test_disk.py": {"_LEAST", "_files", "_used"},
    "doctor/test_work.py": {"_states"},
    "engine/test_broken_off.py": {"_background", "_thread"},
    "engine/test_compile.py": {"_COMPILER_FNS"},
    "engine/test_cuda.py": {"_slots"},
    "engine/test_overlap.py": {"_clip"},
    "engine/test_sweep.py": {"_compare"},
    "engine/test_traffic.py": {"_scratch"},
    "engine/test_unreached.py": {"_placed"},
    "fabric/test_fabric.py": {"_args"},
    "folders.py": {"_non_persistent_buffers_set"},
    "planner/test_arguments.py": {"_machine"},
    "planner/test_phase_memory.py": {"_follow"},
    "project/test_documented.py": {"_COMMANDS"},
    "runtime/test_executor.py": {"_drain"},
    "schedule/test_pipelines.py": {
        *("_calculate_single_rank_operations", "_n_microbatches", "_num_stages", "_stages"),
    },
    "state/test_arrays.py": {"_slabs"},
    "state/test_background.py": {"_guarded", "_thread"},
    "store/test_stalls.py": {"_files", "_stalls", "_under_way", "_watcher"},
    "sweep/trial.py": {"_BatchNorm", "_DropoutNd"},
}
"""What is still looked at, by file. It is to become shorter: add a public look instead of a line."""


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def looks(tree: ast.AST) -> set[str]:
    """Private names of other files that a file looks at: attributes, and what it imports."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(value=value, attr=name) if _private(name):
                if ast.unparse(value).partition(".")[0] not in OF_OTHERS:
                    found.add(name)
            case ast.ImportFrom(module=str(module), names=names) if module.startswith(("penstock", "tests")):
                found |= {alias.name for alias in names if _private(alias.name)}
    return found


def test_files_of_tests_look_at_what_is_public() -> None:
    files = {str(path.relative_to(TESTS)): path for path in TESTS.rglob("*.py")}
    new = {name: looks(ast.parse(path.read_text())) - LEFT.get(name, set()) for name, path in sorted(files.items())}
    found = {name: names for name, names in new.items() if names}
    assert not found, "give it a public look, or look through Engine.inside"


def test_private_looks_are_seen() -> None:
    assert looks(ast.parse("engine._arrays.x; self._own; a.__class__; torch._C; f()._y")) == {"_arrays", "_y"}
    assert looks(ast.parse("from penstock.a import _b, c\nfrom torch import _d")) == {"_b"}
