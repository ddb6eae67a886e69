"""Data: nothing of the text is lost or shared between training and validation, and order is a function of the seed."""

from pathlib import Path

import numpy as np
import pytest

from penstock.config import DataConfig
from penstock.data.batches import Batches
from penstock.data.text import PIECE, documents, pieces
from penstock.data.tokens import END_OF_TEXT, TokenArray, tokenize
from penstock.errors import ConfigError


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    rng = np.random.default_rng(0)
    words = ["penstock", "turbine", "größe", "水", "river", "\t", "valve", "x = 1", "#"]
    for i in range(6):
        lines = [" ".join(rng.choice(words, size=8)) + str(rng.integers(10**6)) for _ in range(1500)]
        (folder / f"{i}.txt").write_text("\n".join(lines))
    return folder


def _config(folder: Path, **changes: object) -> DataConfig:
    settings: dict[str, object] = {"files": (f"{folder}/*.txt",), "vocabulary": 600, "sequence_length": 32}
    return DataConfig(source="files", **{**settings, **changes})  # type: ignore[arg-type]


def _words(count: int) -> TokenArray:
    return np.arange(count, dtype=np.uint16)


def test_the_tokens_decode_to_every_document_in_order(text_folder: Path, tmp_path: Path) -> None:
    config = _config(text_folder)
    text = tokenize(config, tmp_path, held_out=0.1)
    assert text.validation is not None
    ids = [*text.train.tolist(), *text.validation.tolist()]
    want = "".join(path.read_text() + END_OF_TEXT for path in documents(config))
    assert text.tokenizer.decode(ids, skip_special_tokens=False) == want
    assert text.tokenizer.get_vocab_size() == config.vocabulary


def test_the_held_out_share_is_about_what_was_asked(text_folder: Path, tmp_path: Path) -> None:
    text = tokenize(_config(text_folder), tmp_path, held_out=0.5)
    assert text.validation is not None
    share = len(text.validation) / (len(text.train) + len(text.validation))
    assert abs(share - 0.5) < 1.5 * PIECE / text.nbytes < 0.25


def test_equal_text_gives_equal_tokens(text_folder: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    tokenize(_config(text_folder), one, held_out=0.1)
    tokenize(_config(text_folder), two, held_out=0.1)
    for name in ("train.tokens", "validation.tokens", "tokenizer.json"):
        assert (one / name).read_bytes() == (two / name).read_bytes()


def test_pieces_are_whole_lines_and_together_the_file(text_folder: Path) -> None:
    paths = documents(_config(text_folder))
    parts = list(pieces(paths, None))
    assert "".join(p.text for p in parts) == "".join(path.read_text() for path in paths)
    assert all(p.last or p.text.endswith("\n") for p in parts)
    assert sum(p.last for p in parts) == len(paths)
    assert len(parts) > len(paths)


def test_a_limit_stops_after_that_many_bytes(text_folder: Path) -> None:
    limit = 3 * PIECE
    used = sum(p.nbytes for p in pieces(documents(_config(text_folder)), limit))
    assert limit <= used < limit + 2 * PIECE


def test_the_standard_library_is_there_and_is_utf8() -> None:
    config = DataConfig(source="stdlib", vocabulary=512, sequence_length=8)
    paths = documents(config)
    assert sum(p.nbytes for p in pieces(paths, None)) > 5_000_000
    assert not any("site-packages" in path.parts for path in paths)


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"vocabulary": 60_000}, "only enough repetition"), ({"files": ("/nowhere/*.txt",)}, "matches no file")],
)
def test_text_that_will_not_do_is_refused(
    text_folder: Path, tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        tokenize(_config(text_folder, **changes), tmp_path, held_out=None)


def test_text_that_is_not_utf8_is_refused_by_name(text_folder: Path, tmp_path: Path) -> None:
    (text_folder / "bad.txt").write_bytes(b"\xff\xfe not utf8 \xff")
    with pytest.raises(ConfigError, match=r"bad\.txt.*UTF-8"):
        tokenize(_config(text_folder), tmp_path, held_out=None)


def test_an_epoch_has_every_sequence_once_and_the_next_another_order() -> None:
    batches = Batches(
        tokens=_words(103), name="training", sequence_length=5, micro_batches=2, micro_batch_size=2, seed=3
    )
    rows = [tuple(row.tolist()) for step in range(10) for mb in batches.step(step) for row in mb["input_ids"]]
    assert batches.sequences == 20
    assert sorted(rows[:20]) == sorted(rows[20:]) == [tuple(range(i, i + 5)) for i in range(0, 100, 5)]
    assert rows[:20] != rows[20:]


def test_a_step_depends_on_the_seed_and_its_number_only() -> None:
    def make(seed: int | None) -> Batches:
        return Batches(
            tokens=_words(500), name="training", sequence_length=5, micro_batches=2, micro_batch_size=2, seed=seed
        )

    walked, jumped = make(3), make(3)
    last = [walked.step(step) for step in range(40)][-1]
    assert all((a["labels"] == b["labels"]).all() for a, b in zip(last, jumped.step(39), strict=True))
    assert not all((a["labels"] == b["labels"]).all() for a, b in zip(last, make(4).step(39), strict=True))
    assert make(None).step(0)[0]["input_ids"][0].tolist() == [0, 1, 2, 3, 4]


def test_too_few_tokens_for_a_micro_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"validation text has 19 tokens.*evaluate\.share"):
        Batches(tokens=_words(19), name="validation", sequence_length=5, micro_batches=1, micro_batch_size=4, seed=None)
