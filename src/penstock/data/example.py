"""Examples of any form as one of three kinds, checked for what their kind needs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.config.data import INSTRUCTION_CHAT, INSTRUCTION_PROMPT, Form
from penstock.data import instructions
from penstock.data.conversations import Message, messages_of, type_of
from penstock.data.forms import lacks
from penstock.data.sources.reader import Example
from penstock.errors import ConfigError


def read_as(example: Example, form: Form, *, answers: bool) -> Example:
    """An example with the fields of its kind: ``text``; ``prompt`` and ``completion``; ``messages`` and
    ``tools``. ``answers``: it must have some.

    Raises:
        ConfigError: it lacks something, or has something of another type.
    """
    lacks(example, form)
    if form.kind == "chat":
        messages = instructions.chat(example) if form is INSTRUCTION_CHAT else messages_of(example, form.needs[0])
        if answers:
            _check_answers(messages, example.place)
        return replace(example, fields={"messages": messages, "tools": example.fields.get("tools")})
    if form is INSTRUCTION_PROMPT:
        prompt, completion = instructions.prompt_and_completion(example)
        return replace(example, fields={"prompt": prompt, "completion": completion})
    for name in form.needs:
        if not isinstance(value := example.fields[name], str):
            raise ConfigError(f"{example.place}: {example.called(name)} must be text, not {type_of(value)}")
    if form.kind == "completion" and not example.fields["completion"]:
        raise ConfigError(f"{example.place}: {example.called('completion')} is empty: there is nothing to learn")
    return example


def _check_answers(messages: Sequence[Message], place: str) -> None:
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise ConfigError(f"{place}: no message is the assistant's (only {roles}): there is nothing to learn")


def texts_in(example: Example) -> list[str]:
    """The texts of an example that has been read."""
    fields: Mapping[str, Any] = example.fields
    if "messages" in fields:
        return [m["content"] for m in fields["messages"] if isinstance(m.get("content"), str)]
    return [fields[name] for name in ("text", "prompt", "completion") if isinstance(fields.get(name), str)]
