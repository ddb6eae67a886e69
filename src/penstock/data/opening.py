"""From settings to data that can be trained on: finds the sources, the tokenizer, and whether all is as it was."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from penstock import files
from penstock.config.data import STREAM_FROM, DataConfig, SourceConfig, each_source
from penstock.data import tokenizer as tokenizers
from penstock.data.chat import asks_for_day
from penstock.data.encode import Encoder, ends_of
from penstock.data.example import read_as, texts_in
from penstock.data.forms import form_of_source
from penstock.data.identity import (
    IDENTITY,
    FileFacts,
    Identity,
    facts_of,
    fingerprint,
    identity_in,
    require_place,
)
from penstock.data.mixture import Mixture
from penstock.data.pieces import Cuts, Pieces, continuous_pieces, pieces_of
from penstock.data.prepare import Opened, made_of, prepare
from penstock.data.sources.find import left_out, local_source, open_source
from penstock.data.sources.hub import HubDataset
from penstock.data.sources.reader import Reader, Renamed
from penstock.data.sources.walk import ending
from penstock.data.stream import Prepared, Stream
from penstock.data.streamed import Streamed, StreamSource
from penstock.data.token_files import TokenFile
from penstock.errors import ConfigError

log = logging.getLogger("penstock")

LOOKED_AT = 1_000
"""Rows of a source that is streamed in which the fields that the settings name are looked for."""
_SHUFFLE = 10_000
_VERSION = 6  # of what is written from equal settings
_PREPARED = 7  # of the form that it is written in


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data that a run is trained and evaluated on. ``largest``: the largest token id there may be. ``pad``: the one
    that fills sequences up. ``folders``: all that has been prepared for it. ``forms``: what was recognised of sources
    whose rows are not in Penstock's own form, and that documents end with no token, where that is so.
    """

    tokenizer: PreTrainedTokenizerBase
    train: Stream
    validation: Prepared | None
    identity: Identity
    largest: int
    pad: int
    folders: tuple[Path, ...]
    forms: tuple[str, ...]


def open_data(
    config: DataConfig,
    run: Path,
    *,
    seed: int,
    own: PreTrainedTokenizerBase | None,
    position: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = log.info,
) -> Data:
    """Open the data of a run, tokenised into its folder where they are not streamed.

    ``own``: the model's tokenizer, if it has one. ``position``: the place in the data that the run's last commit has;
    None: it has none. ``say``: told what takes time. Where ``run`` has data already, they must be these, and what it
    keeps of them is written only then.

    Raises:
        ConfigError: sources, tokenizer or a document will not do; or the data have changed since the run began.
    """
    known = _known(run, position)
    stream = _streams(config)
    if stream and config.prepared is not None and known is None:
        raise ConfigError(
            f"data.prepared={config.prepared!r} has no effect, as the data are so large that they are streamed, and "
            "nothing is prepared: set data.streaming: false to have them tokenised into it first, or drop it"
        )
    template = own.chat_template is not None if own is not None else config.chat_template is not None
    opened, forms = _opened(config.each_source, template, known, streaming=stream)
    apart = config.validation.sources if config.validation is not None else None
    held_out, held_out_forms = _opened(each_source(apart or ()), template, known, streaming=False)
    if known is None:
        _check_loss_on(config, [*opened, *held_out])
    before, trained_on = known.files if known else (), [p for one in opened for p in one.files]
    facts = facts_of(trained_on, before[: len(trained_on)], whole=not stream)  # a file of both has two digests
    facts += facts_of([p for one in held_out for p in one.files], before[len(trained_on) :], whole=True)
    folder = config.prepared_in(run)
    tokenizer, *used = _tokenizer(config, own, opened, facts, folder, say)
    day = _day(tokenizer, [*opened, *held_out], known)
    settings = _settings(config, tokenizer, [*opened, *held_out], seed, stream)
    identity = Identity(files=facts, settings=settings | ({} if day is None else {_DAY: day.isoformat()}))
    if known is not None and (changed := identity.difference(known)) is not None:
        raise ConfigError(
            f"the data of the run in {run} are not what they were: {changed}. A resumed run must see the same data: "
            "put them back, say where they are (--data.sources), or start another run"
        )
    if position is not None:
        require_place(position, identity.fingerprint)
    make = partial(_prepared, config, tokenizer, folder, day)
    share = config.validation.share if config.validation else None
    train: Stream
    rest: Prepared | None = None
    if stream:
        train = _streamed(config, tokenizer, opened, seed, day)
        largest = tokenizers.largest_id(tokenizer)
    else:
        train, rest, largest, place = make(opened, facts, share, seed)
        used.append(place)
    validation = rest
    if held_out:
        validation, _, most, place = make(held_out, facts[len(trained_on) :], None, None)
        largest = max(largest, most)
        used.append(place)
    if known is None or known.to_json() != identity.to_json():
        try:
            files.replace(run / IDENTITY, identity.to_json())
        except OSError as error:
            raise ConfigError(f"{run / IDENTITY} cannot be written: {error.strerror}") from None
    return Data(
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        identity=identity,
        largest=largest,
        pad=tokenizers.pad_id(tokenizer),
        folders=tuple(dict.fromkeys(place for place in used if place.is_dir())),
        forms=(*forms, *held_out_forms, *_without_end(tokenizer, [*opened, *held_out], config)),
    )


