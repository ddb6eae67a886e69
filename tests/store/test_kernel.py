"""Transfers of which all requests are with the kernel at once, on a kernel that does all that a real one may."""

import ctypes
import errno
import os
import platform
import re
import resource
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import StoreError
from penstock.store import ALIGN, Layout, Region, Store, aligned_bytes, kernel
from penstock.store.checksums import Borders, checksums
from penstock.store.packed import PackedFile, allocate
from penstock.store.striping import Piece, Striping
from penstock.store.transfer import StripedFiles, byte_view
from tests.accelerator import build
from tests.store.hostile_kernel import Hostile, built
from tests.store.test_digests import flip
from tests.store.test_store import random_bytes

NBYTES = 96 * ALIGN
WEIGHTS = (3, 1, 2)
STRIPE = 4 * ALIGN

needs_compiler = pytest.mark.skipif(
    build.compiler() is None and not os.environ.get("CI"), reason="needs a C++ compiler"
)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Hostile:
    return built(tmp_path_factory.mktemp("hostile"))


@pytest.fixture(scope="module")
def drives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[PackedFile]]:
    """Three files of one address space, read and written directly."""
    files = []
    for name in "abc":
        path = tmp_path_factory.mktemp("drive") / name
        allocate(path, NBYTES)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            files.append(PackedFile(path))
    if not all(file.direct for file in files):
        pytest.skip("the temporary directory does no direct I/O")
    yield files
    for file in files:
        file.close()


@contextmanager
def on(library: kernel.Library | None, *, request: int = kernel.REQUEST) -> Iterator[None]:
    """Transfers are the library's meanwhile, in requests of so many bytes at most."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "library", lambda: library)
        patch.setattr(kernel, "REQUEST", request)
        yield


def striped(files: list[PackedFile]) -> StripedFiles:
    return StripedFiles(files, stripe=STRIPE, request=10 * ALIGN, weights=WEIGHTS)


def borders_at(*places: int) -> Borders:
    """Borders of blocks, in pages."""
    return np.array(places, dtype=np.int64) * ALIGN


@st.composite
def blocks(draw: st.DrawFn) -> Borders:
    """Some blocks of an extent, one after another, from anywhere in it."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=16))
    return borders_at(*accumulate([draw(st.integers(0, 20)), *sizes]))


@needs_compiler
@given(blocks(), st.integers(1, 7), st.integers(0, 2**63))
def test_bytes_and_checksums_are_right_whatever_the_kernel_does(
    hostile: Hostile, drives: list[PackedFile], borders: Borders, request: int, seed: int
) -> None:
    files, address, nbytes = striped(drives), int(borders[0]), int(borders[-1] - borders[0])
    content, again = random_bytes(nbytes, seed % 1000), random_bytes(nbytes, 1)
    wanted = checksums(content.data, borders).tolist()
    with on(hostile, request=request * ALIGN):
        hostile.begin(seed, grain=ALIGN)
        assert files.write(address, byte_view(content), borders).tolist() == wanted
        assert files.read(address, byte_view(again), borders).tolist() == wanted
    assert np.array_equal(content, again)
    assert hostile.flying == 0
    assert hostile.moves >= 2 * nbytes // (request * ALIGN)
    assert files.bytes_read == files.bytes_written == sum(files.written_each) == nbytes
    assert files.read(address, byte_view(content[:0])).tolist() == []
    again[:] = 0
    with on(None):
        assert files.read(address, byte_view(again), borders).tolist() == wanted
    assert np.array_equal(content, again)
    files.stalls.close()


