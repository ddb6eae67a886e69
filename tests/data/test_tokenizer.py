"""A tokenizer is loaded whole, or not at all, and its hash is of all that decides about ids."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CTRLTokenizer, PreTrainedTokenizerFast

from penstock.data.encode import ends_of
from penstock.data.tokenizer import digest, load, save, with_template
from penstock.errors import ConfigError
from tests.data_documents import sentences, settings, tokenizer

TEXT = " ".join(sentences(20))
WORDS = {"[UNK]": 0} | {word: n for n, word in enumerate(sorted(set(TEXT.split())), start=1)}


def of(model: Any) -> Any:
    found = Tokenizer(model)
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=found, unk_token="[UNK]", eos_token="[UNK]")


KINDS: dict[str, Callable[[], Any]] = {
    "BPE": tokenizer,
    "WordPiece": lambda: of(models.WordPiece(WORDS, unk_token="[UNK]")),
    "WordLevel": lambda: of(models.WordLevel(WORDS, unk_token="[UNK]")),
    "Unigram": lambda: of(models.Unigram([(word, -1.0) for word in WORDS], unk_id=0)),
}


@pytest.mark.parametrize("hidden", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_cannot_be_looked_at_for_once_gives_no_other_tokens(
    kind: str, hidden: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``os.path.isfile`` says no where the drive fails, and transformers then makes a tokenizer of the rest."""
    save(KINDS[kind](), tmp_path)
    is_file, asked = os.path.isfile, [0, 0]

    def told(path: str) -> bool:
        if os.path.basename(path) != hidden:
            return is_file(path)
        asked[0] += 1
        return asked[0] - 1 != asked[1] and is_file(path)

    whole = load(str(tmp_path))
    monkeypatch.setattr(os.path, "isfile", told)
    refused = 0
    for at in range(6):
        asked[:] = [0, at]
        try:
            found = load(str(tmp_path))
        except ConfigError:
            refused += 1
        else:
            assert found(TEXT)["input_ids"] == whole(TEXT)["input_ids"]
            assert found.special_tokens_map == whole.special_tokens_map
        if asked[0] <= at:
            break
    assert at > 0, "transformers has looked"
    assert refused or hidden != "tokenizer.json"


def test_tokenizers_that_give_other_ids_of_special_tokens_in_a_text_have_other_hashes() -> None:
    plain, split = tokenizer(), tokenizer()
    assert digest(plain) == digest(split)
    split.split_special_tokens = True
    text = f"{TEXT} {plain.eos_token}"
    assert plain(text)["input_ids"] != split(text)["input_ids"]
    assert digest(plain) != digest(split)


def test_tokenizers_of_python_alone_with_other_merges_or_options_have_other_hashes(tmp_path: Path) -> None:
    letters = ["<unk>", *"abc", *(f"{letter}@@" for letter in "abc"), "ab", "ab@@", "bc", "bc@@"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: n for n, token in enumerate(letters)}))

    def made(*merges: str, **options: Any) -> Any:
        (tmp_path / "merges.txt").write_text("\n".join(("#version: 0.2", *merges, "")))
        return CTRLTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"), **options)

    first, second = made("a b", "b c</w>"), made("b c</w>", "a b")
    assert not first.is_fast
    assert first.get_vocab() == second.get_vocab()
    assert first("abc")["input_ids"] != second("abc")["input_ids"]
    others = (second, made("a b", "b c</w>", some_option=True))
    assert len({digest(first), *map(digest, others)}) == 3
    save(first, tmp_path / "saved")
    assert digest(load(str(tmp_path / "saved"))) == digest(first)


def test_a_template_that_has_no_end_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=r"chat_template=.*: cannot read it: it is no regular file"):
            with_template(tokenizer(), settings("a", chat_template=str(file)))


PANICS: dict[str, dict[str, Any]] = {
    "as it is loaded": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/w=="}},
    "as it takes a text": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "B", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    },
}


@pytest.mark.parametrize("when", PANICS)
def test_a_tokenizer_that_its_library_gives_up_on_is_refused(when: str, tmp_path: Path) -> None:
    """By what is no Exception of Python's, and so no part of any error's handling."""
    save(tokenizer(), tmp_path)
    whole = tmp_path / "tokenizer.json"
    whole.write_text(json.dumps(json.loads(whole.read_text()) | PANICS[when]))
    with pytest.raises(ConfigError, match="the library tokenizers broke off"):
        ends_of(load(str(tmp_path)))
