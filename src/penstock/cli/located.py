"""YAML whose every value knows where it was written, so that an error can name file and line, or the flag.

Scalars follow YAML 1.2's core schema rather than PyYAML's 1.1: ``1e-3`` is a number, ``on`` and ``1:30`` are text.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from penstock.documents.text import SMALL, MalformedError, read_text
from penstock.documents.typed import shown
from penstock.errors import ConfigError

Plain = str | int | float | bool | None


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own class attribute, replaced, not shared


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - as above

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind, _pattern, _first in (
    ("bool", r"true|True|false|False", "tTfF"),
    ("null", r"null|~|", ["n", "~", ""]),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", "-+0123456789"),
    ("float", r"[-+]?([0-9][0-9_]*\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.inf|\.nan", "-+."),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"^(?:{_pattern})$"), list(_first))


@dataclass(frozen=True, kw_only=True)
class Located:
    """A value as written, and where: ``demo.yaml:12`` or ``--optimizer.lr``."""

    value: "Plain | dict[str, Located] | list[Located]"
    where: str

    def plain(self) -> Any:
        """The value without its places: scalars, lists and dicts."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    """Text with line breaks that PyYAML would read back as others is written with escapes."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if _BREAKS.search(text) else None)


_BREAKS = re.compile("[\x85\u2028\u2029]")
_Dumper.add_representer(str, _text)


def parse_yaml(text: str, name: str, *, flag: bool = False, written: bool = False) -> Located:
    """The one YAML document in ``text``. Places are ``name:line``, or just ``name`` for a flag's value, which is text
    where it begins as a pattern (``*.txt``) or with ``{run}``: a shell has taken the quotes that YAML asks for.
    ``written``: by Penstock, which spells out what somebody has given, so that it may be larger.

    Raises:
        ConfigError: not YAML, a key that is not text, a key given twice; or a document that is larger, deeper or
            (through aliases) holds more values than settings do.
    """
    if len(text) > (most := SMALL if written else _MOST_CHARACTERS):
        raise ConfigError(f"{name}: {len(text):,} characters are no settings: at most {most:,}")
    if _BRACKETS.search(text):  # PyYAML takes minutes to find that out
        raise ConfigError(f"{name}: {_TOO_DEEP}")
    if flag and text.startswith(_TEXTS) and text.isprintable():
        return Located(value=text, where=name)
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        raise ConfigError(
            f"{name}: this is not YAML: it has the character {error.character!r} at {error.position}"
        ) from None
    try:
        node = loader.get_single_node()
        if node is None:
            return Located(value=None, where=name)
        return _Reading(loader, name, flag=flag, most=len(text) if written else _MOST_VALUES).value(node, 0)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark is not None and not flag else name
        problem = getattr(error, "problem", None) or _first_line(error)
        line = "" if mark is None else text.splitlines()[mark.line : mark.line + 1]
        raise ConfigError(f"{where}: this is not YAML: {problem}{_to_quote(''.join(line))}") from None
    except RecursionError:
        raise ConfigError(f"{name}: {_TOO_DEEP}") from None
    finally:
        loader.dispose()


