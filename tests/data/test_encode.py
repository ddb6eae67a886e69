"""Encoding: a long text, which is handled part by part, has the tokens of the whole."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from penstock.config import SourceConfig
from penstock.data.opening import open_data
from penstock.data.rows import Packing
from penstock.data.sources.find import open_source
from penstock.data.sources.text import PART
from penstock.data.summary import summary_of
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


@pytest.mark.parametrize("make", [tokenizer, _with_spaces_before], ids=["bytes", "spaces"])
def test_a_text_has_the_tokens_of_the_whole_whatever_its_parts_are(tmp_path: Path, make: type) -> None:
    words: PreTrainedTokenizerBase = make()
    text = "\n".join(sentences(600)) + "\n"
    assert len(text) > 3 * PART
    (tmp_path / "a.txt").write_text(text)
    reader = open_source(SourceConfig(path=str(tmp_path / "a.txt")), streaming=False)
    assert not isinstance(reader, tuple)
    parts = encoded(reader, words, settings(tmp_path / "a.txt"))
    assert len(parts) > 3
    ids = [number for part in parts for number in part.ids.tolist()]
    assert ids == [*words(text, add_special_tokens=False)["input_ids"], words.eos_token_id]


@pytest.mark.parametrize("packing", ["continuous", True])
def test_documents_that_no_token_ends_are_said_at_the_start(packing: Packing, tmp_path: Path) -> None:
    words = tokenizer()
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in sentences(300)])
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
    assert open_data(settings(write_jsonl(tmp_path / "a.jsonl", chats(200))), tmp_path, seed=0, own=words).forms == ()
