"""Chats to tokens: the tokenizer's chat template, and which tokens are the assistant's.

A template that marks answers (``{% generation %}``) says it itself. Of any other it is found out by rendering the chat
up to each answer: what the whole has beyond that, up to where the answer ends, is the answer. This holds only if
a chat's rendering begins with the rendering of its beginning, which is checked for each chat. Where there is nothing to
render before an answer, or the template opens no turn of the assistant's there, the answer begins where that of another
answer would differ.
"""

import copy
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import processors
from transformers import PreTrainedTokenizerBase

from penstock.compat.transformers import marked_chat
from penstock.data.conversations import Message, object_in, tools_of, with_arguments
from penstock.data.limits import check_length, check_template, limited
from penstock.data.sources.reader import Example
from penstock.data.token_files import Document
from penstock.errors import ConfigError

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NOW = re.compile(r"""\bstrftime_now\(\s*("[^"\\]*"|'[^'\\]*')\s*\)""")
_REMEDY = (
    "Give a template that marks the assistant's turns with {% generation %} and {% endgeneration %} "
    "(data.chat_template), or let all tokens count (data.loss_on: all)"
)


@dataclass(frozen=True, kw_only=True)
class _Chat:
    """A chat as the template takes it. ``place``: where it stands, for messages to people."""

    place: str
    messages: Sequence[Message]
    tools: Any

    def until(self, count: int) -> "_Chat":
        """The chat of its first messages."""
        return replace(self, messages=self.messages[:count])

    def with_turn(self, number: int, *others: Message) -> "_Chat":
        """The chat with other messages in the place of one, or none."""
        return replace(self, messages=[*self.messages[:number], *others, *self.messages[number + 1 :]])


