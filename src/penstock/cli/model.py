"""The model of a run, on the meta device: of a folder, of a configuration, or as the run's folder keeps it."""

import difflib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedTokenizerBase

from penstock.config import DataConfig, ModelConfig, Precision, asked_vocabulary, check_parts
from penstock.data.opening import choose_tokenizer
from penstock.data.tokenizer import END_OF_TEXT_ID, largest_id
from penstock.engine.start import WeightSource
from penstock.errors import ConfigError, ModelError, StoreError
from penstock.hf.models import kept, shell
from penstock.hf.models.folder import CONFIG, resolve
from penstock.hf.models.loading import load
from penstock.hf.models.shift import shifts


@dataclass(frozen=True, kw_only=True)
class RunModel:
    """A run's model before there is an engine.

    ``weights``: where its values come from; None: it initialises itself. ``folder``: that its own tokenizer is in.
    ``config``: as an export is to have it. ``dtype``: of its weights as they came, None for random ones. ``rules``:
    that it was loaded by, None if it was not. ``tokenizer``: None if it will be trained.
    """

    model: nn.Module
    weights: WeightSource | None
    folder: Path | None
    config: Any
    dtype: torch.dtype | None
    rules: tuple[Any, ...] | None
    tokenizer: PreTrainedTokenizerBase | None

    def keep(self, folder: Path, precision: Precision, named: str | None, tokenizer: Any = None) -> None:
        """Write what a run keeps of it. ``precision``: in whose dtype random weights are exported. ``named``: its path
        in the settings. ``tokenizer``: if it is not the one in ``folder``.

        Raises:
            ConfigError: it cannot be written.
        """
        kept.keep(
            folder,
            self.model,
            config=self.config,
            dtype=self.dtype or shell.FLOATS[precision],
            rules=self.rules,
            source=self.folder,
            tokenizer=tokenizer,
            named=named,
        )


