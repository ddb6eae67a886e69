"""Finds the reader for a path."""

import os
import re
from collections import Counter
from pathlib import Path

from penstock import files
from penstock.config import SourceConfig
from penstock.data.sources.delimited import Csv
from penstock.data.sources.hub import open_dataset
from penstock.data.sources.jsonl import JsonLines
from penstock.data.sources.pattern import OF_THE_SYSTEM, is_file, is_pattern, matching, unreadable
from penstock.data.sources.reader import Reader, Renamed, wanted
from penstock.data.sources.text import TextFiles, in_order, stdlib
from penstock.data.sources.walk import ending, is_packed
from penstock.errors import ConfigError

_KINDS = {
    **dict.fromkeys((".jsonl", ".json", ".ndjson"), "JSON"),
    **dict.fromkeys((".csv", ".tsv"), "CSV"),
    **dict.fromkeys((".tokens", ".bin"), "tokens"),
    ".parquet": "Parquet",
    **dict.fromkeys((".txt", ".md"), "text"),
}
"""Kinds of files by the endings that are those of data; others are read as text where a pattern names them."""
_REFUSED = {
    **dict.fromkeys((".pkl", ".pickle", ".pt", ".pth", ".joblib"), "pickle runs whatever code the file holds"),
    **dict.fromkeys((".npy", ".npz"), "write token ids with penstock.data.write_tokens"),
    **dict.fromkeys((".arrow", ".xlsx"), "convert it to JSONL, CSV or Parquet"),
    **dict.fromkeys((".zip", ".tar", ".zst", ".xz", ".bz2"), "unpack it"),
}
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def open_source(source: SourceConfig, *, streaming: bool, commit: str | None = None) -> Reader | tuple[Path, ...]:
    """The reader of a source; of one that is token ids already, its files. ``commit``: of a data set on the hub, where
    it is known which one is to be read.

    Raises:
        ConfigError: there is nothing there, of several kinds, or of a kind that is not read.
    """
    here = local_source(source)
    if here is not None:
        return here
    return _renamed(source, open_dataset(source, streaming=streaming, commit=commit))


def _renamed(source: SourceConfig, reader: Reader) -> Reader:
    return reader if source.fields is None else Renamed(path=source.path, reader=reader, names=source.fields)


def local_source(source: SourceConfig) -> Reader | tuple[Path, ...] | None:
    """The reader of a source in the file system; None: it may be a data set on the hub. Imports no torch.

    Raises:
        ConfigError: as ``open_source``.
    """
    if source.path == "stdlib":
        _check_keys(source, "text")
        return TextFiles(files=stdlib(), limit=source.limit_bytes)
    files = _files(source.path)
    if not files:
        if (left := left_out(source)) is not None:
            raise ConfigError(f"data: {source.path!r} has no file that is read: {left}")
        if Path(os.path.expanduser(source.path)).is_dir():
            raise ConfigError(f"data: {source.path!r} is a folder without a file, but for hidden ones")
        if not _HUB_NAME.fullmatch(source.path) or ending(Path(source.path)) in _KINDS:
            raise ConfigError(f"data: {source.path!r} matches no file (relative to {os.getcwd()})")
        _check_keys(source, "hub")
        return None
    group = _group(source.path, files)
    _check_keys(source, group)
    if group == "tokens":
        return tuple(path for path in files if _kind(path) == "tokens")
    if group == "text":
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


def _check_keys(source: SourceConfig, group: str) -> None:
    """A setting that has no effect on a source of this group is refused, and a kind that its documents are not of."""
    words = {"text": "is plain text", "tokens": "holds token ids", "hub": "is a data set on the hub"}
    what, without_fields = words.get(group, f"holds {group}"), group in ("text", "tokens")
    if source.fields is not None and without_fields:
        raise ConfigError(f"data: fields has no effect on {source.path!r}, which {what} and has no fields: drop it")
    if source.limit is not None and group != "text":
        raise ConfigError(f"data: limit has no effect on {source.path!r}: it is for plain text only")
    for key in ("split", "subset", "revision"):
        if getattr(source, key) is not None and group != "hub":
            raise ConfigError(f"data: {key} has no effect on {source.path!r}: it is for data sets on the hub only")
    if source.kind not in (None, group) if without_fields else source.kind == "tokens":
        raise ConfigError(f"data: {source.path!r} {what}, not kind: {source.kind}")