def _known(run: Path, position: Mapping[str, Any] | None) -> Identity | None:
    """The identity of the data that a run was on, as far as its folder has one that the last commit vouches for."""
    known = identity_in(run)
    if known is not None and position is not None and position.get("data", known.fingerprint) != known.fingerprint:
        log.warning("%s is of other data than the run's last commit, and is made again", run / IDENTITY)
        return None
    return known


def _check_loss_on(config: DataConfig, opened: Sequence[Opened]) -> None:
    if config.loss_on is not None and all(one.kind in ("text", "tokens") for one in opened):
        raise ConfigError(
            f"data.loss_on={config.loss_on!r} has no effect on text, which counts whole, nor on token ids, which say "
            "themselves what counts: drop it"
        )


def _without_end(tokenizer: PreTrainedTokenizerBase, opened: Sequence[Opened], config: DataConfig) -> Iterator[str]:
    """Words for documents that no token ends, as the tokenizer has none. A chat ends as its template says."""
    paths = [one.source.path for one in opened if one.kind in ("text", "completion")]
    if paths and not ends_of(tokenizer)[1]:
        runs_on = ", and one runs on into the next" if config.packing == "continuous" else ""
        yield (
            f"{paths[0]}: the tokenizer has no end-of-text token, so no document ends with one{runs_on}. Set eos_token "
            "in its tokenizer_config.json, or take a tokenizer that has one (data.tokenizer)"
        )


def choose_tokenizer(config: DataConfig, own: str | None) -> PreTrainedTokenizerBase | None:
    """The tokenizer that there is before the data are read; None: it will be trained on them.

    ``own``: where the model is from, if it is not from scratch.

    Raises:
        ConfigError: there is none, or it cannot be loaded.
    """
    if config.training is not None:
        return None
    if isinstance(config.tokenizer, str):
        return tokenizers.with_template(tokenizers.load(config.tokenizer), config)
    if own is None:
        raise ConfigError(
            "data.tokenizer: a model from scratch has none of its own. Name one (a folder, or a name on the hub), or "
            "have one trained: data.tokenizer: {train: {vocabulary: 4096}}"
        )
    return tokenizers.with_template(tokenizers.load(own, key="model"), config)


def for_model(data: Data, model: Any) -> Data:
    """The data, with a token to fill up sequences that the model has.

    A tokenizer may have more tokens than the model, as those of some models have for padding or for pictures, where no
    document has one of these. ``model``: one of Hugging Face's, which has its sizes in ``config``.

    Raises:
        ConfigError: a document has an id that the model has no weights for, or of data that are streamed may have.
    """
    vocabulary = int(model.config.get_text_config().vocab_size)
    if data.largest < vocabulary:
        return data
    room = (
        f"and the model a vocabulary of {vocabulary} (ids up to {vocabulary - 1}). Use the model's own tokenizer "
        "(data.tokenizer: null)"
    )
    if not isinstance(data.train, Prepared):
        raise ConfigError(
            f"the tokenizer does not match the model: it has token ids up to {data.largest}, {room}; if it is that, "
            "data.streaming: false finds out whether documents have such ids"
        )
    parts = (data.train, *([] if data.validation is None else [data.validation]))
    if (largest := max(part.largest for part in parts)) >= vocabulary:
        raise ConfigError(
            f"the tokenizer does not match the model: documents have token ids up to {largest}, {room}; if it is that, "
            "leave out the documents that have them"
        )
    return replace(data, pad=tokenizers.pad_id(data.tokenizer, below=vocabulary))


def _streams(config: DataConfig) -> bool:
    """True if data are to be streamed: as the settings say, else by the size of the files."""
    if config.streaming is not None:
        asked = config.streaming
    else:
        readers = [here for source in config.each_source if (here := local_source(source)) is not None]
        files = [p for r in readers for p in (r if isinstance(r, tuple) else r.files)]
        examples = not any(isinstance(r, tuple) for r in readers)
        asked = examples and config.training is None and sum(p.stat().st_size for p in files) >= STREAM_FROM
    if not asked:
        return False
    if config.validation is not None and config.validation.share is not None:
        raise ConfigError(
            "data.validation.share cannot be held out of data that are streamed: name data.validation.sources, or set "
            "data.streaming: false"
        )
    if len(config.each_source) > 1 and config.each_source[0].weight is None:
        raise ConfigError("data.sources: to stream several, give each a weight, as the tokens in each are not known")
    return True


