"""Documents, tokenizers and chat templates for the tests of data."""

import csv
import gzip
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from penstock.config import DataConfig, TokenizerTrainingConfig
from penstock.config.data import Kind
from penstock.data.encode import Encoder
from penstock.data.forms import form_of
from penstock.data.sources.reader import Reader
from penstock.data.token_files import Document
from penstock.data.tokenizer import train

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


def tokenizer(vocabulary: int = 320) -> PreTrainedTokenizerBase:
    return train(TokenizerTrainingConfig(vocabulary=vocabulary), sentences(300))


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


def encoded(
    reader: Reader, words: PreTrainedTokenizerBase, config: DataConfig, kind: Kind | None = None
) -> list[Document]:
    """The documents of a source, whose examples are of the form of the first."""
    first, _ = next(reader.read(None))
    form = form_of(first, kind, template=words.chat_template is not None)
    return [document for document, _ in Encoder(words, config, form, alone=True).documents(reader.read(None))]
