"""Settings of the data to train on: sources, tokenizer, validation."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from penstock.config.sizes import TEXT_LEAST, check_size, parse_size
from penstock.errors import ConfigError

Kind = Literal["text", "completion", "chat", "tokens"]
LossOn = Literal["answers", "all"]
TooLong = Literal["split", "cut", "drop"]

MOST_HELD = 1 << 25
"""Tokens that a stream holds at a time to bring its documents into another order: 128 MiB of ids."""

STREAM_FROM = 10_000_000_000
"""Bytes of files from which on data are streamed, unless the settings say otherwise."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form of rows. ``called``: an example of it, in words. ``kind``: what it becomes. ``needs``: the fields that a
    row must have; ``may``: those that count if it has them.
    """

    called: str
    kind: Kind
    needs: tuple[str, ...]
    may: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.needs, *self.may)


TEXT = Form(called="a text", kind="text", needs=("text",))
COMPLETION = Form(called="a prompt with its completion", kind="completion", needs=("prompt", "completion"))
CHAT = Form(called="a chat", kind="chat", needs=("messages",), may=("system", "tools"))
INSTRUCTION_CHAT = Form(
    called="an instruction with its output",
    kind="chat",
    needs=("instruction", "output"),
    may=("input", "system", "history"),
)
INSTRUCTION_PROMPT = replace(INSTRUCTION_CHAT, kind="completion")
FORMS = (TEXT, COMPLETION, CHAT, INSTRUCTION_CHAT, INSTRUCTION_PROMPT)


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One source of documents.

    | field | meaning |
    |---|---|
    | ``path`` | a file, a folder, a glob pattern, the name of a data set on the hub, or ``stdlib``: the sources of
    Python's own standard library |
    | ``weight`` | share of the tokens, relative to the other sources'; None: each document once per epoch |
    | ``kind`` | ``text``, ``completion`` (of a prompt), ``chat`` (messages) or ``tokens``; None: by the fields |
    | ``fields`` | what the file calls the fields of an example, such as ``{messages: chat}`` or ``{prompt: question,
    completion: answer}``; None: by the names in docs/data.md |
    | ``limit`` | bytes of a text source to use at most (or ``"8MB"``); None: all of it |
    | ``split``, ``subset``, ``revision`` | of a data set on the hub |
    | ``dtype`` | of a raw file of token ids (``.bin``): ``uint16`` or ``uint32`` |
    """

    shorthand: ClassVar[str] = "path"
    """the field that a plain text in the place of the section stands for"""

    path: str
    weight: float | None = None
    kind: Kind | None = None
    fields: Mapping[str, str] | None = None
    limit: str | int | float | None = None
    split: str | None = None
    subset: str | None = None
    revision: str | None = None
    dtype: Literal["uint16", "uint32"] | None = None

    @property
    def limit_bytes(self) -> int | None:
        return None if self.limit is None else parse_size(self.limit)

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("path is empty: name a file, a folder, a glob pattern or a data set on the hub")
        if self.weight is not None and self.weight <= 0:
            raise ConfigError(f"weight={self.weight}: must be positive; leave out a source that is not to be used")
        if self.fields is not None:
            _check_fields(self.fields, self.kind)
        if self.limit is not None:
            check_size("limit", self.limit, TEXT_LEAST)
        if self.limit_bytes == 0:
            raise ConfigError("limit is 0 bytes: nothing would be left to train on")
        if self.path == "stdlib" and self.kind not in (None, "text"):
            raise ConfigError(f"kind={self.kind!r}: the standard library is text")
        if (self.dtype is None) != (not self.path.lower().endswith(".bin")):
            raise ConfigError(
                "dtype is for raw files of token ids (.bin), which cannot be read without: "
                + ("say uint16 or uint32" if self.dtype is None else f"drop it, {self.path} is none")
            )


Sources = str | tuple[SourceConfig, ...]