class _Reading:
    """Turns nodes into values that know their places. An alias stands for a copy of what it names."""

    def __init__(self, loader: _Loader, name: str, *, flag: bool, most: int) -> None:
        """``most``: values that there may be; without aliases they are no more than characters."""
        self._loader, self._name, self._flag, self._most = loader, name, flag, most
        self._values = 0

    def value(self, node: yaml.Node, depth: int) -> Located:
        where = self._where(node)
        self._values += 1
        if depth > _DEEPEST:
            raise ConfigError(f"{where}: {_TOO_DEEP}")
        if self._values > self._most:
            raise ConfigError(
                f"{where}: more than {self._most:,} values, counting those that aliases stand for: no settings"
            )
        if isinstance(node, yaml.CollectionNode) and node.tag not in _COLLECTIONS:
            raise ConfigError(f"{where}: the tag {shown(node.tag)} has no meaning here: settings are plain values")
        if isinstance(node, yaml.MappingNode):
            return Located(value=self._items(node, depth), where=where)
        if isinstance(node, yaml.SequenceNode):
            return Located(value=[self.value(item, depth + 1) for item in node.value], where=where)
        return Located(value=self._scalar(node), where=where)

    def _items(self, node: yaml.MappingNode, depth: int) -> dict[str, Located]:
        """The mapping, with those that ``<<`` merges into it behind its own keys, which come before theirs."""
        items: dict[str, Located] = {}
        places: dict[str, str] = {}
        for key_node, value_node in node.value:
            at = self._where(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{at}: a list or mapping is no key: a key is text")
            key = self._scalar(key_node)
            if not isinstance(key, str):
                raise ConfigError(f"{at}: the key {shown(key)} is not text: write it in quotes")
            if key in places:
                raise ConfigError(f"{at}: {key!r} is given twice, first at {places[key]}: keep one")
            places[key], items[key] = at, self.value(value_node, depth + 1)
        if node.flow_style and [(key, item.value) for key, item in items.items()] == [(RUN[1:-1], None)]:
            raise ConfigError(f'{self._where(node)}: {RUN} without quotes is a mapping: write "{RUN}"')
        if (merged := items.pop(_MERGE, None)) is None:
            return items
        for other in merged.value if isinstance(merged.value, list) else [merged]:
            if not isinstance(other.value, dict):
                raise ConfigError(f"{places[_MERGE]}: {_MERGE} merges mappings, not {shown(other.plain())}")
            items = {**other.value, **items}
        return items

    def _where(self, node: yaml.Node) -> str:
        return self._name if self._flag else f"{self._name}:{node.start_mark.line + 1}"

    def _scalar(self, node: yaml.Node) -> Plain:
        """A value of the kinds that JSON has: a tag may ask for others."""
        try:
            value = self._loader.construct_object(node, deep=True)
        except (ValueError, LookupError, TypeError, AttributeError) as error:  # a tag that does not fit, many digits
            raise ConfigError(f"{self._where(node)}: this cannot be read: {_first_line(error)}") from None
        if not isinstance(value, str | int | float | bool | None):
            raise ConfigError(f"{self._where(node)}: a {type(value).__name__} is no setting: write text in quotes")
        return value


def _to_quote(line: str) -> str:
    """Advice for a line that has a text where YAML sees the beginning of something else."""
    found = _UNQUOTED.search(line)
    return "" if found is None else f': write it in quotes, "{found[1]}"'


_MERGE = "<<"
RUN = "{run}"
"""Words in a path of ``budget.disk`` that stand for the run."""
_TEXTS = ("*", RUN)
_UNQUOTED = re.compile(r"(?:^|[:,\[-])\s*((?:\*|\{run\})[^\s,\]\}]*)")
_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_MOST_CHARACTERS = 1 << 16
_MOST_VALUES = 20_000
_DEEPEST = 32
_BRACKETS = re.compile(rf"(?:[\[{{]\s*(?:\w+:\s*)?){{{_DEEPEST + 1}}}")
_TOO_DEEP = f"lists and mappings are within each other more than {_DEEPEST} deep: no settings are"


def is_plain_text(value: str) -> bool:
    """True if a text can be the name of a file: it has no NUL, and no half of a character."""
    try:
        return "\0" not in value and bool(value.encode() or True)
    except UnicodeEncodeError:
        return False


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def read_yaml(path: Path) -> Located:
    """The YAML document in a file.

    Raises:
        ConfigError: the file cannot be read, or is not YAML.
    """
    try:
        text = read_text(path, 4 * _MOST_CHARACTERS)
    except (OSError, MalformedError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot read the settings in {path}: {reason}") from None
    return parse_yaml(text, str(path))


def dump_yaml(value: Mapping[str, Any] | Sequence[Any] | Plain) -> str:
    """YAML that ``parse_yaml`` reads back to the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
