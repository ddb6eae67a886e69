"""A snapshot that shares blocks with the store holds what one that was copied does, and keeps it."""

import errno
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import StoreError
from penstock.store import ALIGN, Layout, Region, SnapshotReader, Store, aligned_bytes, written_snapshot
from tests.models import PLAIN
from tests.store.test_store import random_bytes
from tests.training import assert_same_state, budget, run_steps, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

MIB = 1 << 20
GRID = (Region(nbytes=40 * ALIGN, block=16 * ALIGN), Region(nbytes=7 * ALIGN, block=ALIGN))
GRIDS = {"a": GRID, "b": GRID}
ENTRIES = [("a", 47 * ALIGN), ("b", 47 * ALIGN)]
LAYOUT = Layout.build([(name, nbytes, 2) for name, nbytes in ENTRIES], GRIDS)
CASE = PLAIN
STEPS = steps_of(CASE, 3)


@pytest.fixture(params=["xfs", "btrfs"])
def reflink_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A mounted file system with reflinks in a sparse file; skips where this process may not mount one."""
    make = {"xfs": ["mkfs.xfs", "-q", "-m", "reflink=1"], "btrfs": ["mkfs.btrfs", "-q"]}[request.param]
    image, mount = tmp_path / "disk.img", tmp_path / "disk"
    if os.geteuid() != 0 or shutil.which(make[0]) is None:
        pytest.skip(f"a file system with reflinks needs root and {make[0]}")
    mount.mkdir()
    image.write_bytes(b"")
    os.truncate(image, 512 * MIB)
    subprocess.run([*make, str(image)], check=True, capture_output=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(mount)], capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def copying(fd: int, code: int, request: bytes) -> int:
    """FICLONERANGE as a file system with reflinks does it, seen from its user: the range has the same bytes."""
    source, start, nbytes, offset = struct.unpack("=qQQQ", request)
    assert code == 0x4020940D
    assert start % ALIGN == nbytes % ALIGN == offset % ALIGN == 0
    os.fsync(source)
    with open(f"/proc/self/fd/{source}", "rb") as a, open(f"/proc/self/fd/{fd}", "r+b") as b:
        a.seek(start)
        b.seek(offset)
        b.write(a.read(nbytes))
    return 0


def refusing(code: int, after: int = 0) -> Callable[..., int]:
    """Works ``after`` times, and then no more."""
    left = iter(range(after))

    def ioctl(*args: Any) -> int:
        if next(left, None) is None:
            raise OSError(code, os.strerror(code))
        return copying(*args)

    return ioctl


def content(seed: int) -> Any:
    return random_bytes(47 * ALIGN, seed)


def adopt(store: Store, path: Path) -> list[bool]:
    """Save slot 1 of both extents; which of them were taken over by reference."""
    adopted = []
    with written_snapshot(path, ENTRIES, {}, grids=GRIDS) as writer:
        for name, nbytes in ENTRIES:
            adopted.append(writer.adopt(name, store.lend(name, 1)))
            if not adopted[-1]:
                buffer = aligned_bytes(nbytes)
                store.read(name, 0, buffer, 1)
                writer.write(name, 0, buffer)
    return adopted


def check(path: Path) -> None:
    with SnapshotReader(path) as reader:
        reader.verify()
        for seed, (name, nbytes) in enumerate(ENTRIES):
            out = aligned_bytes(nbytes)
            reader.read(name, 0, out)
            assert np.array_equal(out, content(seed))


def filled(paths: list[Path], stripe: int = 3 * ALIGN, weights: Sequence[int] = ()) -> Store:
    store = Store.create(paths, LAYOUT, model={}, stripe=stripe, weights=weights)
    for seed, (name, _) in enumerate(ENTRIES):
        store.write(name, 0, content(10 + seed), 0)
        store.write(name, 0, content(seed), 1)
    return store


@pytest.mark.parametrize("drives", [1, 3])
def test_a_shared_snapshot_keeps_what_the_store_overwrites(reflink_disk: Path, drives: int) -> None:
    """On real file systems, with directories striped on one of them; no data is written for it."""
    with filled([reflink_disk / f"d{i}" for i in range(drives)]) as store:
        before = store.stats
        assert adopt(store, reflink_disk / "s") == [True, True]
        assert store.stats == before
        check(reflink_disk / "s")
        for name, _ in ENTRIES:
            store.write(name, 0, content(20), 1)
        store.flush()
        check(reflink_disk / "s")
        out = aligned_bytes(47 * ALIGN)
        store.read("a", 0, out, 1)
        assert np.array_equal(out, content(20))


def test_a_drive_that_is_not_the_stores_gets_a_copy(reflink_disk: Path, tmp_path: Path) -> None:
    with filled([reflink_disk / "d"]) as store:
        assert adopt(store, tmp_path / "s") == [False, False]
    check(tmp_path / "s")


@pytest.mark.parametrize("weights", [(1,), (1, 1, 1), (3, 1, 2)])
def test_whether_shared_or_copied_a_snapshot_is_the_same(
    weights: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the file system stops sharing on the way. The system call is played by a copy here."""
    files, drives = set(), len(weights)
    with filled([tmp_path / f"d{i}" for i in range(drives)], weights=weights) as store:
        stretches = len(store.lend("a", 1).stretches)
        assert (stretches > 1) == (drives > 1)
        cases = {
            "shared": (copying, [True, True]),
            "copied": (refusing(errno.EOPNOTSUPP), [False, False]),
            "other drive": (refusing(errno.EXDEV), [False, False]),
            "half": (refusing(errno.EINVAL, stretches), [True, False]),
            "within": (refusing(errno.EXDEV, stretches // 2), [False, False]),
        }
        for name, (ioctl, adopted) in cases.items():
            monkeypatch.setattr(fcntl, "ioctl", ioctl)
            assert adopt(store, tmp_path / name) == adopted, name
            check(tmp_path / name)
            files.add(tuple((tmp_path / name / file).read_bytes() for file in ("penstock.snapshot", "snapshot.json")))
    assert len(files) == 1


def test_a_drive_that_fails_at_it_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled([tmp_path / "d"]) as store:
        monkeypatch.setattr(fcntl, "ioctl", refusing(errno.EIO))
        with pytest.raises(StoreError, match=r"penstock\.snapshot: sharing of .*penstock\.store at offset") as caught:
            adopt(store, tmp_path / "s")
        assert caught.value.errno == errno.EIO
    assert not (tmp_path / "s").exists()


def test_damage_in_the_store_is_found_in_a_shared_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read to make it, so it is found when it is read."""
    with filled([tmp_path / "d"]) as store:
        file, offset, _ = store.lend("b", 1).stretches[0]
        with file.path.open("r+b") as drive:
            drive.seek(offset)
            drive.write(bytes([content(1)[0] ^ 1]))
        monkeypatch.setattr(fcntl, "ioctl", copying)
        assert adopt(store, tmp_path / "s") == [True, True]
    with SnapshotReader(tmp_path / "s") as reader, pytest.raises(StoreError, match="b is damaged in bytes 0 to"):
        reader.verify()


def test_training_goes_on_from_a_shared_snapshot_bit_for_bit(reflink_disk: Path) -> None:
    with wrap(CASE, budget(reflink_disk / "one")) as engine:
        run_steps(engine, STEPS[:2])
        assert engine.inside.resources.commits.store is not None
        before = engine.inside.resources.commits.store.stats
        engine.save(reflink_disk / "snapshot")
        assert engine.inside.resources.commits.store.stats == before
        wanted = run_steps(engine, STEPS[2:])
    with wrap(CASE, budget(reflink_disk / "two")) as engine:
        engine.load(reflink_disk / "snapshot")
        found = run_steps(engine, STEPS[2:])
    assert found.losses == wanted.losses
    assert_same_state(found.state, wanted.state)
