"""``penstock train --help``: every setting by its section, with what it must be, its default and its meaning."""

import textwrap
import typing
from collections.abc import Iterator

from penstock.cli.arguments import TrainArguments
from penstock.cli.settings import describe, section_of
from penstock.cli.words import columns, help_of
from penstock.config import TrainConfig
from penstock.config.meanings import by_need, is_required

_FLAG = 34
"""Columns of the flags."""


def train_help() -> str:
    """The usage, then what a run is told first, a paragraph for each section, and what is rarely needed."""
    rows = describe(TrainConfig)
    hints, order = typing.get_type_hints(TrainConfig), by_need(TrainConfig)
    rare = next(n for n, f in enumerate(order) if section_of(hints[f.name]) and not is_required(f))
    first = {f.name for f in order[:rare]}
    own = [row for row in rows if "." not in row[0]]
    parts = [help_of(TrainArguments).rstrip(), "\n".join(["run", *_rows([row for row in own if row[0] in first])])]
    for f in order:
        section = section_of(hints[f.name])
        inside = [row for row in rows if row[0].startswith(f"{f.name}.")]
        if section is not None and inside:
            about = " ".join((section.__doc__ or "").split("\n\n")[0].replace("``", "").split())
            parts.append(
                "\n".join([*textwrap.wrap(f"{f.name}: {about}", columns(), subsequent_indent="  "), *_rows(inside)])
            )
    parts.append("\n".join(["rarely needed", *_rows([row for row in own if row[0] not in first])]))
    return "\n\n".join(parts) + "\n"


def _rows(rows: list[tuple[str, str, str, str]]) -> Iterator[str]:
    for name, kind, default, meaning in rows:
        shown = default if default.startswith("required") else f"default {default}"
        kind = kind.removesuffix(" or null") if default == "null" else kind
        head = f"  --{name:<{_FLAG - 4}}  {kind}; {shown}"
        yield from textwrap.wrap(head, columns(), subsequent_indent=" " * _FLAG, break_long_words=False)
        yield from textwrap.wrap(meaning, columns(), initial_indent=" " * 6, subsequent_indent=" " * 6)