class ChatEncoder:
    """Encodes chats. ``answers``: only what the assistant says counts in the loss. ``alone``: no engine works beside.
    ``day``: the one that the template writes where it asks for one (``asks_for_day``); None: the one that it is.

    Raises:
        ConfigError: the tokenizer has no chat template, or cannot say where its tokens stand in the text.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, answers: bool, alone: bool, day: date | None = None
    ) -> None:
        template = tokenizer.chat_template
        if template is None:
            raise ConfigError(
                "data: the sources hold chats, but the tokenizer has no chat template: give one as a file "
                "(data.chat_template), or data with prompt and completion, or text"
            )
        check_template(template)
        if answers and not tokenizer.is_fast:
            raise ConfigError(
                f"data: the tokenizer ({type(tokenizer).__name__}) cannot tell which tokens are the assistant's: use "
                "one of the tokenizers library, or let all tokens count (data.loss_on: all)"
            )
        self._tokenizer = cast(Any, _with_whole_places(tokenizer) if answers else tokenizer)
        self._answers, self._alone = answers, alone
        self._day = day
        self._place = ""  # of the chat that is being rendered
        self._marked = isinstance(template, str) and bool(_MARKS.search(template))
        self._shown: set[str] = set()  # what of tools the template has been seen to write
        self._takes_text: bool | None = None  # arguments of calls that are JSON text; None: not known yet

    def encode(self, examples: Sequence[Example]) -> list[Document]:
        """Raises:
        ConfigError: the template refuses a chat, or does not say which part of it is the answer.
        """
        chats = [_Chat(place=each.place, messages=_messages(each), tools=tools_of(each)) for each in examples]
        texts, spans = [], []
        with limited(lambda: self._place, alone=self._alone):
            chats = [self._with_arguments(chat) for chat in chats]
            for chat in chats:
                self._check_tools(chat)
            for chat in chats:
                if self._answers and self._marked:
                    text, where = self._apply(partial(marked_chat, self._tokenizer), chat)
                else:
                    text = self._render(chat)
                    where = self._spans(chat, text) if self._answers else []
                _check_parts(chat, text)
                texts.append(text)
                spans.append(where)
        # The template writes all special tokens itself.
        found = self._tokenizer(
            texts,
            add_special_tokens=False,
            return_offsets_mapping=self._answers,
            return_attention_mask=False,
            verbose=False,
        )
        all_ids = [np.asarray(ids, dtype=np.uint32) for ids in found["input_ids"]]
        if not self._answers:
            return [Document(ids=ids) for ids in all_ids]
        answers = [_within(offsets, where) for offsets, where in zip(found["offset_mapping"], spans, strict=True)]
        return [Document(ids=ids, answers=counts) for ids, counts in zip(all_ids, answers, strict=True)]

    def _with_arguments(self, chat: _Chat) -> _Chat:
        """The chat with objects in the place of arguments that are their JSON text, as OpenAI's form has them, unless
        the template writes such a text as it stands: most would write it as a text in quotes. One chat tells."""
        other = replace(chat, messages=with_arguments(chat.messages, lambda _: _ARGUMENTS))
        if other == chat or self._takes_text:
            return chat
        if self._takes_text is None:
            try:
                self._takes_text = _ARGUMENTS in self._render(other)
            except ConfigError:  # it goes through an object's keys
                self._takes_text = False
        return chat if self._takes_text else replace(chat, messages=with_arguments(chat.messages, object_in))

    def _check_tools(self, chat: _Chat) -> None:
        """Refuse a template that leaves out tools, calls of them or their results: who is trained to call tools must
        be shown them. One chat of each sort tells.
        """
        if chat.tools:
            self._check_written(chat, "what tools there are", "'tools' has", replace(chat, tools=None))
        for number, message in enumerate(chat.messages):
            if message.get("tool_calls"):
                less = {k: v for k, v in message.items() if k != "tool_calls"}
                self._check_written(chat, "calls of tools", f"message {number + 1} has", chat.with_turn(number, less))
            elif message["role"] == "tool":
                self._check_written(chat, "results of tools", f"message {number + 1} has", chat.with_turn(number))

    def _check_written(self, chat: _Chat, found: str, who: str, without: _Chat) -> None:
        """Raises:
        ConfigError: the template renders a chat as it does the one ``without`` what ``found`` says. One that fails on
            that does look at it.
        """
        if found in self._shown:
            return
        try:
            less = self._render(without)
        except ConfigError:
            less = None
        if less == self._render(chat):
            raise ConfigError(
                f"{chat.place}: the chat template leaves out {found}, as {who} them: give one that writes them "
                "(data.chat_template), or data without them"
            )
        self._shown.add(found)

    def _spans(self, chat: _Chat, text: str) -> list[tuple[int, int]]:
        """The assistant's turns in ``text``: of each its first character, and the one behind its last."""
        spans = []
        for number, message in enumerate(chat.messages):
            if message["role"] != "assistant":
                continue
            until = chat.until(number + 1)
            through = self._render(until)
            before = self._before(until, through)
            if text.startswith(through) and through.startswith(before):
                spans.append((len(before), len(through)))
            elif (span := self._in_place(chat, text, number)) is not None:
                spans.append(span)
            else:
                raise ConfigError(
                    f"{chat.place}: the chat template does not say where the assistant's answers are: it renders "
                    f"message {number + 1} otherwise within the chat than at its end. {_REMEDY}"
                )
        return spans

    def _in_place(self, chat: _Chat, text: str, number: int) -> tuple[int, int] | None:
        """An answer's place in a chat whose template renders its beginning otherwise than the beginning of the whole,
        as those do that drop the reasoning of earlier turns: where the chat differs if the answer is another one, and
        the mark that ends it. None: more than that differs.
        """
        others = [chat.with_turn(number, _in_other_words(chat.messages[number], words)) for words in _OTHERS]
        try:
            chats = [self._render(other) for other in others]
            ended = [self._render(other.until(number + 1)) for other in others]
        except ConfigError:
            return None
        start = len(_shared([text, *chats]))
        behind = len(_shared([each[::-1] for each in (text, *chats)]))
        end, marks = len(text) - behind, {each.rpartition(words)[2] for each, words in zip(ended, _OTHERS, strict=True)}
        if start > end or len(marks) != 1 or [each[start : len(each) - behind] for each in chats] != list(_OTHERS):
            return None
        mark = marks.pop()
        return (start, end + len(mark)) if text.startswith(mark, end) else None

    def _before(self, chat: _Chat, through: str) -> str:
        """The text of a chat before its last message, which is an answer, together with the words that open its turn.

        ``through``: the chat's text. Where there is nothing before the answer, or the template opens no turn when it
        is asked to, it may still write a header before the answer, or words of the system's, which another answer has.
        """
        last = len(chat.messages) - 1
        earlier = chat.until(last)
        before = self._render(earlier, prompt=True) if last else ""
        if last and before != self._render(earlier):
            return before
        others = [chat.with_turn(last, _in_other_words(chat.messages[last], text)) for text in _OTHERS]
        shared = _shared([through, *map(self._render, others)])
        if not shared.startswith(before):
            return before
        behind = self._render(chat, prompt=True)
        opening = behind.removeprefix(through) if behind.startswith(through) else ""
        place = shared.rfind(opening, len(before)) if opening else -1
        return shared if place < 0 else shared[: place + len(opening)]

    def _render(self, chat: _Chat, *, prompt: bool = False) -> str:
        how = {"tokenize": False, "add_generation_prompt": prompt}
        return cast(str, self._apply(self._tokenizer.apply_chat_template, chat, **how))

    def _apply(self, render: Callable[..., Any], chat: _Chat, **how: Any) -> Any:
        self._place = chat.place
        try:
            if self._day is not None:  # transformers lets no template have a clock but its own
                how["chat_template"] = _written_on(self._day, self._tokenizer.get_chat_template(tools=chat.tools))
            found = render(list(chat.messages), tools=chat.tools, **how)
        except Exception as error:  # noqa: BLE001  a template is a program and may raise anything
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"{chat.place}: the chat template fails on this chat: {type(error).__name__}: {reason}"
            ) from None
        check_length(found if isinstance(found, str) else found[0], chat.place)
        return found