class _InStore:
    """The source of weights of a run whose store has all values: to be asked for one means that the store is gone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __contains__(self, name: str) -> bool:
        return True

    def fill(self, name: str, out: torch.Tensor) -> None:
        raise StoreError(f"{self._folder.parent}: the store went away while the run was started: start it again")


class _InSnapshot:
    """The source of weights of a run that is resumed from a snapshot, which brings all values once the engine is
    there."""

    def __contains__(self, name: str) -> bool:
        return True

    def fill(self, name: str, out: torch.Tensor) -> None:
        out.zero_()


def run_model(config: ModelConfig, data: DataConfig) -> RunModel:
    """The causal language model that is asked for; no parameter has memory yet.

    One from scratch has the vocabulary of its tokenizer, unless a larger one is asked for.

    Raises:
        ConfigError: a folder or a configuration that cannot be used, contradicts the data, or what the model's own
            classes refuse.
        ModelError: a folder's files do not fit its configuration.
    """
    if config.path:
        loaded = load(config.path, revision=config.revision, trust_remote_code=config.trust_remote_code)
        _check_causal(loaded.model, f"model.path={config.path!r}")
        found = RunModel(
            model=loaded.model,
            weights=loaded.weights,
            folder=loaded.folder,
            config=loaded.config,
            dtype=loaded.dtype,
            rules=loaded.rules,
            tokenizer=choose_tokenizer(data, str(loaded.folder)),
        )
    else:
        found = _from_scratch(config, data)
    _check_length(found.config, data)
    return found


def resumed_model(folder: Path, config: ModelConfig, data: DataConfig, *, in_store: bool, own_code: bool) -> RunModel:
    """The model of a run that goes on, as its own folder keeps it: the one that it came from may be gone.

    ``in_store``: whether its values are in a store; else a snapshot has them, which is loaded later. ``own_code``:
    whether the command has said that code which is kept with it may run.

    Raises:
        ConfigError: there is none.
        ModelError: the installed transformers is another, and lacks something.
    """
    found = kept.kept_model(folder, trust_remote_code=own_code, flag="--model.trust_remote_code true")
    _check_length(found.config, data)
    return RunModel(
        model=found.model,
        weights=None if not config.path else _InStore(folder) if in_store else _InSnapshot(),
        folder=found.folder,
        config=found.config,
        dtype=shell.dtype_of(found.config),
        rules=None if found.rules is None else tuple(found.rules),
        tokenizer=choose_tokenizer(data, str(found.folder)),
    )


def _from_scratch(config: ModelConfig, data: DataConfig) -> RunModel:
    folder = None
    if isinstance(config.config, Mapping):
        given = dict(config.config)
        kind = given.pop("model_type")
        check_parts(given, "model.config")
        _check_keys(kind, given)
        tokenizer = choose_tokenizer(data, None)
        vocabulary = vocabulary_of(data, tokenizer)
        _check_against_data(given, vocabulary)
        try:
            full = AutoConfig.for_model(kind, **_ends(tokenizer) | {"vocab_size": vocabulary} | given)
        except shell.REFUSED as error:
            raise ConfigError(
                f"model.config: Hugging Face cannot build this {kind} model: {shell.short(error)}"
            ) from error
    else:
        source = Path(config.source)
        folder = source.parent if source.name == CONFIG and source.is_file() else None
        if folder is None:
            folder = resolve(
                config.source, revision=config.revision, trust_remote_code=config.trust_remote_code, weights=False
            )
        full = shell.config_of(folder, trust_remote_code=config.trust_remote_code)
        tokenizer = choose_tokenizer(data, str(folder))
        if data.tokenizer is not None:  # it is another than that of the model that the configuration is from
            for key, value in {**_ends(tokenizer), "vocab_size": vocabulary_of(data, tokenizer)}.items():
                setattr(full, key, value)
    try:
        model = shell.build(full)
    except ConfigError as error:
        raise ConfigError(f"model.config: {error}") from error
    _check_causal(model, "model.config")
    return RunModel(model=model, weights=None, folder=folder, config=full, dtype=None, rules=None, tokenizer=tokenizer)


def _check_causal(model: nn.Module, asked: str) -> None:
    """``asked``: the setting that the model is of, for messages.

    Raises:
        ConfigError: the model is not one that predicts the next token, from those before alone.
    """
    name, config = type(model).__name__, model.config
    try:
        if not {"input_ids", "labels"} <= set(inspect.signature(model.forward).parameters):
            raise ModelError("it takes no input_ids and labels")
        if getattr(config, "is_encoder_decoder", False):
            raise ModelError("it reads its text with an encoder")
        shifted = shifts(model)
    except ModelError as error:
        raise ConfigError(
            f"{asked} is a {name}, and penstock train trains causal language models on text: train it from "
            f"Python, with penstock.hf.load and penstock.wrap (docs/models.md). Here, {error}"
        ) from error
    if shifted is False:
        raise ConfigError(
            f"{asked} is a {name}, whose loss does not compare a token with the next one: given text, it would learn "
            "to repeat what it reads. Train it from Python, with labels of your own (penstock.wrap)"
        )
    if getattr(config, "is_decoder", True) is False and _sees_what_follows(model):
        raise ConfigError(
            f"{asked} is a {name} that is no decoder (is_decoder is false in its configuration): each token sees those "
            "that follow, so that there is nothing to predict. Set is_decoder: true in its configuration"
        )


def _sees_what_follows(model: nn.Module) -> bool:
    """True if a model's attention is causal only where its configuration calls it a decoder. GPT-NeoX's always is."""
    given = inspect.getsource(inspect.getmodule(type(model)) or type(model))
    return given.count("config.is_decoder") > 1


def _check_length(config: Any, data: DataConfig) -> None:
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(longest, int) and 0 < longest < data.sequence_length:
        raise ConfigError(
            f"data.sequence_length={data.sequence_length} is more than the model's max_position_embeddings={longest}: "
            "lower the one, or raise the other in the model's configuration"
        )


def _check_keys(kind: str, given: Mapping[str, Any]) -> None:
    """Hugging Face keeps unknown keys without a word; here a typing error must not become a silent default."""
    if kind not in CONFIG_MAPPING:
        near = _meant(kind, CONFIG_MAPPING.keys(), cutoff=0.6)
        raise ConfigError(f"model.config.model_type={kind!r} is not a type that the installed transformers knows{near}")
    cls = CONFIG_MAPPING[kind]
    try:
        plain = cls()
    except shell.REFUSED as error:
        raise ConfigError(
            f"model.config.model_type={kind!r}: the installed transformers cannot make one of it: {shell.short(error)}"
        ) from error
    known = {*inspect.signature(cls).parameters, *cls.attribute_map, *vars(plain)} - {"kwargs", "model_type"}
    for key in given:
        if key not in known:
            near = _meant(key, known, cutoff=0.5)
            raise ConfigError(f"model.config.{key} is not a setting of {kind} ({cls.__name__}){near}")


def _meant(word: str, known: Iterable[str], cutoff: float) -> str:
    """A question at the end of a message; empty where no known word is near."""
    near = difflib.get_close_matches(word, [*known], n=1, cutoff=cutoff)
    return f": did you mean {near[0]}?" if near else ""


def vocabulary_of(data: DataConfig, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Tokens that a model needs for a tokenizer; ``tokenizer`` None: for the one that will be trained."""
    if tokenizer is not None:
        return largest_id(tokenizer) + 1
    assert data.vocabulary is not None, "where no tokenizer is there, one is trained"
    return data.vocabulary


def _ends(tokenizer: PreTrainedTokenizerBase | None) -> dict[str, int]:
    """The ids of the beginning and the end of a text, as far as there are such."""
    if tokenizer is None:
        return {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": END_OF_TEXT_ID}
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return {name: value for name, value in ids.items() if isinstance(value, int)}


def _check_against_data(given: Mapping[str, Any], vocabulary: int) -> None:
    asked = asked_vocabulary(given, vocabulary)
    if asked < vocabulary:
        raise ConfigError(
            f"model.config.vocab_size={asked}, but the tokenizer has {vocabulary} tokens: drop vocab_size, it follows "
            "from the tokenizer"
        )
    if "dtype" in given:
        raise ConfigError("model.config.dtype has no effect, as the engine keeps the weights: set precision instead")
    if given.get("use_cache"):
        raise ConfigError("model.config.use_cache=true: training has no use for a KV cache; drop it")
