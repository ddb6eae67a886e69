"""Documents, tokenizers and chat templates for the tests of data."""

import copy
import csv
import gzip
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from penstock.config import DataConfig, SourceConfig, TokenizerTrainingConfig
from penstock.config.data import Kind
from penstock.data.batches import Batches
from penstock.data.encode import Encoder
from penstock.data.forms import form_of
from penstock.data.rows import Packing
from penstock.data.sources.find import open_source
from penstock.data.sources.reader import Reader
from penstock.data.stream import Stream
from penstock.data.token_files import Document
from penstock.data.tokenizer import train

B = TypeVar("B", bound=Batches)
WORDS = ["penstock", "turbine", "größe", "水", "river", "valve", "x = 1", "#", "the", "water", "of", "head"]

PLAIN_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""It does not say which part is the assistant's."""

MARKED_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<assistant>{% generation %}{{ m.content }}</assistant>\n"
    "{% endgeneration %}{% else %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""It renders as ``PLAIN_TEMPLATE`` does, and says so."""

TOOLS_TEMPLATE = PLAIN_TEMPLATE.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls | default('') }}")
"""It writes calls of tools, too."""

LAST_ONLY_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if loop.last %}[last]{% endif %}{{ m.content }}\n{% endfor %}"
)
"""A message is rendered otherwise when another follows."""


def sentences(count: int, seed: int = 0, words: tuple[int, int] = (3, 40)) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, size=rng.integers(*words))) + f" {i}" for i in range(count)]


@cache
def _trained(vocabulary: int) -> PreTrainedTokenizerBase:
    return train(TokenizerTrainingConfig(vocabulary=vocabulary), sentences(300))


def tokenizer(vocabulary: int = 320) -> PreTrainedTokenizerBase:
    """One of the caller's own, who may change it."""
    return copy.deepcopy(_trained(vocabulary))


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """CSV, or TSV, of rows that all have the same fields; what is no text is JSON."""
    text = io.StringIO()
    table = csv.writer(text, delimiter="\t" if ".tsv" in path.name else ",")
    table.writerow(rows[0])
    table.writerows([value if isinstance(value, str) else json.dumps(value) for value in row.values()] for row in rows)
    data = text.getvalue().encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def chats(count: int) -> list[dict[str, Any]]:
    lines = iter(sentences(4 * count))
    roles = ("user", "assistant", "user", "assistant")
    return [{"messages": [{"role": role, "content": next(lines)} for role in roles]} for _ in range(count)]


def settings(sources: Any, **changes: Any) -> DataConfig:
    return DataConfig(
        **{"sources": str(sources) if isinstance(sources, Path) else sources, "sequence_length": 64, **changes}
    )


def batches_of(stream: Stream, packing: Packing, length: int, *, kind: type[B] = Batches, **changes: Any) -> B:
    """Rows of a stream in micro-batches of two, unless other sizes are given."""
    what: dict[str, Any] = {"sequences_per_step": 4, "micro_batch_size": 2, "pad": 0, "fingerprint": "f", **changes}
    return kind(stream=stream, packing=packing, length=length, **what)


def reader_of(path: Path, **source: Any) -> Reader:
    found = open_source(SourceConfig(path=str(path), **source), streaming=False)
    assert not isinstance(found, tuple)
    return found


def encoded(
    path: Path, words: PreTrainedTokenizerBase, *, loss_on: Any = None, kind: Kind | None = None, **source: Any
) -> list[Document]:
    """The documents of a source, whose examples are of the form of the first."""
    reader, config = reader_of(path, kind=kind, **source), settings(path, loss_on=loss_on)
    first, _ = next(reader.read(None))
    form = form_of(first, kind, template=words.chat_template is not None)
    return [document for document, _ in Encoder(words, config, form, alone=True).documents(reader.read(None))]
