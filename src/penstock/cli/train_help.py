"""``penstock train --help``: every setting by its section, with what it must be, its default and its meaning."""

import textwrap
import typing
from collections.abc import Iterator

from penstock.cli.settings import describe, in_order, section_of
from penstock.config import TrainConfig

_WIDTH = 100
_FLAG = 34
"""Columns of the flags."""

_USAGE = """\
penstock train CONFIG.yaml [--SETTING VALUE ...] [--overwrite | --resume] [--print-config]

  --overwrite      replace the run that is in the folder, and its state on disk
  --resume         go on with the run that is in the folder
  --print-config   print the resolved settings and stop

Each setting is a key in the file, or a flag: --optimizer.lr 1e-3. A flag's value is YAML: null,
[1, 2], {every: 5}. Bytes may be written as 512MiB, 24GiB or 8GB. docs/training.md tells more, and
examples/ has files to begin with.
"""


def train_help() -> str:
    """The usage, then the run's own settings, then a paragraph for each section."""
    rows = describe(TrainConfig)
    own = [row for row in rows if "." not in row[0]]
    parts = [_USAGE.rstrip(), "\n".join(["run", *_rows(own)])]
    hints = typing.get_type_hints(TrainConfig)
    for f in in_order(TrainConfig):
        section = section_of(hints[f.name])
        inside = [row for row in rows if row[0].startswith(f"{f.name}.")]
        if section is not None and inside:
            about = " ".join((section.__doc__ or "").split("\n\n")[0].replace("``", "").split())
            parts.append(
                "\n".join([*textwrap.wrap(f"{f.name}: {about}", _WIDTH, subsequent_indent="  "), *_rows(inside)])
            )
    return "\n\n".join(parts) + "\n"


def _rows(rows: list[tuple[str, str, str, str]]) -> Iterator[str]:
    for name, kind, default, meaning in rows:
        shown = default if default.startswith("required") else f"default {default}"
        kind = kind.removesuffix(" or null") if default == "null" else kind
        head = f"  --{name:<{_FLAG - 4}}  {kind}; {shown}"
        yield from textwrap.wrap(head, _WIDTH, subsequent_indent=" " * _FLAG, break_long_words=False)
        yield from textwrap.wrap(meaning, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
