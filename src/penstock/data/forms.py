"""The forms that rows have, told apart by their fields: Penstock's own, ShareGPT's and Alpaca's."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.config.data import (
    CHAT,
    COMPLETION,
    INSTRUCTION_CHAT,
    INSTRUCTION_PROMPT,
    TEXT,
    Form,
    Kind,
    SourceConfig,
)
from penstock.data.sources.reader import TURNS, Example
from penstock.errors import ConfigError

CHATS = tuple(replace(CHAT, needs=(name,)) for name in (*CHAT.needs, *TURNS))
_ALPACA = (INSTRUCTION_CHAT, INSTRUCTION_PROMPT)

_KNOWN = (
    "text (for plain text), prompt and completion, messages or conversations (for chat), or instruction and output. "
    "If they are there under other names, say which (data.sources: fields)"
)


def form_of_source(source: SourceConfig, first: Example | None, *, template: bool) -> tuple[Form, str | None]:
    """The form of a source, which is that of its first example, and what is to be said of it (``recognised``).

    Raises:
        ConfigError: there is no example, or as ``form_of``.
    """
    if first is None:
        raise ConfigError(f"data: {source.path!r} has no documents: there is nothing to train on")
    form = form_of(first, source.kind, template=template)
    return form, recognised(first, form, source.kind, template=template)


def form_of(example: Example, kind: Kind | None, *, template: bool) -> Form:
    """The form of an example. ``kind``: the one asked for. ``template``: whether the tokenizer can render a chat, which
    an instruction with its output then is.

    Raises:
        ConfigError: the example's fields say none, or several.
    """
    forms = _forms(example, kind, template=template)
    found = [form for form in forms if _is(example, form)]
    alpaca = next((form for form in found if form in _ALPACA), None)
    by_kind = {form.kind: form for form in reversed(found) if form is not alpaca}
    if alpaca is not None and not by_kind.keys() & {"chat", "completion"}:
        by_kind[alpaca.kind] = alpaca
    if len(by_kind) == 1:
        return next(iter(by_kind.values()))
    if by_kind:
        kinds = " or ".join(kind for kind in ("text", "completion", "chat") if kind in by_kind)
        raise ConfigError(f"{example.place}: it has {example.listed}, so it may be {kinds}: say which (kind)")
    if kind is not None or example.names is not None:
        lacks(example, forms[0])
    raise ConfigError(f"{example.place}: it has {example.listed}, and none of the fields that are read: {_KNOWN}")


def _forms(example: Example, kind: Kind | None, *, template: bool) -> list[Form]:
    """The forms that an example may have, by the settings alone."""
    alpaca = INSTRUCTION_CHAT if kind == "chat" or (kind is None and template) else INSTRUCTION_PROMPT
    forms = [form for form in (TEXT, COMPLETION, *CHATS, alpaca) if kind in (None, form.kind)]
    if example.names is None:
        return forms
    return [form for form in forms if example.names.keys() <= {*form.names}]


def _is(example: Example, form: Form) -> bool:
    return _missing(example, form) is None and _fits(example, form)


def _missing(example: Example, form: Form) -> str | None:
    """The first field of those that a form needs which an example has not."""
    return next((name for name in form.needs if example.fields.get(name) is None), None)


def lacks(example: Example, form: Form) -> None:
    """Raises:
    ConfigError: the example has not all that the form needs.
    """
    name = _missing(example, form)
    if name is not None and name in example.fields:
        raise ConfigError(f"{example.place}: {form.called} needs {example.called(name)}, and here that is empty (null)")
    if name is not None:
        raise ConfigError(f"{example.place}: {form.called} needs {example.called(name)}, and this has {example.listed}")


def _fits(example: Example, form: Form) -> bool:
    """True if the field is a list, or is no field like ``conversations``: others use these names for anything."""
    return form.needs[0] not in TURNS or is_list(example.fields[form.needs[0]])


def is_list(value: Any) -> bool:
    """True if a value is a list, or JSON text of one, as a table has it."""
    return value.lstrip().startswith("[") if isinstance(value, str) else isinstance(value, Sequence)


def recognised(example: Example, form: Form, kind: Kind | None, *, template: bool) -> str | None:
    """A note on the form in which a source is read; None: it is Penstock's own, by its own names, and the only one that
    the rows fit. ``kind``, ``template``: as in ``form_of``.
    """
    others = [other for other in _forms(example, kind, template=template) if other is not form and _is(example, other)]
    words = _words(example, form, template=template)
    if not others:
        return words
    left = ", ".join(_named(example, other.needs) for other in others)
    theirs = {name if name not in TURNS else "messages": name for name in others[0].needs}
    fields = ", ".join(f"{here}: {name}" for here, name in {**(example.names or {}), **theirs}.items())
    read = words or f"{form.called} ({_named(example, form.needs)})"
    return f"{read}, and not what rows have as {left}, which fields: {{{fields}}} reads instead"


def _words(example: Example, form: Form, *, template: bool) -> str | None:
    if form in _ALPACA:
        fields = [name for name in ("instruction", "input", "output") if name in example.fields]
        how = "each a chat in the tokenizer's template" if form is INSTRUCTION_CHAT else "in Alpaca's words"
        how += "" if template or form is INSTRUCTION_CHAT else ", as the tokenizer has no chat template"
        return f"Alpaca's form ({_named(example, fields)}), {how}"
    if form.kind == "chat":
        name = form.needs[0]
        turns = example.fields[name]
        first = turns[0] if isinstance(turns, Sequence) and not isinstance(turns, str) and turns else None
        if isinstance(first, Mapping) and first.get("from") is not None:
            return f"ShareGPT's form ({_named(example, [name])}: from, value), each a chat"
        return f"chats ({_named(example, [name])})" if name in TURNS or example.names else None
    return f"{form.kind} ({_named(example, form.needs)})" if example.names else None


def _named(example: Example, names: Sequence[str]) -> str:
    theirs = example.names or {}
    return ", ".join(f"{theirs[name]} as {name}" if name in theirs else name for name in names)
