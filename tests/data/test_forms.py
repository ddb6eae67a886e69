"""Forms of rows: ShareGPT's, Alpaca's and those under other names give the tokens and the masks of Penstock's own."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerBase

from penstock.config import SourceConfig, ValidationConfig
from penstock.data import opening, write_tokens
from penstock.data.forms import form_of, recognised
from penstock.data.opening import Data, open_data
from penstock.data.prepare import Opened
from penstock.data.sources.find import open_source
from penstock.data.sources.reader import Example
from penstock.data.summary import summary_of
from penstock.data.token_files import Document
from penstock.errors import ConfigError
from tests.data_documents import (
    MARKED_TEMPLATE,
    PLAIN_TEMPLATE,
    TOOLS_TEMPLATE,
    chats,
    encoded,
    reader_of,
    settings,
    tokenizer,
    write_jsonl,
    write_table,
)

Row = Mapping[str, Any]
SHAREGPT = {"user": "human", "assistant": "gpt", "system": "system"}


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerBase:
    return tokenizer()


@pytest.fixture
def bpe(words: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    words.chat_template = PLAIN_TEMPLATE
    return words


def _written(path: Path, rows: Sequence[Row]) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), path)
    elif path.suffix == ".csv":
        write_table(path, rows)
    else:
        write_jsonl(path, rows)
    return path


def _documents(bpe: PreTrainedTokenizerBase, path: Path, loss_on: Any = None, **source: Any) -> list[Document]:
    return encoded(path, bpe, loss_on=loss_on, **source)


def _same(found: Sequence[Document], expected: Sequence[Document]) -> None:
    assert [d.ids.tolist() for d in found] == [d.ids.tolist() for d in expected]
    masks = [[None if d.answers is None else d.answers.tolist() for d in one] for one in (found, expected)]
    assert masks[0] == masks[1]


def _conversations() -> tuple[list[Row], list[Row]]:
    """Chats as messages, and as ShareGPT has them: the system's words in front, or in a field of their own."""
    own, theirs = [], []
    for number, row in enumerate(chats(20)):
        said = [*row["messages"]]
        turns = [{"from": SHAREGPT[m["role"]], "value": m["content"], "weight": None} for m in said]
        system = f'answer "{number}",\nin a line' if number % 2 else ""
        own.append({"messages": [{"role": "system", "content": system}] * bool(system) + said})
        inside = [{"from": "system", "value": system, "weight": None}] if number % 4 == 1 else []
        theirs.append({"system": "" if inside else system, "conversations": inside + turns})
    return own, theirs


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
@pytest.mark.parametrize(
    ("template", "loss_on"), [(PLAIN_TEMPLATE, None), (MARKED_TEMPLATE, None), (PLAIN_TEMPLATE, "all")]
)
def test_a_chat_of_sharegpt_has_the_tokens_and_the_mask_of_its_messages(
    bpe: PreTrainedTokenizerBase, tmp_path: Path, kind: str, template: str, loss_on: Any
) -> None:
    bpe.chat_template = template
    own, theirs = _conversations()
    expected = _documents(bpe, _written(tmp_path / "own.jsonl", own), loss_on)
    assert (expected[0].answers is None) == (loss_on == "all")
    _same(_documents(bpe, _written(tmp_path / f"theirs.{kind}", theirs), loss_on), expected)
    other = [{"chat": row["conversations"], "sys": row["system"], "id": "7"} for row in theirs]
    fields = {"messages": "chat", "system": "sys"}
    _same(_documents(bpe, _written(tmp_path / f"other.{kind}", other), loss_on, fields=fields), expected)