_ARGUMENTS = '{"z": "0"}'
"""Arguments of a call as text, which no template writes of others."""
_OTHERS = ("0", "z")
"""Answers of which at least one differs from any other in the first character."""


def _check_parts(chat: _Chat, text: str) -> None:
    """Raises:
    ConfigError: the template has written a list of parts as Python prints it, and not what these say.
    """
    for number, message in enumerate(chat.messages, start=1):
        parts = message.get("content")
        if isinstance(parts, list) and parts and str(parts) in text:
            raise ConfigError(
                f"{chat.place}: the chat template takes text alone, and would write the parts that are the content of "
                f"message {number} as a list of Python's: give text as content, or a template that goes through parts "
                "(data.chat_template)"
            )


def _in_other_words(answer: Message, text: str) -> Message:
    """An answer with the same parts, such as its reasoning, each of another text, and without calls of tools."""
    parts = {key: text for key, value in answer.items() if isinstance(value, str)}
    content = text if isinstance(answer.get("content"), str | None) else [{"type": "text", "text": text}]
    return {**parts, "role": answer["role"], "content": content}


def _shared(texts: Sequence[str]) -> str:
    """The longest text that all of the ``texts`` begin with."""
    least, most = min(texts), max(texts)
    return least[: next((n for n, pair in enumerate(zip(least, most, strict=False)) if pair[0] != pair[1]), len(least))]


def _messages(example: Example) -> list[Message]:
    """Messages without keys that are null, and without lists of no calls, which tables add and templates take for
    given."""
    messages: Sequence[Message] = example.fields["messages"]
    return [
        {k: v for k, v in message.items() if k == "content" or not (v is None or (k == "tool_calls" and not v))}
        for message in messages
    ]


def _with_whole_places(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A tokenizer of the same tokens that says of each where all of it stands in the text. Some leave out the spaces
    that a token begins or ends with, so that one of spaces alone would stand nowhere, and be no part of an answer.

    That is done behind the encoding, by a step which besides adds special tokens; a template writes these itself.
    """
    found = cast(Any, tokenizer)("a\n        b", add_special_tokens=False, return_offsets_mapping=True)
    if all(first < end for first, end in found["offset_mapping"]):
        return tokenizer
    whole = copy.deepcopy(tokenizer)
    cast(Any, whole).backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return whole


def asks_for_day(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if what the chat template writes depends on the day: it asks for one with a format in quotes."""
    template = tokenizer.chat_template
    each = template.values() if isinstance(template, dict) else (template,)
    return any(isinstance(text, str) and _NOW.search(text) for text in each)


def _written_on(day: date, template: str) -> str:
    """A template that writes this day where it asks for one."""
    return _NOW.sub(lambda asked: json.dumps(day.strftime(asked[1][1:-1]), ensure_ascii=False), template)


def _within(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> NDArray[np.uint8]:
    """1 for each token that has a character within a span."""
    places = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    found = np.zeros(len(places), dtype=np.uint8)
    for first, end in spans:
        found |= (np.maximum(places[:, 0], first) < np.minimum(places[:, 1], end)).astype(np.uint8)
    return found
