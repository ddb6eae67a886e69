"""Sources: every kind of file gives the same documents, from any cursor on; what is wrong is named with its line."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerBase

from penstock.config import SourceConfig
from penstock.data import write_tokens
from penstock.data.prepare import Opened
from penstock.data.sources.find import left_out, open_source
from penstock.data.sources.hub import HubDataset
from penstock.data.sources.text import PART, TextFiles
from penstock.data.token_files import make_sums, open_tokens, write_sums
from penstock.data.tokenizer import with_template
from penstock.errors import ConfigError
from tests.data_documents import (
    PLAIN_TEMPLATE,
    encoded,
    reader_of,
    sentences,
    settings,
    tokenizer,
    write_jsonl,
    write_table,
)

ROWS = [{"text": text} for text in sentences(700)]


@pytest.fixture(scope="module")
def bpe() -> PreTrainedTokenizerBase:
    return tokenizer()


def _parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=100)
    return path


def _written(folder: Path, kind: str) -> Path:
    halves = (ROWS[:350], ROWS[350:])
    for i, rows in enumerate(halves):
        numbered = [{"id": n, **row} for n, row in enumerate(rows)]
        if kind == "parquet":
            _parquet(folder / f"{i}.parquet", numbered)
        elif kind == "array.json":
            text = json.dumps(numbered, indent=1 + i, ensure_ascii=False)
            (folder / f"{i}.json").write_text("\ufeff" * i + text, encoding="utf-8")
        elif kind.startswith(("csv", "tsv")):
            write_table(folder / f"{i}.{kind}", numbered)
        else:
            write_jsonl(folder / f"{i}.{kind}", rows)
    return folder


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "array.json", "parquet", "csv", "tsv.gz"])
def test_each_kind_of_file_gives_all_documents_in_order_from_any_cursor_on(tmp_path: Path, kind: str) -> None:
    reader = reader_of(_written(tmp_path, kind))
    found = list(reader.read(None))
    assert [dict(example.fields) for example, _ in found] == ROWS
    for number in (0, 99, 100, 349, 350, 698, 699):
        rest = [example for example, _ in reader.read(found[number][1])]
        assert [dict(example.fields) for example in rest] == ROWS[number + 1 :]
        assert [example.place for example in rest] == [example.place for example, _ in found[number + 1 :]]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dataset_of_the_hub_gives_all_documents_from_any_cursor_on(tmp_path: Path, streaming: bool) -> None:
    """The hub cannot be reached from a test: ``datasets`` loads a folder here, as it would a data set's."""
    folder = _written(tmp_path, "parquet")
    loaded = datasets.load_dataset(str(folder), split="train", streaming=streaming, cache_dir=str(tmp_path / "cache"))
    reader = HubDataset(name="me/texts", rows=loaded if streaming else loaded.to_iterable_dataset())
    found = list(reader.read(None))
    assert [dict(example.fields) for example, _ in found] == ROWS
    for number in (0, 120, 349, 500):
        rest = list(reader.read(found[number][1]))
        assert [dict(example.fields) for example, _ in rest] == ROWS[number + 1 :]
        again = [example for example, _ in reader.read(rest[150][1])]
        assert again == [example for example, _ in found[number + 152 :]]


NASTY = ['a "b", c', "two\nlines\n\nand more", "\r\n", "a\rb", "\t, ", '"', "", "größe 水 \ufeff", "x" * 200_000, " y "]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv.gz"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_table_gives_its_cells_to_the_character_from_any_row_on(tmp_path: Path, name: str, mark: bytes) -> None:
    """Quotes, separators and line ends within cells; with the mark that Excel puts first; each file has its header."""
    rows = [{"prompt": NASTY[i % 10], "id": str(i), "completion": NASTY[i * 7 % 10]} for i in range(30)]
    for half, part in (("0", rows[:20]), ("1", [dict(reversed(row.items())) for row in rows[20:]])):
        path = write_table(tmp_path / f"{half}{name}", part)
        data = gzip.decompress(path.read_bytes()) if name.endswith("gz") else path.read_bytes()
        data = mark + data.replace(b"\r\n0,", b"\r\n\r\n0,")  # an empty line is no row
        path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    reader = reader_of(tmp_path)
    expected = [{k: v for k, v in row.items() if k != "id"} for row in rows]
    found = list(reader.read(None))
    assert [dict(example.fields) for example, _ in found] == expected
    for number in (*range(11), 18, 19, 20, 28):  # each cell once, and around the next file
        cursor = json.loads(json.dumps(found[number][1]))
        assert list(reader.read(cursor)) == found[number + 1 :]


