"""Encoding: a long text, which is handled part by part, has the tokens of the whole."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from penstock.config import TokenizerTrainingConfig
from penstock.data.encode import ends_of
from penstock.data.opening import open_data
from penstock.data.rows import Packing
from penstock.data.sources.text import PART
from penstock.data.summary import summary_of
from penstock.data.tokenizer import train
from tests.data_documents import MARKED_TEMPLATE, chats, encoded, sentences, settings, tokenizer, write_jsonl


def _with_spaces_before() -> PreTrainedTokenizerBase:
    """A tokenizer that puts a space before a text, and takes ends of lines by themselves, as Llama 2's does."""
    made = Tokenizer(models.BPE())
    lines, words = pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Metaspace(prepend_scheme="first")
    made.pre_tokenizer = pre_tokenizers.Sequence([lines, words])
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["</s>"], initial_alphabet=["\n"], show_progress=False)
    made.train_from_iterator(sentences(300), trainer)
    found = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    assert isinstance(found, PreTrainedTokenizerBase)
    return found


CODE = "def f(x):\n    if x:\n        return x + 1 \n\n\n"


def _with_runs_of_spaces() -> PreTrainedTokenizerBase:
    """A tokenizer with tokens of several spaces and ends of lines."""
    return train(TokenizerTrainingConfig(vocabulary=340), [*sentences(100), *[f"{CODE}\r\n\u3000\u3000a"] * 100])


@pytest.fixture(scope="module")
def by_name() -> Mapping[str, PreTrainedTokenizerBase]:
    return {"bytes": _with_runs_of_spaces(), "spaces": _with_spaces_before()}


@pytest.mark.parametrize("name", ["bytes", "spaces"])
@pytest.mark.parametrize(
    "between", ["\n", ".\n\n", ".\r\n", "\n\u3000\u3000", " ", "one by one: \n\n", "one by one:,"], ids=repr
)
def test_a_text_has_the_tokens_of_the_whole_whatever_its_parts_are(
    tmp_path: Path,
    name: str,
    between: str,
    by_name: Mapping[str, PreTrainedTokenizerBase],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part, words = PART // 4, by_name[name]
    monkeypatch.setattr("penstock.data.sources.text.PART", part)
    of_words, one_by_one = between.removeprefix("one by one:"), between.startswith("one by one:")
    text = of_words.join(" ".join(sentences(150)).split() if one_by_one else sentences(150)) + "\n" + CODE * 75
    assert len(text) > 6 * part
    (tmp_path / "a.txt").write_bytes(text.encode())
    parts = encoded(tmp_path / "a.txt", words)
    assert len(parts) > 3
    ids = [number for part in parts for number in part.ids.tolist()]
    assert ids == [*words(text, add_special_tokens=False)["input_ids"], words.eos_token_id]


def test_no_space_comes_between_a_prompt_and_its_completion(tmp_path: Path) -> None:
    words = _with_spaces_before()
    rows = [{"prompt": prompt, "completion": "valve"} for prompt in ("the river\n", "x = ", "")]
    found = encoded(write_jsonl(tmp_path / "a.jsonl", rows), words)
    assert [words.decode(document.ids.tolist()) for document in found] == [f"{row['prompt']}valve</s>" for row in rows]


def test_a_line_that_is_a_space_to_a_tokenizer_is_kept_before_a_completion(tmp_path: Path) -> None:
    words = _with_spaces_before()
    to_one = [normalizers.Replace("\n", " "), normalizers.Replace(Regex(" {2,}"), " ")]  # as XGLM's
    words.backend_tokenizer.normalizer = normalizers.Sequence(to_one)
    rows = [{"prompt": "the", "completion": "\nb = valve"}]
    (found,) = encoded(write_jsonl(tmp_path / "a.jsonl", rows), words)
    assert words.decode(found.ids.tolist()) == "the b = valve</s>"


@pytest.mark.parametrize("left_out", ["", "a"])
def test_what_a_tokenizer_puts_around_a_text_is_found_whatever_letters_it_lacks(left_out: str) -> None:
    made = Tokenizer(models.BPE())
    texts = [text.replace(left_out, "") for text in sentences(300)] if left_out else sentences(300)
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False)
    made.train_from_iterator(texts, trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    words = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    assert ends_of(words) == ([0], [1])


@pytest.mark.parametrize("packing", ["continuous", True])
def test_documents_that_no_token_ends_are_said_at_the_start(packing: Packing, tmp_path: Path) -> None:
    words = tokenizer()
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in sentences(30)])
    for eos, said in (
        ("<|endoftext|>", ""),
        (None, "the tokenizer has no end-of-text token, so no document ends with"),
    ):
        words.eos_token = eos
        run = tmp_path / str(eos)
        run.mkdir()
        data = open_data(settings(source, packing=packing), run, seed=0, own=words)
        lines = [line for line in summary_of(data, 64).splitlines() if "end-of-text" in line]
        assert len(lines) == (eos is None)
        for line in lines:
            assert said in line
            assert ("runs on into the next" in line) == (packing == "continuous")
            assert "Set eos_token" in line


def test_a_chat_ends_as_its_template_says(tmp_path: Path) -> None:
    words = tokenizer()
    words.chat_template, words.eos_token = MARKED_TEMPLATE, None
    assert open_data(settings(write_jsonl(tmp_path / "a.jsonl", chats(20))), tmp_path, seed=0, own=words).forms == ()
