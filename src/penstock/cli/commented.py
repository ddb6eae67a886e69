"""A settings file with comments: what each setting means, in the words of its own documentation, and why it is so."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.cli.located import dump_yaml
from penstock.cli.settings import Setting, settings_below
from penstock.config import TrainConfig

_WIDTH = 100


def written(settings: Mapping[str, Any], reasons: Mapping[str, str], title: Sequence[str] = ()) -> str:
    """The settings as YAML that the reader of settings reads back to the same values.

    ``reasons``: why a setting has its value, by dotted name. ``title``: lines above all.
    """
    known = {setting.name: setting for setting in settings_below(TrainConfig)}
    lines = [*(f"# {_printable(line)}" for line in title), ""]
    return "\n".join([*lines, *_mapping(settings, "", known, reasons)]) + "\n"


def _mapping(
    settings: Mapping[str, Any], section: str, known: Mapping[str, Setting], reasons: Mapping[str, str]
) -> list[str]:
    indent, lines = "  " * (section.count(".") + bool(section)), list[str]()
    for key, value in settings.items():
        name = f"{section}.{key}" if section else key
        lines += [""] * (not section and bool(lines))
        lines += _comment((known[name].kind and known[name].meaning) or known[name].about, indent)
        lines += _comment(reasons[name], indent, "-> ") if name in reasons else []
        if known[name].section is not None and isinstance(value, Mapping):
            lines += [f"{indent}{key}:", *_mapping(value, name, known, reasons)]
        else:
            lines += textwrap.indent(dump_yaml({key: value}), indent).splitlines()
    return lines


def _comment(text: str, indent: str, mark: str = "") -> list[str]:
    """A text in lines that YAML passes over, whatever characters are in it."""
    return textwrap.wrap(
        mark + _plain(text), _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# {' ' * len(mark)}"
    )


def _plain(text: str) -> str:
    return " ".join(_printable(text).split())


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)