def test_an_array_gives_its_objects_whatever_is_in_their_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets, quotes and backslashes in texts, wherever a stretch that is read may end."""
    nasty = ['"', "\\", '\\"', "{", "}]", '{"a": "', "\\\\", "größe 水", "", "x" * 100]
    rows = [{"text": nasty[i % 10] + nasty[i * 3 % 10], "id": {"n": [{}, {"i": i}]}} for i in range(60)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=2))
    reader = reader_of(path)
    for size in (1, 2, 7, 1 << 16):
        monkeypatch.setattr("penstock.data.sources.json_array.AT_ONCE", size)
        found = list(reader.read(None))
        assert [dict(example.fields) for example, _ in found] == [{"text": row["text"]} for row in rows]
        assert list(reader.read(found[40][1])) == found[41:]
    path.write_text(" [ ] ")
    assert list(reader.read(None)) == []


BAD_TABLES = [
    (b"text,id\na,1\nb\n", "line 3: it has 1 fields, and the header names 2"),
    (b"text,id\na,1\nb,2,3\n", "line 3: it has 3 fields, and the header names 2"),
    (b'text,id\n"a\nb",1\n"c,2\nd,3\n', "line 4: this is no row of a table: unexpected end of data"),
    (b'text,id\n"a"b,1\n', "line 2: this is no row of a table: ',' expected after"),
    (b"text,id\ra,1\r", "line 1: this is no row of a table: new-line character"),
    (
        b"What is water?,Wet.\nWhat is fire?,Hot.\n",
        r"its first row must name the columns.*'What is water\?', 'Wet.'. Add",
    ),
    (b"prompt;completion\na;b\n", r"it has 'prompt;completion'. Columns are separated by commas"),
    (b"text,text\na,b\n", "its header names 'text' twice"),
    (b"text\n\xff\xfe\n", "line 2: it is not UTF-8 text"),
    ("text\na\n".encode("utf-16"), "line 1: it is not UTF-8 text"),
    (b'text\na\n"' + b"x\n" * 100, "line 3: the row that begins here has more than 64 bytes"),
]


@pytest.mark.parametrize(("data", "says"), BAD_TABLES)
def test_a_table_that_will_not_do_is_refused_with_its_line(
    tmp_path: Path, data: bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.data.sources.delimited.LONGEST", 64)
    (tmp_path / "bad.csv").write_bytes(data)
    with pytest.raises(ConfigError, match=rf"bad\.csv.*{says}"):
        list(reader_of(tmp_path / "bad.csv").read(None))


def test_text_files_are_whole_and_in_an_order_of_their_names_alone(tmp_path: Path) -> None:
    long = "".join(f"line {i} of a long text\n" for i in range(3000))
    for name, text in {"a.txt": "one", "b.txt": long, "c.md": "three\n", "empty.txt": ""}.items():
        (tmp_path / name).write_text(text)
    reader = reader_of(tmp_path)
    found = list(reader.read(None))
    assert len(long) > 3 * PART
    for number in range(len(found)):
        assert list(reader.read(found[number][1])) == found[number + 1 :]
    whole, begun = {}, ""
    for example, _ in found:
        assert example.begins == (begun == "")
        begun += example.fields["text"]
        if example.ends:
            whole[Path(example.place).name], begun = begun, ""
    assert whole == {"a.txt": "one", "b.txt": long, "c.md": "three\n"}


def test_text_files_come_in_the_same_order_wherever_their_folder_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by another way of saying where: the order, and so the data's fingerprint, is that of every machine."""
    orders = []
    for folder in (tmp_path / "here", tmp_path / "there" / "deeper"):
        (folder / "more").mkdir(parents=True)
        for i in range(12):
            (folder / ("more" if i % 3 else ".") / f"{i}.txt").write_text(f"text {i}")
        orders.append([example.fields["text"] for example, _ in reader_of(folder).read(None)])
    monkeypatch.chdir(folder.parent)
    orders.append([example.fields["text"] for example, _ in reader_of(Path("deeper")).read(None)])
    monkeypatch.chdir(folder)
    orders.append([example.fields["text"] for example, _ in reader_of(Path("**/*.txt")).read(None)])
    assert len(set(orders[0])) == 12
    assert all(order == orders[0] for order in orders[1:])