def test_calls_of_tools_are_the_assistants_and_results_are_not(bpe: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    bpe.chat_template = TOOLS_TEMPLATE
    call = {"name": "valve", "arguments": {"open": 1}}
    asked, result = {"role": "user", "content": "open it"}, {"role": "tool", "content": "done"}
    own = [asked, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}, result]
    expected = _documents(bpe, _written(tmp_path / "own.jsonl", [{"messages": own, "tools": []}]))
    for value in (call, [call], {**call, "arguments": '{"open": 1}'}):
        turns = [("Human", "open it"), ("function_call", json.dumps(value)), ("observation", "done")]
        row = {"conversations": [{"from": who, "value": said} for who, said in turns], "tools": "[]"}
        _same(_documents(bpe, _written(tmp_path / "theirs.jsonl", [row])), expected)
    bpe.chat_template = PLAIN_TEMPLATE
    with pytest.raises(ConfigError, match="line 1: the chat template leaves out calls of tools, as message 2"):
        _documents(bpe, tmp_path / "theirs.jsonl")
    bpe.chat_template = TOOLS_TEMPLATE.replace("messages %}<", "messages if m.role != 'tool' %}<")
    with pytest.raises(ConfigError, match="line 1: the chat template leaves out results of tools, as message 3"):
        _documents(bpe, tmp_path / "theirs.jsonl")


def test_tools_that_the_template_does_not_write_are_refused(bpe: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "valve", "parameters": {"type": "object", "properties": {}}}}]
    path = _written(tmp_path / "own.jsonl", [{"messages": chats(1)[0]["messages"], "tools": tools}])
    with pytest.raises(ConfigError, match="line 1: the chat template leaves out what tools there are, as 'tools' has"):
        _documents(bpe, path)
    bpe.chat_template = "{% for t in tools %}{{ t.function.name }}{% endfor %}" + PLAIN_TEMPLATE
    assert "valve" in bpe.decode(_documents(bpe, path)[0].ids.tolist())


ALPACA: list[Row] = [
    {"instruction": "add", "input": "1, 2", "output": "3"},
    {"instruction": 'say "x"', "input": "", "output": "x\ny"},
]
BELOW = "Below is an instruction that describes a task"
REQUEST = "Write a response that appropriately completes the request.\n\n### Instruction:\n"


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_an_instruction_is_a_chat_where_there_is_a_template_and_alpacas_prompt_elsewhere(
    bpe: PreTrainedTokenizerBase, tmp_path: Path, kind: str
) -> None:
    path = _written(tmp_path / f"a.{kind}", ALPACA)
    said = [("add\n1, 2", "3"), ('say "x"', "x\ny")]
    own = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in said]
    as_chats = _documents(bpe, _written(tmp_path / "own.jsonl", own))
    _same(_documents(bpe, path), as_chats)
    paired = f"{BELOW}, paired with an input that provides further context. {REQUEST}"
    prompts = [
        f"{paired}add\n\n### Input:\n1, 2\n\n### Response:\n",
        f'{BELOW}. {REQUEST}say "x"\n\n### Response:\n',
    ]
    pairs = [{"prompt": p, "completion": row["output"]} for p, row in zip(prompts, ALPACA, strict=True)]
    as_prompts = _documents(bpe, _written(tmp_path / "pairs.jsonl", pairs))
    _same(_documents(bpe, path, kind="completion"), as_prompts)
    bpe.chat_template = None
    _same(_documents(bpe, path), as_prompts)
    other = [{"q": r["instruction"], "more": r["input"], "a": r["output"], "output": "no"} for r in ALPACA]
    fields = {"instruction": "q", "input": "more", "output": "a"}
    _same(_documents(bpe, _written(tmp_path / f"other.{kind}", other), fields=fields), as_prompts)


