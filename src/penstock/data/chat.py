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
from datetime import date
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import processors
from transformers import PreTrainedTokenizerBase

from penstock.compat.transformers import marked_chat
from penstock.data.conversations import Message, tools_of
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

    def encode(self, examples: Sequence[Example]) -> list[Document]:
        """Raises:
        ConfigError: the template refuses a chat, or does not say which part of it is the answer.
        """
        texts, spans = [], []
        with limited(lambda: self._place, alone=self._alone):
            for example in examples:
                self._check_tools(example)
            for example in examples:
                messages, tools = _messages(example), tools_of(example)
                if self._answers and self._marked:
                    text, where = self._apply(example, partial(marked_chat, self._tokenizer), messages, tools)
                else:
                    text = self._render(example, messages, tools)
                    where = self._spans(example, text, messages, tools) if self._answers else []
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

    def _check_tools(self, example: Example) -> None:
        """Refuse a template that leaves out tools, calls of them or their results: who is trained to call tools must
        be shown them. One chat of each sort tells.
        """
        messages, tools = _messages(example), tools_of(example)
        if tools:
            self._check_written(example, "what tools there are", "'tools' has", messages, None)
        for number, message in enumerate(messages):
            if not (message.get("tool_calls") or message["role"] == "tool"):
                continue
            found = "calls of tools" if message.get("tool_calls") else "results of tools"
            less = [{k: v for k, v in message.items() if k != "tool_calls"}] if message.get("tool_calls") else []
            without = [*messages[:number], *less, *messages[number + 1 :]]
            self._check_written(example, found, f"message {number + 1} has", without, tools)

    def _check_written(self, example: Example, found: str, who: str, without: Sequence[Message], tools: Any) -> None:
        """Raises:
        ConfigError: the template renders a chat as it does ``without`` what ``found`` says, and these ``tools``. One
            that fails on that does look at it.
        """
        if found in self._shown:
            return
        try:
            less = self._render(example, without, tools)
        except ConfigError:
            less = None
        if less == self._render(example, _messages(example), tools_of(example)):
            raise ConfigError(
                f"{example.place}: the chat template leaves out {found}, as {who} them: give one that writes them "
                "(data.chat_template), or data without them"
            )
        self._shown.add(found)

    def _spans(self, example: Example, text: str, messages: Sequence[Message], tools: Any) -> list[tuple[int, int]]:
        """The assistant's turns in ``text``: of each its first character, and the one behind its last."""
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            through = self._render(example, messages[: number + 1], tools)
            before = self._before(example, through, messages[: number + 1], tools)
            if text.startswith(through) and through.startswith(before):
                spans.append((len(before), len(through)))
            elif (span := self._in_place(example, text, messages, number, tools)) is not None:
                spans.append(span)
            else:
                raise ConfigError(
                    f"{example.place}: the chat template does not say where the assistant's answers are: it renders "
                    f"message {number + 1} otherwise within the chat than at its end. {_REMEDY}"
                )
        return spans

    def _in_place(
        self, example: Example, text: str, messages: Sequence[Message], number: int, tools: Any
    ) -> tuple[int, int] | None:
        """An answer's place in a chat whose template renders its beginning otherwise than the beginning of the whole,
        as those do that drop the reasoning of earlier turns: where the chat differs if the answer is another one, and
        the mark that ends it. None: more than that differs.
        """
        earlier, later = messages[:number], messages[number + 1 :]
        others = [_in_other_words(messages[number], words) for words in _OTHERS]
        try:
            chats = [self._render(example, [*earlier, other, *later], tools) for other in others]
            ended = [self._render(example, [*earlier, other], tools) for other in others]
        except ConfigError:
            return None
        start = len(_shared([text, *chats]))
        behind = len(_shared([chat[::-1] for chat in (text, *chats)]))
        end, marks = len(text) - behind, {chat.rpartition(words)[2] for chat, words in zip(ended, _OTHERS, strict=True)}
        if start > end or len(marks) != 1 or [chat[start : len(chat) - behind] for chat in chats] != list(_OTHERS):
            return None
        mark = marks.pop()
        return (start, end + len(mark)) if text.startswith(mark, end) else None

    def _before(self, example: Example, through: str, messages: Sequence[Message], tools: Any) -> str:
        """The text of a chat before its last message, which is an answer, together with the words that open its turn.

        ``through``: the chat. Where there is nothing before the answer, or the template opens no turn when it is asked
        to, it may still write a header before the answer, or words of the system's, which another answer has, too.
        """
        *earlier, answer = messages
        before = self._render(example, earlier, tools, prompt=True) if earlier else ""
        if earlier and before != self._render(example, earlier, tools):
            return before
        others = [_in_other_words(answer, text) for text in _OTHERS]
        shared = _shared([through, *(self._render(example, [*earlier, other], tools) for other in others)])
        if not shared.startswith(before):
            return before
        behind = self._render(example, messages, tools, prompt=True)
        opening = behind.removeprefix(through) if behind.startswith(through) else ""
        place = shared.rfind(opening, len(before)) if opening else -1
        return shared if place < 0 else shared[: place + len(opening)]

    def _render(self, example: Example, messages: Sequence[Message], tools: Any, *, prompt: bool = False) -> str:
        how = {"tokenize": False, "add_generation_prompt": prompt}
        return cast(str, self._apply(example, self._tokenizer.apply_chat_template, messages, tools, **how))

    def _apply(
        self, example: Example, render: Callable[..., Any], messages: Sequence[Message], tools: Any, **how: Any
    ) -> Any:
        self._place = example.place
        try:
            if self._day is not None:  # transformers lets no template have a clock but its own
                how["chat_template"] = _written_on(self._day, self._tokenizer.get_chat_template(tools=tools))
            found = render(list(messages), tools=tools, **how)
        except Exception as error:  # noqa: BLE001  a template is a program and may raise anything
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"{example.place}: the chat template fails on this chat: {type(error).__name__}: {reason}"
            ) from None
        check_length(found if isinstance(found, str) else found[0], example.place)
        return found


_OTHERS = ("0", "z")
"""Answers of which at least one differs from any other in the first character."""


def _in_form_of(message: Message, text: str) -> Any:
    """A content as the message's is: text, or a list of parts."""
    return text if isinstance(message.get("content"), str | None) else [{"type": "text", "text": text}]


def _in_other_words(answer: Message, text: str) -> Message:
    """An answer with the same parts, such as its reasoning, each of another text, and without calls of tools."""
    parts = {key: text for key, value in answer.items() if isinstance(value, str)}
    return {**parts, "role": answer["role"], "content": _in_form_of(answer, text)}


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
