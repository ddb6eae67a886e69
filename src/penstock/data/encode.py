"""Examples to documents of token ids, and which of them count in the loss."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from itertools import chain, islice
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from penstock.config.data import DataConfig, Form, LossOn
from penstock.data.chat import ChatEncoder
from penstock.data.example import read_as
from penstock.data.sources.reader import Cursor, Example
from penstock.data.token_files import Document
from penstock.data.tokenizer import panics_refused

_BATCH = 128  # examples encoded at once: enough for every core
_TRIED = 1000  # tokens of which one is looked for that is a text of its own


class Encoder:
    """Encodes the examples of one source, which are of one form. ``alone``, ``day``: as of ``ChatEncoder``.

    Raises:
        ConfigError: an example is not what its kind needs; the template or the tokenizer will not do.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        form: Form,
        *,
        alone: bool,
        day: date | None = None,
    ) -> None:
        self._form, self._alone, self._day = form, alone, day
        self._tokenizer = cast(Any, tokenizer)
        self._loss_on: LossOn | None = config.loss_on
        self._chat: ChatEncoder | None = None
        self._begin, self._end = ends_of(tokenizer)
        self._line = self._found_behind_a_line()

    def documents(self, examples: Iterable[tuple[Example, Cursor]]) -> Iterator[tuple[Document, Cursor]]:
        """Each example's document, with the cursor behind it."""
        examples = iter(examples)
        while batch := list(islice(examples, _BATCH)):
            found = self._encode([example for example, _ in batch])
            yield from zip(found, (cursor for _, cursor in batch), strict=True)

    @property
    def answers(self) -> bool:
        """True if documents say which of their tokens count."""
        return self._loss_on != "all" and self._form.kind in ("completion", "chat")

    @panics_refused()
    def _encode(self, examples: Sequence[Example]) -> list[Document]:
        kind = self._form.kind
        examples = [read_as(example, self._form, answers=self.answers) for example in examples]
        if kind == "chat":
            if self._chat is None:
                self._chat = ChatEncoder(self._tokenizer, answers=self.answers, alone=self._alone, day=self._day)
            return self._chat.encode(examples)
        return self._texts(examples) if kind == "text" else self._completions(examples)

    def _texts(self, examples: Sequence[Example]) -> list[Document]:
        found = self._in_place([e.fields["text"] for e in examples], [e.begins for e in examples])
        return [
            Document(
                ids=_joined(self._begin if e.begins else [], ids, self._end if e.ends and self._more(ids) else []),
                ends=e.ends,
            )
            for e, ids in zip(examples, found, strict=True)
        ]

    def _in_place(self, texts: Sequence[str], begins: Sequence[bool]) -> list[list[int]]:
        """The ids of texts. One that does not begin a document is encoded as it stands behind a line's end, where some
        tokenizers put no space before it."""
        found, begun = self._ids(texts), len(self._line)
        if not begun or all(begins):
            return found
        behind = self._ids([f"\n{text}" for text in texts])
        return [
            alone if first or ids[:begun] != self._line else ids[begun:]
            for first, alone, ids in zip(begins, found, behind, strict=True)
        ]

    @panics_refused()
    def _found_behind_a_line(self) -> list[int]:
        """The ids of a line's end, if the tokenizer puts something before a text that is not put behind such an end,
        and does not take several ends for one; else none."""
        line, lines, once, twice = self._ids(["\n", "\n\n", "a\n", "a\na\n"])
        return [] if [*once, *once] == twice or line == lines else line

    def _completions(self, examples: Sequence[Example]) -> list[Document]:
        """Prompt and completion are encoded apart: so the model will be given the prompt, too. The completion goes on
        where the prompt ends, so that no tokenizer puts a space of its own between them."""
        asked = [example.fields["prompt"] for example in examples]
        prompts = self._ids(asked)
        completions = self._in_place([e.fields["completion"] for e in examples], [not prompt for prompt in asked])
        found = []
        for prompt, completion in zip(prompts, completions, strict=True):
            answer = [*completion, *(self._end if self._more(completion) else [])]
            ids = _joined(self._begin, prompt, answer)
            counts = np.zeros(len(ids), np.uint8)
            counts[len(ids) - len(answer) :] = 1
            found.append(Document(ids=ids, answers=counts if self.answers else None))
        return found

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        found = self._tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return cast(list[list[int]], found["input_ids"])

    def _more(self, ids: Sequence[int]) -> bool:
        """True if the tokens of the end must be added: a text may bring its own."""
        return not self._end or list(ids[-len(self._end) :]) != self._end


@panics_refused()
def ends_of(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer puts before and behind a document. Behind it always comes the end of text, if there
    is one.
    """
    call = cast(Any, tokenizer)
    plain, word = next(_words(tokenizer), ([], ""))
    whole = list(call(word, add_special_tokens=True)["input_ids"])
    first = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    behind = whole[first + len(plain) :]
    eos = tokenizer.eos_token_id
    return whole[:first], behind or ([eos] if isinstance(eos, int) else [])


def _words(tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[list[int], str]]:
    """Short texts with their ids, which are no special ones. A vocabulary may lack any letter."""
    call, special = cast(Any, tokenizer), {*tokenizer.all_special_ids}
    for word in chain(["a"], map(call.decode, range(_TRIED))):
        ids = list(call(word, add_special_tokens=False)["input_ids"])
        if ids and special.isdisjoint(ids):
            yield ids, word


def _joined(*parts: Sequence[int]) -> NDArray[np.uint32]:
    return np.concatenate([np.asarray(part, dtype=np.uint32) for part in parts])
