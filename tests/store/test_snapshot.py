"""Snapshots: complete or not there at all, and every byte checked."""

import ctypes
import errno
import json
import os
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import StoreError
from penstock.store import ALIGN, SnapshotReader, aligned_bytes, written_snapshot
from penstock.store.digests import Digests
from penstock.store.layout import BLOCK
from penstock.store.snapshot import PartWriter
from tests import warm

ENTRIES = [("weights", 3 * BLOCK + 5 * ALIGN), ("tiny", 10), ("moments", BLOCK)]
META = {"step": 7, "random": "abc", "losses": [1.5, 2.25]}


def contents(seed: int = 0) -> dict[str, npt.NDArray[np.uint8]]:
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, nbytes in ENTRIES:
        arrays[name] = aligned_bytes(-(-nbytes // ALIGN) * ALIGN)
        arrays[name][:] = rng.integers(0, 256, len(arrays[name]), np.uint8)
    return arrays


def write_all(writer: PartWriter, arrays: dict[str, npt.NDArray[np.uint8]], chunk: int = 2 * BLOCK) -> None:
    for name, data in arrays.items():
        for offset in range(0, len(data), chunk):
            writer.write(name, offset, data[offset : offset + chunk])


def save(path: Path, seed: int = 0, *, overwrite: bool = False) -> None:
    with written_snapshot(path, ENTRIES, META | {"seed": seed}, overwrite=overwrite) as writer:
        write_all(writer, contents(seed))


def check(path: Path, seed: int = 0) -> None:
    with SnapshotReader(path) as reader:
        assert reader.meta == META | {"seed": seed}
        for name, data in contents(seed).items():
            out = aligned_bytes(len(data))
            reader.read(name, 0, out)
            assert np.array_equal(out, data)


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    save(tmp_path / "s")
    check(tmp_path / "s")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    assert {path.name for path in (tmp_path / "s").iterdir()} == {"snapshot.json", "penstock.snapshot"}


@settings(max_examples=8, deadline=None)
@given(write=st.integers(1, 700), read=st.integers(1, 700), start=st.integers(0, 700))
def test_chunks_of_any_size_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, write: int, read: int, start: int
) -> None:
    path = tmp_path_factory.mktemp("snapshots") / "s"
    arrays = contents()
    with written_snapshot(path, ENTRIES, META) as writer:
        write_all(writer, arrays, write * ALIGN)
    data = arrays["weights"]
    with SnapshotReader(path) as reader:
        for offset in reversed(range(start * ALIGN, len(data), read * ALIGN)):
            out = aligned_bytes(min(read * ALIGN, len(data) - offset))
            reader.read("weights", offset, out)
            assert np.array_equal(out, data[offset : offset + len(out)])
        reader.verify()


def test_a_flipped_bit_is_found_and_named(tmp_path: Path) -> None:
    save(tmp_path / "s")
    with (tmp_path / "s" / "penstock.snapshot").open("r+b") as file:
        file.seek(2 * BLOCK + 999)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with SnapshotReader(tmp_path / "s") as reader:
        reader.read("weights", 0, aligned_bytes(2 * BLOCK))
        reader.read("moments", 0, aligned_bytes(BLOCK))
        message = rf"weights is damaged in bytes {2 * BLOCK} to {3 * BLOCK}"
        with pytest.raises(StoreError, match=message):
            reader.read("weights", 3 * BLOCK - ALIGN, aligned_bytes(ALIGN))  # another part of the damaged block
        with pytest.raises(StoreError, match=message):
            reader.verify()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d | {"format": 2}, "format 2"),
        (lambda d: d | {"checksum": "0"}, "checksum"),
        (lambda d: d | {"penstock": "store"}, "not a snapshot of penstock's"),
    ],
)
def test_wrong_manifests_are_refused(tmp_path: Path, change: object, message: str) -> None:
    assert callable(change)
    save(tmp_path / "s")
    manifest = tmp_path / "s" / "snapshot.json"
    manifest.write_text(json.dumps(change(json.loads(manifest.read_text()))))
    with pytest.raises(StoreError, match=message):
        SnapshotReader(tmp_path / "s")


