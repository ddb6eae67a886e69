"""Finds the reader for a path."""

import glob
import os
import re
from pathlib import Path

from penstock.config import SourceConfig
from penstock.data.sources.delimited import Csv
from penstock.data.sources.hub import open_dataset
from penstock.data.sources.jsonl import JsonLines
from penstock.data.sources.reader import Reader, Renamed, wanted
from penstock.data.sources.text import TextFiles, in_order, stdlib
from penstock.errors import ConfigError

_JSON = {".jsonl", ".json", ".ndjson"}
_CSV = {".csv", ".tsv"}
_TOKENS = {".tokens", ".bin"}
_TEXT = {".txt", ".md"}
_NAMED = _JSON | _CSV | _TOKENS | _TEXT | {".parquet"}
_REFUSED = {
    **dict.fromkeys((".pkl", ".pickle", ".pt", ".pth", ".joblib"), "pickle runs whatever code the file holds"),
    **dict.fromkeys((".npy", ".npz"), "write token ids with penstock.data.write_tokens"),
    **dict.fromkeys((".arrow", ".xlsx"), "convert it to JSONL, CSV or Parquet"),
    **dict.fromkeys((".zip", ".tar", ".zst", ".xz", ".bz2"), "unpack it"),
}
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def open_source(source: SourceConfig, *, streaming: bool) -> Reader | tuple[Path, ...]:
    """The reader of a source; of one that is token ids already, its files.

    Raises:
        ConfigError: there is nothing there, of several kinds, or of a kind that is not read.
    """
    here = local_source(source)
    if here is not None:
        return here
    return _renamed(source, open_dataset(source, streaming=streaming))


def _renamed(source: SourceConfig, reader: Reader) -> Reader:
    return reader if source.fields is None else Renamed(path=source.path, reader=reader, names=source.fields)


def local_source(source: SourceConfig) -> Reader | tuple[Path, ...] | None:
    """The reader of a source in the file system; None: it may be a data set on the hub. Imports no torch.

    Raises:
        ConfigError: as ``open_source``.
    """
    if source.path == "stdlib":
        _check_keys(source, text=True)
        return TextFiles(files=stdlib(), limit=source.limit_bytes)
    files = _files(source.path)
    if not files:
        if not _HUB_NAME.fullmatch(source.path) or Path(source.path).suffix in _NAMED:
            raise ConfigError(f"data: {source.path!r} matches no file (relative to {os.getcwd()})")
        _check_keys(source, hub=True, rows=True)
        return None
    group = _group(source.path, files)
    _check_keys(source, text=group == "text", rows=group not in ("text", "tokens"))
    if group == "tokens":
        if source.kind not in (None, "tokens"):
            raise ConfigError(f"data: {source.path!r} holds token ids, not kind: {source.kind}")
        return tuple(path for path in files if path.suffix in _TOKENS)
    if source.kind == "tokens":
        raise ConfigError(f"data: {source.path!r} holds {group}, not kind: tokens")
    if group == "text":
        if source.kind not in (None, "text"):
            raise ConfigError(f"data: {source.path!r} is plain text, not kind: {source.kind}")
        return TextFiles(files=in_order(_named(files)), limit=source.limit_bytes)
    if group == "JSON":
        return _renamed(source, JsonLines(files=files, wanted=wanted(source.fields)))
    if group == "CSV":
        return _renamed(source, Csv(files=files, wanted=wanted(source.fields)))
    from penstock.data.sources.parquet import Parquet  # pyarrow, which no other kind needs

    return _renamed(source, Parquet(files=files, wanted=wanted(source.fields)))


def _named(files: tuple[Path, ...]) -> dict[str, Path]:
    """The files by their names below the folder that all are in, whose own place does not matter."""
    root = os.path.commonpath([path.parent for path in files])
    return {path.relative_to(root).as_posix() if root else path.as_posix(): path for path in files}


def _check_keys(source: SourceConfig, *, text: bool = False, rows: bool = False, hub: bool = False) -> None:
    """A setting that has no effect on this kind of source is refused."""
    if source.fields is not None and not rows:
        what = "is plain text" if text else "holds token ids"
        raise ConfigError(f"data: fields has no effect on {source.path!r}, which {what} and has no fields: drop it")
    if source.limit is not None and not text:
        raise ConfigError(f"data: limit has no effect on {source.path!r}: it is for plain text only")
    for key in ("split", "subset", "revision"):
        if getattr(source, key) is not None and not hub:
            raise ConfigError(f"data: {key} has no effect on {source.path!r}: it is for data sets on the hub only")


def _files(pattern: str) -> tuple[Path, ...]:
    """The files that a path or pattern names, in order; of a folder, those in it and below but for hidden ones."""
    path = Path(pattern).expanduser()
    if path.is_file():
        return (path,)
    if path.is_dir():
        inside = (p for p in path.rglob("*") if p.is_file() and not p.relative_to(path).as_posix().startswith("."))
        return tuple(sorted(p for p in inside if _kind(p) != "text" or p.suffix in _TEXT))
    return tuple(sorted(Path(p) for p in glob.glob(str(path), recursive=True) if os.path.isfile(p)))


def _kind(path: Path) -> str:
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix in _JSON:
        return "JSON"
    if suffix in _CSV:
        return "CSV"
    if suffix in _TOKENS:
        return "tokens"
    return "Parquet" if suffix == ".parquet" else "text"


def _group(pattern: str, files: tuple[Path, ...]) -> str:
    """The one kind that all files are of. The files beside ``.tokens`` belong to it."""
    tokens = {path.with_suffix("") for path in files if path.suffix == ".tokens"}
    kinds: dict[str, Path] = {}
    for path in files:
        if path.suffix in _REFUSED:
            raise ConfigError(f"data: cannot use {path}: {_REFUSED[path.suffix]}")
        if path.suffix == ".tokens" or path.with_suffix("") not in tokens:
            kinds.setdefault(_kind(path), path)
    if len(kinds) > 1:
        found = " and ".join(f"{kind} ({path.name})" for kind, path in sorted(kinds.items()))
        raise ConfigError(f"data: {pattern!r} holds {found}: give a pattern for one of them, and each as a source")
    return next(iter(kinds))
