"""Texts, bytes and words that somebody has changed: schedules, templates, tokenizers, Parquet files, command lines.

Each comes to an exit code of ours or an error of ours, soon and within bounded memory. What once broke a reader is in
``hostile_corpus.json`` and is tried first. ``--campaign`` tries many more.
"""

import json
import multiprocessing
import resource
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.cli import main
from penstock.data.chat import ChatEncoder
from penstock.data.example import read_as
from penstock.data.forms import form_of
from penstock.data.sources.delimited import Csv
from penstock.data.sources.parquet import Parquet
from penstock.data.sources.reader import Example
from penstock.data.tokenizer import load
from penstock.errors import ConfigError
from tests.cli.test_hostile import CORPUS, SECONDS
from tests.conftest import Campaign
from tests.data_documents import MARKED_TEMPLATE, tokenizer
from tests.hostile import mutated, mutated_bytes, mutated_text, mutated_words
from tests.reports import offload_schedule

GROWTH = 2 << 30
"""Bytes of address space that reading a file may add."""

SAID = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "water"}]

COMMANDS = {
    name: tuple(words.split())
    for name, words in {
        "simulate": "simulate 1f1b --layers 4 --ranks 2 --micro-batches 4 --json",
        "simulate offload": "simulate vertical --costs a100-40g --layers 4 --micro-batches 4 --delay 0.5 --json",
        "plan": "plan --model llama-8b --machine a100-40g --batch 4 --sequence-length 512 --json",
        "plan cut": "plan --model gpt-13b --machine a100-40g --micro-batches 2 --micro-batch-size 2 --host 64GiB",
    }.items()
}
"""Plans are not searched for, which takes long whatever was asked."""


_TABLE = 'id,instruction,output\n1,"the ""water""",of\n2,"two\nlines",river\n'


@dataclass(frozen=True, kw_only=True)
class Reader:
    """``valid``: what is read without an error. ``changed``: others of its kind. ``read``: writes it, and reads it."""

    valid: Any
    changed: st.SearchStrategy[Any]
    read: Callable[[Any], object]


def _schedule(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    assert main(["simulate", str(path)]) in (0, 2)


def _template(template: str) -> None:
    words = tokenizer(300)
    words.chat_template = template
    with suppress(ConfigError):
        ChatEncoder(words, answers=True, alone=True).encode(
            [Example(fields={"messages": SAID}, place="a.jsonl, line 1")]
        )


def _tokenizer(folder: Path, document: Any) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8", errors="surrogatepass")
    load(str(folder))("water of the river")


def _parquet(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    for example, _ in Parquet(files=(path,)).read(None):
        read_as(example, form_of(example, None, template=True), answers=True)


def _csv(path: Path, text: str) -> None:
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with suppress(ConfigError):
        for example, _ in Csv(files=(path,)).read(None):
            read_as(example, form_of(example, None, template=True), answers=True)


def _command(words: Sequence[str]) -> None:
    assert main(words) in (0, 1, 2)


class _FoundError(ConfigError):
    """The task that was asked for is made."""


def _no_search(*_: object, **__: object) -> None:
    raise _FoundError(_NO_SEARCH)


_NO_SEARCH = "no plan is searched for here"


def _apart(read: Callable[[Any], None]) -> Callable[[Any], None]:
    """In a process of its own, as the library that reads may end it, or take all memory."""

    def child(document: Any, outcome: Any) -> None:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + GROWTH, size + GROWTH))
        try:
            read(document)
            outcome.send("")
        except ConfigError:
            outcome.send("")
        except BaseException as error:  # noqa: BLE001  a panic of the library is none of Exception's
            outcome.send(f"{type(error).__name__}: {error}")

    def run(document: Any) -> None:
        mine, its = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=child, args=(document, its))
        process.start()
        its.close()
        try:
            said = mine.recv() if mine.poll(SECONDS) else f"it did not end within {SECONDS} s"
        except EOFError:
            process.join()
            said = f"the process ended with {process.exitcode}"
        finally:
            process.kill()
            process.join()
        assert not said

    return run


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Reader]:
    folder = tmp_path_factory.mktemp("texts")
    schedule = str(offload_schedule(1))
    table = pyarrow.table({"messages": [SAID] * 3, "id": [1, 2, 3]})
    pyarrow.parquet.write_table(table, folder / "a.parquet")
    parquet = (folder / "a.parquet").read_bytes()
    tokenizer(300).save_pretrained(folder)
    tokens = json.loads((folder / "tokenizer.json").read_text())
    found = {
        "schedule": Reader(
            valid=schedule,
            changed=mutated_text(schedule),
            read=lambda text: _schedule(folder / "s.txt", text),
        ),
        "template": Reader(valid=MARKED_TEMPLATE, changed=mutated_text(MARKED_TEMPLATE), read=_template),
        "tokenizer": Reader(
            valid=tokens, changed=mutated(tokens), read=_apart(lambda found: _tokenizer(folder, found))
        ),
        "csv": Reader(valid=_TABLE, changed=mutated_text(_TABLE), read=lambda text: _csv(folder / "c.csv", text)),
        "parquet": Reader(
            valid=parquet.decode("latin-1"),
            changed=mutated_bytes(parquet).map(lambda data: data.decode("latin-1")),
            read=_apart(lambda data: _parquet(folder / "b.parquet", data.encode("latin-1"))),
        ),
    }
    commands = {
        name: Reader(valid=words, changed=mutated_words(words), read=_command) for name, words in COMMANDS.items()
    }
    return found | commands


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_accepted_before_it_is_changed(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("penstock.planner.ask.report", _no_search)
    code = main(COMMANDS[name])
    assert (code, _NO_SEARCH in capsys.readouterr().err) == ((2, True) if name.startswith("plan") else (0, False))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["schedule", "template", "tokenizer", "parquet", "csv", *COMMANDS])
def test_a_changed_text_is_read_or_refused(
    name: str, readers: Mapping[str, Reader], campaign: Campaign, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # of what a changed command writes
    monkeypatch.setattr("penstock.planner.ask.report", _no_search)
    reader = readers[name]
    reader.read(reader.valid)
    for known in json.loads(CORPUS.read_text()):
        if known["reader"] == name:
            reader.read(known["document"])

    @settings(
        max_examples=campaign.cases(few=3, many=1500),
        deadline=timedelta(seconds=SECONDS),
        suppress_health_check=list(HealthCheck),
        derandomize=not campaign.full,
        database=None,
    )
    @given(document=reader.changed)
    def every(document: Any) -> None:
        reader.read(document)

    every()
    reader.read(reader.valid)
