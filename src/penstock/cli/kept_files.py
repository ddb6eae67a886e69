"""Files that a run keeps beside its store, and what vouches for them: damage is an error, not another model or text.

model/                      configuration, tokenizer, code, notes: size and hash of each in kept.json
data/, or data.prepared     a tokenizer, checksums: the same; token ids by these checksums, as they are read
kept.json                   by a checksum in it, and by each commit of the store, which has it too
data.json                   by a checksum in it, and by the data's fingerprint in each commit
config.yaml                 by its last line, which whoever changes the file by hand removes
metrics.jsonl               its last lines are in each commit until they are flushed; nothing is trained by it

`kept.json` is written once, when all of that is there and flushed, and before the store is made. A run goes on with
what it began with, or says which file is another. The rest (traces, predictions, reports) decides nothing.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from penstock import files
from penstock.data.identity import digest_of
from penstock.data.token_files import SUMS
from penstock.errors import StoreError
from penstock.store.directory import is_there
from penstock.store.packed import store_error
from penstock.store.records import read_document, write_document

KEPT = "kept.json"
KEPT_KEY = "kept"
"""Key of ``kept.json``'s digest in a position of ``Engine.step``, which each commit has."""

_KIND = "kept"
_BY_BLOCKS = frozenset({".tokens", ".ends", ".loss"})
"""Endings of what is compared block by block as it is read."""

ADVICE = (
    "Put it back from a copy, or from where the model came from; what is in the folder of prepared data is made again "
    "if you remove that"
)


@dataclass(frozen=True, kw_only=True)
class KeptFile:
    """A file: its name below the run's folder, its size in bytes, its hash (xxh3, 128). Below ``data/`` are those of
    the folder of prepared data, wherever that is; older runs have all of the path of a file that is elsewhere."""

    name: str
    nbytes: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class KeptFiles:
    """All files of a run that stay as they are from before its first commit on, each once, in the order of names."""

    files: tuple[KeptFile, ...]

    def __post_init__(self) -> None:
        names = [file.name for file in self.files]
        assert names == sorted(set(names)), names

    @classmethod
    def of(cls, run: Path, prepared: Path, folders: Sequence[Path]) -> "KeptFiles":
        """The files that are in ``folders`` now, at any depth; each is in ``run`` or in ``prepared``, its data.

        Raises:
            StoreError: a file cannot be read.
        """
        paths = {path for folder in folders for path in _files_in(folder)}
        found = [
            KeptFile(name=_name(run, prepared, path), nbytes=path.stat().st_size, digest=_digest(path))
            for path in paths
        ]
        return cls(files=tuple(sorted(found, key=lambda file: file.name)))

    @classmethod
    def read(cls, run: Path) -> "KeptFiles | None":
        """The list as a run has written it; None where it has not: it ended before that.

        Raises:
            StoreError: it is damaged, or cannot be read.
        """
        if not is_there(run / KEPT):
            return None
        try:
            body = read_document(run / KEPT, _KIND)
        except StoreError as error:
            if error.errno is not None:
                raise
            raise StoreError(f"{error}. Put it back from a copy: it says what the run's files have to be") from error
        return cls(files=tuple(KeptFile(**file) for file in body))

    def write(self, run: Path) -> None:
        """Raises StoreError: it cannot be written."""
        write_document(run / KEPT, _KIND, [asdict(file) for file in self.files])

    @property
    def digest(self) -> str:
        """The hash of all that it says: what a commit has."""
        state = xxhash.xxh3_128()
        for file in self.files:
            state.update(f"{file.name}\0{file.nbytes}\0{file.digest}\n".encode())
        return state.hexdigest()

    def below(self, folder: str) -> "KeptFiles":
        """The files in one folder of the run's."""
        return KeptFiles(files=tuple(file for file in self.files if file.name.startswith(f"{folder}/")))

    def damage(self, run: Path, prepared: Path, *, missing_in: Sequence[Path] = ()) -> Iterator[str]:
        """Each file that is not as it was, in words. ``missing_in``: what is gone from there is made again."""
        for file in self.files:
            path = _place(run, prepared, file.name)
            if any(path.is_relative_to(folder) and _is_gone(path, folder) for folder in missing_in):
                continue
            try:
                size = path.stat().st_size
                same = size == file.nbytes and _digest(path) == file.digest
            except OSError as error:
                yield f"{path} cannot be read: {error.strerror}"
                continue
            if not same:
                sizes = f"{file.nbytes:,} bytes then, {size:,} now" if size != file.nbytes else "other bytes"
                yield f"{path} is not what the run wrote there ({sizes})"

    def require(self, run: Path, prepared: Path, *, missing_in: Sequence[Path] = ()) -> None:
        """Raises StoreError: a file is not as it was; names the first."""
        for found in self.damage(run, prepared, missing_in=missing_in):
            raise StoreError(f"{found}: check the drive. {ADVICE}")


def kept_of(run: Path, vouched: str | None) -> KeptFiles:
    """The files that a run with state keeps, as its ``kept.json`` lists them.

    ``vouched``: the digest of ``kept.json`` that the store's last commit has; None: it has none.

    Raises:
        StoreError: ``kept.json`` is damaged, gone, or not that of the run whose state is in the store.
    """
    kept = KeptFiles.read(run)
    if kept is None:
        raise StoreError(f"{run / KEPT} is gone, which says what the run's files have to be: put it back from a copy")
    if vouched not in (None, kept.digest):
        raise StoreError(
            f"{run / KEPT} is not that of the run whose state is in the store: put it back from a copy, with the "
            "files that it names"
        )
    return kept


def vouched_by(record: Mapping[str, Any] | None) -> str | None:
    """The digest of what a run keeps that a commit record has; None: it has none, or there is no commit."""
    position = None if record is None else record.get("position")
    return None if position is None else position.get(KEPT_KEY)


def corpora(kept: KeptFiles, run: Path, prepared: Path) -> Iterator[Path]:
    """The token ids that belong to what a run keeps: a file ``NAME.tokens`` each."""
    paths = (_place(run, prepared, file.name) for file in kept.files)
    yield from (path.with_suffix(".tokens") for path in paths if path.suffix == SUMS and path.name[:5] != "given")


def _is_gone(path: Path, folder: Path) -> bool:
    """True if all of what a path is in, just below ``folder``, is not there."""
    return not (folder / path.relative_to(folder).parts[0]).exists()


_PREPARED = "data/"


def _name(run: Path, prepared: Path, path: Path) -> str:
    if path.is_relative_to(prepared) and not (run.is_relative_to(prepared) and path.is_relative_to(run)):
        return f"{_PREPARED}{path.relative_to(prepared)}"
    return str(path.relative_to(run))


def _place(run: Path, prepared: Path, name: str) -> Path:
    return prepared / name.removeprefix(_PREPARED) if name.startswith(_PREPARED) else run / name


def _files_in(folder: Path) -> Iterator[Path]:
    for place, _, names in os.walk(folder, onerror=files.refuse):
        yield from (Path(place) / name for name in names if Path(name).suffix not in _BY_BLOCKS)


def _digest(path: Path) -> str:
    try:
        return digest_of(path)
    except OSError as error:
        raise store_error(f"{path} cannot be read: {error.strerror}: check the drive", error) from error
