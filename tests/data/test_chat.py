"""Which tokens count in the loss: of chats the assistant's, of prompts and completions the completion's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from penstock.data.token_files import Document
from penstock.errors import ConfigError
from tests.data_documents import (
    LAST_ONLY_TEMPLATE,
    MARKED_TEMPLATE,
    PLAIN_TEMPLATE,
    chats,
    encoded,
    tokenizer,
    write_jsonl,
)


@pytest.fixture
def bpe() -> PreTrainedTokenizerBase:
    return tokenizer()


def _answers(bpe: PreTrainedTokenizerBase, document: Document) -> str:
    assert document.answers is not None
    text = bpe.decode(document.ids[document.answers == 1].tolist(), skip_special_tokens=False)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKED_TEMPLATE])
def test_of_a_chat_the_assistants_turns_count_with_the_mark_that_ends_them(
    bpe: PreTrainedTokenizerBase, tmp_path: Path, template: str
) -> None:
    bpe.chat_template = template
    rows = chats(20)
    found = encoded(write_jsonl(tmp_path / "c.jsonl", rows), bpe)
    for row, document in zip(rows, found, strict=True):
        turns = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        assert _answers(bpe, document) == "".join(f"{turn}</assistant>\n" for turn in turns)
        whole = "".join(f"<{m['role']}>{m['content']}</{m['role']}>\n" for m in row["messages"])
        assert bpe.decode(document.ids.tolist(), skip_special_tokens=False) == whole


def _of_words(texts: list[str]) -> PreTrainedTokenizerBase:
    made = Tokenizer(models.WordLevel(unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["?"], show_progress=False))
    found = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?")
    assert isinstance(found, PreTrainedTokenizerBase)
    return found


@pytest.mark.parametrize("end", ["", "\n", "</assistant>\n"], ids=repr)
@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_what_a_template_marks_counts_whole_and_nothing_else_does(kind: str, end: str, tmp_path: Path) -> None:
    """Also where its last character is of several tokens, or it begins or ends with what is in no token."""
    words = (
        tokenizer()
        if kind == "bytes"
        else _of_words(["<user assistant> / the water river of head x valve \N{WATER WAVE}"])
    )
    words.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}{% else %}<assistant>"
        f"{{% generation %}}{{{{ m.content }}}}{end}{{% endgeneration %}}{{% endif %}}{{% endfor %}}"
    )
    said = ["river", " the water \N{WATER WAVE}", "of head", "\nx", "valve", " \N{WATER WAVE}"]
    roles = ("user", "assistant") * 3
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    (found,) = encoded(write_jsonl(tmp_path / "c.jsonl", [{"messages": messages}]), words)
    answers = "".join(f"{text}{end}" for text in said[1::2])
    assert _answers(words, found).split() == words.decode(words(answers)["input_ids"]).split()


def test_a_token_around_an_answer_that_is_empty_is_not_its_own(tmp_path: Path) -> None:
    words = _of_words(["river begin"])
    words.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %} be{% generation %}{{ m.content }}"
        "{% endgeneration %}gin{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "river"}, {"role": "assistant", "content": ""}]
    (found,) = encoded(write_jsonl(tmp_path / "c.jsonl", [{"messages": messages}]), words)
    assert (words.decode(found.ids.tolist()), _answers(words, found)) == ("river begin", "")


GREETED = (
    "{% if messages[0].role != 'system' %}<system>You help.</system>\n{% endif %}" + PLAIN_TEMPLATE.split("{% if")[0]
)
"""It writes words of the system's before a chat that has none, and opens no turn of the assistant's."""
OPENED = GREETED + "{% if add_generation_prompt and messages[-1].role != 'tool' %}<assistant>{% endif %}"


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKED_TEMPLATE, GREETED, OPENED])
@pytest.mark.parametrize("who", ["a", "aua", "saua", "uaa", "uta", "ata"])
def test_what_a_template_writes_before_an_answer_is_not_the_answers(
    bpe: PreTrainedTokenizerBase, tmp_path: Path, template: str, who: str
) -> None:
    """Also where nothing is said before the answer, or the template opens no turn behind what is said."""
    bpe.chat_template = template
    roles = {"a": "assistant", "u": "user", "s": "system", "t": "tool"}
    said = [
        {"role": roles[letter], "content": text} for letter, text in zip(who, ["0", "is", "z a", "<"], strict=False)
    ]
    (found,) = encoded(write_jsonl(tmp_path / "c.jsonl", [{"messages": said}]), bpe)
    assert _answers(bpe, found) == "".join(f"{m['content']}</assistant>\n" for m in said if m["role"] == "assistant")
    assert "<assistant>0" in bpe.decode(found.ids.tolist()) or who[0] != "a"


def test_an_answers_reasoning_is_its_own_where_the_template_opens_no_turn(
    bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    bpe.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}{% else %}"
        "{{ '<think>' + m.reasoning_content + '</think>' + m.content + '<end>' }}{% endif %}{% endfor %}"
    )
    answer = {"role": "assistant", "content": "yo", "reasoning_content": "hm"}
    row = {"messages": [{"role": "user", "content": "hi"}, answer]}
    (found,) = encoded(write_jsonl(tmp_path / "c.jsonl", [row]), bpe)
    assert _answers(bpe, found) == "hm</think>yo<end>"


OPENS = "{% for m in messages %}<{{ m.role }}>"
CLOSES = "{{ m.content.split('</think>')[-1] }}</{{ m.role }}>\n{% endfor %}"
THINKS_LAST = (
    OPENS + "{% if m.role == 'assistant' and loop.last %}<think>{{ m.content.split('</think>')[0][7:] "
    "if '</think>' in m.content }}</think>{% endif %}" + CLOSES + "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""It drops the reasoning of all answers but the last, for which it writes an empty one where there is none."""
