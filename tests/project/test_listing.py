"""Folders that cannot be looked into are not taken for empty."""

import ast
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import files
from penstock.cli.run_snapshots import snapshots_of
from penstock.config import SourceConfig
from penstock.data.sources.find import left_out, local_source
from penstock.errors import ConfigError, StoreError
from penstock.hf.models.kept import copy_tokenizer
from tests.project.sources import nodes

HARMLESS = {
    "cli/report.py": "what it would show besides",
    "cli/first_look.py": "a size that is said",
    "cli/run_folder.py": "what is removed with a run, whose removal then says what is left",
    "doctor/mounts.py": "what the kernel shows",
    "fabric/strategy.py": "what is left of an older checkpoint",
    "hardware/profiles.py": "a cache",
    "hardware/system.py": "what the kernel shows",
    "hf/models/exporting.py": "a size that is said",
    "hf/models/folder.py": "what to say of a folder without a model",
    "report/trace_file.py": "older traces",
    "state/numa.py": "what the kernel shows",
    "store/whole.py": "what a killed process has left",
}
"""Files that ask ``Path.glob``, which takes a folder that may not be read for an empty one; and what for."""


def test_what_may_not_be_missed_is_listed_by_what_says_so() -> None:
    found = {name for name, node in nodes("glob") if isinstance(node, ast.Attribute) and node.attr in ("glob", "rglob")}
    assert found == HARMLESS.keys()


def test_folders_are_walked_through_by_what_says_that_one_may_not_be_read() -> None:
    silent = {
        name
        for name, node in nodes("walk")
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "os.walk"
        if "onerror" not in {keyword.arg for keyword in node.keywords}
    }
    assert silent == {"data/sources/text.py"}, "but for Python's own library"


@pytest.fixture
def unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that nobody may look into, not even root."""
    folder = tmp_path / "closed"
    folder.mkdir()
    for name in ("listdir", "scandir"):
        look: Callable[..., Any] = getattr(os, name)

        def refused(path: Any = ".", look: Callable[..., Any] = look) -> Any:
            if Path(path) == folder:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
            return look(path)

        monkeypatch.setattr(os, name, refused)
    return folder


def test_a_folder_that_may_not_be_read_is_an_error(unreadable: Path, tmp_path: Path) -> None:
    for look in (
        lambda: files.matching(unreadable, "*"),
        lambda: snapshots_of(unreadable),
        lambda: copy_tokenizer(unreadable, tmp_path),
    ):
        with pytest.raises((PermissionError, StoreError), match="closed"):
            look()


def test_data_in_a_folder_that_may_not_be_read_are_missed(unreadable: Path) -> None:
    """A folder below the one that is named; a hidden one is not looked into."""
    with pytest.raises(ConfigError, match=r"closed cannot be read \(Permission denied\): make it"):
        left_out(SourceConfig(path=str(unreadable.parent)))
    unreadable.rename(unreadable.with_name(".closed"))
    assert left_out(SourceConfig(path=str(unreadable.parent))) is None


@pytest.mark.parametrize("pattern", ["**/*.jsonl", "*/*.jsonl", "closed/*.jsonl", "**"])
def test_data_that_a_pattern_names_in_a_folder_that_may_not_be_read_are_missed(pattern: str, unreadable: Path) -> None:
    (unreadable.parent / "open").mkdir()
    (unreadable.parent / "open" / "a.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(ConfigError, match=r"closed cannot be read \(Permission denied\): make it"):
        local_source(SourceConfig(path=str(unreadable.parent / pattern)))
    assert local_source(SourceConfig(path=str(unreadable.parent / "[!c]*/*.jsonl"))) is not None


def test_names_are_found_by_their_patterns(tmp_path: Path) -> None:
    for name in ("b.json", "a.json", ".c.json", "d.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in files.matching(tmp_path, "*.json")] == [".c.json", "a.json", "b.json"]
    assert files.matching(tmp_path / "nowhere", "*") == files.matching(tmp_path / "d.txt", "*") == []


def test_what_cannot_be_looked_at_is_not_taken_for_nothing() -> None:
    """``os.path.lexists`` is false of it."""
    found = {name for name, node in nodes("lexists") if isinstance(node, ast.Attribute) and node.attr == "lexists"}
    assert not found, "ask penstock.store.directory.is_there"