@needs_compiler
@pytest.mark.parametrize("verb", ["read", "write"])
@given(blocks(), st.integers(1, 7), st.integers(0, 2**63), st.integers(0, 40), st.sampled_from([errno.EIO, 0]))
def test_an_error_names_the_first_byte_that_was_not_moved_when_nothing_is_in_flight(
    hostile: Hostile,
    drives: list[PackedFile],
    verb: str,
    borders: Borders,
    request: int,
    seed: int,
    at: int,
    error: int,
) -> None:
    """A request that fails once: all before it is moved, in the order of bytes, and what was moved is counted."""
    files, address, nbytes = striped(drives), int(borders[0]), int(borders[-1] - borders[0])
    content, failure = random_bytes(nbytes, 2), None
    with on(None):
        files.write(address, byte_view(random_bytes(nbytes, 1)))
    count = sum(files.written_each)
    hostile.begin(seed, fail_at=at, error=error, grain=ALIGN)
    with on(hostile, request=request * ALIGN):
        try:
            getattr(files, verb)(address, byte_view(content), borders)
        except StoreError as raised:
            failure = raised
    assert hostile.flying == 0
    assert not files.stalls.under_way
    assert (failure is not None) == (hostile.moves > at)
    if verb == "write":
        assert sum(files.written_each) - count == hostile.bytes
    if failure is not None:
        assert failure.errno == (error or None)
        descriptor, offset = hostile.failed
        path = next(file.path for file in drives if file.descriptor == descriptor)
        said = re.search(rf"{path}: {verb} of (\d+) bytes at offset (\d+) stopped after (\d+) bytes", str(failure))
        assert said is not None, failure
        asked, start, done = map(int, said.groups())
        assert start + done == offset
        assert done < asked
        cut = Striping(files=3, stripe=STRIPE, weights=WEIGHTS).pieces(address, nbytes, 10 * ALIGN)
        before = next(p.start for p in cut if (drives[p.file].path, p.offset) == (path, start)) + done
        there = content
        if verb == "write":
            there = aligned_bytes(nbytes)
            with on(None):
                files.read(address, byte_view(there))
        assert np.array_equal(there[:before], random_bytes(nbytes, 2 if verb == "write" else 1)[:before])
    files.stalls.close()


@needs_compiler
def test_a_kernel_without_queues_is_said_and_done_without(tmp_path: Path, drives: list[PackedFile]) -> None:
    library, files = built(tmp_path), striped(drives)
    content, borders = random_bytes(8 * ALIGN), borders_at(0, 8)
    library.begin(0, grain=ALIGN)
    library.refuse(errno.EUSERS)  # which no other test is refused with: it is said once for each reason
    with on(library):
        with pytest.warns(RuntimeWarning, match=r"one request after another, which is slower.*fs\.aio-max-nr"):
            assert files.write(0, byte_view(content), borders).tolist() == checksums(content.data, borders).tolist()
        files.read(0, byte_view(aligned_bytes(8 * ALIGN)), borders)  # it is said once
    assert library.moves == 0
    files.stalls.close()


def test_a_missing_library_is_said_and_done_without(tmp_path: Path, drives: list[PackedFile]) -> None:
    with pytest.warns(RuntimeWarning, match=r"slower: the native library .*none\.so is not built.*pip install"):
        library = kernel.loaded(tmp_path / "none.so")
    files, borders, content = striped(drives), borders_at(0, 8), random_bytes(8 * ALIGN)
    with on(library):
        assert files.write(0, byte_view(content), borders).tolist() == checksums(content.data, borders).tolist()
    files.stalls.close()


@needs_compiler
@pytest.mark.parametrize("flags", [["-mavx2"], []], ids=["avx2", "baseline"])
def test_the_checksum_of_each_instruction_set_is_that_of_xxhash(flags: list[str], tmp_path: Path) -> None:
    if flags and platform.machine() != "x86_64":
        pytest.skip("there is one, for this kind of processor")
    if flags == ["-mavx2"] and " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has none of AVX2")
    compiler, source = build.compiler(), kernel.PATH.parent / "native" / "xxh3.cpp"
    assert compiler is not None
    made = tmp_path / "xxh3.so"
    options = ["-std=c++17", "-O2", "-fPIC", "-shared", "-DPENSTOCK_XXH3=xxh3_baseline"]
    subprocess.run([compiler, *options, *flags, source, "-o", made], check=True)
    xxh3 = ctypes.CDLL(str(made))["_ZN8penstock13xxh3_baselineEPKvm"]
    xxh3.restype, xxh3.argtypes = ctypes.c_uint64, (ctypes.c_char_p, ctypes.c_size_t)
    for nbytes in (*range(241, 2300), ALIGN, 3 * ALIGN, 1 << 20):
        content = np.random.default_rng(nbytes).bytes(nbytes)
        assert xxh3(content, nbytes) == xxhash.xxh3_64_intdigest(content), nbytes


