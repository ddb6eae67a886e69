"""The words after a command, read into a frozen dataclass as the settings file is: by its type hints, by the same code.

Each field is an option, ``--micro-batches N`` for ``micro_batches``, and its row in the docstring's table is its help:

    bool                a switch, which takes no value
    tuple[X, ...]       may be given more than once
    bool | Path         the value may be left out: it is the next word only if that ends as ``endings`` says
    text, Path          as it stands, and never empty; any other value is YAML, as that of a setting is, but not null:
                        who wants what an option is without a value leaves it out

``operands`` names the fields that words without dashes are; the last takes all that are left if it is a tuple. Of a
class with a field ``settings``, any other option is a setting of a file: (dotted name, YAML text).
"""

import difflib
import inspect
import re
import shutil
import textwrap
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, Union

from penstock.cli.located import Located, parse_yaml
from penstock.cli.settings import options_of, read, unknown
from penstock.config.elsewhere import counterpart
from penstock.config.meanings import by_need, is_required, joined_rows, meanings, names_in
from penstock.documents.typed import hints_of
from penstock.errors import ConfigError

SETTINGS = "settings"
_FLAG = 25
"""Columns of an option with its value."""
_READABLE = 100


@dataclass(frozen=True, kw_only=True)
class Words:
    """The command line arguments of a command. ``takes``: its operands in words, for messages."""

    command: ClassVar[str]
    takes: ClassVar[str] = ""
    operands: ClassVar[tuple[str, ...]] = ()
    endings: ClassVar[Mapping[str, str]] = {}
    of_a_run: ClassVar[bool] = False
    """True if options are a run's settings, for which other tools have names of theirs."""


W = TypeVar("W", bound=Words)


def read_words(kind: type[W], words: Sequence[str]) -> W:
    """Read a command's arguments from the words that follow its name.

    Raises:
        ConfigError: names the option that is unknown, given twice, without its value or with an impossible one, or
            missing; or too few or too many words are given beside the options.
    """
    plain, flags = split_words(kind, words)
    options = _options(kind)
    given: dict[str, Located] = {}
    settings: list[Located] = []
    said: set[str] = set()
    for flag, text in flags:
        key = _key(flag)
        if key in said and not (key in options and _is_list(options[key])):
            raise ConfigError(f"{_flag(key)} is given twice: keep one")
        said.add(key)
        if key not in options:
            settings.append(Located(value=[_text(flag.removeprefix("--"), flag), _text(text or "", flag)], where=flag))
            continue
        value = Located(value=True, where=flag) if text is None else _value(options[key], text, flag)
        if _is_list(options[key]):
            earlier = given[key].value if key in given else []
            assert isinstance(earlier, list)
            value = Located(value=[*earlier, value], where=flag)
        given[key] = value
    if settings:
        given[SETTINGS] = Located(value=settings, where=kind.command)
    given |= _operands(kind, plain)
    for field in fields(kind):
        if field.name in options and is_required(field) and field.name not in given:
            raise ConfigError(f"{kind.command} needs {_flag(field.name)}. Try: {kind.command} --help")
    hints = {key: _without_null(hint) if key in options else hint for key, hint in hints_of(kind).items()}
    return read(kind, Located(value=given, where=kind.command), section="", hints=hints)


def split_words(kind: type[Words], words: Sequence[str]) -> tuple[list[str], list[tuple[str, str | None]]]:
    """The words without dashes, and the options with their values; None: a switch, or a value that was left out.

    Raises:
        ConfigError: an option is unknown, or has no value and needs one, or has one and takes none.
    """
    options = _options(kind)
    plain: list[str] = []
    flags: list[tuple[str, str | None]] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            plain.append(word)
            continue
        flag, equals, text = word.partition("=")
        hint, ending = options.get(_key(flag)), kind.endings.get(_key(flag))
        if hint is None and SETTINGS not in hints_of(kind):
            known = [_flag(key).removeprefix("--") for key in options]
            key = flag.removeprefix("--")
            there = counterpart(key) if kind.of_a_run else None
            raise ConfigError(unknown(key, known, takes=kind.command, what="option", form="--{}", there=there))
        if hint is bool:
            if equals or (rest and rest[0] in ("true", "false")):
                raise ConfigError(f"{flag} takes no value: write {flag} alone, or leave it out")
            flags.append((flag, None))
        elif ending is not None and not equals and not (rest and (rest[0].endswith(ending) or not rest[0])):
            flags.append((flag, None))
        elif equals and text:
            flags.append((flag, text))
        elif not equals and rest and not rest[0].startswith("--") and (rest[0] or not _as_it_stands(hint)):
            flags.append((flag, rest.pop(0)))
        else:
            needs = "VALUE (text in YAML: null, true, [1, 2])" if hint is None else _value_name(hint)
            near = [] if hint is not None else difflib.get_close_matches(_key(flag), options, n=1)
            meant = f"; or did you mean {_flag(near[0])}?" if near else ""
            raise ConfigError(f"{flag} needs a value: {flag} {needs}{meant}")
    return plain, flags


