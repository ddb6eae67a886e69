"""Settings of the model to train."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from penstock.documents.typed import fits, shown
from penstock.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model that is trained: one that is there, or one from random weights.

    | field | meaning |
    |---|---|
    | ``path`` | a folder of safetensors files as Hugging Face writes them, or a name on its hub; ``model: PATH`` is
    short for it |
    | ``revision`` | of a name on the hub: a branch, tag or commit; None: its main branch |
    | ``trust_remote_code`` | run the Python code that the model's folder brings |
    | ``config`` | instead of ``path``: the Hugging Face configuration of a new model (``model_type`` and any settings
    of that type), or a config.json, folder or name to take it from; needs ``init: true`` |
    | ``init`` | the weights are random, as the model initialises itself |
    """

    shorthand: ClassVar[str] = "path"
    """the field that a plain text in the place of the section stands for"""

    path: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    config: str | Mapping[str, Any] | None = None
    init: bool = False

    @property
    def name(self) -> str:
        """The model in a word or two."""
        if isinstance(self.config, Mapping):
            return str(self.config["model_type"])
        named = Path(self.path or self.config or "")
        return (named.parent.name or named.name) if named.name == "config.json" else named.name

    @property
    def source(self) -> str:
        """The path or name that the configuration is read from; there is one unless it is given here."""
        assert not isinstance(self.config, Mapping)
        return self.path or self.config or ""

    def __post_init__(self) -> None:
        if not (self.path or self.config is not None):
            raise ConfigError(
                "model names no model: give model.path, a folder or a name on the hub, or model.config and "
                "model.init: true for a new one"
            )
        if self.path and self.config is not None:
            raise ConfigError(
                "model.config has no effect with model.path, which brings its own: drop one of them (with model.config "
                "the weights are random)"
            )
        if self.path and self.init:
            raise ConfigError(
                f"model.init is true, and model.path={self.path!r} brings weights: for random ones write "
                f"model.config: {self.path}"
            )
        if self.config is not None and not self.init:
            raise ConfigError(
                "model.config describes a model without weights: say model.init: true to train it from random ones, or "
                "give model.path instead"
            )
        if isinstance(self.config, Mapping):
            self._check_mapping()

    def _check_mapping(self) -> None:
        assert isinstance(self.config, Mapping)
        if not isinstance(self.config.get("model_type"), str):
            raise ConfigError("model.config has no model_type: name a Hugging Face model type, for example llama")
        for key in ("revision", "trust_remote_code"):
            if getattr(self, key):
                raise ConfigError(f"model.{key} has no effect: model.config is written out here. Drop it")


_MOST_LAYERS, _MOST_EXPERTS = 4096, 1 << 14
"""Layers of a model, and experts of one: more are in none, and layers take minutes to build."""

_WIDTHS = ("size", "dim")
"""Parts of names that say how wide a layer or an expert is (``shared_expert_intermediate_size``), not how many."""


def check_parts(given: Mapping[str, Any], where: str) -> None:
    """Look at the layers, experts and heads that a Hugging Face configuration asks for; within it there may be others.

    Raises:
        ConfigError: more than any model has, or heads that cannot share keys and values.
    """
    heads, shared = given.get("num_attention_heads"), given.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(shared, int) and (shared < 1 or heads % shared):
        raise ConfigError(f"{where}: num_attention_heads={heads} is no multiple of num_key_value_heads={shared}")
    for key, value in given.items():
        if isinstance(value, Mapping):
            check_parts(value, where)
        named = "layer" in key or "expert" in key or key in ("depth", "depths", "num_stages")
        counted = named and not any(word in key for word in _WIDTHS)
        most = _MOST_EXPERTS if "expert" in key else _MOST_LAYERS
        if counted and isinstance(value, int) and value > most:
            raise ConfigError(f"{where}: {key}={shown(value)} is more than any model has (at most {most:,})")


def asked_vocabulary(given: Mapping[str, Any], vocabulary: int) -> int:
    """Tokens of the vocabulary that a configuration asks for; without any the tokenizer's ``vocabulary``.

    Raises:
        ConfigError: it asks for no number of tokens.
    """
    asked = given.get("vocab_size", vocabulary)
    if not fits(asked, int):
        raise ConfigError(f"model.config.vocab_size must be a whole number, not {shown(asked)}: drop it, or give one")
    return int(asked)
