"""The kinds of examples, and a check that one has what its kind needs."""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.config.data import Kind
from penstock.data.sources.reader import Example
from penstock.errors import ConfigError

_NEEDS: dict[Kind, tuple[str, ...]] = {
    "text": ("text",),
    "completion": ("prompt", "completion"),
    "chat": ("messages",),
}
_KNOWN = "text (for plain text), prompt and completion, or messages (for chat)"


def kind_of(example: Example) -> Kind:
    """The kind of an example, by its fields.

    Raises:
        ConfigError: they say none, or several.
    """
    kinds = [kind for kind, names in _NEEDS.items() if all(example.fields.get(name) is not None for name in names)]
    if len(kinds) == 1:
        return kinds[0]
    found = ", ".join(map(repr, example.fields)) or "no fields"
    if kinds:
        raise ConfigError(f"{example.place}: it has {found}, so it may be {' or '.join(kinds)}: say which (kind)")
    raise ConfigError(f"{example.place}: it has {found}, and none of the fields that are read: {_KNOWN}")


def check(example: Example, kind: Kind, *, answers: bool) -> None:
    """Raise ConfigError unless an example has what its kind needs, of the right types. ``answers``: with answers."""
    for name in _NEEDS[kind]:
        if example.fields.get(name) is None:
            found = ", ".join(map(repr, example.fields)) or "no fields"
            raise ConfigError(f"{example.place}: {_called(kind)} needs {name!r}, and this has {found}")
    if kind == "chat":
        _check_messages(example, answers=answers)
        return
    for name in _NEEDS[kind]:
        if not isinstance(value := example.fields[name], str):
            raise ConfigError(f"{example.place}: {name!r} must be text, not {_type(value)}")
    if kind == "completion" and not example.fields["completion"]:
        raise ConfigError(f"{example.place}: 'completion' is empty: there is nothing to learn")


def _check_messages(example: Example, *, answers: bool) -> None:
    messages = example.fields["messages"]
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ConfigError(f"{example.place}: 'messages' must be a list of messages, not {_type(messages)}")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ConfigError(f"{example.place}: message {number} must be an object with 'role' and 'content'")
        content = message.get("content")
        if not isinstance(content, str | Sequence) and not message.get("tool_calls"):
            raise ConfigError(f"{example.place}: the 'content' of message {number} must be text, not {_type(content)}")
    if answers and not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise ConfigError(f"{example.place}: no message is the assistant's (only {roles}): there is nothing to learn")


def _called(kind: Kind) -> str:
    return {"text": "a text", "completion": "a prompt with its completion", "chat": "a chat"}.get(kind, kind)


def _type(value: Any) -> str:
    names = {type(None): "null", dict: "an object", list: "a list", bool: "true or false", str: "text"}
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "a number"
    empty = "an empty list" if value == [] else None
    return empty or names.get(type(value), type(value).__name__)
