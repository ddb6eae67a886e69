"""Small files that ask for much, and large ones that say little: refused in words, and soon."""

import json
import os
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.cli.located import parse_yaml
from penstock.cli.schedule_file import read_world
from penstock.cli.settings import load
from penstock.config import BatchConfig, DataConfig
from penstock.data import limits
from penstock.data.chat import ChatEncoder
from penstock.data.sources import jsonl, text
from penstock.data.sources.jsonl import JsonLines
from penstock.data.sources.reader import Example
from penstock.data.sources.text import TextFiles
from penstock.errors import ConfigError
from penstock.shape.huggingface import model_shape
from tests.data_documents import MARKED_TEMPLATE, tokenizer

LAUGHS = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in pairwise("abcdefghijklmnopqrstuvwx"))


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    began = time.process_time()
    yield
    assert time.process_time() - began < 10


@pytest.mark.parametrize(
    "document",
    [
        LAUGHS,
        "a: &a [*a]",
        "&a {x: *a}",
        "[" * 10_000,
        "{a: " * 5_000,
        "- " * 5_000,
        "x: [" + "1," * 25_000 + "]",
        "x: " + "9" * 10_000,
        "x: !!python/object/apply:os.system [true]",
        "x: !!binary aGVsbG8=",
        "x: !!int nothing",
        "? [a, b]\n: c",
        f"? {'[' * 20}x{']' * 20}\n: c",
        "x: 1\n" * 1000,
        "\0",
        "x: \x01",
        "a" * 300_000,
    ],
    ids=lambda document: document[:20],
)
def test_yaml_that_asks_for_much(document: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^(x|x:\d+): "):
        parse_yaml(document, "x")
    (tmp_path / "c.yaml").write_text(document)
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load(tmp_path / "c.yaml")


def test_an_alias_stands_for_what_it_names() -> None:
    assert parse_yaml("a: &a {x: 1}\nb: *a", "x").plain() == {"a": {"x": 1}, "b": {"x": 1}}


@pytest.mark.parametrize("given", [{"sequences": 10**12}, {"tokens": 10**18}, {"sequences": 2**63 - 1}])
def test_a_batch_beyond_all_is_refused(given: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"batch\.(sequences|tokens)=.*at most"):
        BatchConfig(**given).sequences_of(2)
    with pytest.raises(ConfigError, match="at most"):
        DataConfig(sources="x", sequence_length=10**12)


def test_a_line_of_100_mb_is_refused_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + b'{"text": "')
    os.truncate(path, 200 << 20)
    with pytest.raises(ConfigError, match=f"line 2: it has more than {jsonl.LONGEST:,} bytes"):
        list(JsonLines(files=(path,)).read(None))


def test_a_text_of_one_line_is_read_in_parts(tmp_path: Path) -> None:
    """Between characters, wherever a part ends; and every part can be gone on from."""
    path = tmp_path / "long.txt"
    for shift in range(4):
        whole = "x" * shift + "水" * text.PART + "\nend"
        path.write_text(whole)
        found = list(TextFiles(files=(path,)).read(None))
        assert len(found) >= 2
        assert "".join(example.fields["text"] for example, _ in found) == whole
        rest = [example.fields["text"] for example, _ in TextFiles(files=(path,)).read(found[0][1])]
        assert rest == [example.fields["text"] for example, _ in found[1:]]


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{{ '' }}{% endfor %}{% endfor %}"
GROWS = "{% set n = namespace(a='xxxxxxxxxxxxxxxx') %}{% for i in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}"


@pytest.mark.parametrize(("template", "why"), [(LOOPS, "seconds"), (GROWS, "memory")], ids=["loops", "grows"])
@pytest.mark.parametrize("marked", [True, False])
def test_a_chat_template_without_end_is_ended(
    template: str, why: str, marked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, *(("SECONDS", 0.5) if why == "seconds" else ("GROWTH", 100 << 20)))
    words = tokenizer(300)
    words.chat_template = template + MARKED_TEMPLATE if marked else template
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    example = Example(fields={"messages": said}, place="a.jsonl, line 1")
    with pytest.raises(ConfigError, match=f"a.jsonl, line 1: the chat template does not come to an end.*{why}"):
        ChatEncoder(words, answers=marked, alone=True).encode([example])
    words.chat_template = MARKED_TEMPLATE
    assert ChatEncoder(words, answers=True, alone=True).encode([example])[0].answers is not None


def test_memory_of_others_does_not_end_a_chat_that_is_rendered_beside_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GROWTH", -1)
    words = tokenizer(300)
    words.chat_template = LOOPS.replace("99999", "1500") + MARKED_TEMPLATE
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    example = Example(fields={"messages": said}, place="a.jsonl, line 1")
    with pytest.raises(ConfigError, match="memory"):
        ChatEncoder(words, answers=True, alone=True).encode([example])
    beside = ChatEncoder(words, answers=True, alone=False)
    assert beside.encode([example])[0].answers is not None
    monkeypatch.setattr(limits, "LONGEST", 5)
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 1: the chat template does not come to an end.*more than 5"):
        beside.encode([example])


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_layers_beyond_all_are_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "num_hidden_layers": 10**9}))
    with pytest.raises(ConfigError, match="num_hidden_layers=1000000000 is more than any model has"):
        model_shape(tmp_path)


def test_a_schedule_file_is_bounded(tmp_path: Path) -> None:
    """In its bytes, in its ranks, and in the ops of all of them, which a few lines may name; a pipe is none."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 1 << 40)
    ops = "\n".join(f"F0m{m}" for m in range(50))
    (tmp_path / "ranks").write_text(f"world w ranks 90000\nrank 0-89999\nschedule a micro-batches 50 chunk 1\n{ops}\n")
    for name, says in {"pipe": "no regular file", "large": "at most", "ranks": "4,500,000 ops"}.items():
        with pytest.raises(ConfigError, match=f"{name}.*{says}"):
            read_world(tmp_path / name)
