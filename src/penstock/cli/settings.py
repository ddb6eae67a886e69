"""Settings files and flags, read strictly into the dataclasses of ``penstock.config``.

A file and the flags after it become one tree of located values; the tree is read into dataclasses by their type
hints. So there is one definition of every setting, and one place that refuses what is not one.
"""

import difflib
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from penstock.cli.located import RUN, Located, dump_yaml, is_plain_text, parse_yaml, read_yaml
from penstock.config import TrainConfig
from penstock.config.elsewhere import counterpart
from penstock.config.meanings import by_need, is_required, meanings
from penstock.documents.typed import NAMES, fits, hints_of, shown
from penstock.errors import ConfigError

T = TypeVar("T")

_NAMES = {**NAMES, type(None): "null"}


def load(path: Path, flags: Sequence[tuple[str, str]] = ()) -> TrainConfig:
    """The settings in a file, with flags (``("optimizer.lr", "1e-3")``) laid over them, ``{run}`` filled in.

    Raises:
        ConfigError: unknown or missing settings, wrong types, impossible values, with the file's line or the flag.
    """
    config = _load(read_yaml(path), str(path), flags)
    for disk in config.budget.disk_paths:
        check_braces("budget.disk=", str(disk), known=os.path.abspath(config.run))
    if RUN in config.run:
        raise ConfigError(f"run={config.run!r}: {RUN} stands for this folder in budget.disk: give it another name")
    if config.data.prepared is not None and RUN in config.data.prepared:
        raise ConfigError(
            f"data.prepared={config.data.prepared!r}: {RUN} stands for the run's folder in budget.disk alone. Without "
            "data.prepared the token ids are there, and no other run's"
        )
    return config


def load_text(text: str, name: str, flags: Sequence[tuple[str, str]] = ()) -> TrainConfig:
    """The settings in a text that Penstock has written, with flags laid over them. ``name``: where they are from, for
    messages."""
    return _load(parse_yaml(text, name, written=True), name, flags)


def _load(tree: Located, name: str, flags: Sequence[tuple[str, str]]) -> TrainConfig:
    if tree.value is None:
        raise ConfigError(f"{name} is empty: it must hold the settings of a run")
    tree = _spelled_out(tree)
    for key, text in flags:
        tree = _overlay(tree, key.replace("-", "_").split("."), parse_yaml(text, f"--{key}", flag=True))
    config = _at_home(read(TrainConfig, tree, section=""))
    paths = [_filled_in(str(p), config.run) for p in config.budget.disk_paths]
    disk = None if not paths else paths[0] if len(paths) == 1 else tuple(paths)
    return replace(config, budget=replace(config.budget, disk=disk))


def _at_home(config: TrainConfig) -> TrainConfig:
    """The settings with ``~`` at the beginning of a path as the home folder, so that all who use it see the same place.
    The disk's and the sources' are for those who read them."""
    data, model, schedule = config.data, config.model, config.schedule
    names = {key: getattr(data, key) for key in ("tokenizer", "chat_template", "prepared")}
    models = {key: getattr(model, key) for key in ("path", "config")}
    return replace(
        config,
        run=os.path.expanduser(config.run),
        schedule=Path(os.path.expanduser(schedule)) if isinstance(schedule, Path) else schedule,
        data=replace(data, **_expanded(names)),
        model=replace(model, **_expanded(models)),
    )


def _expanded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: os.path.expanduser(value) for key, value in values.items() if isinstance(value, str)}


def _filled_in(path: str, run: str) -> str:
    """``{run}`` is the run's folder where a path begins with it, and further on the folder's name: each run has its
    own directory on a drive, wherever its folder is."""
    name = Path(os.path.abspath(run)).name
    first = path.replace(RUN, run, 1) if path.startswith(RUN) else path
    return first.replace(RUN, name)


def check_braces(key: str, path: str, *, known: str = RUN) -> None:
    """Raises ConfigError: something is in braces in a path that is none of what is ``known``: ``{run}``, or in a path
    that is filled in the run's own name. ``key``: what the path was given as."""
    for found in re.findall(r"\{\w*\}", path):
        if found not in known:
            raise ConfigError(f"{key}{path!r}: {found} stands for nothing; {RUN} does, for the run's folder")


def dump(config: TrainConfig) -> str:
    """The settings as YAML that ``load`` reads back to an equal ``TrainConfig``."""
    return dump_yaml(plain(config))


def plain(config: TrainConfig) -> dict[str, Any]:
    """The settings as nested dictionaries of scalars and lists. Those in a list (``data.sources``), of which there
    may be hundreds, are without what is None."""
    found: dict[str, Any] = _plain(config)
    return {f.name: found[f.name] for f in by_need(TrainConfig)}


