"""Text to token ids on disk: a byte-level BPE is trained on the text, then the text is streamed through it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock.config import DataConfig
from penstock.data.text import Piece, documents, pieces, total_bytes
from penstock.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
"""The token after each document."""

END_OF_TEXT_ID = 0
"""Its id: special tokens come first."""

_BATCH = 256  # pieces encoded at once: 2 MiB of text, enough for every core

TokenArray = NDArray[np.uint16] | NDArray[np.uint32]


@dataclass(frozen=True, kw_only=True)
class TokenizedText:
    """Token ids of the training and the held-out text, mapped from files: 1-D, little-endian uint16 or uint32."""

    tokenizer: Tokenizer
    train: TokenArray
    validation: TokenArray | None
    nbytes: int


def tokenize(config: DataConfig, folder: Path, *, held_out: float | None) -> TokenizedText:
    """Train the tokenizer and write ``tokenizer.json``, ``train.tokens`` and ``validation.tokens`` into ``folder``.

    The last ``held_out`` share of the bytes is kept for validation. Equal text gives equal ids on every machine
    that has the same version of ``tokenizers``.

    Raises:
        ConfigError: text that is missing, unreadable, or too little for the vocabulary.
    """
    paths = documents(config)
    tokenizer = train_tokenizer(config, pieces(paths, config.sample_bytes))
    tokenizer.save(str(folder / "tokenizer.json"))
    nbytes = total_bytes(paths, config.limit_bytes)
    boundary = nbytes if held_out is None else int(nbytes * (1 - held_out))
    dtype = np.dtype("<u2") if config.vocabulary <= 1 << 16 else np.dtype("<u4")
    names = ["train.tokens"] if held_out is None else ["train.tokens", "validation.tokens"]
    files = [(folder / f"{name}.partial").open("wb") for name in names]
    seen = 0
    try:
        for ids, piece in _encode(tokenizer, pieces(paths, config.limit_bytes)):
            part = files[-1] if seen >= boundary else files[0]
            part.write(np.asarray(ids, dtype=dtype).tobytes())
            seen += piece.nbytes
    finally:
        for file in files:
            file.close()
    for name in names:  # never in place: a run that is under way here would lose the text under its feet
        (folder / f"{name}.partial").replace(folder / name)
    arrays = [_map(folder / name, dtype) for name in names]
    validation = None if held_out is None else arrays[1]
    return TokenizedText(tokenizer=tokenizer, train=arrays[0], validation=validation, nbytes=seen)


def train_tokenizer(config: DataConfig, sample: Iterator[Piece]) -> Tokenizer:
    """A byte-level BPE of exactly ``config.vocabulary`` tokens: end of text, 256 bytes, merges.

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
    tokenizer.train_from_iterator((piece.text for piece in sample), trainer)
    size = tokenizer.get_vocab_size()
    if size != config.vocabulary:
        raise ConfigError(
            f"data.vocabulary={config.vocabulary}, but the text has only enough repetition for {size} tokens: "
            "lower it, raise data.tokenizer_sample, or give more text"
        )
    return tokenizer


def _encode(tokenizer: Tokenizer, text: Iterator[Piece]) -> Iterator[tuple[Sequence[int], Piece]]:
    """Each piece with its ids; the last piece of a document ends with the end-of-text token."""
    while batch := list(islice(text, _BATCH)):
        encodings = tokenizer.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
        for encoding, piece in zip(encodings, batch, strict=True):
            yield [*encoding.ids, END_OF_TEXT_ID] if piece.last else encoding.ids, piece


def _map(path: Path, dtype: np.dtype[np.uint16] | np.dtype[np.uint32]) -> TokenArray:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")