THINKS_FIRST = OPENS + CLOSES + "{% if add_generation_prompt %}<assistant><think>{% endif %}"
"""It asks for reasoning, and leaves it out of all that was said."""


@pytest.mark.parametrize("form", [str, lambda text: [{"type": "text", "text": text}]], ids=["text", "parts"])
@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (THINKS_LAST, ("yo</assistant>\n", "<think>b</think>no</assistant>\n")),
        (THINKS_FIRST, ("yo</assistant>\n", "no</assistant>\n")),
    ],
    ids=["last", "first"],
)
def test_answers_are_found_where_a_template_drops_their_reasoning(
    bpe: PreTrainedTokenizerBase, tmp_path: Path, template: str, answers: tuple[str, str], form: Callable[[str], Any]
) -> None:
    flat = "{% set m = {'role': m.role, 'content': m.content if m.content is string else m.content[0].text} %}"
    bpe.chat_template = template.replace(OPENS, OPENS.replace("<{{", flat + "<{{"))
    said = ["hi", "<think>a</think>yo", "more", "<think>b</think>no"]
    roles = ["user", "assistant", "user", "assistant"]
    row = {"messages": [{"role": role, "content": form(text)} for role, text in zip(roles, said, strict=True)]}
    (found,) = encoded(write_jsonl(tmp_path / "c.jsonl", [row]), bpe)
    assert _answers(bpe, found) == "".join(answers)


