"""YAML whose every value knows where it was written, so that an error can name file and line, or the flag.

Scalars follow YAML 1.2's core schema rather than PyYAML's 1.1: ``1e-3`` is a number, ``on`` and ``1:30`` are text.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

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


def parse_yaml(text: str, name: str, *, flag: bool = False) -> Located:
    """The one YAML document in ``text``. Places are ``name:line``, or just ``name`` for a flag's value.

    Raises:
        ConfigError: not YAML, a key that is not text, or a key given twice.
    """
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        raise ConfigError(
            f"{name}: this is not YAML: it has the character {error.character!r} at {error.position}"
        ) from None

    def convert(node: yaml.Node) -> Located:
        where = name if flag else f"{name}:{node.start_mark.line + 1}"
        if isinstance(node, yaml.MappingNode):
            items: dict[str, Located] = {}
            for key_node, value_node in node.value:
                key = loader.construct_object(key_node, deep=True)
                if not isinstance(key, str):
                    raise ConfigError(f"{where}: the key {key!r} is not text: write it in quotes")
                if key in items:
                    at = where if flag else f"{name}:{key_node.start_mark.line + 1}"
                    raise ConfigError(f"{at}: {key!r} is given twice, first at {items[key].where}: keep one")
                items[key] = convert(value_node)
            return Located(value=items, where=where)
        if isinstance(node, yaml.SequenceNode):
            return Located(value=[convert(item) for item in node.value], where=where)
        return Located(value=loader.construct_object(node, deep=True), where=where)

    try:
        node = loader.get_single_node()
        return Located(value=None, where=name) if node is None else convert(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark is not None and not flag else name
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{where}: this is not YAML: {problem}") from None
    finally:
        loader.dispose()


def read_yaml(path: Path) -> Located:
    """The YAML document in a file.

    Raises:
        ConfigError: the file cannot be read, or is not YAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the settings in {path}: {reason}") from None
    return parse_yaml(text, str(path))


def dump_yaml(value: Mapping[str, Any] | Sequence[Any] | Plain) -> str:
    """YAML that ``parse_yaml`` reads back to the same value."""
    # Unicode is escaped: PyYAML writes some of its line breaks (such as U+0085) as they are, and reads them as spaces.
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=120)
