"""Documents to token files, once, in a folder that is there whole or not at all.

The folder's name says what is in it: a fingerprint of the sources' contents, the tokenizer and all settings that decide
about a token. So whoever needs the same finds it, and nothing is used that was made of something else.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import xxhash
from transformers import PreTrainedTokenizerBase

from penstock import files
from penstock.config import SourceConfig
from penstock.config.data import DataConfig, Form, Kind
from penstock.data.encode import Encoder
from penstock.data.identity import FileFacts, require_unchanged
from penstock.data.sources.reader import Reader
from penstock.data.sources.walk import ending
from penstock.data.token_files import (
    SUMS,
    TokenFile,
    TokenWriter,
    lacks_sums,
    make_sums,
    open_tokens,
    write_sums,
)
from penstock.data.tokenizer import largest_id
from penstock.errors import ConfigError, StoreError

_WHOLE = 1 << 64


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A source and what reads it: a reader of examples, which have a form, or the files of one that is token ids.
    ``commit``: of a data set on the hub, that the run began with; None: its identity does not have it."""

    source: SourceConfig
    reader: Reader | tuple[Path, ...]
    form: Form | None = None
    commit: str | None = None

    @property
    def kind(self) -> Kind:
        """The kind of its documents."""
        return "tokens" if self.form is None else self.form.kind

    @property
    def files(self) -> tuple[Path, ...]:
        if not isinstance(self.reader, tuple):
            return self.reader.files
        beside = (p.with_suffix(e) for p in self.reader if ending(p) == ".tokens" for e in (".json", ".ends", ".loss"))
        return (*self.reader, *(path for path in beside if path.exists()))

    def token_files(self, folder: Path, number: int) -> list[TokenFile]:
        """The corpora of source ``number`` that are token ids already. ``folder``: that has their checksums.

        Raises:
            ConfigError: what is there is not whole.
            StoreError: it is damaged.
        """
        made, dtype = self._sums(number), self.source.dtype
        return [open_tokens(path, dtype, folder / made[path] if path in made else None) for path in self.given]

    @property
    def given(self) -> tuple[Path, ...]:
        """The files that are token ids already."""
        return self.reader if isinstance(self.reader, tuple) else ()

    def _sums(self, number: int) -> dict[Path, str]:
        """The names of the checksums of such files that have none of their own."""
        lacking = [(i, path) for i, path in enumerate(self.given) if lacks_sums(path, self.source.dtype)]
        return {path: f"given-{number}-{i}{SUMS}" for i, path in lacking}

    def needs(self, number: int) -> bool:
        """True if something has to be prepared of it, as source ``number``."""
        return not isinstance(self.reader, tuple) or bool(self._sums(number))

    def write_sums(self, folder: Path, number: int) -> None:
        """Make the checksums that are missing."""
        for path, name in self._sums(number).items():
            write_sums(folder / name, make_sums(path, self.source.dtype))


@contextmanager
def made_of(
    opened: Sequence[Opened], facts: Sequence[FileFacts], folder: Path, what: str, *, private: bool
) -> Iterator[Path]:
    """A new folder for ``what`` is made of the sources. It is kept as ``folder`` if their files still have these
    ``facts``.

    Raises:
        ConfigError: they do not, or the folder cannot be written.
    """
    try:
        with files.made_once(folder, private=private) as under_way:
            yield under_way
            require_unchanged([path for one in opened for path in one.files], facts)
    except StoreError:
        raise
    except OSError as error:
        raise ConfigError(
            f"data: cannot write {what} into {folder.parent}: {error.strerror or error}: make it writable, with room "
            "in it, or give another folder (data.prepared)"
        ) from None


def prepare(
    opened: Sequence[Opened],
    facts: Sequence[FileFacts],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    folder: Path,
    share: float | None,
    day: date | None = None,
) -> list[tuple[list[TokenFile], list[TokenFile]]]:
    """Each source's token files: those to train on, and the ``share`` that is held out. ``day``: as of ``Encoder``.

    What is not token ids already is written into ``folder`` first, and the checksums of what is and has none, if
    they are not there. ``facts``: of their files, which the folder's name is made of.

    Raises:
        ConfigError: a document is not what it should be, or a file not what it was, or the folder cannot be written.
        StoreError: what is there is damaged.
    """
    if any(one.needs(number) for number, one in enumerate(opened)) and not folder.is_dir():
        dtype = "uint16" if largest_id(tokenizer) < 1 << 16 else "uint32"
        with made_of(opened, facts, folder, "what is tokenised", private=config.prepared is None) as partial:
            for number, one in enumerate(opened):
                if isinstance(one.reader, tuple):
                    one.write_sums(partial, number)
                else:
                    assert one.form is not None
                    encoder = Encoder(tokenizer, config, one.form, alone=True, day=day)
                    _write(one.reader, encoder, partial, number, dtype, share)
    return [_files(one, number, folder, share) for number, one in enumerate(opened)]


def _write(reader: Reader, encoder: Encoder, folder: Path, number: int, dtype: str, share: float | None) -> None:
    documents = encoder.documents(reader.read(None))
    first, _ = next(documents)
    with (
        TokenWriter(folder / f"train-{number}.tokens", dtype, loss=encoder.answers) as train,
        TokenWriter(folder / f"validation-{number}.tokens", dtype, loss=encoder.answers) as validation,
    ):
        train.write(first)
        for count, (document, _) in enumerate(documents, start=1):
            held = share is not None and _held_out(number, count, share)
            (train if held else validation).part()
            (validation if held else train).write(document)


def _held_out(source: int, document: int, share: float) -> bool:
    """True if a document, or a stretch of a long text, is for validation; a function of its number. The first never."""
    return xxhash.xxh3_64_intdigest(f"{source}:{document}".encode()) < share * _WHOLE


def _files(one: Opened, number: int, folder: Path, share: float | None) -> tuple[list[TokenFile], list[TokenFile]]:
    if not isinstance(one.reader, tuple):
        held = open_tokens(folder / f"validation-{number}.tokens")
        return [open_tokens(folder / f"train-{number}.tokens")], [held] if held.documents else []
    given = one.token_files(folder, number)
    if share is None:
        return given, []
    parts = [file.divided(share) for file in given if len(file.ids) > 1]
    return [train for train, _ in parts], [held for _, held in parts]