def test_an_answer_is_found_where_only_the_last_message_is_rendered_otherwise(
    bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    bpe.chat_template = LAST_ONLY_TEMPLATE
    rows = chats(5)
    for row, found in zip(rows, encoded(write_jsonl(tmp_path / "c.jsonl", rows), bpe), strict=True):
        assert _answers(bpe, found) == "".join(f"{m['content']}\n" for m in row["messages"] if m["role"] == "assistant")


def test_all_of_a_chat_counts_if_asked_for(bpe: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    bpe.chat_template = PLAIN_TEMPLATE
    path = write_jsonl(tmp_path / "c.jsonl", chats(3))
    only, everything = encoded(path, bpe), encoded(path, bpe, loss_on="all")
    assert all(document.answers is None for document in everything)
    assert [d.ids.tolist() for d in only] == [d.ids.tolist() for d in everything]


def test_of_a_prompt_and_its_completion_the_completion_counts_and_the_end(
    bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rows = [{"prompt": f"what is {i}? ", "completion": f"it is {i * i}"} for i in range(5)]
    for row, document in zip(rows, encoded(write_jsonl(tmp_path / "c.jsonl", rows), bpe), strict=True):
        assert _answers(bpe, document) == row["completion"] + "<|endoftext|>"
        whole = bpe.decode(document.ids.tolist(), skip_special_tokens=False)
        assert whole == row["prompt"] + row["completion"] + "<|endoftext|>"


def test_a_text_has_one_end_even_if_it_brings_its_own(bpe: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [{"text": "water"}, {"text": "water<|endoftext|>"}])
    one, two = encoded(path, bpe)
    assert one.ids.tolist() == two.ids.tolist()
    assert one.ids.tolist().count(0) == 1


def test_keys_that_are_null_in_a_table_are_not_there_for_the_template(
    bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    bpe.chat_template = "{% for m in messages %}{{ 'CALL' if 'tool_calls' in m }}{{ m.content }}{% endfor %}"
    for nothing in (None, list[Any]()):
        row = {"messages": [{"role": "assistant", "content": "x", "tool_calls": nothing}]}
        (found,) = encoded(write_jsonl(tmp_path / "c.jsonl", [row]), bpe)
        assert bpe.decode(found.ids.tolist()) == "x"


CALLS = (
    "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ ARGUMENTS }}{% endfor %}{% endfor %}"
)


def calling(name: str, arguments: Any, **told: Any) -> dict[str, Any]:
    """A row in which a tool is called."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    asked = {"role": "user", "content": "hi "}
    return {"messages": [asked, {"role": "assistant", "content": None, "tool_calls": [call]}], **told}


def test_keys_that_a_table_has_for_other_rows_are_not_there_for_the_template(
    bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """Tools and arguments of calls have other keys in each row, and a table all of them in all rows."""
    bpe.chat_template = CALLS.replace("ARGUMENTS", "call.function.arguments | tojson")
    rows = [
        calling("look", {"at": "x"}, tools=[{"name": "look", "parameters": {"at": {"type": "text"}}}]),
        calling("open", {"far": [1]}, tools=[{"name": "open", "parameters": {"far": {"type": "list"}}}]),
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    found = [bpe.decode(document.ids.tolist()) for document in encoded(tmp_path / "c.parquet", bpe)]
    assert found == [
        '[{"name": "look", "parameters": {"at": {"type": "text"}}}]hi {"at": "x"}',
        '[{"name": "open", "parameters": {"far": {"type": "list"}}}]hi {"far": [1]}',
    ]


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ("call.function.arguments | tojson", ['{"at": "x"}', "{}", '"print(1)"', '{"z": 1}']),
        ("'' + call.function.arguments", ['{"at":"x"}', "{}", "print(1)", '{"z":1}']),
        ("call.function.arguments.items() | list", ["[('at', 'x')]", "[]", None, "[('z', 1)]"]),
    ],
)
def test_arguments_of_a_call_that_are_json_text_are_what_the_template_takes(
    written: str, wanted: list[str | None], bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """As OpenAI's form has them. Most templates would write them in quotes, or look for an object's keys."""
    bpe.chat_template = CALLS.replace("ARGUMENTS", written)
    for given, text in zip(('{"at":"x"}', "{}", "print(1)", '{"z":1}'), wanted, strict=True):
        path = write_jsonl(tmp_path / "c.jsonl", [calling("do", given)])
        if text is None:
            with pytest.raises(ConfigError, match="the chat template fails on this chat: UndefinedError"):
                encoded(path, bpe)
        else:
            (found,) = encoded(path, bpe)
            assert bpe.decode(found.ids.tolist()) == f"hi {text}"


@pytest.mark.parametrize("nothing", [None, [], "", "[]", "null"])
def test_a_chat_with_a_list_of_no_tools_has_none(bpe: PreTrainedTokenizerBase, tmp_path: Path, nothing: Any) -> None:
    """Llama 3.1's template asks if there is a list, and then tells of what is in it."""
    bpe.chat_template = "{% if tools is not none %}TOOLS{% endif %}" + PLAIN_TEMPLATE
    (found,) = encoded(write_jsonl(tmp_path / "c.jsonl", [{**chats(1)[0], "tools": nothing}]), bpe)
    assert "TOOLS" not in bpe.decode(found.ids.tolist())


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKED_TEMPLATE])
def test_spaces_of_an_answer_count_where_the_tokenizer_says_that_they_stand_nowhere(
    bpe: PreTrainedTokenizerBase, tmp_path: Path, template: str
) -> None:
    """As those do that leave out the spaces at a token's ends: how the library makes them unless it is told."""
    bpe.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    bpe.chat_template = template
    said = [("user", "hi\n\n"), ("assistant", "x = 1\n\n\n  the\n"), ("user", "\n\n"), ("assistant", "  of\n\n")]
    row = {"messages": [{"role": role, "content": text} for role, text in said]}
    (found,) = encoded(write_jsonl(tmp_path / "c.jsonl", [row]), bpe)
    assert _answers(bpe, found) == "".join(f"{text}</assistant>\n" for role, text in said if role == "assistant")


@pytest.mark.parametrize("written", ["m.content", "m.content | trim"])
def test_parts_that_a_template_would_print_as_a_list_are_refused(
    written: str, bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    row = {"messages": [{"role": role, "content": [{"type": "text", "text": "x"}]} for role in ("user", "assistant")]}
    path = write_jsonl(tmp_path / "c.jsonl", [row])
    bpe.chat_template = PLAIN_TEMPLATE.replace("m.content", written)
    with pytest.raises(ConfigError, match=r"line 1: the chat template takes text alone, .* of message 1 as a list"):
        encoded(path, bpe)
    bpe.chat_template = PLAIN_TEMPLATE.replace("m.content", "m.content[0].text")
    (found,) = encoded(path, bpe)
    assert _answers(bpe, found) == "x</assistant>\n"


COUNTS = THINKS_LAST.replace("{% for", "{{ messages | map(attribute='content') | join | length }}{% for", 1)
"""It writes something else of an answer elsewhere, which could pass for a part of it."""


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "the tokenizer has no chat template: give one as a file"),
        (COUNTS, "line 1: the chat template does not say where the assistant's answers are.*message 2"),
        ("{{ raise_exception('roles must alternate') }}", "line 1: the chat template fails.*roles must alternate"),
        ("{% for m in %}", "line 1: the chat template fails on this chat: TemplateSyntaxError"),
    ],
)
def test_a_template_that_will_not_do_is_refused(
    bpe: PreTrainedTokenizerBase, tmp_path: Path, template: str | None, says: str
) -> None:
    bpe.chat_template = template
    path = write_jsonl(tmp_path / "c.jsonl", chats(2))
    with pytest.raises(ConfigError, match=says):
        encoded(path, bpe)
