"""A model from its Hugging Face configuration, on the meta device: the engine fills it group by group."""

import difflib
import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from penstock.config import DataConfig, ModelConfig
from penstock.data.tokens import END_OF_TEXT_ID
from penstock.errors import ConfigError


def build_model(config: ModelConfig, data: DataConfig) -> nn.Module:
    """A causal language model with random weights to come: no parameter has memory yet.

    The vocabulary is the tokenizer's, and the KV cache is off, as nothing is generated.

    Raises:
        ConfigError: a key that this model type does not know, one that contradicts the data, or what the model's own
            classes refuse.
    """
    given = dict(config.config)
    kind = given.pop("model_type")
    _check_keys(kind, given)
    _check_against_data(given, data)
    ends = {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": END_OF_TEXT_ID}
    settings = {**ends, **given, "vocab_size": data.vocabulary, "use_cache": False}
    build = cast(Any, AutoModelForCausalLM).from_config  # transformers leaves it without types
    try:
        full = AutoConfig.for_model(kind, **settings)
        with torch.device("meta"):
            model = build(full)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"model.config: Hugging Face cannot build this {kind} model: {reason[:400]}") from error
    longest = getattr(full, "max_position_embeddings", None)
    if isinstance(longest, int) and longest < data.sequence_length:
        raise ConfigError(
            f"data.sequence_length={data.sequence_length} is more than the model's max_position_embeddings={longest}: "
            "lower the one or raise model.config.max_position_embeddings"
        )
    assert isinstance(model, nn.Module)
    return model


def parameter_count(model: nn.Module) -> int:
    """Parameters, tied ones counted once."""
    return sum(p.numel() for p in model.parameters())


def _check_keys(kind: str, given: Mapping[str, Any]) -> None:
    """Hugging Face keeps unknown keys without a word; here a typing error must not become a silent default."""
    if kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(kind, CONFIG_MAPPING.keys(), n=1)
        raise ConfigError(
            f"model.config.model_type={kind!r} is not a type that the installed transformers knows"
            + (f": did you mean {near[0]}?" if near else "")
        )
    cls = CONFIG_MAPPING[kind]
    known = {*inspect.signature(cls).parameters, *cls.attribute_map, *vars(cls())} - {"kwargs", "model_type"}
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            raise ConfigError(
                f"model.config.{key} is not a setting of {kind} ({cls.__name__})"
                + (f": did you mean {near[0]}?" if near else "")
            )


def _check_against_data(given: Mapping[str, Any], data: DataConfig) -> None:
    vocabulary = given.get("vocab_size", data.vocabulary)
    if vocabulary != data.vocabulary:
        raise ConfigError(
            f"model.config.vocab_size={vocabulary}, but the tokenizer has data.vocabulary={data.vocabulary} tokens: "
            "drop vocab_size, it follows from the data"
        )
    if "dtype" in given:
        raise ConfigError("model.config.dtype has no effect, as the engine keeps the weights: set precision instead")
    if given.get("use_cache"):
        raise ConfigError("model.config.use_cache=true: training has no use for a KV cache; drop it")