def _files(pattern: str) -> tuple[Path, ...]:
    """The files that a path or pattern names, in order; of a folder, those in it and below whose endings are those of
    data, but for hidden ones."""
    path = Path(os.path.expanduser(pattern))
    if is_file(path):
        return (path,)
    if path.is_dir():
        return tuple(file for file in _inside(path)[0] if _is_data(file))
    return matching(path) if is_pattern(str(path)) else ()


def _inside(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files in a folder and below, in order, and the links to folders, which are not followed; none that is hidden,
    or in a hidden folder.

    Raises:
        ConfigError: a folder cannot be looked into, or what has the name of data is no file, such as a pipe or a link
            to nothing.
    """
    found, linked = list[Path](), list[Path]()
    try:
        for where, folders, names in os.walk(folder, onerror=files.refuse):
            folders[:] = [name for name in folders if not name.startswith(".") and name != OF_THE_SYSTEM]
            linked += [path for name in folders if (path := Path(where, name)).is_symlink()]
            found += [Path(where, name) for name in names if not name.startswith(".")]
    except OSError as error:
        raise unreadable(error) from error
    return sorted(path for path in found if (is_file(path) if _is_data(path) else path.is_file())), sorted(linked)


def _is_data(path: Path) -> bool:
    return _kind(path) != "text" or (ending(path) in _KINDS and not is_packed(path))


def left_out(source: SourceConfig) -> str | None:
    """Words on what is in a folder and not read: files by their endings, and linked folders; None: all is read."""
    folder = Path(os.path.expanduser(source.path))
    if source.path == "stdlib" or not folder.is_dir():
        return None
    inside, linked = _inside(folder)
    tokens = {path.with_suffix("") for path in inside if ending(path) == ".tokens"}
    rest = [path for path in inside if not _is_data(path) and path.with_suffix("") not in tokens]
    said = [*([_by_endings(source, rest)] if rest else []), *([_links(linked)] if linked else [])]
    return f"left out of the folder: {'; '.join(said)}" if said else None


def _by_endings(source: SourceConfig, rest: list[Path]) -> str:
    counts = Counter(path.suffix for path in rest).most_common()
    named = ", ".join(f"{count:,} {suffix or 'without an ending'}" for suffix, count in counts[:_MOST_NAMED])
    more = f" and {len(counts) - _MOST_NAMED} other endings" if len(counts) > _MOST_NAMED else ""
    texts = Counter(path.suffix for path in rest if _refused(path) is None).most_common()
    if not texts:
        return f"{named}{more} ({_refused(rest[0])})"
    pattern = Path(source.path, "**", f"*{next(filter(None, (suffix for suffix, _ in texts)), '')}")
    return f"{named}{more} (a pattern reads them as text: {pattern})"


def _links(linked: list[Path]) -> str:
    named = ", ".join(map(str, linked[:_MOST_NAMED]))
    more = f" and {len(linked) - _MOST_NAMED} more" if len(linked) > _MOST_NAMED else ""
    return f"links to folders, {named}{more} (name each as a source of its own)"


_MOST_NAMED = 5


def _kind(path: Path) -> str:
    return _KINDS.get(ending(path), "text")


def _refused(path: Path) -> str | None:
    """The reason that a file is not read, or what to do with it; None: it is."""
    return "unpack it" if is_packed(path) and _kind(path) not in ("JSON", "CSV") else _REFUSED.get(ending(path))


def _group(pattern: str, files: tuple[Path, ...]) -> str:
    """The one kind that all files are of. The files beside ``.tokens`` belong to it."""
    tokens = {path.with_suffix("") for path in files if ending(path) == ".tokens"}
    kinds: dict[str, Path] = {}
    for path in files:
        if (refused := _refused(path)) is not None:
            raise ConfigError(f"data: cannot use {path}: {refused}")
        if ending(path) == ".tokens" or path.with_suffix("") not in tokens:
            kinds.setdefault(_kind(path), path)
    if len(kinds) > 1:
        found = " and ".join(f"{kind} ({path.name})" for kind, path in sorted(kinds.items()))
        raise ConfigError(f"data: {pattern!r} holds {found}: give a pattern for one of them, and each as a source")
    return next(iter(kinds))