def _check_fields(given: Mapping[str, str], kind: Kind | None) -> None:
    """Refuse a mapping from the names of fields here to those of a file that fits no kind of example."""
    if not given:
        raise ConfigError("fields is empty: write {name here: name in the file}, or drop it")
    known = {name for form in FORMS for name in form.names}
    for name, theirs in given.items():
        if name not in known:
            turned = f"; the other way round it is {{{theirs}: {name}}}" if theirs in known else ""
            raise ConfigError(f"fields.{name}: there is no such field here{turned}. {_WAYS}")
        if not isinstance(theirs, str) or not theirs:  # type: ignore[redundant-expr]  # a settings file has anything
            raise ConfigError(f"fields.{name} must be the name of a field of the file, not {theirs!r}")
        if twice := [other for other in given if given[other] == theirs and other != name]:
            raise ConfigError(f"fields.{name}: {theirs!r} is {twice[0]} already: give another field of the file")
    forms = [form for form in FORMS if given.keys() <= {*form.names}]
    if not forms:
        raise ConfigError(f"fields has {_listed(tuple(given))}, which do not go together. {_WAYS}")
    for name, theirs in given.items():
        if theirs not in given and any(theirs in form.needs for form in forms):
            raise ConfigError(f"fields.{name}: the file's {theirs!r} is {name} then: give fields.{theirs}, too")
    if kind is not None and all(form.kind != kind for form in forms):
        raise ConfigError(f"fields has {_listed(tuple(given))}, which kind: {kind} does not have")


