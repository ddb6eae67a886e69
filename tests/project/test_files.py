"""What lies in a run's folder under a name that a command writes is never written through; what is kept is private."""

import ast
import fcntl
import multiprocessing
import os
import shutil
import signal
import stat
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from penstock import files
from penstock.cli import main
from penstock.errors import StoreError
from penstock.store.directory import DirectoryLock
from penstock.store.journal import Journal
from penstock.store.manifest import DATA
from tests.project.sources import trees

pytestmark = pytest.mark.usefixtures("one_thread", "each_model_is_looked_at_once")

ALLOWED = {
    "files.py": "the place for it",
    "report/chrome.py": "where the user has said",
    "cli/showing/summary.py": "a file of the kernel's",
    "hardware/profiles.py": "mkstemp, in the user's cache",
    "hf/trainer.py": "the Trainer's own checkpoint folder, as it writes it",
}
"""Modules that open files for writing by themselves, and why that is right there."""

_WRITES = {"write_text", "write_bytes", "touch", "symlink_to", "hardlink_to", "mkstemp"}
_NAMES = {"open", "save", *_WRITES}
_OPENS = {"O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND"}


def _opens_for_writing(tree: ast.AST) -> list[int]:
    """Lines that open a file for writing, or write one, without ``penstock.files``."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name not in _NAMES and not name.startswith("copy"):
            continue
        owner, _, name = ast.unparse(node.func).rpartition(".")
        words = [a.value for a in [*node.args, *(k.value for k in node.keywords)] if isinstance(a, ast.Constant)]
        modes = [w for w in words if isinstance(w, str) and set(w) <= set("rwaxbt+") and set(w) & set("wax+")]
        flags = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)} & _OPENS
        nowhere = any(isinstance(n, ast.Attribute) and n.attr == "devnull" for n in ast.walk(node))
        if (
            (name == "open" and owner not in ("os", "gzip") and modes)
            or (owner == "os" and name == "open" and flags and not nowhere)
            or name in _WRITES
            or (owner == "shutil" and name.startswith("copy"))
            or (owner == "torch" and name == "save")
        ):
            found.append(node.lineno)
    return found


def test_the_search_for_writers_finds_them() -> None:
    for line in (
        "open(p, 'w')",
        "p.open('ab')",
        "path.open(mode='x')",
        "os.open(p, os.O_RDWR | os.O_CREAT)",
        "p.write_text('')",
        "shutil.copy(a, b)",
    ):
        assert _opens_for_writing(ast.parse(line)), line
    for line in ("open(p)", "p.open('rb')", "os.open(p, os.O_RDONLY)", "os.open(os.devnull, os.O_WRONLY)"):
        assert not _opens_for_writing(ast.parse(line)), line


def test_files_are_written_in_one_place() -> None:
    found = {
        name: lines
        for name, tree in trees(*(f"{name}(" for name in _NAMES), "copy")
        if (lines := _opens_for_writing(tree))
    }
    assert {path: lines for path, lines in found.items() if path not in ALLOWED} == {}, "not through penstock.files"
    assert set(ALLOWED) <= set(found), "an exception that is none any more"


def _link(path: Path) -> Path:
    victim = path.with_name("victim")
    victim.write_text("the user's own")
    path.symlink_to(victim)
    return victim


@pytest.mark.parametrize(
    "write",
    [
        files.create,
        files.append,
        files.update,
        lambda path: files.descriptor(path, os.O_RDWR | os.O_CREAT),
    ],
)
def test_a_link_is_not_followed(write: Callable[[Path], object], tmp_path: Path) -> None:
    """Be there something behind it or not."""
    victim = _link(tmp_path / "name")
    with pytest.raises(OSError, match=r"symbolic link|File exists"):
        write(tmp_path / "name")
    assert victim.read_text() == "the user's own"
    victim.unlink()
    with pytest.raises(OSError, match=r"symbolic link|File exists"):
        write(tmp_path / "name")
    assert not victim.exists()


def test_what_is_replaced_takes_the_place_of_a_link(tmp_path: Path) -> None:
    """One in the place of what is on its way there is not followed, either: nobody could know of it."""
    path = tmp_path / "name"
    victim = _link(path)
    files.replace(path, "ours")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(uuid, "uuid4", lambda: uuid.UUID(int=0))
        (waits := tmp_path / f"name.{'0' * 12}.partial").symlink_to(victim)
        with pytest.raises(FileExistsError):
            files.replace(path, "more")
        assert victim.read_text() == "the user's own"
        waits.unlink()
    (tmp_path / "given").write_text("a copy")
    (tmp_path / "copied").symlink_to(victim)
    files.copy(tmp_path / "given", tmp_path / "copied")
    assert ((tmp_path / "copied").read_text(), (tmp_path / "copied").is_symlink()) == ("a copy", False)
    assert (path.read_text(), path.is_symlink(), victim.read_text()) == ("ours", False, "the user's own")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copied", "given", "name", "victim"]


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for write in (files.append, files.update):
        with pytest.raises(OSError, match=r"not a regular file|No such device"):
            write(tmp_path / "pipe")


def test_files_are_the_owners_alone_and_outputs_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        files.replace(tmp_path / "own", "")
        files.append(tmp_path / "journal").close()
        files.replace(tmp_path / "shown", "", private=False)
        (tmp_path / "tree").mkdir()
        (tmp_path / "tree" / "file").touch()
        files.sync_tree(tmp_path / "tree")
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.rglob("*") if p.is_file()}
    assert modes == {"own": 0o600, "journal": 0o600, "shown": 0o644, "file": 0o600}


def test_what_fails_on_the_way_leaves_the_old_file_and_no_half_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.replace(tmp_path / "name", "old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            files.replace(tmp_path / "name", "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("name", "old")]


def test_of_processes_that_write_the_same_file_one_has_written_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def write(text: str) -> None:
        for _ in range(50):
            files.replace(path, text * 50_000)

    writers = [multiprocessing.get_context("fork").Process(target=write, args=(text,)) for text in "ab"]
    for writer in writers:
        writer.start()
    seen = set[str]()
    while any(writer.is_alive() for writer in writers):
        with suppress(FileNotFoundError):
            seen.add(path.read_text())
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert seen | {path.read_text()} <= {"a" * 50_000, "b" * 50_000}
    assert list(tmp_path.iterdir()) == [path]


def test_what_was_left_of_a_file_by_a_kill_goes_as_it_is_written_again(tmp_path: Path) -> None:
    """Once nobody else can be at work on it."""
    path, other = tmp_path / "file", tmp_path / f"other.{'0' * 12}.partial"
    files.replace(path, "old")
    other.touch()
    _age(other)
    if not (child := os.fork()):
        os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        files.replace(path, "half")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (left,) = files.left_of(path)
    files.replace(path, "new")
    assert (path.read_text(), files.left_of(path)) == ("new", [left])
    _age(left)
    with open(left) as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        files.replace(path, "newer")
        assert files.left_of(path) == [left]
    files.replace(path, "newest")
    assert (path.read_text(), files.left_of(path)) == ("newest", [])
    assert sorted(tmp_path.iterdir()) == [path, other]


def test_of_two_that_make_the_same_folder_one_stands(tmp_path: Path) -> None:
    with files.made_once(tmp_path / "deep" / "same") as mine:
        (mine / "file").write_text("mine")
        with files.made_once(tmp_path / "deep" / "same") as other:
            (other / "file").write_text("other")
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["same"]
    assert (tmp_path / "deep" / "same" / "file").read_text() == "other"


def test_what_was_left_of_a_folder_by_a_kill_goes_as_it_is_made_again(tmp_path: Path) -> None:
    (tmp_path / f"other.{'0' * 12}.partial").mkdir()  # another folder's
    if not (child := os.fork()):
        with files.made_once(tmp_path / "same") as left:
            (left / "file").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (left,) = tmp_path.glob("same.*")
    with files.made_once(tmp_path / "same"):
        assert left.exists(), "another host's, perhaps, whose lock is not seen here"
    shutil.rmtree(tmp_path / "same")
    _age(left)
    with files.made_once(tmp_path / "same") as made, suppress(KeyError):
        assert not left.exists()
        _age(made)
        with files.made_once(tmp_path / "same"):  # beside one that is under way
            assert made.exists()
            raise KeyError
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"other.{'0' * 12}.partial", "same"]


def test_who_looks_for_what_was_left_of_a_folder_has_no_lock_that_its_maker_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Path] = []

    def lock() -> float:
        fd = os.open(young, os.O_RDONLY)
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken.append(young)
        os.close(fd)
        return real()

    real, young = time.time, tmp_path / f"same.{'0' * 12}.partial"
    young.mkdir()
    monkeypatch.setattr(time, "time", lock)
    with files.made_once(tmp_path / "same"):
        assert taken


def _age(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (0, 0))


def test_a_lock_and_a_journal_say_what_is_in_their_way(tmp_path: Path) -> None:
    victim = _link(tmp_path / "lock")
    with pytest.raises(StoreError, match="is a symbolic link, which is not followed here: remove the link"):
        DirectoryLock(tmp_path)
    (tmp_path / "metrics").symlink_to(victim)
    with pytest.raises(StoreError, match="is a symbolic link"):
        Journal(tmp_path / "metrics", "a")
    Journal(tmp_path / "metrics", "w").close()  # begins anew: the link goes, what it led to stays
    assert victim.read_text() == "the user's own"
    assert not (tmp_path / "metrics").is_symlink()


# ---- what commands do with a folder that somebody else has made


def _snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


def _commands(run: Path, out: Path) -> list[list[str]]:
    return [
        ["verify", str(run)],
        ["report", str(run)],
        ["export", str(run), str(out)],
        ["resume", str(run), "--steps", "4"],
        ["train", str(run / "config.yaml"), "--run", str(run), "--steps", "1", "--overwrite"],
    ]


def test_no_command_writes_through_a_link_that_lies_where_a_file_is_on_its_way(a_run: Path, tmp_path: Path) -> None:
    victims = tmp_path / "victims"
    victims.mkdir()
    names = [p for p in a_run.rglob("*") if p.is_file()]
    for number, path in enumerate([*names, a_run / "report.html", a_run / "trace-from-4.json"]):
        victim = victims / str(number)
        victim.write_bytes((a_run / "trace.json").read_bytes())
        path.with_name(path.name + files.PARTIAL).symlink_to(victim)
        if not path.exists():
            path.symlink_to(victim)
    before = _snapshot(victims)
    for words in _commands(a_run, tmp_path / "out"):
        assert main(words) == 0, words
        assert _snapshot(victims) == before, words


@pytest.mark.parametrize("name", ["store/lock", "store/commit.0", "store/commit.1", f"store/{DATA}", "metrics.jsonl"])
def test_no_command_writes_through_a_link_that_lies_where_a_file_is_changed(
    name: str, a_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The link leads to what was there, so that there is nothing to see for who follows it."""
    victims = tmp_path / "victims"
    victims.mkdir()
    (a_run / name).rename(victims / "victim")
    (a_run / name).symlink_to(victims / "victim")
    before = _snapshot(victims)
    for words in _commands(a_run, tmp_path / "out")[:-1]:
        code = main(words)
        assert _snapshot(victims) == before, words
        assert code == 0 or "is a symbolic link" in capsys.readouterr().err, words
    assert main(["resume", str(a_run), "--steps", "5"]) == 1


def test_all_that_a_run_keeps_is_its_owners_alone(finished_run: Path) -> None:
    open_to_others = [p for p in finished_run.rglob("*") if p.is_file() and stat.S_IMODE(p.stat().st_mode) & 0o077]
    assert not open_to_others
