"""Chats as files have them, as messages with ``role`` and ``content``.

Beside Penstock's own form, which is the chat template's, that is ShareGPT's: turns with ``from`` and ``value``, whose
names for who speaks and for calls of tools are those of FastChat, axolotl and LLaMA-Factory.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.data.sources.reader import Example
from penstock.documents.text import MalformedError, parse_json
from penstock.errors import ConfigError

Message = Mapping[str, Any]

ROLES: Mapping[str, str] = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model", "bot"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "tool_response", "function_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
}
"""Roles by ShareGPT's names of speakers, in small letters. ``call``: the assistant, who calls tools. ``function`` is a
call to some and a result to others, so it is not here."""


def messages_of(example: Example, field: str) -> list[Message]:
    """The messages of a chat in ``field``, behind the row's ``system``, if it has one and they begin with none.

    Raises:
        ConfigError: they are no messages.
    """
    turns = list_in(example, field)
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise ConfigError(f"{example.place}: {example.called(field)} must be a list of messages, not {type_of(turns)}")
    messages = [_message(turn, example.place, number) for number, turn in enumerate(turns, start=1)]
    for number, message in enumerate(messages, start=1):
        if message["role"] == "assistant" and (key := _counts_otherwise(message)) is not None:
            raise ConfigError(
                f"{example.place}: message {number} is an answer that is not to be trained as others are ({key}="
                f"{message[key]!r}), and all answers of a chat are: leave the chat out, or end it before that message"
            )
    if messages[0]["role"] == "system":
        return messages
    return [*system_of(example), *messages]


def _counts_otherwise(answer: Message) -> str | None:
    """The key by which an answer is not to count in the loss, or with a weight of its own."""
    if answer.get("weight") not in (None, 1):
        return "weight"
    return next((key for key in ("train", "loss") if answer.get(key) in (False, 0)), None)


def list_in(example: Example, field: str) -> Any:
    """A field's value; of JSON text of a list, as a table has it, the list.

    Raises:
        ConfigError: such text is not JSON.
    """
    value = example.fields.get(field)
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    return _parsed(value, f"{example.place}: {example.called(field)} is text that cannot be read")


def system_of(example: Example) -> list[Message]:
    """The system's message that a row has in a field of its own.

    Raises:
        ConfigError: it is no text.
    """
    text = example.fields.get("system")
    if text is not None and not isinstance(text, str):
        raise ConfigError(f"{example.place}: {example.called('system')} must be text, not {type_of(text)}")
    return [{"role": "system", "content": text}] if text else []


def tools_of(example: Example) -> Any:
    """The tools of a chat, as the template takes them; None: there are none. Of an empty list, which tables have in
    such rows, some templates would write that there are tools.

    Raises:
        ConfigError: they are text that is not JSON.
    """
    tools = example.fields.get("tools")
    if isinstance(tools, str):
        says = f"{example.place}: {example.called('tools')} is text that cannot be read"
        tools = _parsed(tools, says) if tools.strip() else None
    return tools or None


def _message(turn: Any, place: str, number: int) -> Message:
    found: Message = turn if isinstance(turn, Mapping) else {}
    speaker = found.get("from")
    if found.get("role") is None and isinstance(speaker, str):
        return _translated(found, speaker, f"{place}: message {number}")
    if not isinstance(found.get("role"), str):
        has = f": it has {', '.join(map(repr, found))}" if found else f", not {type_of(turn)}"
        raise ConfigError(
            f"{place}: message {number} must be an object with 'role' and 'content', or with 'from' and 'value'{has}"
        )
    content = found.get("content")
    if not isinstance(content, str | Sequence) and not found.get("tool_calls"):
        raise ConfigError(f"{place}: the 'content' of message {number} must be text, not {type_of(content)}")
    return found


def _translated(turn: Message, speaker: str, place: str) -> Message:
    """A turn in ShareGPT's form as a message. ``place``: for messages to people."""
    role = ROLES.get(speaker.strip().lower())
    if role is None:
        raise ConfigError(f"{place} is from {speaker!r}, which is no known speaker: write one of {', '.join(ROLES)}")
    rest = {key: value for key, value in turn.items() if key not in ("from", "value", "role")}
    content = turn.get("value", turn.get("content"))
    if not isinstance(content, str):
        raise ConfigError(f"{place}: its 'value' must be text, not {type_of(content)}")
    if role != "call":
        return {**rest, "role": role, "content": content}
    return {**rest, "role": "assistant", "content": "", "tool_calls": _calls(content, place)}


def _calls(text: str, place: str) -> list[Message]:
    """The calls of tools in a turn, as chat templates take them."""
    value = _parsed(text, f"{place} is a call of a tool, and its 'value' is not JSON")
    calls: list[Any] = value if isinstance(value, list) and value else [value]
    for call in calls:
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str) or "arguments" not in call:
            raise ConfigError(
                f"{place} is a call of a tool, and its 'value' must be JSON with 'name' and 'arguments', or a list of "
                f"such, not {text[:80]!r}"
            )
    return [{"type": "function", "function": {**call, "arguments": _arguments(call, place)}} for call in calls]


def _arguments(call: Message, place: str) -> Any:
    """Arguments are an object, or its JSON, which templates would write as a text."""
    given = call["arguments"]
    says = f"{place} is a call of a tool, and its 'arguments' are not JSON"
    return _parsed(given, says) if isinstance(given, str) else given


def with_arguments(messages: Sequence[Message], change: Callable[[str], Any]) -> list[Message]:
    """The messages, with what ``change`` makes of arguments of calls of tools that are text."""

    def changed(call: Any) -> Any:
        if not isinstance(call, Mapping):
            return call
        given = call.get("arguments")
        inner = {"function": changed(call["function"])} if "function" in call else {}
        return {**call, **inner, **({"arguments": change(given)} if isinstance(given, str) else {})}

    return [
        {**message, "tool_calls": [changed(call) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def object_in(text: str) -> Any:
    """The object that a text of JSON is; of any other text, that text."""
    try:
        value = parse_json(text, finite=False)
    except MalformedError:
        return text
    return value if isinstance(value, Mapping) else text


def _parsed(text: str, otherwise: str) -> Any:
    """The value of a text of JSON; ``otherwise``: said of one that is none."""
    try:
        return parse_json(text, finite=False)
    except MalformedError as error:
        raise ConfigError(f"{otherwise}: {error}") from None


def type_of(value: Any) -> str:
    """The type of a value of JSON, in words."""
    names = {type(None): "null", dict: "an object", list: "a list", bool: "true or false", str: "text"}
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "a number"
    empty = "an empty list" if value == [] else None
    return empty or names.get(type(value), type(value).__name__)
