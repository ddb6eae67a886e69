"""Parquet files, a row group at a time; columns that are not needed are not read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet

from penstock.data.sources.reader import FIELDS, Cursor, Example, without_nulls
from penstock.errors import ConfigError

_ROWS = 256  # that are in memory as Python objects at once


@dataclass(frozen=True, kw_only=True)
class Parquet:
    """Reads Parquet files. A cursor is (file, row) of what comes next. ``wanted``: the columns that are read."""

    files: tuple[Path, ...]
    wanted: Sequence[str] = FIELDS

    def read(self, start: Cursor) -> Iterator[tuple[Example, Cursor]]:
        first, skip = start or (0, 0)
        for index in range(first, len(self.files)):
            path, row = self.files[index], skip
            try:
                for fields, names in _rows(path, skip, self.wanted):
                    row += 1
                    fields = {name: without_nulls(value) for name, value in fields.items()}
                    yield Example(fields=fields, place=f"{path}, row {row}", has=names), [index, row]
            except (OSError, pyarrow.ArrowException, UnicodeDecodeError, ValueError, OverflowError) as error:
                if isinstance(error, ConfigError):
                    raise
                raise ConfigError(f"data: cannot read {path}, after row {row}: {_first_line(error)}") from None
            skip = 0


def _rows(path: Path, skip: int, wanted: Sequence[str]) -> Iterator[tuple[dict[str, object], Sequence[str]]]:
    """Each row, with the names of all columns."""
    with pyarrow.parquet.ParquetFile(path, memory_map=True) as file:
        names = file.schema_arrow.names
        columns = [name for name in wanted if name in names]
        if not columns:
            yield {}, names  # which a message has to say
            return
        if twice := [name for name in columns if names.count(name) > 1]:
            raise ConfigError(f"{path}: it has two columns {twice[0]!r}: name one of them otherwise")
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if skip >= rows:
                skip -= rows
                continue
            for batch in file.iter_batches(batch_size=_ROWS, row_groups=[group], columns=columns):
                yield from ((row, names) for row in batch.to_pylist()[skip:])
                skip = max(skip - batch.num_rows, 0)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