def test_a_field_that_is_named_is_not_read_under_its_own_name_as_well(
    bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    expected = _documents(bpe, _written(tmp_path / "own.jsonl", [{"instruction": "add", "output": "3"}]))
    path = _written(tmp_path / "a.jsonl", [{"input": "add", "reply": "3"}])
    _same(_documents(bpe, path, fields={"instruction": "input", "output": "reply"}), expected)


def test_earlier_turns_and_the_systems_words_of_an_instruction_are_kept(
    bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    row = {"instruction": "q", "input": None, "output": "a", "system": "be brief", "history": [["p", "b"]]}
    said = [("system", "be brief"), ("user", "p"), ("assistant", "b"), ("user", "q"), ("assistant", "a")]
    own = {"messages": [{"role": role, "content": text} for role, text in said]}
    path = _written(tmp_path / "a.jsonl", [row])
    expected = _documents(bpe, _written(tmp_path / "own.jsonl", [own]))
    _same(_documents(bpe, path), expected)
    _same(_documents(bpe, _written(tmp_path / "a.csv", [{**row, "input": ""}])), expected)
    with pytest.raises(
        ConfigError, match="line 1: 'history' has earlier turns, which only a chat has: leave out kind: completion"
    ):
        _documents(bpe, path, kind="completion")
    pair = {"prompt": "be brief\n\n### Instruction:\nq\n\n### Response:\n", "completion": "a"}
    expected = _documents(bpe, _written(tmp_path / "pair.jsonl", [pair]))
    _same(_documents(bpe, _written(tmp_path / "a.jsonl", [{**row, "history": []}]), kind="completion"), expected)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_fields_of_other_names_are_read_as_if_they_had_the_names_here(
    bpe: PreTrainedTokenizerBase, tmp_path: Path, kind: str
) -> None:
    """Also where the file has a field of such a name that is something else."""
    pairs: list[Row] = [{"prompt": f"what is {i}? ", "completion": f"it is {i}"} for i in range(5)]
    expected = _documents(bpe, _written(tmp_path / "own.jsonl", pairs))
    rows = [{"text": row["prompt"], "answer": row["completion"], "messages": "x"} for row in pairs]
    path = _written(tmp_path / f"other.{kind}", rows)
    _same(_documents(bpe, path, fields={"prompt": "text", "completion": "answer"}), expected)
    half = [{"prompt": row["prompt"], "text": "x", "answer": row["completion"]} for row in pairs]
    path = _written(tmp_path / f"half.{kind}", half)
    _same(_documents(bpe, path, fields={"completion": "answer"}), expected)
    plain: list[Row] = [{"text": row["completion"]} for row in pairs]
    text = _documents(bpe, _written(tmp_path / "plain.jsonl", plain))
    _same(_documents(bpe, path, fields={"text": "answer"}), text)


FROM = '{"conversations": [{"from": "human", "value": "x"}, %s]}'
BAD: list[tuple[str, dict[str, Any], str]] = [
    (
        '{"question": "a"}',
        {"fields": {"text": "body"}},
        r"a text needs 'body' \(fields.text\), and this has 'question'",
    ),
    ('{"body": 3}', {"fields": {"text": "body"}}, r"'body' \(fields.text\) must be text, not a number"),
    ('{"text": "a", "conversations": [{}]}', {}, "it may be text or chat: say which"),
    ('{"text": "a", "instruction": "b", "output": "c"}', {}, "it may be text or chat: say which"),
    ('{"input": "a", "output": "b"}', {}, r"and none of the fields .*say which \(data.sources: fields\)"),
    (FROM % '{"from": "narrator", "value": "y"}', {}, "message 2 is from 'narrator', which is no known speaker"),
    (FROM % '{"from": "function", "value": "y"}', {}, "message 2 is from 'function', which is no known speaker"),
    (
        FROM % '{"from": "function_call", "value": "y"}',
        {},
        "message 2 is a call of a tool, and its 'value' is not JSON",
    ),
    (FROM % '{"from": "function_call", "value": "[3]"}', {}, "message 2 is a call .* with 'name' and 'arguments'"),
    (FROM % '{"from": "gpt", "value": 3}', {}, "message 2: its 'value' must be text, not a number"),
    (FROM % '{"from": "gpt", "value": "y", "weight": 0}', {}, "message 2 is an answer that is not to be trained"),
    (FROM % '{"role": "assistant", "content": "y", "train": false}', {}, "message 2 is an answer that is not to be"),
    (FROM % '{"from": "gpt", "value": "y", "weight": 0.5}', {}, r"not to be trained as others are \(weight=0.5\)"),
    (FROM % '{"role": "assistant", "content": "y", "loss": false}', {}, r"trained as others are \(loss=False\)"),
    (FROM % '{"who": "gpt", "text": "y"}', {}, "message 2 must be an object .* with 'from' and 'value': it has 'who'"),
    (FROM % '"y"', {}, "message 2 must be an object .*, not text"),
    (FROM % '{"from": "human", "value": "y"}', {}, r"no message is the assistant's \(only user\)"),
    ('{"conversations": [], "x": 1}', {}, "'conversations' must be a list of messages, not an empty list"),
    ('{"messages": "[{]"}', {}, "'messages' is text that cannot be read: this is not JSON"),
    ('{"messages": [{"role": "assistant", "content": "a"}], "system": 3}', {}, "'system' must be text, not a number"),
    ('{"instruction": "a", "output": ""}', {}, "'output' is empty: there is nothing to learn"),
    ('{"instruction": ["a"], "output": "b"}', {}, "'instruction' must be text, not a list"),
    ('{"instruction": "a", "output": "b", "history": [["c"]]}', {}, "'history' must be a list of pairs"),
]


@pytest.mark.parametrize(("row", "source", "says"), BAD)
def test_a_row_that_will_not_do_is_refused_with_its_line_and_what_it_has(
    bpe: PreTrainedTokenizerBase, tmp_path: Path, row: str, source: dict[str, Any], says: str
) -> None:
    (tmp_path / "bad.jsonl").write_text(row + "\n")
    with pytest.raises(ConfigError, match=rf"bad\.jsonl, line 1: .*{says}"):
        _documents(bpe, tmp_path / "bad.jsonl", **source)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "fields is empty"),
        (
            {"body": "text"},
            r"fields.body: there is no such field here; the other way round it is {text: body}. An .*has",
        ),
        (
            {"conversations": "chat"},
            "fields.conversations: .* An example has text; or prompt and completion; or messages",
        ),
        ({"text": 3}, "fields.text must be the name of a field of the file, not 3"),
        ({"text": ""}, "fields.text must be the name"),
        ({"prompt": "a", "completion": "a"}, "fields.prompt: 'a' is completion already"),
        ({"text": "a", "messages": "b"}, "fields has text and messages, which do not go together"),
        (
            {"completion": "prompt"},
            "fields.completion: .*'prompt' is completion then: give fields.prompt",
        ),
        ({"messages": "a"}, "fields has messages, which kind: completion does not have"),
    ],
)
def test_a_mapping_that_fits_no_example_is_refused_as_a_setting(fields: dict[str, Any], says: str) -> None:
    kind: Any = "completion" if "kind" in says else None
    with pytest.raises(ConfigError, match=f"^{says}"):
        SourceConfig(path="a.jsonl", fields=fields, kind=kind)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_a_field_that_no_row_has_is_refused_when_all_have_been_read(
    bpe: PreTrainedTokenizerBase, tmp_path: Path, kind: str
) -> None:
    path = _written(tmp_path / f"a.{kind}", [{"messages": row["messages"], "id": 1} for row in chats(3)])
    last = {"csv": "line 4", "jsonl": "line 3", "parquet": "row 3"}[kind]
    says = rf"a.{kind}': fields.tools is 'functions', which no row has; .*, {last}, has 'messages', 'id'"
    with pytest.raises(ConfigError, match=says):
        _documents(bpe, path, fields={"tools": "functions"})