def flat(values: Mapping[str, Any], prefix: str = "", *, numbered: bool = False) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything in nested mappings; ``numbered``: and in lists of such, by their numbers."""
    for key, value in values.items():
        if numbered and isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            value = {str(n): item for n, item in enumerate(value)}
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.", numbered=numbered)
        else:
            yield f"{prefix}{key}", value


def _plain(value: Any, *, listed: bool = False) -> Any:
    if is_dataclass(value):
        given = ((f, getattr(value, f.name)) for f in fields(value))
        return {f.name: _plain(item) for f, item in given if not (listed and f.default is None is item)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, listed=True) for item in value]
    return str(value) if isinstance(value, Path) else value


def _spelled_out(tree: Located) -> Located:
    """The file with sections that are written as a plain text (``model: PATH``) written out, so that a flag can add to
    them."""
    if not isinstance(tree.value, dict):
        return tree
    hints, items = hints_of(TrainConfig), dict(tree.value)
    for key, item in items.items():
        short = getattr(section_of(hints[key]), "shorthand", None) if key in hints else None
        if short is not None and isinstance(item.value, str):
            items[key] = Located(value={short: item}, where=item.where)
    return Located(value=items, where=tree.where)


def _overlay(tree: Located, path: Sequence[str], new: Located) -> Located:
    """``tree`` with the value at ``path`` replaced; sections on the way that are missing or null are made."""
    if not path:
        return new
    if tree.value is not None and not isinstance(tree.value, dict):
        raise ConfigError(f"{new.where}: {tree.where} gives {shown(tree.plain())} there, which has no settings inside")
    items = dict(tree.value or {})
    items[path[0]] = _overlay(items.get(path[0], Located(value=None, where=new.where)), path[1:], new)
    return Located(value=items, where=tree.where)


def read(cls: type[T], tree: Located, section: str, hints: Mapping[str, Any] | None = None) -> T:
    """An instance of the dataclass ``cls`` from a mapping. ``section`` is its dotted name, for messages.
    ``hints``: what the fields may be given as, where that is less than their types are.

    Raises:
        ConfigError: as in ``load``.
    """
    assert is_dataclass(cls)
    named = section or ("the file" if cls is TrainConfig else "the mapping")
    if not isinstance(tree.value, dict):
        raise ConfigError(f"{tree.where}: {named} must be a mapping, not {shown(tree.plain())}")
    known = {f.name: f for f in by_need(cls)}
    for key, item in tree.value.items():
        if key not in known:
            of_the_file = section or cls is TrainConfig
            there = (counterpart(key, section, known) or _elsewhere(key, section)) if of_the_file else None
            said = unknown(key, list(known), takes=named, form=_dotted(section, "{}"), there=there)
            raise ConfigError(f"{item.where}: {said}")
    missing = [name for name, f in known.items() if name not in tree.value and is_required(f)]
    if missing:
        raise ConfigError(f"{tree.where}: {named} lacks {', '.join(missing)}")
    hints = hints_of(cls) if hints is None else hints
    values = {key: _convert(item, hints[key], _dotted(section, key)) for key, item in tree.value.items()}
    try:
        return cls(**values)
    except ConfigError as error:
        where, said = _blame(tree, str(error), section), str(error)
        beside = [] if where.startswith("--") else [*_flags_named(tree, said, section)]
        more = f"; given as a flag: {', '.join(beside)}" if beside else ""
        raise ConfigError(_said_at(where, f"{said}{more}")) from None


def _dotted(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def _elsewhere(key: str, section: str) -> str | None:
    """A hint where settings of this name are further in or further out than ``section``; None: there is none."""
    names = (setting.name.rpartition(".") for setting in settings_below(TrainConfig))
    places = [place for place, _, name in names if name == key and (_holds(place, section) or _holds(section, place))]
    found = (_dotted(place, key) for place in sorted(places, key=lambda place: place.count(".")))
    return f"here it is {' or '.join(found)}" if places else None


def _holds(section: str, other: str) -> bool:
    return not section or f"{other}.".startswith(f"{section}.")


def unknown(
    key: str,
    known: Sequence[str],
    *,
    takes: str,
    what: str = "setting",
    form: str = "{}",
    there: str | None = None,
) -> str:
    """The message for a key that is none of the ``known`` ones. ``takes``: who takes these; ``what``: a key is called,
    and ``form``: it is written, in the message. ``there``: the counterpart here of a key that is another tool's.
    """
    if there is not None:
        return f"there is no {what} {form.format(key)}; {there}"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    names = ", ".join(known if what == "setting" else map(form.format, known))
    listed = f"{takes} takes {names or f'no {what}s'}"
    hint = f"did you mean {form.format(near[0])}? ({listed})" if near else listed
    return f"there is no {what} {form.format(key)}; {hint}"


def _blame(tree: Located, message: str, section: str) -> str:
    """The place of the setting that a message of a dataclass's own check begins with, else of the section."""
    place = tree
    for key in re.split(r"[=: ]", message.removeprefix(section).lstrip("."), maxsplit=1)[0].split("."):
        if not isinstance(place.value, dict) or key not in place.value:
            break
        place = place.value[key]
    return place.where


def _flags_named(tree: Located, message: str, section: str, *, own: bool = True) -> Iterator[str]:
    """The flags of settings that such a message names: with their sections, or a section's ``own`` in what it says
    before any advice."""
    fault = message.partition(": ")[0]
    for key, item in tree.value.items() if isinstance(tree.value, dict) else ():
        name = _dotted(section, key)
        if isinstance(item.value, dict):
            yield from _flags_named(item, message, name, own=False)
        elif item.where.startswith("--"):
            with_section = bool(section) and _names(message, name)
            if with_section or (own and _names(fault, key)):
                yield item.where


