"""Encoding: a long text, which is handled part by part, has the tokens of the whole."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from penstock.config import SourceConfig
from penstock.data.sources.find import open_source
from penstock.data.sources.text import PART
from tests.documents import encoded, sentences, settings, tokenizer


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
