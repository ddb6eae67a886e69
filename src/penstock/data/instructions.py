"""Alpaca's form: an instruction, an input for it or none, and the output.

Where the tokenizer has a chat template, each is a chat of a user's turn and the assistant's, the input in the line
behind the instruction, as LLaMA-Factory has it. Elsewhere it is the prompt of Stanford's Alpaca, with the line end that
axolotl and torchtune put behind "Response:", and its completion.
"""

from penstock.data.conversations import Message, list_in, system_of, type_of
from penstock.data.sources.reader import Example
from penstock.errors import ConfigError

_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)
_WITHOUT = "Below is an instruction that describes a task. Write a response that appropriately completes the request."


def chat(example: Example) -> list[Message]:
    """The messages of an instruction with its output.

    Raises:
        ConfigError: a field is no text, or the output is empty.
    """
    instruction, given, output = _parts(example)
    asked = "\n".join(filter(None, (instruction, given)))
    turns = [*_history(example), (asked, output)]
    said = [{"role": role, "content": text} for turn in turns for role, text in zip(_ROLES, turn, strict=True)]
    return [*system_of(example), *said]


_ROLES = ("user", "assistant")


def prompt_and_completion(example: Example) -> tuple[str, str]:
    """The prompt in Alpaca's words, and what completes it. A system prompt takes the place of their first paragraph.

    Raises:
        ConfigError: as ``chat``, or there are turns before, which only a chat has.
    """
    instruction, given, output = _parts(example)
    if _history(example):
        raise ConfigError(
            f"{example.place}: {example.called('history')} has earlier turns, which only a chat has: leave out kind: "
            "completion where that is said, and where the tokenizer has no chat template, give one as a file "
            "(data.chat_template)"
        )
    system = [message["content"] for message in system_of(example)]
    begins = system or [_WITH_INPUT if given else _WITHOUT]
    middle = [f"### Input:\n{given}"] if given else []
    parts = [*begins, f"### Instruction:\n{instruction}", *middle, "### Response:\n"]
    return "\n\n".join(parts), output


def _parts(example: Example) -> tuple[str, str, str]:
    found = []
    for name in ("instruction", "input", "output"):
        value = example.fields.get(name)
        if value is None and name == "input":
            value = ""
        if not isinstance(value, str):
            raise ConfigError(f"{example.place}: {example.called(name)} must be text, not {type_of(value)}")
        found.append(value)
    instruction, given, output = found
    if not output:
        raise ConfigError(f"{example.place}: {example.called('output')} is empty: there is nothing to learn")
    return instruction, given, output


def _history(example: Example) -> list[tuple[str, str]]:
    """The turns before: pairs of what was asked and what was answered."""
    history = list_in(example, "history") or []
    pairs = history if isinstance(history, list) else [history]
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise ConfigError(
                f"{example.place}: {example.called('history')} must be a list of pairs, a question and its answer each"
            )
    return [(asked, answered) for asked, answered in pairs]