def _opened(
    sources: Sequence[SourceConfig], template: bool, known: Identity | None, *, streaming: bool
) -> tuple[list[Opened], list[str]]:
    """The sources with the form of each, which is that of its first example, and what is to be said of forms, and of
    what is not read.

    A run that goes on in the middle of a source reads what it began with, and so in the same form. ``known``: what that
    was; a data set on the hub is read from the same commit, whatever has been added since.
    """
    opened, said = [], []
    for source in sources:
        began = _commit_in(known, source)
        reader = open_source(source, streaming=streaming, commit=began)
        pinned = known is None or began is not None
        form = None
        if not isinstance(reader, tuple):
            first, _ = next(reader.read(None), (None, None))
            form, words = form_of_source(source, first, template=template)
            if streaming and isinstance(reader, Renamed):
                reader.look(LOOKED_AT)
            said += [] if words is None else [f"{source.path}: {words}"]
        said += [] if (words := left_out(source)) is None else [f"{source.path}: {words}"]
        opened.append(Opened(source=source, reader=reader, form=form, commit=_commit_of(reader) if pinned else None))
    return opened, said


def _commit_of(reader: Reader | tuple[Path, ...]) -> str | None:
    """The commit that the rows of a data set on the hub are of; None: it is none."""
    inner = reader.reader if isinstance(reader, Renamed) else reader
    return inner.commit if isinstance(inner, HubDataset) else None


def _commit_in(known: Identity | None, source: SourceConfig) -> str | None:
    """The commit of a data set on the hub that a run began with; None: there is none with these settings."""
    sources = known.settings.get("data.sources") if known is not None else None
    wanted = {**_meaning(Opened(source=source, reader=())), "commit": None}
    for then in sources if isinstance(sources, list) else ():
        if isinstance(then, dict) and {**then, "commit": None} == wanted:
            return then.get("commit")
    return None


def _tokenizer(
    config: DataConfig,
    own: PreTrainedTokenizerBase | None,
    opened: Sequence[Opened],
    facts: Sequence[FileFacts],
    folder: Path,
    say: Callable[[str], None],
) -> tuple[PreTrainedTokenizerBase, *tuple[Path, ...]]:
    """The tokenizer, and the folder that it is in, if it was trained for these data."""
    if config.training is None:
        assert own is not None
        return (own,)
    kinds = [one.kind for one in opened]  # as a template decides, too
    source = {"train": asdict(config.training), **_texts(opened, facts), "kinds": kinds, "version": _VERSION}
    place = folder / f"tokenizer-{fingerprint(source)}"
    if not place.is_dir():
        say(f"Training a tokenizer of {config.training.vocabulary:,} tokens")
        found = tokenizers.train(config.training, _sample(opened, config.training.sample_bytes))
        private = config.prepared is None
        with made_of(opened, facts, place, "the tokenizer that was trained", private=private) as under_way:
            tokenizers.save(found, under_way)
    return tokenizers.with_template(tokenizers.load(str(place)), config), place


def _sample(opened: Sequence[Opened], nbytes: int) -> Iterator[str]:
    """Text from the beginning of each source, as much of each."""
    for one in opened:
        if isinstance(one.reader, tuple):
            raise ConfigError(
                f"data.tokenizer.train: {one.source.path!r} is token ids already, and no text to train on"
            )
        seen = 0
        assert one.form is not None
        for example, _ in one.reader.read(None):
            if seen >= nbytes // len(opened):
                break
            for text in texts_in(read_as(example, one.form, answers=False)):
                seen += len(text.encode())
                yield text


def _settings(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, opened: Sequence[Opened], seed: int, stream: bool
) -> dict[str, Any]:
    """All settings that decide which sequences a step sees, by the names that users know."""
    names = ("sequence_length", "packing", "too_long", "loss_on")
    return {
        **{f"data.{name}": getattr(config, name) for name in names},
        "data.sources": [_meaning(one) for one in opened],
        "data.validation.share": config.validation.share if config.validation else None,
        "data.streaming": stream,
        "data.shuffle": (config.shuffle or _SHUFFLE) if stream else None,
        "the tokenizer's hash": tokenizers.digest(tokenizer),
        "seed": seed,
        "version": _VERSION,
    }


_DAY = "the tokenizer's template's day"


def _day(tokenizer: PreTrainedTokenizerBase, opened: Sequence[Opened], known: Identity | None) -> date | None:
    """The day that a chat template writes which asks for it, for as long as the run goes on: that on which it began.
    None: there are no such chats, or the run began with a version that has not kept it.
    """
    if not asks_for_day(tokenizer) or all(one.kind != "chat" for one in opened):
        return None
    if known is None:
        return date.today()
    try:
        return date.fromisoformat(known.settings[_DAY]) if _DAY in known.settings else None
    except (TypeError, ValueError):
        raise ConfigError(f"{IDENTITY}: {_DAY} is none: put the file back from a copy") from None


