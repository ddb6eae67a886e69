"""Transfers of which all requests are with the kernel at once, on a kernel that does all that a real one may."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import StoreError
from penstock.store import ALIGN, Layout, Region, Store, aligned_bytes, kernel
from penstock.store.checksums import checksums
from penstock.store.packed import PackedFile, allocate
from penstock.store.transfer import StripedFiles, byte_view
from tests.accelerator import build
from tests.store.hostile_kernel import Hostile, built
from tests.store.test_digests import noise

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
        files.append(PackedFile(path, direct=True))
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


@st.composite
def blocks(draw: st.DrawFn) -> list[range]:
    """Some blocks of an extent, one after another, from anywhere in it."""
    start, found = draw(st.integers(0, 20)) * ALIGN, list[range]()
    for size in draw(st.lists(st.integers(1, 9), min_size=1, max_size=16)):
        found.append(range(start, start + size * ALIGN))
        start = found[-1].stop
    return found


@needs_compiler
@given(blocks(), st.integers(1, 7), st.integers(0, 2**63))
def test_bytes_and_checksums_are_right_whatever_the_kernel_does(
    hostile: Hostile, drives: list[PackedFile], found: list[range], request: int, seed: int
) -> None:
    files, address, nbytes = striped(drives), found[0].start, found[-1].stop - found[0].start
    content, again = noise(nbytes, seed % 1000), noise(nbytes, 1)
    wanted = checksums(content.data, found)
    with on(hostile, request=request * ALIGN):
        hostile.begin(seed, grain=ALIGN)
        assert files.write(address, byte_view(content), found).tolist() == wanted
        assert files.read(address, byte_view(again), found).tolist() == wanted
    assert np.array_equal(content, again)
    assert hostile.flying == 0
    assert hostile.moves >= 2 * nbytes // (request * ALIGN)
    assert files.bytes_read == files.bytes_written == sum(files.written_each) == nbytes
    again[:] = 0
    with on(None):
        assert files.read(address, byte_view(again), found).tolist() == wanted
    assert np.array_equal(content, again)
    files.stalls.close()


@needs_compiler
@pytest.mark.parametrize("verb", ["read", "write"])
@given(blocks(), st.integers(1, 7), st.integers(0, 2**63), st.integers(0, 40))
def test_an_error_comes_when_nothing_is_in_flight_and_names_the_place(
    hostile: Hostile,
    drives: list[PackedFile],
    verb: str,
    found: list[range],
    request: int,
    seed: int,
    at: int,
) -> None:
    files, nbytes = striped(drives), found[-1].stop - found[0].start
    content = noise(nbytes)
    hostile.begin(seed, fail_at=at, error=errno.EIO, grain=ALIGN)
    failure = None
    with on(hostile, request=request * ALIGN):
        try:
            getattr(files, verb)(found[0].start, byte_view(content), found)
        except StoreError as error:
            failure = error
    assert (failure is not None) == (hostile.moves > at)
    if failure is not None:
        assert failure.errno == errno.EIO
        assert any(f"{file.path}: {verb} of " in str(failure) for file in drives)
        assert sum(files.written_each) < nbytes
    assert hostile.flying == 0
    assert not files.stalls.under_way
    files.stalls.close()


@needs_compiler
def test_a_kernel_without_queues_is_said_and_done_without(tmp_path: Path, drives: list[PackedFile]) -> None:
    library, files = built(tmp_path), striped(drives)
    content, found = noise(8 * ALIGN), [range(8 * ALIGN)]
    library.begin(0, grain=ALIGN)
    library.refuse(errno.EAGAIN)
    with on(library):
        with pytest.warns(RuntimeWarning, match=r"one request after another, which is slower.*fs\.aio-max-nr"):
            assert files.write(0, byte_view(content), found).tolist() == checksums(content.data, found)
        files.read(0, byte_view(aligned_bytes(8 * ALIGN)), found)  # it is said once
    assert library.moves == 0
    files.stalls.close()


def test_a_missing_library_is_said_and_done_without(tmp_path: Path, drives: list[PackedFile]) -> None:
    with pytest.warns(RuntimeWarning, match=r"slower: the native library .*none\.so is not built.*pip install"):
        library = kernel.loaded(tmp_path / "none.so")
    files, found, content = striped(drives), [range(8 * ALIGN)], noise(8 * ALIGN)
    with on(library):
        assert files.write(0, byte_view(content), found).tolist() == checksums(content.data, found)
    files.stalls.close()


LAYOUT = Layout.build([("a", 64 * ALIGN, 1)], {"a": (Region(nbytes=64 * ALIGN, block=3 * ALIGN),)})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create([tmp_path / "d"], LAYOUT, model={}, direct=True) as made:
        yield made


def test_a_limit_on_the_size_of_files(store: Store) -> None:
    """A request that stops short at it goes on there, and fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20 * ALIGN, before[1]))
    try:
        with pytest.raises(StoreError, match=r"write of 262144 bytes at offset 0 stopped after 81920 byte") as failure:
            store.write("a", 0, noise(64 * ALIGN))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert failure.value.errno == errno.EFBIG
    assert store.files.written_each == [20 * ALIGN]
    with pytest.raises(StoreError, match="never written"):
        store.read("a", 0, aligned_bytes(64 * ALIGN))


def test_a_forked_child_has_queues_of_its_own(store: Store, tmp_path: Path) -> None:
    content = noise(64 * ALIGN)
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
