"""The tokenizer: loaded from where the model or the settings say, or a byte-level BPE trained on the text.

Both are a ``PreTrainedTokenizerBase`` of transformers, so that an exported model has one that any tool loads.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import xxhash
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from penstock.config.data import DataConfig, TokenizerTrainingConfig
from penstock.documents.text import MalformedError, read_text
from penstock.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
"""A trained tokenizer's token after each document. It also stands for the beginning, and fills up."""

END_OF_TEXT_ID = 0
"""The id of ``END_OF_TEXT``: special tokens come first."""


def load(path: str, *, key: str = "data.tokenizer") -> PreTrainedTokenizerBase:
    """The tokenizer in a folder, or of a name on the hub. No code that comes with it is run.

    Raises:
        ConfigError: there is none, or none that transformers can load, or that it has not loaded whole.
    """
    try:
        with panics_refused():
            found = cast(Any, AutoTokenizer).from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001  whatever transformers, tokenizers or the hub make of what is there
        reason = " ".join(str(error).split())[:300]
        where = "" if Path(path).exists() else f"{Path(path).absolute()} is not there, and by that name "
        raise ConfigError(f"{key}={path!r}: {where}there is no tokenizer that can be loaded: {reason}") from None
    assert isinstance(found, PreTrainedTokenizerBase)
    if not found.get_vocab():
        raise ConfigError(f"{key}={path!r}: the tokenizer there has no vocabulary")
    if (lacking := _lacking(found, Path(path))) is not None:
        raise ConfigError(f"{key}={path!r}: transformers has not read all of {lacking} there: try again")
    return found


@contextmanager
def panics_refused() -> Iterator[None]:
    """Raises:
    ConfigError: the part of tokenizers that is not in Python has given up on a tokenizer, or on a text; it says so in
        what is no Exception, which nobody catches.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"the library tokenizers broke off ({reason}): is the tokenizer's tokenizer.json whole, and of a version "
            "that this one knows?"
        ) from None


_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def _lacking(tokenizer: PreTrainedTokenizerBase, folder: Path) -> str | None:
    """The file of a folder that a tokenizer from there was made without; None: none. transformers takes a file that
    cannot be looked at for one that is not there, and makes a tokenizer of the rest, whose tokens are others."""
    whole, backend = _document(folder / "tokenizer.json"), getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(told := whole.get("model"), dict) and backend is not None:
        document = json.loads(backend.to_str())
        made = document["model"]
        other = made["type"] != told.get("type", made["type"])
        if type(tokenizer) is PreTrainedTokenizerFast:  # which adds nothing of its own to the file
            other |= any(_type(whole, part) != _type(document, part) for part in ("normalizer", "pre_tokenizer"))
        if other or any(told.get(part) and not made.get(part) for part in ("vocab", "merges")):
            return "tokenizer.json"
    named = _document(folder / "tokenizer_config.json")
    lost = any(named.get(token) and getattr(tokenizer, token, None) is None for token in _SPECIAL)
    return "tokenizer_config.json" if lost else None


def _type(document: dict[str, Any], part: str) -> str | None:
    found = document.get(part)
    return found.get("type") if isinstance(found, dict) else None


def _document(file: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is no such file, or no such object in it."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):  # transformers has made something of it, or there is a name of the hub
        return {}
    return found if isinstance(found, dict) else {}


def save(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer of transformers into a folder, as its ``save_pretrained`` does.

    Raises:
        OSError: the system refused it. The part that is not in Python says so in a plain Exception.
    """
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        found = None if isinstance(error, OSError) else re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(folder)) from error


def with_template(tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> PreTrainedTokenizerBase:
    """The tokenizer with the chat template that the settings name, if they do.

    Raises:
        ConfigError: the file cannot be read.
    """
    if config.chat_template is not None:
        try:
            tokenizer.chat_template = read_text(Path(config.chat_template)).removeprefix("\ufeff")
        except (OSError, MalformedError) as error:
            raise ConfigError(f"data.chat_template={config.chat_template!r}: cannot read it: {error}") from None
    return tokenizer


@panics_refused()
def train(config: TokenizerTrainingConfig, sample: Iterable[str]) -> PreTrainedTokenizerBase:
    """A byte-level BPE of exactly ``config.vocabulary`` tokens: end of text, 256 bytes, merges.

    Equal text gives an equal tokenizer on every machine that has the same version of ``tokenizers``.

    Raises:
        ConfigError: the sample has too little repetition for that many merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    size = tokenizer.get_vocab_size()
    if size != config.vocabulary:
        raise ConfigError(
            f"data.tokenizer.train.vocabulary={config.vocabulary}, but the text has only enough repetition for {size} "
            "tokens: lower it, raise data.tokenizer.train.sample, or give more text"
        )
    ends = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    made = cast(Any, PreTrainedTokenizerFast)(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **ends)
    assert isinstance(made, PreTrainedTokenizerBase)
    return made


def largest_id(tokenizer: PreTrainedTokenizerBase) -> int:
    return max(tokenizer.get_vocab().values())


def pad_id(tokenizer: PreTrainedTokenizerBase, below: int | None = None) -> int:
    """The token that fills up sequences, of those with an id ``below`` a number. No label and no attention ever touches
    it, so that any of them will do."""
    for value in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(value, int) and (below is None or value < below):
            return value
    return 0


def digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of all that decides which ids a document gets."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        whole = _saved(tokenizer)
    else:  # but for how a batch would be filled up, which is not asked for
        whole = json.dumps({**json.loads(backend.to_str()), "padding": None, "truncation": None}, sort_keys=True)
    parts = [whole, str(tokenizer.chat_template), str(sorted(tokenizer.special_tokens_map.items(), key=str))]
    if tokenizer.split_special_tokens:  # of text that has their words, which the backend does not say
        parts.append("split_special_tokens")
    return xxhash.xxh3_128_hexdigest("\0".join(parts).encode())


_OF_LOADING = ("is_local", "local_files_only", "model_max_length")
"""Keys of ``tokenizer_config.json`` that say how a tokenizer was loaded, or what it is not asked for here."""


def _saved(tokenizer: PreTrainedTokenizerBase) -> str:
    """All that a tokenizer writes of itself, which those that are Python's alone say in no other way: files with its
    vocabulary, merges or model, and its options."""
    with TemporaryDirectory() as place:
        folder = Path(place)
        save(tokenizer, folder)
        options = {k: v for k, v in _document(folder / "tokenizer_config.json").items() if k not in _OF_LOADING}
        rest = sorted(file for file in folder.iterdir() if file.name != "tokenizer_config.json")
        return repr([sorted(options.items()), *((file.name, file.read_bytes()) for file in rest)])