@pytest.mark.parametrize(
    ("piece", "borders", "writes"),
    [
        (Piece(file=0, offset=NBYTES - ALIGN, start=0, nbytes=2 * ALIGN), borders_at(0), True),
        (Piece(file=0, offset=-ALIGN, start=0, nbytes=2 * ALIGN), borders_at(0), True),
        (Piece(file=0, offset=0, start=ALIGN, nbytes=2 * ALIGN), borders_at(0), True),
        (Piece(file=0, offset=0, start=0, nbytes=2 * ALIGN), borders_at(0, 1), True),
        (Piece(file=0, offset=0, start=0, nbytes=2 * ALIGN), borders_at(0, 3), True),
        (Piece(file=0, offset=0, start=0, nbytes=2 * ALIGN), borders_at(0, 3, 2), True),
        (Piece(file=0, offset=0, start=0, nbytes=2 * ALIGN), borders_at(0), False),
    ],
    ids=["file ends", "before", "memory ends", "too few", "too many", "back and forth", "read-only"],
)
def test_nothing_outside_of_the_file_and_the_memory_is_touched(
    drives: list[PackedFile], piece: Piece, borders: Borders, writes: bool
) -> None:
    library, view = kernel.Library(kernel.PATH), byte_view(random_bytes(2 * ALIGN))
    with pytest.raises(ValueError, match=r"are not 8192 bytes of each|read-only"):
        library.transfer(
            drives, [piece], view.toreadonly(), borders, np.zeros((len(drives), 2), dtype=np.int64), write=writes
        )


LAYOUT = Layout.build([("a", 64 * ALIGN, 1)], {"a": (Region(nbytes=64 * ALIGN, block=3 * ALIGN),)})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = Store.create([tmp_path / "d"], LAYOUT, model={})
    with made:
        if not made.direct:
            pytest.skip("the temporary directory does no direct I/O")
        yield made


def test_damage_in_any_request_of_a_transfer_is_found_and_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "REQUEST", 8 * ALIGN)  # of some blocks each, whose borders are others
    content, found = random_bytes(64 * ALIGN), aligned_bytes(64 * ALIGN)
    store.write("a", 0, content)
    assert np.array_equal(store.lend("a", 0).digests, checksums(content.data, LAYOUT["a"].borders))
    for _, block in LAYOUT["a"].spans():
        flip(store.paths[0] / "penstock.store", block.stop - 1)
        with pytest.raises(StoreError, match=f"a is damaged in bytes {block.start} to {block.stop} of slot 0"):
            store.read("a", 0, found)
        flip(store.paths[0] / "penstock.store", block.stop - 1)
    store.read("a", 0, found)
    assert np.array_equal(found, content)


def test_a_limit_on_the_size_of_files(store: Store) -> None:
    """A request that stops short at it goes on there, and fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20 * ALIGN, before[1]))
    try:
        with pytest.raises(StoreError, match=r"write of 262144 bytes at offset 0 stopped after 81920 byte") as failure:
            store.write("a", 0, random_bytes(64 * ALIGN))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert failure.value.errno == errno.EFBIG
    assert store.files.written_each == [20 * ALIGN]
    assert failure.value.__cause__ is not None
    with pytest.raises(StoreError, match="never written"):
        store.read("a", 0, aligned_bytes(64 * ALIGN))


def test_a_forked_child_has_queues_of_its_own(store: Store, tmp_path: Path) -> None:
    content = random_bytes(64 * ALIGN)
    store.write("a", 0, content)  # the parent has a queue now
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with Store.create([tmp_path / "child"], LAYOUT, model={}, direct=True) as own:
                own.write("a", 0, content)
                found = aligned_bytes(64 * ALIGN)
                own.read("a", 0, found)
                code = 0 if np.array_equal(found, content) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    store.read("a", 0, aligned_bytes(64 * ALIGN))