def _options(kind: type[Words]) -> dict[str, Any]:
    """The type of each option, in the order in which people look for them."""
    hints, others = hints_of(kind), (*kind.operands, SETTINGS)
    return {f.name: hints[f.name] for f in by_need(kind) if f.name not in others}


def _operands(kind: type[Words], plain: Sequence[str]) -> dict[str, Located]:
    """The words without dashes, by the names of their fields.

    Raises:
        ConfigError: there are too few or too many of them, or an empty one.
    """
    names, hints = kind.operands, hints_of(kind)
    needed = {f.name for f in fields(kind) if is_required(f)} & {*names}
    many = bool(names) and _is_list(hints[names[-1]])
    if not len(needed) <= len(plain) or (len(plain) > len(names) and not many) or "" in plain:
        given = " and ".join(filter(None, plain)) or "none"
        raise ConfigError(f"{kind.command} takes {kind.takes}, and was given {given}. Try: {kind.command} --help")
    found = {name: _text(word, kind.command) for name, word in zip(names, plain, strict=False)}
    if many and len(plain) >= len(names):
        rest = [_text(word, kind.command) for word in plain[len(names) - 1 :]]
        found[names[-1]] = Located(value=rest, where=kind.command)
    return found


def _value(hint: Any, text: str, flag: str) -> Located:
    if _as_it_stands(hint):
        return _text(text, flag)
    found = parse_yaml(text, flag, flag=True)
    return found if found.value is not None else _text(text, flag)


def _as_it_stands(hint: Any) -> bool:
    """True if an option's value is a text; None, the type of a setting: it is not."""
    options = options_of(_each(hint))
    return str in options or Path in options or any(isinstance(word, str) for word in _chosen_from(options))


def _chosen_from(options: Collection[Any]) -> list[Any]:
    """The values that a setting of one of these types is chosen from, where one is a Literal."""
    return [word for option in options if typing.get_origin(option) is Literal for word in typing.get_args(option)]


def _without_null(hint: Any) -> Any:
    """The type hint of an option's value on the command line: without None, which stands for an option left out."""
    return Union[tuple(option for option in options_of(hint) if option is not type(None))]  # noqa: UP007  of a tuple


def _text(text: str, where: str) -> Located:
    return Located(value=text, where=where)


def _is_list(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple


def _each(hint: Any) -> Any:
    """The type of one value of an option that may be given more than once; of another one its type."""
    return typing.get_args(hint)[0] if _is_list(hint) else hint


def _key(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


# ---- help


def help_of(kind: type[Words], but: type[Words] = Words, **names: str) -> str:
    """A command's docstring for people: its tables are lists of options, with those that it shares with other classes
    at the end of the last one, except for those of ``but``. ``names``: what stands in braces there.
    """
    lines = joined_rows(inspect.cleandoc(kind.__doc__ or "").format(**names))
    meaning, hints, out = meanings(kind), hints_of(kind), list[str]()
    own = {key for line in lines for key in names_in(line)}
    last = max(n for n, line in enumerate(lines) if names_in(line)) if own else len(lines)
    for n, line in enumerate(lines):
        if not line.startswith("|"):
            out.append(line)
        elif keys := names_in(line):
            head, text = (cell.strip() for cell in line.strip("| ").split(" | "))
            out += _row([_named(hints[key], key, head) for key in keys], text + _default(kind, keys[0]))
        if n == last:
            shared = [key for key in _options(kind) if key not in (*own, *_options(but))]
            out += [
                line
                for key in shared
                for line in _row([_named(hints[key], key, "")], meaning[key] + _default(kind, key))
            ]
    return "\n".join(out) + "\n"


def columns() -> int:
    """Columns of the terminal, so far as lines of that length can be read."""
    return max(60, min(shutil.get_terminal_size((_READABLE, 24)).columns, _READABLE))


def _row(flags: Sequence[str], meaning: str) -> list[str]:
    head = f"  {', '.join(flags)}"
    text = meaning.replace("``", "").replace("None:", "if not given:")
    first = f"{head:<{_FLAG}}" if len(head) < _FLAG - 1 else ""
    wrapped = textwrap.wrap(text, columns(), initial_indent=first or " " * _FLAG, subsequent_indent=" " * _FLAG)
    return wrapped if first else [head, *wrapped]


def _named(hint: Any, key: str, head: str) -> str:
    """An option with a name for its value: the one that stands behind it in the table, or one by its type."""
    given = re.search(rf"``{key}`` ([^,`]+)", head)
    return f"{_flag(key)} {given[1].strip() if given else _value_name(hint)}".rstrip()


def _value_name(hint: Any) -> str:
    """Placeholder for a value in help and messages: ``N``, ``FILE``, or the words to choose from; empty: a switch."""
    options = {*options_of(_each(hint))} - {type(None)}
    if hint is bool:
        return ""
    if words := _chosen_from(options):
        return "|".join(map(str, words))
    if bool in options:
        return "[FILE]" if Path in options else "true|false"
    if {str, int} <= options:
        return "SIZE"
    return "FILE" if Path in options else "TEXT" if str in options else "N" if int in options else "X"


def _default(kind: type[Words], key: str) -> str:
    default = next(f.default for f in fields(kind) if f.name == key)
    return "" if default in (None, False, (), MISSING) else f" ({default})"
