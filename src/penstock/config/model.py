"""What is trained."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model that is trained, from random weights.

    | field | meaning |
    |---|---|
    | ``config`` | a Hugging Face configuration: ``model_type`` and whatever that type can be told |
    """

    config: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.config.get("model_type"), str):
            raise ConfigError("model.config has no model_type: name a Hugging Face model type, for example llama")