def _names(message: str, setting: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(setting)}(?!\w|\.\w)", message) is not None


def _said_at(where: str, message: str) -> str:
    """A message that begins with its setting, and where that was given: a flag is the setting, and said once."""
    key = where.removeprefix("--").replace("-", "_")
    if where.startswith("--") and re.match(rf"{re.escape(key)}[=: ]", message):
        return where + message.removeprefix(key)
    return f"{where}: {message}"


def _convert(item: Located, hint: Any, key: str) -> Any:
    """``item`` as the type ``hint``, or a ConfigError that says what ``key`` must be."""
    if isinstance(item.value, str) and not is_plain_text(item.value):
        raise ConfigError(f"{item.where}: {key} has a character that is none (NUL, or half of one): {item.plain()!a}")
    options = options_of(hint)
    for option in options:
        if is_dataclass(option) and isinstance(option, type):
            if isinstance(item.value, dict):
                return read(option, item, key)
            if isinstance(item.value, str) and (short := getattr(option, "shorthand", None)) is not None:
                return read(option, Located(value={short: item}, where=item.where), key)
        found, value = _match(item, option, key)
        if found:
            return value
    raise ConfigError(_said_at(item.where, f"{key} must be {_expected(options)}, not {shown(item.plain())}"))


def _match(item: Located, hint: Any, key: str) -> tuple[bool, Any]:
    """True if ``item`` is of one type that is no union, and its value as that type."""
    value = item.value
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(value, dict) and origin is tuple and args[-1] is Ellipsis and is_dataclass(args[0]):
        value = [item]  # one mapping is a list of it
    if isinstance(value, list) and isinstance(origin, type) and issubclass(origin, Sequence):
        inner = list(args) if origin is tuple and args[-1] is not Ellipsis else [args[0]] * len(value)
        return len(inner) == len(value), tuple(_convert(v, h, key) for v, h in zip(value, inner, strict=False))
    if isinstance(value, dict):
        return isinstance(origin, type) and issubclass(origin, Mapping), item.plain()
    found = fits(value, str if hint is Path else hint)
    return found, hint(value) if found and hint in (float, Path) else value


def _expected(options: Sequence[Any]) -> str:
    names: list[str] = []
    for hint in options:
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin is Literal:
            names.append("one of " + ", ".join(map(str, args)))
        elif origin is tuple and args[-1] is not Ellipsis:
            names.append(f"a list of {len(args)}")
        elif origin is tuple or (isinstance(origin, type) and issubclass(origin, Sequence)):
            names.append("a list")
        elif is_dataclass(hint) or origin is not None:
            names += ["text"] * hasattr(hint, "shorthand") + ["a mapping"]
        else:
            names.append(_NAMES[hint])
    if _NAMES[float] in names:  # a whole number is one
        names = [name for name in names if name != _NAMES[int]]
    return " or ".join(dict.fromkeys(names))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting, or a section of them, for people. ``name``: dotted. ``section``: its class, of one that is, or may be,
    a section. ``kind``: what it must be; empty: nothing but a section. ``default``: as YAML has it, or when it is
    required. ``meaning``: from the docstrings."""

    name: str
    hint: Any
    section: type | None
    kind: str
    default: str
    meaning: str

    @property
    def about(self) -> str:
        """The meaning of a section: the first paragraph of its docstring."""
        return " ".join((self.section.__doc__ or "").split("\n\n")[0].replace("``", "").split())


def settings_below(cls: type, section: str = "") -> list[Setting]:
    """Every setting below ``cls``, in the order in which people look for them; each section before its own."""
    assert is_dataclass(cls)
    hints, meaning, found = hints_of(cls), meanings(cls), list[Setting]()
    for f in by_need(cls):
        hint, inner = hints[f.name], section_of(hints[f.name])
        others = [option for option in options_of(hint) if inner is None or option not in (inner, type(None))]
        setting = Setting(
            name=_dotted(section, f.name),
            hint=hint,
            section=inner,
            kind=" or ".join([_expected(others), *(["a section"] if inner else [])]) if others else "",
            default=_default(f),
            meaning=meaning.get(f.name, "").replace("``", "").replace("None:", "null:"),
        )
        found.append(setting)
        if inner is not None:
            within = setting.default if setting.default == "required" else "required if the section is there"
            below = settings_below(inner, setting.name)
            found += [replace(each, default=within) if each.default == "required" else each for each in below]
    return found


def _default(f: Field[Any]) -> str:
    """The default as YAML has it; of a section that has one for each of its settings nothing."""
    if f.default is MISSING:
        return "required" if is_required(f) else ""
    return dump_yaml([_plain(f.default)]).removeprefix("-").strip()


def section_of(hint: Any) -> type | None:
    """The dataclass of a setting that is, or may be, a section."""
    return next((option for option in options_of(hint) if isinstance(option, type) and is_dataclass(option)), None)


def options_of(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