def test_a_truncated_snapshot_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "s")
    os.truncate(tmp_path / "s" / "penstock.snapshot", BLOCK)
    with pytest.raises(StoreError, match="damaged"):
        SnapshotReader(tmp_path / "s")


def test_a_snapshot_that_cannot_be_opened_leaves_no_file_and_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "s")

    def fail(*_: object) -> None:
        raise MemoryError("injected")

    def look() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), sum(t.name == "penstock-stalls" for t in threading.enumerate())

    before = look()
    monkeypatch.setattr(Digests, "read", fail)
    with pytest.raises(MemoryError, match="injected"):
        SnapshotReader(tmp_path / "s")
    assert look() == before


def test_what_is_no_snapshot_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(StoreError, match="not a snapshot"):
            SnapshotReader(path)


def test_a_snapshot_is_not_overwritten_unless_told(tmp_path: Path) -> None:
    save(tmp_path / "s", 1)
    with pytest.raises(StoreError, match="exists"):
        save(tmp_path / "s", 2)
    check(tmp_path / "s", 1)
    save(tmp_path / "s", 2, overwrite=True)
    check(tmp_path / "s", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_where_a_link_leads_is_overwritten_and_the_link_stays(tmp_path: Path) -> None:
    save(tmp_path / "s", 1)
    (tmp_path / "latest").symlink_to("s")
    save(tmp_path / "latest", 2, overwrite=True)
    check(tmp_path / "s", 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "s"]
    assert (tmp_path / "latest").is_symlink()


def test_overwriting_where_names_cannot_be_swapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class OldKernel:
        def renameat2(self, *_: object) -> int:
            ctypes.set_errno(errno.ENOSYS)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: OldKernel())
    save(tmp_path / "s", 1)
    save(tmp_path / "s", 2, overwrite=True)
    check(tmp_path / "s", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_folder_that_is_no_snapshot_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1").write_text("mine")
    with pytest.raises(StoreError, match="not a snapshot, so it is not overwritten"):
        save(tmp_path / "thesis", overwrite=True)
    assert (tmp_path / "thesis" / "chapter1").read_text() == "mine"


def test_a_path_that_is_taken_meanwhile_is_kept(tmp_path: Path) -> None:
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(StoreError, match="exists"))
        write_all(stack.enter_context(written_snapshot(tmp_path / "s", ENTRIES, META)), contents())
        (tmp_path / "s").mkdir()
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize("begun", [False, True])
def test_who_fails_leaves_nothing(begun: bool, tmp_path: Path) -> None:
    with suppress(KeyError), written_snapshot(tmp_path / "s", ENTRIES, META) as writer:
        if begun:
            writer.write("moments", 0, contents()["moments"])
        raise KeyError
    assert not any(tmp_path.iterdir())


def test_writing_out_of_order_or_not_all_is_our_mistake(tmp_path: Path) -> None:
    arrays = contents()
    with (
        pytest.raises(AssertionError, match="were written"),
        written_snapshot(tmp_path / "s", ENTRIES, META) as writer,
        pytest.raises(AssertionError, match="next write"),
    ):
        writer.write("weights", ALIGN, arrays["weights"][:ALIGN])
    assert not any(tmp_path.iterdir())


def test_a_missing_parent_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(StoreError, match="does not exist: create it"),
        written_snapshot(tmp_path / "nowhere" / "s", ENTRIES, META),
    ):
        pass


KILLED = """
import os, signal, sys
from pathlib import Path
from penstock.store import aligned_bytes, written_snapshot
with written_snapshot(Path(sys.argv[1]), [("a", 8192)], {}) as writer:
    writer.write("a", 0, aligned_bytes(4096))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_save_leaves_no_snapshot_and_the_next_one_clears_up(tmp_path: Path) -> None:
    warm.run(["-c", KILLED, tmp_path / "s"])
    assert not (tmp_path / "s").exists()
    assert len(list(tmp_path.iterdir())) == 1
    with suppress(KeyError), written_snapshot(tmp_path / "s", ENTRIES, META):
        save(tmp_path / "s")
        check(tmp_path / "s")
        assert len(list(tmp_path.iterdir())) == 2  # the dead save's folder is gone, the live one's is not
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
