"""Documents of any text in any format, with any tokenizer, under any settings: rows are those of a plain reference.

The reference has a text's tokens from one call of the tokenizer on all of it, and a chat's answers from where they
stand in the text; documents are cut into pieces as lists. Each epoch, and each window of a stream, has exactly these
pieces, and a step that is gone on from is the next one.
"""

import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from penstock.config import DataConfig
from penstock.data.opening import open_data
from penstock.data.rows import IGNORED, Row
from penstock.errors import ConfigError
from tests.conftest import Campaign
from tests.data_documents import batches_of, write_jsonl, write_table
from tests.data_victim import digest

WORDS = (
    *("pen", "größe", "水", "e\u0301", "é", "x = 1", "#", "the", "of", "\u00a0", "\t", "\n", "\n\n", "    ", "ﬁ", "Ⅷ"),
    *("</s>", "<s>", "\u200b", "\x00", "\r\n", "👩‍👩‍👧", "İ", "don't", "1234", ".", "...", "ACGT", "\ufeff", "\u2028"),
)
SPECIAL = ["<s>", "</s>", "<unk>"]
Pieces = Counter[tuple[tuple[int, ...], tuple[int, ...]]]
Encoded = tuple[list[int], list[int]]
"""The ids of a document, and which of them count"""


def any_text(rng: random.Random, words: int) -> str:
    return "".join(rng.choice(WORDS) + rng.choice(("", " ", " ")) for _ in range(rng.randrange(words)))


def any_tokenizer(rng: random.Random) -> Any:
    """A tokenizer that puts tokens before or behind a text, or none, and has an end of text, or none."""
    texts = [any_text(random.Random(seed), 30) for seed in range(60)]
    how: dict[str, Any] = {"special_tokens": SPECIAL, "show_progress": False}
    split = pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?[^\s\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=rng.random() < 0.3, use_regex=rng.random() < 0.5)
    bpe = trainers.BpeTrainer(vocab_size=330, **how)
    kinds: dict[str, tuple[Any, Any, Any]] = {
        "bytes": (models.BPE(), pre_tokenizers.Sequence([split, byte_level]), bpe),
        "spaces": (models.BPE(unk_token="<unk>"), pre_tokenizers.Metaspace(prepend_scheme="first"), bpe),
        "letters": (models.BPE(), None, bpe),
        "unigram": (
            models.Unigram(),
            pre_tokenizers.Metaspace(),
            trainers.UnigramTrainer(vocab_size=330, unk_token="<unk>", **how),
        ),
        "pieces": (
            models.WordPiece(unk_token="<unk>"),
            pre_tokenizers.BertPreTokenizer(),
            trainers.WordPieceTrainer(vocab_size=330, **how),
        ),
    }
    kind = rng.choice([*kinds])
    model, before, trainer = kinds[kind]
    made = Tokenizer(model)
    made.pre_tokenizer = before
    made.decoder = decoders.ByteLevel() if kind == "bytes" else None
    if kind == "unigram" and rng.random() < 0.5:
        made.normalizer = normalizers.NFKC()
    made.train_from_iterator(texts if kind != "letters" else [text.replace("a", "") for text in texts], trainer)
    if around := rng.choice(("", "<s> $A", "$A </s>", "<s> $A </s>")):
        special = [(token, made.token_to_id(token)) for token in SPECIAL[:2]]
        made.post_processor = processors.TemplateProcessing(single=around, special_tokens=special)
    eos = {"eos_token": "</s>"} if rng.random() < 0.8 else {}
    found: Any = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", unk_token="<unk>", **eos)
    found.ended = around.endswith("</s>")
    return found


def of_text(words: Any, text: str) -> Encoded:
    """Begun and ended as the tokenizer does it, and by one end of text, which the text may bring."""
    ids, own = list(words(text)["input_ids"]), list(words(text, add_special_tokens=False)["input_ids"])
    if words.ended:
        ids = ids[:-1] if own and own[-1] == ids[-1] else ids
    elif words.eos_token_id is not None and (not own or own[-1] != words.eos_token_id):
        ids = [*ids, words.eos_token_id]
    return ids, [1] * len(ids)


def of_chat(words: Any, messages: Sequence[Any], begin: str, end: str) -> Encoded:
    text, spans = "", []
    for message in messages:
        text += begin + message["role"] + "\n"
        spans += [range(len(text), len(text) + len(message["content"] + end))] if message["role"] == "assistant" else []
        text += message["content"] + end
    found = words(text, add_special_tokens=False, return_offsets_mapping=True)
    counts = [any(range(max(a, s.start), min(b, s.stop)) for s in spans) for a, b in found["offset_mapping"]]
    return list(found["input_ids"]), [int(c) for c in counts]


def pieces_of(document: Encoded, length: int, rule: str) -> Pieces:
    (ids, counts), found = document, Pieces()
    if len(ids) > length and rule != "split":
        ids, counts = ([], []) if rule == "drop" else (ids[:length], counts[:length])
    for first in range(0, len(ids), length):
        part = slice(first, first + length)
        labels = [token if count else IGNORED for token, count in zip(ids[part], counts[part], strict=True)]
        labels[0] = IGNORED
        if {*labels} != {IGNORED}:
            found[tuple(ids[part]), tuple(labels)] += 1
    return found


