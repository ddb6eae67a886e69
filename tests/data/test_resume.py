"""The position in the data is part of the commit: whoever goes on sees exactly what comes next, in these data only."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from datetime import date, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from penstock.config import SourceConfig, TokenizerTrainingConfig, ValidationConfig
from penstock.config.data import TokenizerConfig
from penstock.data import opening, write_tokens
from penstock.data import prepare as preparing
from penstock.data.ahead import ahead
from penstock.data.batches import Step
from penstock.data.opening import Data, for_model, open_data
from penstock.data.stream import Prepared
from penstock.data.summary import summary_of
from penstock.data.token_files import TokenWriter
from penstock.data.tokenizer import digest as digest_of
from penstock.data.tokenizer import save
from penstock.errors import ConfigError
from tests import warm
from tests.data_documents import batches_of, chats, sentences, settings, tokenizer, write_jsonl, write_table
from tests.data_victim import batches, digest, train
from tests.patience import until

STEPS, KILLED = 9, 4


@pytest.fixture(scope="module")
def bpe() -> PreTrainedTokenizerBase:
    return tokenizer()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in sentences(150, seed=1)])
    lines = [text.replace(" ", ", \n", 1) for text in sentences(25, seed=2)]
    write_table(tmp_path / "b.csv.gz", [{"id": n, "body": text} for n, text in enumerate(lines)])
    return tmp_path


def _run(folder: Path, kill_after: int) -> tuple[int, list[str]]:
    done = warm.run(["-m", "tests.data_victim", folder, str(STEPS), str(kill_after)])
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, done.stdout.splitlines()


@pytest.mark.usefixtures("one_thread")
def test_a_killed_run_sees_what_the_one_that_was_not_killed_sees(folder: Path) -> None:
    """Streamed, two weighted sources, packed, and a delay: the step that a kill took is done again, none is missed."""
    code, killed = _run(folder, KILLED)
    assert code == -signal.SIGKILL
    code, resumed = _run(folder, -1)
    assert code == 0
    for path in (folder / "store").iterdir():
        path.unlink()
    whole = list(train(folder, STEPS))
    assert killed == whole[:KILLED]
    first = int(resumed[0].split()[0])
    assert first in (KILLED, KILLED + 1), "a delay costs the step in flight"
    assert resumed == whole[first - 1 :], "micro-batches and losses, to the bit"
    assert len({line.split()[1] for line in whole}) == STEPS


@pytest.mark.parametrize("packing", [True, False, "continuous"])
def test_a_stream_goes_on_from_any_position(folder: Path, packing: Any) -> None:
    walked = list(islice(batches(folder, packing=packing).steps(), 60))
    assert walked[-1].position["window"] > 3
    assert walked[-1].passes >= 1
    for number in (0, 7, 21, 35, 58):
        position = json.loads(json.dumps(walked[number].position))
        (jumped,) = islice(batches(folder, packing=packing).steps(position), 1)
        assert (digest(jumped), jumped.position) == (digest(walked[number + 1]), walked[number + 1].position)


def test_a_small_share_of_a_stream_is_cut_as_it_adds_up_to_a_sequence(
    folder: Path, bpe: PreTrainedTokenizerBase
) -> None:
    """Of each window the second source has some tokens, far fewer than a sequence; resuming reads them again."""
    two = (
        SourceConfig(path=str(folder / "a.jsonl"), weight=49),
        SourceConfig(path=str(folder / "b.csv.gz"), weight=1, fields={"text": "body"}),
    )
    how = {"streaming": True, "shuffle": 20, "packing": "continuous", "sequence_length": 128}
    open_two = partial(open_data, settings(two, **how), folder, seed=0, own=bpe)
    cut = {"packing": "continuous", "length": 128, "sequences_per_step": 1}
    steps = _steps(open_two(), 400, **cut)
    rows = [bpe.decode(step.micro_batches[0]["input_ids"][0].tolist()) for step in steps]
    small = [number for number, row in enumerate(rows) if ", \n" in row]
    assert 6 <= len(small) <= 10
    assert steps[-1].lost == 0
    assert all("left" in place for place in steps[small[0] - 1].position["sources"])
    for number in (small[0] - 1, small[0], small[4] - 3):
        position = json.loads(json.dumps(steps[number].position))
        again = _steps(open_two(), 60, position, **cut)
        assert [digest(step) for step in again] == [digest(step) for step in steps[number + 1 : number + 61]]
        assert again[-1].position == steps[number + 60].position


def test_a_stream_that_is_shorter_than_a_sequence_is_read_until_it_fills_one(
    tmp_path: Path, bpe: PreTrainedTokenizerBase
) -> None:
    how = {"streaming": True, "shuffle": 1, "packing": "continuous"}
    data = _open(write_jsonl(tmp_path / "a.jsonl", [{"text": "the water"}]), tmp_path / "run", bpe, **how)
    (step,) = _steps(data, 1, packing="continuous", sequences_per_step=1)
    assert step.tokens == 64
    asked = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}
    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    data = _open(write_jsonl(tmp_path / "b.jsonl", [asked]), tmp_path / "other", words, **how)
    with pytest.raises(ConfigError, match="no document of the sources has a token that counts"):
        _steps(data, 1, packing="continuous", sequences_per_step=1)


def test_a_stream_mixes_by_weight(folder: Path) -> None:
    (step,) = islice(batches(folder).steps(), 40, 41)
    tokens = [place["tokens"] for place in step.position["sources"]]
    assert tokens[0] / sum(tokens) == pytest.approx(0.75, abs=0.02)


def _open(path: Path, run: Path, bpe: PreTrainedTokenizerBase, *, seed: int = 0, **changes: Any) -> Data:
    run.mkdir(exist_ok=True)
    return open_data(settings(path, **changes), run, seed=seed, own=bpe)


def _steps(data: Data, count: int, position: Any = None, **changes: Any) -> list[Step]:
    what: dict[str, Any] = {"sequences_per_step": 2, "micro_batch_size": 1, "packing": True, "length": 64, **changes}
    return list(islice(batches_of(data.train, fingerprint=data.identity.fingerprint, **what).steps(position), count))


def test_prepared_data_are_used_again_and_give_the_same(folder: Path, bpe: PreTrainedTokenizerBase) -> None:
    run = folder / "run"
    first = _steps(_open(folder / "a.jsonl", run, bpe), 8)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*.tokens")}
    assert before
    os.utime(folder / "a.jsonl", ns=(1, 1))  # the same bytes, copied
    again = _open(folder / "a.jsonl", run, bpe)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*.tokens")} == before
    (next_one,) = _steps(again, 1, first[4].position)
    assert digest(next_one) == digest(first[5])
    assert not list(run.rglob("*.partial"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (None, r"a\.jsonl has changed since \([\d,]+ bytes then, [\d,]+ now\)"),
        ({"sequence_length": 32}, "data.sequence_length was 64 and is 32 now"),
        ({"packing": False}, "data.packing was True and is False now"),
        ({"seed": 1}, "seed was 0 and is 1 now"),
        ({"validation": ValidationConfig(share=0.2)}, "data.validation.share was None"),
    ],
)
def test_other_data_under_a_run_are_refused(
    folder: Path, bpe: PreTrainedTokenizerBase, changes: dict[str, Any] | None, says: str
) -> None:
    run = folder / "run"
    data = _open(folder / "a.jsonl", run, bpe)
    if changes is None:
        with (folder / "a.jsonl").open("a") as file:
            file.write('{"text": "more"}\n')
    with pytest.raises(ConfigError, match=f"are not what they were: .*{says}"):
        _open(folder / "a.jsonl", run, bpe, **changes or {})
    position = {**_steps(data, 1)[0].position, "data": "0" * 16}
    with pytest.raises(ConfigError, match="another loop"):
        _steps(data, 1, {"epoch": 1, "batch": 3})
    with pytest.raises(ConfigError, match="a place in other data"):
        _steps(data, 1, position)


class _Hub:
    """A data set on the hub, with its rows by commit. ``main``: the commit that its branch is at."""

    def __init__(self) -> None:
        self.commits = {name: [{"text": text} for text in sentences(60, seed=n)] for n, name in enumerate("ab")}
        self.main, self.asked = "a", list[str | None]()

    def load_dataset_builder(self, path: str, name: str | None, revision: str | None) -> Any:
        self.asked.append(revision)
        commit = revision or self.main
        rows = datasets.Dataset.from_list(self.commits[commit])
        return SimpleNamespace(
            hash=commit,
            as_streaming_dataset=lambda split: rows.to_iterable_dataset(),
            download_and_prepare=lambda: None,
            as_dataset=lambda split: rows,
        )


@pytest.mark.parametrize("streaming", [True, False])
def test_a_run_reads_the_commit_of_a_data_set_that_it_began_with(
    tmp_path: Path, bpe: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    hub = _Hub()
    monkeypatch.setattr(datasets, "load_dataset_builder", hub.load_dataset_builder)
    tokens = None if streaming else TokenizerConfig(train=_SMALL)
    how = {"streaming": streaming, "shuffle": 20 if streaming else None, "tokenizer": tokens}
    open_hub = partial(open_data, settings("me/texts", **how), seed=0, own=bpe if streaming else None)
    (tmp_path / "run").mkdir()
    (tmp_path / "new").mkdir()
    walked = _steps(open_hub(tmp_path / "run"), 5)
    hub.main = "b"
    (resumed,) = _steps(open_hub(tmp_path / "run"), 1, walked[3].position)
    assert hub.asked == [None, "a"]
    assert (digest(resumed), resumed.position) == (digest(walked[4]), walked[4].position)
    other = open_hub(tmp_path / "new")
    assert other.identity.settings["data.sources"] == [{"files": 0, "path": "me/texts", "commit": "b"}]
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: hub.load_dataset_builder("", None, "b"))
    with pytest.raises(ConfigError, match=r"are not what they were: data\.sources was .*'commit': 'a'.* and is"):
        open_hub(tmp_path / "run")


_SMALL = TokenizerTrainingConfig(vocabulary=300)


def test_what_is_tokenised_can_be_shared_between_runs(folder: Path, bpe: PreTrainedTokenizerBase) -> None:
    shared = folder / "shared"
    _open(folder / "a.jsonl", folder / "one", bpe, prepared=str(shared))
    before = {path: path.stat().st_mtime_ns for path in shared.rglob("*") if path.is_file()}
    _open(folder / "a.jsonl", folder / "two", bpe, prepared=str(shared), sequence_length=16, seed=9)
    assert {path: path.stat().st_mtime_ns for path in shared.rglob("*") if path.is_file()} == before
    assert not (folder / "two" / "data").exists()


def test_a_tokenizer_that_is_trained_is_of_the_fields_that_the_settings_name(tmp_path: Path) -> None:
    """Also where runs share what is prepared, and another one was trained on the same files."""
    rows = [{"one": text, "other": text.upper()} for text in sentences(100)]
    path, found = str(write_jsonl(tmp_path / "a.jsonl", rows)), {}
    for name in ("one", "other"):
        how = {"tokenizer": TokenizerConfig(train=_SMALL), "prepared": str(tmp_path / "shared")}
        (tmp_path / name).mkdir()
        config = settings((SourceConfig(path=path, fields={"text": name}),), **how)
        found[name] = open_data(config, tmp_path / name, seed=0, own=None).tokenizer
    assert digest_of(found["one"]) != digest_of(found["other"])


def test_preparation_that_fails_leaves_nothing(folder: Path, bpe: PreTrainedTokenizerBase) -> None:
    with (folder / "a.jsonl").open("a") as file:
        file.write("{")
    with pytest.raises(ConfigError, match="line 151"):
        _open(folder / "a.jsonl", folder / "run", bpe)
    assert not [path for path in (folder / "run").rglob("*") if path.is_file()]


def test_held_out_documents_are_the_same_in_every_run_and_never_trained_on(
    folder: Path, bpe: PreTrainedTokenizerBase
) -> None:
    found = []
    for run in ("one", "two"):
        data = _open(folder / "a.jsonl", folder / run, bpe, validation=ValidationConfig(share=0.2), seed=len(run))
        assert data.validation is not None
        assert isinstance(data.train, Prepared)
        train, held = ({_text(bpe, rows, i) for i in range(len(rows))} for rows in _both(data))
        found.append(held)
        assert not train & held
        assert 0.1 < len(held) / len(train | held) < 0.3
    assert found[0] == found[1]
    trained, held_out = _both(data)
    assert len(trained.source) + len(held_out.source) == 150


def _both(data: Data) -> tuple[Any, Any]:
    assert isinstance(data.train, Prepared)
    assert data.validation is not None
    return data.train.epoch(0), data.validation.epoch(0)


def _text(bpe: PreTrainedTokenizerBase, rows: Any, number: int) -> str:
    text = bpe.decode(rows.row(number).ids.tolist())
    assert isinstance(text, str)
    return text


def test_what_was_read_is_said(folder: Path, bpe: PreTrainedTokenizerBase) -> None:
    bpe.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    path = write_jsonl(folder / "c.jsonl", chats(30))
    data = _open(path, folder / "run", bpe, sequence_length=48)
    assert isinstance(data.train, Prepared)
    cuts = data.train.cuts
    words = summary_of(data, 48)
    assert "30 documents" in words
    assert f"{cuts.tokens:,} tokens, {cuts.labels:,} of which count in the loss" in words
    assert f"{cuts.too_long} documents longer than a sequence: {cuts.lost:,} tokens are left out" in words
    assert cuts.labels < cuts.tokens / 1.3
    (step,) = _steps(data, 1, length=48)
    assert step.metrics()["truncated_tokens"] == cuts.lost > 0


@pytest.mark.parametrize("streaming", [False, True])
def test_a_template_that_writes_the_day_writes_that_on_which_the_run_began(
    streaming: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def it_is(day: int) -> None:
        now = datetime(2026, 11, day, 12)
        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", SimpleNamespace(now=lambda: now))
        known = {"today": now.date, "fromisoformat": date.fromisoformat}
        monkeypatch.setattr("penstock.data.opening.date", SimpleNamespace(**known))

    words = tokenizer()
    words.chat_template = (
        "{{ strftime_now('%d of %m \N{CALENDAR}') }}\n"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    )
    path = write_jsonl(folder / "c.jsonl", chats(30))
    it_is(28)
    how: dict[str, Any] = {"streaming": streaming, "shuffle": 20 if streaming else None}
    steps = _steps(_open(path, folder / "run", words, **how), 8)
    assert "28 of 11" in words.decode(steps[0].micro_batches[0]["input_ids"][0].tolist())
    it_is(29)
    shutil.rmtree(folder / "run" / "data", ignore_errors=True)
    again = _steps(_open(path, folder / "run", words, **how), 3, steps[4].position)
    assert [digest(step) for step in again] == [digest(step) for step in steps[5:]]
    (other,) = _steps(_open(path, folder / "other", words, **how), 1)
    assert "29 of 11" in words.decode(other.micro_batches[0]["input_ids"][0].tolist())
    text = _open(folder / "a.jsonl", folder / "text", words, **how)  # in which no template writes
    assert not any("day" in key for key in text.identity.settings)


@pytest.mark.parametrize(
    ("rows", "changes", "says"),
    [
        ([], {}, "has no documents"),
        (
            [{"text": "a b c d e f"}],
            {"sequence_length": 2, "too_long": "drop"},
            "nothing to train on.*1 documents are longer",
        ),
        ([{"text": "a b c d e f g h"}], {"validation": ValidationConfig(share=0.01)}, "leaves none to evaluate on"),
        ([{"text": "a b"}], {"streaming": True, "validation": ValidationConfig(share=0.1)}, "cannot be held out"),
    ],
)
def test_data_that_will_not_do_are_refused_before_the_run(
    tmp_path: Path, bpe: PreTrainedTokenizerBase, rows: list[Any], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        _open(write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "run", bpe, **changes)


def test_a_corpus_without_a_token_is_refused(tmp_path: Path, bpe: PreTrainedTokenizerBase) -> None:
    write_tokens(tmp_path / "c.tokens", [])
    with pytest.raises(ConfigError, match="nothing to train on: of 0 tokens in 0 documents"):
        _open(tmp_path / "c.tokens", tmp_path / "run", bpe, validation=ValidationConfig(share=0.1))


def test_streaming_several_sources_needs_weights_and_text(folder: Path, bpe: PreTrainedTokenizerBase) -> None:
    two = (
        SourceConfig(path=str(folder / "a.jsonl")),
        SourceConfig(path=str(folder / "b.csv.gz"), fields={"text": "body"}),
    )
    with pytest.raises(ConfigError, match="give each a weight"):
        open_data(settings(two, streaming=True), folder, seed=0, own=bpe)


def test_tokens_that_the_model_has_no_weights_for_are_refused_where_documents_may_have_them(folder: Path) -> None:
    """Some models' own tokenizers have more, for padding or for pictures."""
    from transformers import LlamaConfig, LlamaModel

    with torch.device("meta"):
        model = LlamaModel(LlamaConfig(vocab_size=320, num_hidden_layers=1))
    path, words = folder / "a.jsonl", tokenizer()
    data = _open(path, folder / "one", words)
    assert for_model(data, model) is data
    words.add_special_tokens({"pad_token": "<pad>"})
    data = _open(path, folder / "two", words)
    assert (data.largest, data.pad) == (320, 320)
    assert for_model(data, model).pad == 0, "one that it has"
    with pytest.raises(
        ConfigError, match=r"it has token ids up to 320, and the model a vocabulary of 320 .* finds out"
    ):
        for_model(_open(path, folder / "three", words, streaming=True), model)
    with path.open("a") as file:
        file.write('{"text": "<pad>"}\n')
    with pytest.raises(ConfigError, match=r"documents have token ids up to 320, and the model a vocabulary of 320 "):
        for_model(_open(path, folder / "four", words), model)