def _meaning(one: Opened) -> dict[str, Any]:
    """A source's settings without the place of its files, whose contents alone count; of a data set on the hub with
    its name and commit."""
    source = {k: v for k, v in asdict(one.source).items() if v is not None and k != "path"}
    named = {} if one.files else {"path": one.source.path}
    return {**source, "files": len(one.files), **named, **({} if one.commit is None else {"commit": one.commit})}


def _texts(opened: Sequence[Opened], facts: Sequence[FileFacts]) -> dict[str, Any]:
    """All that decides which texts the sources have."""
    return {
        "files": [f.digest for f in facts[: sum(len(one.files) for one in opened)]],
        "endings": [ending(path) for one in opened for path in one.files],
        "sources": [{**_meaning(one), "weight": None} for one in opened],
    }


def _prepared(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    day: date | None,
    opened: Sequence[Opened],
    facts: Sequence[FileFacts],
    share: float | None,
    seed: int | None,
) -> tuple[Prepared, Prepared | None, int, Path]:
    """Data to train on, data held out of them, the largest id, and the folder that was prepared."""
    source = {
        **_texts(opened, facts),
        "tokenizer": tokenizers.digest(tokenizer),
        "loss_on": config.loss_on,
        "share": share,
        "version": _PREPARED,
    }
    if day is not None and any(one.kind == "chat" for one in opened):
        source["day"] = day.isoformat()
    place = folder / fingerprint(source)
    parts = prepare(opened, facts, tokenizer, config, place, share, day)
    largest = tokenizers.largest_id(tokenizer)
    trained, weights = [], []
    for one, (train, held) in zip(opened, parts, strict=True):
        if one.kind == "tokens":
            largest = max([largest, *(file.largest() for file in [*train, *held])])
        pieces = _usable(config, one.source.path, train)
        tokens = sum(p.cuts.tokens for p in pieces)
        trained += pieces
        weights += [(one.source.weight or 1.0) * p.cuts.tokens / tokens for p in pieces]
    weighted = opened[0].source.weight is not None
    train_stream = _stream(config, trained, weights if weighted else None, seed)
    if share is None:
        return train_stream, None, largest, place
    held_out = [p for _, held in parts for p in _pieces(config, held) if len(p)]
    if not held_out:
        raise ConfigError(
            f"data.validation.share={share} of {train_stream.cuts.documents:,} documents leaves none to evaluate on: "
            "hold out more, or name data.validation.sources"
        )
    return train_stream, _stream(config, held_out, None, None), largest, place


def _stream(config: DataConfig, sources: list[Pieces], weights: list[float] | None, seed: int | None) -> Prepared:
    mixture = Mixture(sources=sources, weights=weights, seed=seed)
    return Prepared(mixture=mixture, packing=config.packing, length=config.sequence_length)


def _pieces(config: DataConfig, files: Sequence[TokenFile]) -> list[Pieces]:
    if config.packing == "continuous":
        return [continuous_pieces(file, config.sequence_length) for file in files]
    return [pieces_of(file, config.sequence_length, config.too_long) for file in files]


def _usable(config: DataConfig, path: str, files: Sequence[TokenFile]) -> list[Pieces]:
    """The pieces of a source, which has some that a model can be trained on."""
    found = _pieces(config, files)
    if any(len(pieces) for pieces in found):
        return [pieces for pieces in found if len(pieces)]
    tokens, cuts = sum(len(f.ids) for f in files), sum((p.cuts for p in found), Cuts())
    raise ConfigError(
        f"data: {path!r} has nothing to train on: of {tokens:,} tokens in {cuts.documents:,} documents none counts in "
        f"the loss within a sequence of {config.sequence_length} tokens (data.sequence_length); {cuts.too_long:,} "
        "documents are longer"
    )


def _streamed(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, opened: Sequence[Opened], seed: int, day: date | None
) -> Streamed:
    sources = []
    for one in opened:
        if isinstance(one.reader, tuple):
            raise ConfigError(
                f"data.streaming: {one.source.path!r} is token ids on disk, which need none: set it to false"
            )
        assert one.form is not None
        encoder = partial(Encoder, tokenizer, config, one.form, alone=False, day=day)
        weight = one.source.weight or 1.0
        sources.append(StreamSource(name=one.source.path, reader=one.reader, encoder=encoder, weight=weight))
    return Streamed(
        sources=sources,
        window=config.shuffle or _SHUFFLE,
        seed=seed,
        packing=config.packing,
        length=config.sequence_length,
        rule=config.too_long,
    )
