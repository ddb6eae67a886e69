"""Text that every machine has, to train a small model on: the sources of Python's own standard library, in BPE.

Which files there are, which of them are held out, the tokenizer and the windows are functions of the files' names and
texts alone. Another version of Python brings other texts, so losses compare where ``Corpus.digest`` is the same.
"""

import hashlib
import math
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HELD_OUT_OF = 16
"""One file of so many is held out."""
SHARED = 0.2
"""A file of which a larger part of the lines is in the training text, too, is no held-out text, and dropped."""
_TELLING = 24  # characters of a line that is counted; "return self" is in every file
_LEFT_OUT = {
    *("site-packages", "dist-packages", "ensurepip"),  # not the library's own
    *("test", "tests", "idle_test", "encodings"),  # tables of data, mostly, or not installed everywhere
}
_MACHINE = ("_sysconfigdata", "config-", "sitecustomize")  # written when Python was built, or by who packages it


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Windows of tokens, int64, of ``length`` each: ``train`` (windows, length), ``held_out`` (windows, length).

    ``unigram``: what the held-out loss, in nats per token, is of a model that knows how frequent each token is and
    nothing else. ``digest``: SHA-256 of all that is in the windows.
    """

    train: torch.Tensor
    held_out: torch.Tensor
    unigram: float
    digest: str


def library_texts() -> dict[str, str]:
    """The standard library's modules by their path in it, in order of the paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = {path.relative_to(root): path for path in root.rglob("*.py")}
    return {
        name.as_posix(): paths[name].read_text(encoding="utf-8", errors="replace")
        for name in sorted(paths, key=Path.as_posix)
        if not _LEFT_OUT & set(name.parts) and not any(part.startswith(_MACHINE) for part in name.parts)
    }


def is_held_out(name: str) -> bool:
    """A file's name decides, so that a file more or less moves no other."""
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT_OF == 0


def split(texts: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """The names of the files to train on, and of those to hold out; what is much like the former is in neither."""
    train = [name for name in texts if not is_held_out(name)]
    seen: set[str] = set().union(*(_lines(texts[name]) for name in train))
    held_out = [
        name
        for name in texts
        if is_held_out(name) and (lines := _lines(texts[name])) and len(lines & seen) <= SHARED * len(lines)
    ]
    return train, held_out


def _lines(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines() if len(line.strip()) >= _TELLING}


def read(texts: Mapping[str, str], *, vocabulary: int, length: int, held_out: int) -> Corpus:
    """Windows of ``length`` tokens by a BPE of ``vocabulary`` tokens that the training files have made.

    ``held_out``: that many windows, evenly from all the held-out text.
    """
    train_names, held_names = split(texts)
    encode = _tokenizer((texts[name] for name in train_names), vocabulary)
    train, held = (_windows(encode(texts[name] for name in names), length) for names in (train_names, held_names))
    if held_out > len(held):
        raise ValueError(f"{held_out} held-out windows of {length} tokens: there are {len(held)}")
    held = held[torch.arange(held_out) * len(held) // held_out]
    counts = torch.bincount(train.flatten(), minlength=vocabulary).double() + 1
    unigram = float(-(counts / counts.sum()).log()[held[:, 1:]].mean())
    digest = hashlib.sha256(train.numpy().tobytes() + held.numpy().tobytes()).hexdigest()
    assert unigram < math.log(vocabulary)
    return Corpus(train=train, held_out=held, unigram=unigram, digest=digest)


def _tokenizer(texts: Iterable[str], vocabulary: int) -> Callable[[Iterable[str]], list[int]]:
    """Train a byte-level BPE. It encodes one text after the other, with a token of its own behind each."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    bpe: Any = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<end>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return lambda texts: [token for text in texts for token in (*bpe.encode(text).ids, 0)]


def _windows(tokens: list[int], length: int) -> torch.Tensor:
    """[windows, length] int64; what is left over at the end is dropped."""
    whole = len(tokens) // length * length
    return torch.tensor(tokens[:whole]).view(-1, length)
