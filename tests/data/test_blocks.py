"""Token ids on disk: what is read is what was written, whichever byte of whichever file changes, or it is an error."""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data.blocks import BLOCK, BlockArray, SummedFile, sums_of
from penstock.data.pieces import Pieces, continuous_pieces, pieces_of
from penstock.data.token_files import (
    SUMS,
    Document,
    TokenFile,
    TokenWriter,
    make_sums,
    open_tokens,
    write_sums,
)
from penstock.errors import ConfigError, StoreError
from tests.faults import Call, Nth, error, intercepted


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40,000 tokens in 300 documents, a third of which count: five blocks of ids, three of what counts."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("corpus") / "c.tokens"
    with TokenWriter(path, "uint16", loss=True) as writer:
        for size in rng.multinomial(40_000, [1 / 300] * 300):
            ids = rng.integers(0, 60_000, size, dtype=np.uint32)
            writer.write(Document(ids=ids, answers=(ids % 3 == 0).astype(np.uint8)))
    return path


def _all(corpus: TokenFile) -> Iterator[tuple[bytes, bytes]]:
    assert corpus.answers is not None
    for first in range(0, len(corpus.ids), 1000):
        yield corpus.ids[first : first + 1000].tobytes(), corpus.answers[first : first + 1000].tobytes()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_stretch_is_what_was_written_wherever_it_begins_and_ends(data: st.DataObject, corpus: Path) -> None:
    array, plain = open_tokens(corpus).ids, np.fromfile(corpus, dtype="<u2")
    assert isinstance(array, BlockArray)
    for _ in range(2):
        first = data.draw(st.integers(0, len(array)))
        end = data.draw(st.integers(first, len(array)))
        array, plain = array.window(first, end), plain[first:end]
        assert len(array) == len(plain)
        cut = slice(data.draw(st.integers(0, len(plain))), data.draw(st.integers(0, len(plain))))
        assert np.array_equal(array[cut], plain[cut])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_is_an_error_that_names_the_file_and_never_another_token(
    data: st.DataObject, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    copy = tmp_path_factory.mktemp("flipped") / "c.tokens"
    for file in corpus.parent.iterdir():
        shutil.copy(file, copy.parent)
    truth = list(_all(open_tokens(corpus)))
    file = copy.with_suffix(data.draw(st.sampled_from([".tokens", ".ends", ".loss", ".json", SUMS])))
    changed = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(changed) - 1))
    changed[place] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(changed)
    said, read = None, None
    try:
        read = list(_all(open_tokens(copy)))
    except (StoreError, ConfigError) as error:
        said = error
    if file.suffix == ".json":  # a description that says the same, with a space that is another, is no damage
        assert said is not None or read == truth
    else:
        assert isinstance(said, StoreError)
        where = (
            f"{file} is damaged in bytes {place // BLOCK * BLOCK} to " if file.suffix == ".tokens" else str(copy.parent)
        )
        assert f"{copy.parent}{os.sep}" in str(said)
        assert where in str(said)
        assert "damaged" in str(said)
    shutil.rmtree(copy.parent)


def test_only_the_blocks_that_are_asked_for_are_read_and_compared(corpus: Path, tmp_path: Path) -> None:
    data = bytearray(corpus.read_bytes())
    data[BLOCK] ^= 1
    (tmp_path / "c").write_bytes(data)
    array = BlockArray(tmp_path / "c", "uint16", sums_of(corpus))
    assert array[: BLOCK // 2].tobytes() == corpus.read_bytes()[:BLOCK]
    with pytest.raises(StoreError, match=f"c is damaged in bytes {BLOCK} to {2 * BLOCK}"):
        array[: BLOCK // 2 + 1]
    assert [found is None for _, found in array.damage()] == [False]


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_drive_that_fails_is_an_error_that_names_the_file(code: int, corpus: Path) -> None:
    array = open_tokens(corpus).ids
    says = f"c.tokens cannot be read at offset 0: {os.strerror(code)}"
    fails = Nth(0, error(code), lambda call: call.name == "open")
    with intercepted(corpus.parent, fails), pytest.raises(StoreError, match=says) as caught:
        array[:10]
    assert caught.value.errno == code


def test_half_a_transfer_is_gone_on_with(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, array = os.pread, open_tokens(corpus).ids
    monkeypatch.setattr(os, "pread", lambda fd, count, offset: real(fd, min(count, 5000), offset))
    assert array[:20_000].tobytes() == corpus.read_bytes()[:40_000]


def test_a_file_that_has_shrunk_is_an_error(corpus: Path, tmp_path: Path) -> None:
    shutil.copy(corpus, tmp_path / "c")
    array = BlockArray(tmp_path / "c", "uint16", sums_of(corpus))
    os.truncate(tmp_path / "c", 100)
    with pytest.raises(StoreError, match="ends at offset 100"):
        array[:10_000]


def test_checksums_made_while_writing_are_those_of_the_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    file = SummedFile((tmp_path / "f").open("wb"))
    for size in (0, 1, BLOCK - 1, BLOCK, 3 * BLOCK + 7, 5):
        file.write(rng.bytes(size))
    file.close()
    assert file.sums.tolist() == sums_of(tmp_path / "f").tolist()


def test_a_corpus_without_checksums_gets_them_and_is_then_compared(tmp_path: Path) -> None:
    np.arange(50_000, dtype="<u2").tofile(tmp_path / "raw.bin")
    write_sums(tmp_path / "sums", make_sums(tmp_path / "raw.bin", "uint16"))
    raw = open_tokens(tmp_path / "raw.bin", "uint16", tmp_path / "sums")
    assert raw.ids[:].tolist() == list(range(50_000))
    with (tmp_path / "raw.bin").open("r+b") as file:
        file.write(b"\1")
    with pytest.raises(StoreError, match=r"raw\.bin is damaged in bytes 0 to"):
        raw.ids[:1]


def _numbers(pieces: Pieces) -> tuple[list[int], list[int], int, int]:
    return pieces.first.tolist(), pieces.end.tolist(), pieces.cuts.labels, pieces.cuts.tokens


@pytest.mark.parametrize("at_once", [50, 500, 1 << 24])
def test_labels_are_counted_as_in_memory_however_much_is_read_at_a_time(
    at_once: int, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.data.pieces.AT_ONCE", at_once)
    found = open_tokens(corpus)
    assert found.answers is not None
    memory = TokenFile(ids=found.ids[:], ends=found.ends, answers=found.answers[:])
    for length in (3, 64, 200):
        for rule in ("split", "cut", "drop"):
            assert _numbers(pieces_of(found, length, rule)) == _numbers(pieces_of(memory, length, rule))
        assert _numbers(continuous_pieces(found, length)) == _numbers(continuous_pieces(memory, length))


def test_a_corpus_is_divided_without_reading_it(corpus: Path) -> None:
    calls: list[Call] = []
    found = open_tokens(corpus)

    def count(call: Call, go: object) -> object:
        calls.append(call)
        assert callable(go)
        return go()

    with intercepted(corpus.parent, count):
        train, held = found.divided(0.25)
    assert not calls
    assert len(train.ids) + len(held.ids) == len(found.ids)
    assert held.ids[:].tolist() == found.ids[len(train.ids) : len(found.ids)].tolist()