def test_of_a_stream_a_field_that_the_first_rows_lack_is_refused_before_training(
    bpe: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "LOOKED_AT", 3)
    path = tmp_path / "a.jsonl"
    said = [{"thread": row["messages"]} | ({"persona": "brief"} if i == 2 else {}) for i, row in enumerate(chats(9))]
    late = [said[0], said[1], said[3], said[2]]
    streamed: dict[str, Any] = {"streaming": True, "packing": False}
    source = SourceConfig(path=str(path), fields={"messages": "thread", "system": "persona"})
    _written(path, late)
    says = r"fields.system is 'persona', which none of the first 3 rows has; .*, line 3, has 'thread'\. If later rows"
    with pytest.raises(ConfigError, match=says):
        _open(bpe, tmp_path / "run", source, **streamed)
    _open(bpe, tmp_path / "all", source, packing=False)
    _written(path, said)
    _open(bpe, tmp_path / "run", source, **streamed)


@pytest.mark.parametrize("name", ["a.txt", "a.tokens"])
def test_fields_are_refused_for_sources_that_have_none(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("water")
    with pytest.raises(ConfigError, match=r"fields has no effect on .*and has no fields: drop it"):
        open_source(SourceConfig(path=str(tmp_path / name), fields={"text": "body"}), streaming=False)


def _open(bpe: PreTrainedTokenizerBase, run: Path, *sources: SourceConfig, **changes: Any) -> Data:
    run.mkdir(exist_ok=True)
    return open_data(settings(sources, **changes), run, seed=0, own=bpe)


@pytest.mark.parametrize("streaming", [False, True])
def test_prompts_count_beside_text_that_counts_whole(
    bpe: PreTrainedTokenizerBase, tmp_path: Path, streaming: bool
) -> None:
    """Which is trained on, or evaluated on. Without prompts anywhere the setting has no effect, and is refused."""
    text = SourceConfig(path=str(_written(tmp_path / "text.jsonl", [{"text": "one two"}])))
    asked = SourceConfig(path=str(_written(tmp_path / "asked.jsonl", [{"prompt": "one two", "completion": "three"}])))
    changes: dict[str, Any] = {
        "loss_on": "all",
        "streaming": streaming,
        "shuffle": 2 if streaming else None,
        "validation": ValidationConfig(sources=(text,)),
    }
    weighted = [replace(source, weight=1.0) for source in (text, asked)]
    data = _open(bpe, tmp_path / "run", *weighted, **changes)
    for row, _ in islice(data.train.rows(None), 4):
        assert all((row.labels != -100) == (row.positions > 0))
    ids = tmp_path / "ids.tokens"
    write_tokens(ids, [[1, 2, 3]], loss=[[0, 1, 1]])
    for sources in ((text,), (SourceConfig(path=str(ids)),)):
        with pytest.raises(ConfigError, match=r"data.loss_on='all' has no effect on text, .* nor on token ids"):
            _open(bpe, tmp_path / "other", *sources, **changes | {"streaming": False, "shuffle": None})


def test_what_is_recognised_is_said_and_the_mapping_is_part_of_what_the_data_are(
    bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    share = _written(tmp_path / "share.json", _conversations()[1])
    alpaca = _written(tmp_path / "alpaca.csv", ALPACA)
    both: list[Row] = [{"a": "one", "b": "two"}] * 3
    mapped = _written(tmp_path / "mapped.jsonl", both)
    sources = (SourceConfig(path=str(share)), SourceConfig(path=str(mapped), fields={"text": "a"}))
    held_out = ValidationConfig(sources=(SourceConfig(path=str(alpaca)),))
    data = _open(bpe, tmp_path / "run", *sources, validation=held_out)
    assert summary_of(data, 64).splitlines()[-3:] == [
        f"{share}: ShareGPT's form (conversations: from, value), each a chat",
        f"{mapped}: text (a as text)",
        f"{alpaca}: Alpaca's form (instruction, input, output), each a chat in the tokenizer's template",
    ]
    again = SourceConfig(path=str(mapped), fields={"text": "b"})
    with pytest.raises(ConfigError, match=r"data.sources was .*'fields': {'text': 'a'}.* is .*'text': 'b'"):
        _open(bpe, tmp_path / "run", sources[0], again, validation=held_out)


@pytest.mark.parametrize(
    ("template", "kind", "says"),
    [
        (True, None, "each a chat in the tokenizer's template"),
        (True, "completion", "in Alpaca's words"),
        (False, None, "in Alpaca's words, as the tokenizer has no chat template"),
    ],
)
def test_how_an_instruction_is_read_is_said(tmp_path: Path, template: bool, kind: Any, says: str) -> None:
    example, _ = next(reader_of(_written(tmp_path / "a.jsonl", ALPACA)).read(None))
    found = recognised(example, form_of(example, kind, template=template), kind, template=template)
    assert found == f"Alpaca's form (instruction, input, output), {says}"


SAID = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
ALPACAS = "and not what rows have as instruction, output, which fields: {instruction: instruction, output: output}"
BOTH: list[tuple[Row, Any, str]] = [
    ({"messages": SAID, "instruction": "a", "output": "b"}, None, f"a chat (messages), {ALPACAS}"),
    (
        {"messages": SAID, "conversations": SAID, "prompt": "a", "completion": "b"},
        "chat",
        "a chat (messages), and not what rows have as conversations, which fields: {messages: conversations}",
    ),
    ({"conversations": SAID, "instruction": "a", "output": "b"}, None, f"chats (conversations), {ALPACAS}"),
    (
        {"prompt": "a", "completion": "b", "instruction": "a", "output": "b"},
        "completion",
        f"a prompt with its completion (prompt, completion), {ALPACAS}",
    ),
]


@pytest.mark.parametrize(("row", "kind", "says"), BOTH)
def test_what_rows_have_in_another_form_as_well_is_said_and_fields_choose(row: Row, kind: Any, says: str) -> None:
    example = Example(fields=row, place="a.jsonl, line 1")
    found = recognised(example, form_of(example, kind, template=True), kind, template=True)
    assert found == f"{says} reads instead"
    fields = dict(pair.split(": ") for pair in says.partition("{")[2].partition("}")[0].split(", "))
    assert SourceConfig(path="a.jsonl", kind=kind, fields=fields).fields == fields
    if "instruction" in fields:
        chosen = replace(example, names=fields)
        form = form_of(chosen, kind, template=True)
        assert form.needs == ("instruction", "output")
        assert "and not" not in (recognised(chosen, form, kind, template=True) or "")


def test_penstocks_own_form_by_its_own_names_needs_no_word(bpe: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    for rows in (chats(1), [{"text": "a"}], [{"prompt": "a", "completion": "b"}]):
        example, _ = next(reader_of(_written(tmp_path / "a.jsonl", rows)).read(None))
        assert recognised(example, form_of(example, None, template=True), None, template=True) is None


def test_a_stream_that_goes_on_reads_what_it_began_with(bpe: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Its first row says that it is text; those behind might be chats as well, and one alone would not say which."""
    rows = [{"text": f"water {i}"} | ({"messages": chats(1)[0]["messages"]} if i else {}) for i in range(12)]
    source = SourceConfig(path=str(_written(tmp_path / "a.jsonl", rows)))
    settings: dict[str, Any] = {"streaming": True, "shuffle": 3, "packing": False}
    whole = list(islice(_open(bpe, tmp_path / "run", source, **settings).train.rows(None), 20))
    assert whole[6][1]["sources"][0]["at"] is not None
    for number in (2, 6, 13):
        again = _open(bpe, tmp_path / "run", source, **settings).train.rows(whole[number][1])
        (row, position), (expected, behind) = next(again), whole[number + 1]
        assert (row.ids.tolist(), position) == (expected.ids.tolist(), behind)


def test_an_empty_source_is_refused(bpe: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\n")
    with pytest.raises(ConfigError, match=r"a\.csv' has no documents"):
        _open(bpe, tmp_path / "run", SourceConfig(path=str(tmp_path / "a.csv")))
    assert Opened(source=SourceConfig(path="a.tokens"), reader=()).form is None