def _listed(names: tuple[str, ...]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


_WAYS = "An example has " + "; or ".join(dict.fromkeys(_listed(form.names) for form in FORMS))


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Documents that are not trained on: exactly one of the two.

    | field | meaning |
    |---|---|
    | ``share`` | share of the documents that is held out, always the same ones: they are not trained on |
    | ``sources`` | sources of their own, as in ``data.sources`` |
    """

    share: float | None = None
    sources: Sources | None = None

    def __post_init__(self) -> None:
        if (self.share is None) == (self.sources is None):
            raise ConfigError("data.validation takes share (of the training documents) or sources: give one of them")
        if self.share is not None and not 0 < self.share < 1:
            raise ConfigError(f"data.validation.share={self.share}: must be between 0 and 1")
        if self.sources is not None:
            check_sources("data.validation.sources", each_source(self.sources))
            if any(source.weight is not None for source in each_source(self.sources)):
                raise ConfigError("data.validation.sources: weight has no effect, all documents are used once; drop it")


@dataclass(frozen=True, kw_only=True)
class TokenizerTrainingConfig:
    """A byte-level BPE that is trained on the beginning of the text.

    | field | meaning |
    |---|---|
    | ``vocabulary`` | tokens in the vocabulary: 256 bytes, one end-of-text token and the merges |
    | ``sample`` | bytes of text that it is trained on at most |
    """

    vocabulary: int
    sample: str | int | float = "4MB"

    @property
    def sample_bytes(self) -> int:
        return parse_size(self.sample)

    def __post_init__(self) -> None:
        if not 257 < self.vocabulary <= 2**31:
            raise ConfigError(
                f"data.tokenizer.train.vocabulary={self.vocabulary}: must be more than 257 (256 bytes and end of text)"
            )
        check_size("data.tokenizer.train.sample", self.sample, TEXT_LEAST)
        if self.sample_bytes == 0:
            raise ConfigError("data.tokenizer.train.sample is 0 bytes: nothing would be left to train on")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """A tokenizer of the run's own.

    | field | meaning |
    |---|---|
    | ``train`` | section: train a byte-level BPE on the text |
    """

    train: TokenizerTrainingConfig


_LONGEST = 1 << 26
"""Tokens; the longest documents that any model reads have a few millions."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The documents, and how they become sequences of tokens.

    | field | meaning |
    |---|---|
    | ``sources`` | a path (see below), a mapping, or a list of these; a mapping has ``path``, ``weight``, ``kind``,
    ``fields``, ``limit``, ``split``, ``subset``, ``revision``, ``dtype``. A path is a file (JSONL, CSV, Parquet, text,
    ``.tokens``), a folder, a glob pattern, a data set on the hub, or ``stdlib`` |
    | ``sequence_length`` | tokens in one sequence |
    | ``packing`` | true: whole documents share a sequence, and none attends to another; false: one document each,
    padded; ``continuous``: documents one after the other, cut every ``sequence_length`` tokens |
    | ``too_long`` | documents of more tokens than a sequence: ``split`` into several, ``cut`` off at the end, or
    ``drop``; None: split text, cut the others |
    | ``loss_on`` | ``answers``: only completions and the assistant's turns count in the loss; ``all``: prompts too;
    None: answers, where documents have them |
    | ``tokenizer`` | None: the model's own; a folder or a name on the hub; or ``train`` |
    | ``chat_template`` | a file with a Jinja chat template; None: the tokenizer's own |
    | ``validation`` | what is evaluated on: ``share`` or ``sources``; None: nothing is held out |
    | ``streaming`` | true: read while training; false: tokenise all of it first, into the run's folder; None: stream
    from 10 GB on |
    | ``shuffle`` | documents that a stream holds to bring them into another order, of 33,554,432 tokens at most;
    None: 10,000 |
    | ``prepared`` | a folder for what is tokenised, to share between runs; None: the run's own |
    """

    sources: Sources
    sequence_length: int
    packing: bool | Literal["continuous"] = True
    too_long: TooLong | None = None
    loss_on: LossOn | None = None
    tokenizer: str | TokenizerConfig | None = None
    chat_template: str | None = None
    validation: ValidationConfig | None = None
    streaming: bool | None = None
    shuffle: int | None = None
    prepared: str | None = None

    @property
    def each_source(self) -> tuple[SourceConfig, ...]:
        return each_source(self.sources)

    def prepared_in(self, run: Path) -> Path:
        """The folder of prepared data: in the run's own folder, or one that several runs share."""
        return Path(self.prepared) if self.prepared else run / "data"

    def placed_as(self, other: "DataConfig") -> "DataConfig":
        """The settings with documents where they are in another one's, as far as files there have the same endings.
        Whether they are the same is for ``data.identity`` to say, which has their contents."""
        validation, theirs = self.validation, other.validation
        if validation is not None and validation.sources and theirs is not None and theirs.sources:
            validation = replace(validation, sources=_placed_as(validation.sources, theirs.sources))
        sources = _placed_as(self.sources, other.sources)
        return replace(self, sources=sources, validation=validation, prepared=other.prepared)

    @property
    def training(self) -> TokenizerTrainingConfig | None:
        """Settings of the training of a tokenizer; None: it exists."""
        return self.tokenizer.train if isinstance(self.tokenizer, TokenizerConfig) else None

    @property
    def vocabulary(self) -> int | None:
        """Tokens of a tokenizer that is trained; None: it is for the tokenizer to say."""
        return None if self.training is None else self.training.vocabulary

    def __post_init__(self) -> None:
        check_sources("data.sources", self.each_source)
        if self.sequence_length < 2:
            raise ConfigError(f"data.sequence_length={self.sequence_length}: must be at least 2, to have a next token")
        if self.sequence_length > _LONGEST:
            raise ConfigError(f"data.sequence_length={self.sequence_length}: must be at most {_LONGEST:,}")
        if self.packing == "continuous" and self.too_long is not None:
            raise ConfigError("data.too_long has no effect with packing: continuous, which cuts everywhere: drop it")
        if self.shuffle is not None and self.streaming is not True:
            raise ConfigError("data.shuffle has no effect unless data.streaming is true: all documents are shuffled")
        if self.shuffle is not None and self.shuffle < 1:
            raise ConfigError(f"data.shuffle={self.shuffle}: must be at least 1")
        if self.shuffle is not None and self.shuffle > MOST_HELD:
            raise ConfigError(
                f"data.shuffle={self.shuffle}: a stream holds at most {MOST_HELD:,} tokens at a time, and so no more "
                "documents: lower it, or set data.streaming: false, where all documents are shuffled"
            )
        if self.streaming and self.training is not None:
            raise ConfigError("data.tokenizer.train needs data.streaming: false, as it reads the text before training")
        if self.streaming and self.prepared is not None:
            raise ConfigError("data.prepared has no effect with data.streaming: true, which prepares nothing: drop it")


def each_source(sources: Sources) -> tuple[SourceConfig, ...]:
    return (SourceConfig(path=sources),) if isinstance(sources, str) else sources


def _placed_as(sources: Sources, others: Sources) -> Sources:
    mine, theirs = each_source(sources), each_source(others)
    if len(mine) != len(theirs):
        return sources
    found = tuple(
        replace(own, path=other.path) if Path(own.path).suffix == Path(other.path).suffix else own
        for own, other in zip(mine, theirs, strict=True)
    )
    return others if found == theirs else sources if found == mine else found


def check_sources(key: str, sources: tuple[SourceConfig, ...]) -> None:
    if not sources:
        raise ConfigError(f"{key} is empty: name at least one file, folder, pattern or data set")
    weighted = sum(source.weight is not None for source in sources)
    if weighted == 1 == len(sources):
        raise ConfigError(f"{key}: weight has no effect on a source that is alone: drop it")
    if 0 < weighted < len(sources):
        raise ConfigError(f"{key}: {weighted} of {len(sources)} sources have a weight: give all of them one, or none")