def test_token_ids_that_are_evaluated_on_are_looked_at_too(folder: Path, bpe: PreTrainedTokenizerBase) -> None:
    write_tokens(folder / "held.tokens", [[1, 2, 3], [4, 999, 5]])
    held_out = ValidationConfig(sources=str(folder / "held.tokens"))
    assert _open(folder / "a.jsonl", folder / "run", bpe, validation=held_out).largest == 999


def test_a_stream_may_be_evaluated_on_the_file_that_it_is_trained_on(
    tmp_path: Path, bpe: PreTrainedTokenizerBase
) -> None:
    """Of a large one its ends are compared for the one, and all of it for the other."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text, "id": "x" * (1 << 19)} for text in sentences(5)])
    how: dict[str, Any] = {"streaming": True, "validation": ValidationConfig(sources=str(path))}
    first = _open(path, tmp_path / "run", bpe, **how).identity
    assert first.files[0].digest != first.files[1].digest
    assert _open(path, tmp_path / "run", bpe, **how).identity == first


def test_items_are_made_ahead_in_order_and_an_error_comes_in_its_place() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for i in range(5):
            made.append(i)
            yield i
        raise ConfigError("here")

    taken = []
    with ahead(items, 2) as found:
        assert next(found) == 0
        until(lambda: len(made) >= 4)
        assert len(made) == 4, "one was taken, two wait, and one is in hand"
        with pytest.raises(ConfigError, match="here"):
            taken += list(_noted(found, taken))
    assert taken == [1, 2, 3, 4]


def _noted(items: Iterator[int], taken: list[int]) -> Iterator[int]:
    for item in items:
        taken.append(item)
        if False:
            yield item


def test_a_tokenizer_that_the_system_refuses_to_write_is_an_error_of_the_system(
    bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """What writes it is not in Python, and says so in an exception of no kind."""
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        save(bpe, tmp_path)


def test_a_folder_for_what_is_prepared_is_refused_where_nothing_will_be(
    folder: Path, bpe: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "STREAM_FROM", 1000)
    shared = str(folder / "shared")
    with pytest.raises(ConfigError, match=r"data\.prepared=.* has no effect, .* set data\.streaming: false"):
        _open(folder / "a.jsonl", folder / "one", bpe, prepared=shared)
    _open(folder / "a.jsonl", folder / "two", bpe, prepared=shared, streaming=False)
    _open(folder / "a.jsonl", folder / "three", bpe)
    _open(folder / "a.jsonl", folder / "three", bpe, prepared=shared)  # a run that has begun so goes on


@pytest.mark.parametrize("change", ["grows", "shrinks", "is gone"])
@pytest.mark.parametrize("of", ["a tokenizer", "tokens"])
def test_what_is_made_of_a_file_that_changes_meanwhile_is_not_kept_under_its_name(
    of: str, change: str, folder: Path, bpe: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run on it could not go on, and another one that shares what is prepared would train on something else."""
    file = folder / "a.jsonl"

    def then_change() -> None:
        if change == "is gone":
            file.unlink(missing_ok=True)
        else:
            lines = file.read_text().splitlines(keepends=True)
            file.write_text("".join(lines + lines[:5] if change == "grows" else lines[:-5]))

    class Changing(TokenWriter):
        def __exit__(self, *given: Any) -> None:
            super().__exit__(*given)
            then_change()

    train_tokenizer = opening.tokenizers.train

    def train_changing(*given: Any) -> PreTrainedTokenizerBase:
        found = train_tokenizer(*given)
        then_change()
        return found

    own: dict[str, Any] = {"sources": str(file)}
    if of == "a tokenizer":
        monkeypatch.setattr(opening.tokenizers, "train", train_changing)
        own["tokenizer"] = TokenizerConfig(train=TokenizerTrainingConfig(vocabulary=300))
    else:
        monkeypatch.setattr(preparing, "TokenWriter", Changing)
    said = "a.jsonl: No such file" if change == "is gone" else "a.jsonl has changed while it was read"
    with pytest.raises(ConfigError, match=said):
        open_data(replace(settings(folder), streaming=False, **own), folder / "run", seed=0, own=bpe)
    assert not list((folder / "run").rglob("*.tokens"))
    assert not list((folder / "run").rglob("tokenizer.json"))