def test_the_mark_that_a_text_begins_with_is_no_part_of_it(tmp_path: Path) -> None:
    long = "one line\n" * 2000
    (tmp_path / "a.txt").write_text(long, encoding="utf-8-sig")
    (tmp_path / "b.txt").write_text("", encoding="utf-8-sig")
    found = list(reader_of(tmp_path).read(None))
    assert "".join(example.fields["text"] for example, _ in found) == long
    assert [example.begins for example, _ in found] == [True] + [False] * (len(found) - 1)
    assert list(reader_of(tmp_path).read(found[0][1])) == found[1:]
    words = tokenizer()
    (tmp_path / "template").write_text(PLAIN_TEMPLATE, encoding="utf-8-sig")
    assert with_template(words, settings("a", chat_template=str(tmp_path / "template"))).chat_template == PLAIN_TEMPLATE


def test_the_mark_of_json_lines_is_no_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("", encoding="utf-8-sig")
    (tmp_path / "b.jsonl").write_text('\n\n{"text": "b"}\n', encoding="utf-8-sig")
    assert [(example.fields, cursor) for example, cursor in reader_of(tmp_path).read(None)] == [
        ({"text": "b"}, [1, 19, 3])
    ]


def test_of_a_folder_the_files_of_data_are_read_and_what_is_left_out_is_said(tmp_path: Path) -> None:
    names = "README.md B.TXT a.py b.PY LICENSE .hidden.md sub/c.md sub/.ipynb_checkpoints/a.md .git/b.txt"
    for name in names.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    source = SourceConfig(path=str(tmp_path))
    read = {example.fields["text"] for example, _ in reader_of(tmp_path).read(None)}
    assert read == {"README.md", "B.TXT", "sub/c.md"}
    assert left_out(source) == (
        f"left out of the folder: 1 without an ending, 1 .py, 1 .PY (a pattern reads them as text: {tmp_path}/**/*.py)"
    )
    for name in read:
        (tmp_path / name).unlink()
    for name in ("a.txt.gz", "b.md.gz", "c.log.gz"):  # which no pattern reads
        (tmp_path / name).touch()
    assert (left_out(source) or "").endswith(f"(a pattern reads them as text: {tmp_path}/**/*.py)")
    with pytest.raises(ConfigError, match=r"has no file that is read: left out of the folder: 3 \.gz, 1 .*, 1 \.py"):
        open_source(source, streaming=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty' is a folder without a file"):
        open_source(SourceConfig(path=str(tmp_path / "empty")), streaming=False)
    (tmp_path / "empty" / "ids.npy").touch()
    with pytest.raises(ConfigError, match=r"1 \.npy \(write token ids with penstock\.data\.write_tokens\)"):
        open_source(SourceConfig(path=str(tmp_path / "empty")), streaming=False)
    (tmp_path / "t").mkdir()
    write_tokens(tmp_path / "t" / "c.tokens", [[1]], loss=[[1]])
    assert left_out(SourceConfig(path=str(tmp_path / "t"))) is None


@pytest.mark.parametrize("name", ["A.JSONL", "A.JSON.GZ", "A.CSV", "A.TSV.gz", "A.PARQUET", "A.Tokens", "A.BIN"])
def test_an_ending_in_capitals_is_the_same(tmp_path: Path, name: str) -> None:
    path, rows = tmp_path / name, ROWS[:3]
    if name.endswith("PARQUET"):
        _parquet(path, rows)
    elif name.endswith(("Tokens", "BIN")):
        path.touch()
        dtype = "uint16" if name == "A.BIN" else None
        assert open_source(SourceConfig(path=str(path), dtype=dtype), streaming=False) == (path,)
        return
    else:
        write = write_table if "SV" in name else write_jsonl
        plain = write(tmp_path / name.lower(), rows)
        plain.rename(path)
    assert [dict(example.fields) for example, _ in reader_of(path).read(None)] == rows
    assert [dict(example.fields) for example, _ in reader_of(tmp_path).read(None)] == rows


def test_a_limit_stops_after_that_many_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("water runs\n" * 10_000)
    reader = TextFiles(files=(tmp_path / "a.txt",), limit=3 * PART)
    found = list(reader.read(None))
    assert 3 * PART <= sum(len(example.fields["text"]) for example, _ in found) < 4 * PART + 20
    assert found[-1][0].ends
    assert list(reader.read(found[1][1])) == found[2:]


def test_the_standard_library_is_there_and_is_utf8() -> None:
    reader = open_source(SourceConfig(path="stdlib", limit="6MB"), streaming=False)
    assert isinstance(reader, TextFiles)
    assert sum(len(example.fields["text"]) for example, _ in reader.read(None)) > 5_000_000
    assert not any("site-packages" in path.parts for path in reader.files)


def test_token_files_come_back_as_they_were_written(tmp_path: Path) -> None:
    documents = [[1, 2, 3], [], [70_000], list(range(50))]
    write_tokens(tmp_path / "c.tokens", [np.array(ids, dtype=object) for ids in documents[:3]] + documents[3:])
    found = open_tokens(tmp_path / "c.tokens")
    assert [part.tolist() for part in np.split(found.ids[:], found.ends[:-1])] == documents
    assert (found.documents, found.largest(), found.answers) == (4, 70_000, None)
    np.arange(10, dtype="<u2").tofile(tmp_path / "raw.bin")
    write_sums(tmp_path / "sums", make_sums(tmp_path / "raw.bin", "uint16"))
    raw = open_tokens(tmp_path / "raw.bin", "uint16", tmp_path / "sums")
    assert (raw.ids[:].tolist(), raw.ends.tolist()) == (list(range(10)), [10])


@pytest.mark.parametrize(
    "ids", [[1.5, 2.0], ["1", "2"], "text", 5, None, [None], [[1], [2, 3]], [[1]], [1, -1], [2**70], [float("nan")]]
)
def test_token_ids_are_whole_numbers(tmp_path: Path, ids: object) -> None:
    with pytest.raises(
        ConfigError, match="document 1: token ids are a 1-D array of whole numbers that are not negative"
    ):
        write_tokens(tmp_path / "c.tokens", [[1], ids])
    assert not (tmp_path / "c.json").exists()


def test_token_files_may_say_which_tokens_count(tmp_path: Path) -> None:
    write_tokens(tmp_path / "c.tokens", iter([[1, 2, 3], [], [4]]), loss=iter([[0, 1, True], [], np.zeros(1)]))
    found = open_tokens(tmp_path / "c.tokens")
    assert found.answers is not None
    assert found.answers[:].tolist() == [0, 1, 1, 0]
    for documents, loss, says in [
        ([[1]], [], "document 0: documents and loss are not equally many"),
        ([[1]], [[1], [1]], "document 1: documents and loss are not equally many"),
        ([[1], [1, 2]], [[1], [1]], "document 1: loss has 0 or 1 for each of its 2 tokens"),
        ([[1, 2]], [[1, 2]], "document 0: loss has 0 or 1 for each of its 2 tokens"),
    ]:
        with pytest.raises(ConfigError, match=says):
            write_tokens(tmp_path / "bad.tokens", documents, loss=loss)
    write_tokens(tmp_path / "c.tokens", [[1, 2]])
    (tmp_path / "c.loss").write_bytes(b"\1\0")
    with pytest.raises(ConfigError, match=r"c\.loss has 2 bytes.*: write the corpus with write_tokens again, with its"):
        open_tokens(tmp_path / "c.tokens")


BAD = [
    ('{"text": "a"}\n{"text": 3}\n', "line 2: 'text' must be text, not a number"),
    ('{"text": "a"}\n{"text": null}\n', r"line 2: a text needs 'text', and here that is empty \(null\)"),
    ('{"text": "a"}\n\n{"body": "b"}\n', "line 3: a text needs 'text', and this has 'body'"),
    ('{"text": "a"}\n{"text": \n', "line 2: this is not JSON"),
    ('{"text": "a"}\n{"text": "b \\ud83d c"}\n', r"line 2: the text has \\ud83d, half of a character"),
    ('{"text": "a"}\n' + "[" * 100_000 + "\n", "line 2: .*brackets within brackets"),
    ('{"text": "a"}\n{"text": ' + "1" * 5000 + "}\n", "line 2: this cannot be read: .*digits"),
    ('{"text": "a",\n"b": 1}\n', "line 1: this is not JSON.*over several lines: a .json file must be the list of rows"),
    ('{"text": "a"}\n["b"]\n', "line 2: each line must hold one JSON object, and this one holds a list"),
    ('[{"text": "a"}, ["b"]]', "item 2: each item of the array must be an object"),
    ('["a"]', "item 1: each item of the array must be an object"),
    ('[{"text": "a"}, {"text": 3}]', "item 2: 'text' must be text, not a number"),
    ('[{"text": "a"}, {"text" "b"}]', "item 2: this is not JSON"),
    ('[{"text": "a"}, ]', "item 2: each item of the array must be an object"),
    ('[{"text": "a"} {"text": "b"}]', "behind item 1: a comma or the array's end is missing"),
    ('[{"text": "a"}, {"text": "b', "item 2: it does not end within .* bytes: the file is cut off"),
    ('[{"text": "a"},\n', "behind item 1: the file ends within its array: it is cut off"),
    ('[{"text": "a"}]\n[]', "behind item 1: something follows the array"),
    ('{"body": "a"}\n', "line 1: it has 'body', and none of the fields"),
    ('{"text": "a", "messages": []}\n', "may be text or chat: say which"),
    ('{"prompt": "a", "completion": ""}\n', "line 1: 'completion' is empty"),
    ('{"prompt": ["a"], "completion": "b"}\n', "line 1: 'prompt' must be text, not a list"),
    ('{"prompt": "a", "completion": null}\n', "line 1: it has 'prompt', 'completion', and none"),
    ('{"messages": "hello"}\n', "line 1: 'messages' must be a list of messages, not text"),
    ('{"messages": [{"content": "x"}]}\n', "line 1: message 1 must be an object with 'role'"),
    ('{"messages": [{"role": "user"}]}\n', "line 1: the 'content' of message 1 must be text, not null"),
    ('{"messages": [{"role": "user", "content": "x"}]}\n', r"no message is the assistant's \(only user\)"),
]


@pytest.mark.parametrize("text", ['{"data": [{"text": "a"}], "version": 1}', '{\n  "data": [\n{"text": "a"}]\n}\n'])
def test_a_json_file_that_has_its_rows_within_an_object_is_told_to_have_them_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    reader = reader_of(tmp_path / "a.json")
    with pytest.raises(ConfigError, match=r"a\.json.*: a \.json file must be the list of rows itself.*jq '.NAME' does"):
        list(reader.read(None))
    (tmp_path / "a.json").write_text('{"data": [1]}\n{"text": "a"}\n')
    assert [dict(example.fields) for example, _ in reader.read(None)] == [{}, {"text": "a"}]


@pytest.mark.parametrize(("text", "says"), BAD)
def test_an_example_that_will_not_do_is_refused_with_its_line(
    tmp_path: Path, bpe: PreTrainedTokenizerBase, text: str, says: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"bad\.jsonl.*{says}"):
        encoded(path, bpe)


def test_bytes_that_are_half_of_a_character_are_refused_with_their_line(tmp_path: Path) -> None:
    """As CESU-8 and Java write an emoji; json.loads takes them."""
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n{"text": "\xed\xa0\xbd\xed\xb8\x80"}\n')
    with pytest.raises(ConfigError, match=r"bad\.jsonl, line 2: it is not UTF-8 text \(byte 10\)"):
        list(reader_of(path).read(None))


def test_a_parquet_row_that_will_not_do_is_refused_with_its_number(
    tmp_path: Path, bpe: PreTrainedTokenizerBase
) -> None:
    path = _parquet(tmp_path / "a.parquet", [*ROWS[:300], {"text": None}])
    with pytest.raises(ConfigError, match=r"a\.parquet, row 301: a text needs 'text'"):
        encoded(path, bpe)
    (tmp_path / "cut.parquet").write_bytes(path.read_bytes()[:500])
    with pytest.raises(ConfigError, match=r"cannot read .*cut\.parquet"):
        list(reader_of(tmp_path / "cut.parquet").read(None))
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(ConfigError, match=r"twice\.parquet: it has two columns 'text': name one of them otherwise"):
        list(reader_of(tmp_path / "twice.parquet").read(None))
    other = _parquet(tmp_path / "other.parquet", [{"body": "x"}])
    with pytest.raises(ConfigError, match=r"it has 'body', and none of the fields"):
        encoded(other, bpe)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("missing.jsonl", {}, "matches no file"),
        ("nowhere/*.txt", {}, "matches no file"),
        ("weights.pkl", {}, "pickle runs whatever code"),
        ("table.xlsx", {}, "convert it to JSONL"),
        ("both", {}, r"holds JSON \(a.jsonl\) and Parquet"),
        ("a.jsonl", {"limit": "10B"}, "limit has no effect"),
        ("a.jsonl", {"split": "train"}, "split has no effect"),
        ("a.jsonl", {"kind": "tokens"}, "not kind: tokens"),
        ("a.txt", {"kind": "chat"}, "plain text, not kind: chat"),
        ("t.tokens", {}, "needs t.json beside it"),
        ("t.tokens.gz", {}, "t.tokens.gz: unpack it"),
        ("a.txt.gz", {}, "a.txt.gz: unpack it"),
    ],
)
def test_a_path_that_will_not_do_is_refused(tmp_path: Path, name: str, changes: dict[str, Any], says: str) -> None:
    for made in (
        "a.jsonl",
        "both/a.jsonl",
        "both/b.parquet",
        "weights.pkl",
        "table.xlsx",
        "a.txt",
        "a.txt.gz",
        "t.tokens.gz",
    ):
        write_jsonl(tmp_path / made, [{"text": "x"}])
    (tmp_path / "t.tokens").write_bytes(b"\0\0")
    source = SourceConfig(path=str(tmp_path / name), **changes)
    with pytest.raises(ConfigError, match=says):
        Opened(source=source, reader=open_source(source, streaming=False)).token_files(tmp_path, 0)


def test_a_damaged_gzip_file_and_text_that_is_not_utf8_are_refused_by_name(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"text": "hello"}\n' * 1000)
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe not utf8 \xff")
    for name in ("cut.jsonl.gz", "bad.txt"):
        with pytest.raises(ConfigError, match=name):
            list(reader_of(tmp_path / name).read(None))


def test_a_dataset_of_the_hub_that_cannot_be_read_on_is_an_error_with_its_row() -> None:
    class Rows:
        def __iter__(self) -> Iterator[dict[str, str]]:
            yield {"text": "a"}
            raise RuntimeError("the connection\nis gone")

        def state_dict(self) -> dict[str, int]:
            return {}

    found = HubDataset(name="me/texts", rows=Rows()).read(None)
    assert next(found)[0].fields == {"text": "a"}
    with pytest.raises(
        ConfigError, match="me/texts: cannot be read on after row 1: RuntimeError: the connection is gone"
    ):
        next(found)