def pieces_in(rows: Sequence[Row]) -> Pieces:
    found = Pieces()
    for row in rows:
        begins = [place for place, position in enumerate(row.positions.tolist()) if position == 0]
        for part in map(slice, begins, [*begins[1:], len(row.ids)]):
            found[tuple(row.ids[part].tolist()), tuple(row.labels[part].tolist())] += 1
    return found


def written(rng: random.Random, folder: Path, rows: list[dict[str, Any]]) -> Path:
    ending = rng.choice((".jsonl", ".jsonl.gz", ".json", ".parquet", ".csv", ".tsv.gz"))
    path = folder / f"a{ending}"
    if ending == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=rng.choice((1, 7, 100)))
    elif ending == ".json":
        path.write_text("\ufeff" + json.dumps(rows, indent=rng.choice((None, 1)), ensure_ascii=False))
    else:
        (write_table if "sv" in ending else write_jsonl)(path, rows)
    return path


def any_case(seed: int, folder: Path) -> str:
    """Returns what became of the case."""
    rng = random.Random(seed)
    words, count, streaming = any_tokenizer(rng), rng.randrange(1, 30), rng.random() < 0.5
    length = rng.choice((2, 5, 16, 33, 64))
    packing: Any = rng.choice((True, False, "continuous"))
    rows: list[dict[str, Any]]
    rule = None if packing == "continuous" else rng.choice((None, "split", "cut", "drop"))
    begin, end = rng.choice(("[", "<s>", "\n")), rng.choice(("", "</s>", "\n", "/]"))
    if chats := rng.random() < 0.5:
        marks = rng.choice((("", ""), ("{% generation %}", "{% endgeneration %}")))
        said = f"{{{{ m.content }}}}{{{{ {end!r} }}}}"
        words.chat_template = (
            f"{{% for m in messages %}}{{{{ {begin!r} + m.role + '\\n' }}}}{{% if m.role == 'assistant' %}}"
            f"{said.join(marks)}{{% else %}}{said}{{% endif %}}{{% endfor %}}"
        )
        roles = ("user", "assistant") * 2
        rows = [{"messages": [{"role": role, "content": any_text(rng, 8)} for role in roles]} for _ in range(count)]
        documents = [of_chat(words, row["messages"], begin, end) for row in rows]
    else:
        rows = [{"text": any_text(rng, 30), "id": "x"} for _ in range(count)]
        documents = [of_text(words, row["text"]) for row in rows]
    window = rng.choice((1, 3, 50)) if streaming else 1
    how: dict[str, Any] = {"packing": packing, "too_long": rule, "shuffle": window if streaming else None}
    path = str(written(rng, folder, rows))
    config = DataConfig(sources=path, sequence_length=length, streaming=streaming, **how)

    def wanted(documents: Sequence[Encoded]) -> Pieces:
        if packing != "continuous":
            each = (pieces_of(document, length, rule or ("cut" if chats else "split")) for document in documents)
            return sum(each, Pieces())
        ids, counts = ([*chain(*(document[part] for document in documents))] for part in (0, 1))
        full = len(ids) // length * length
        return pieces_of((ids[:full], counts[:full]), length, "split")

    def steps(position: Any = None) -> Any:
        data = open_data(config, folder, seed=seed, own=words)
        made: dict[str, Any] = {"pad": data.pad, "sequences_per_step": 2, "micro_batch_size": 1}
        fingerprint = data.identity.fingerprint
        return batches_of(data.train, packing, length, fingerprint=fingerprint, **made).steps(position)

    try:
        stream = open_data(config, folder, seed=seed, own=words).train
        rows_of: dict[int, list[Row]] = defaultdict(list)
        for row, position in islice(stream.rows(None), 300):
            rows_of[position["window" if streaming else "epoch"]].append(row)
    except ConfigError as error:
        rightly = not wanted(documents * (length if streaming else 1)) and re.search(
            "nothing to train on|no doc", str(error)
        )
        return "refused" if rightly else f"refused: {error}"
    whole = max(rows_of)  # the walk ended within it
    at_once = 1 if packing != "continuous" or not streaming else whole  # windows whose rows are compared together
    for place in range(0, whole, at_once):
        places = range(place, place + at_once)
        read = [documents[n % count] for each in places for n in range(each * window, (each + 1) * window)]
        found = pieces_in([row for each in places for row in rows_of[each]])
        assert found == wanted(read if streaming else documents), f"window or epoch {place}"
    walked = list(islice(steps(), 8))
    at = rng.randrange(7)
    again = list(islice(steps(json.loads(json.dumps(walked[at].position))), 7 - at))
    assert [(digest(s), s.position, s.labels) for s in again] == [
        (digest(s), s.position, s.labels) for s in walked[at + 1 :]
    ]
    return "trained"


def test_any_documents_are_the_pieces_of_a_plain_reference(campaign: Campaign, tmp_path: Path) -> None:
    became = Counter[str]()
    for seed in range(campaign.cases(10, 3000)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            became[any_case(seed, folder)] += 1
        except AssertionError as error:
            raise AssertionError(f"case {seed}") from error
    campaign.found(f"any data: {dict(became)}")
    assert {*became} <= {"trained", "refused"}
    assert became["trained"] > became.total() / 2
