"""Data sets on the Hugging Face hub, through ``datasets``. It runs no code of a data set's own and reads no pickle."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config import SourceConfig
from penstock.data.sources.reader import FIELDS, Cursor, Example, wanted, without_nulls
from penstock.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class HubDataset:
    """Reads a data set on the hub. A cursor is what ``datasets`` keeps of its place in a stream, and the rows so far.
    ``commit``: that the rows are of."""

    name: str
    rows: Any
    """``datasets.IterableDataset``"""
    commit: str | None = None
    files: tuple[Path, ...] = ()
    wanted: Sequence[str] = FIELDS

    def read(self, start: Cursor) -> Iterator[tuple[Example, Cursor]]:
        # Each reading begins with a stream of its own: one that is read keeps its place.
        rows = self.rows.take(2**63 - 1) if hasattr(self.rows, "take") else self.rows
        count = 0
        if start is not None:
            rows.load_state_dict(start["state"])
            count = start["row"]
        found = iter(rows)
        while True:
            try:
                row = next(found)
            except StopIteration:
                return
            except Exception as error:  # whatever the network, a file or ``datasets`` raises
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                raise ConfigError(f"data: {self.name}: cannot be read on after row {count}: {reason}") from error
            count += 1
            fields = {name: without_nulls(row[name]) for name in self.wanted if name in row}
            example = Example(fields=fields, place=f"{self.name}, row {count}", has=tuple(row))
            yield example, {"state": rows.state_dict(), "row": count}


def open_dataset(source: SourceConfig, *, streaming: bool, commit: str | None) -> HubDataset:
    """A data set by its name, one split of it. ``commit``: the one to read; None: that of the source's revision now.

    Raises:
        ConfigError: it cannot be had, with what ``datasets`` says.
    """
    import datasets

    split = source.split or "train"
    try:
        builder = datasets.load_dataset_builder(source.path, source.subset, revision=commit or source.revision)
        if streaming:
            rows = builder.as_streaming_dataset(split=split)
        else:
            builder.download_and_prepare()
            rows = builder.as_dataset(split=split).to_iterable_dataset()
    except Exception as error:  # noqa: BLE001  whatever hub, network or data set makes of a name
        raise ConfigError(
            f"data: {source.path!r} is no file, folder or pattern here, and cannot be had from the hub either: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from None
    return HubDataset(name=source.path, rows=rows, commit=builder.hash, wanted=wanted(source.fields))
