"""Low-rank adapters by ``peft``, on a model that has no memory."""

import warnings
from typing import Any

import torch
from torch import nn

from penstock.compat.peft import base_name
from penstock.config import LoraConfig
from penstock.engine.start import WeightSource
from penstock.errors import ConfigError


def with_adapters(model: nn.Module, lora: LoraConfig) -> nn.Module:
    """The model with adapters that train, its own weights frozen: ``peft.get_peft_model``. Its module is changed.

    Raises:
        ConfigError: no layer has one of the names, or peft knows no default for this type of model.
    """
    import peft

    targets: Any = lora.target_modules
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(targets) if isinstance(targets, tuple) else targets,
        task_type="CAUSAL_LM",
    )
    first, names = next(model.parameters()), [name for name, _ in model.named_modules()]
    linear = {name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    try:
        with torch.device(first.device), warnings.catch_warnings():
            # peft asks the model by a name that transformers has deprecated, which is nothing that a user can change
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
            adapted = peft.get_peft_model(model, settings)
    except ValueError as error:
        if targets is None:
            raise ConfigError(
                "lora.target_modules=None: peft knows no layers for this type of model by itself: name their ends, as "
                "[q_proj, v_proj], or all-linear"
            ) from error
        raise ConfigError(f"lora.target_modules={targets!r}: {' '.join(str(error).split())[:300]}") from error
    assert isinstance(adapted, nn.Module)
    # peft is content with one that it finds. Names of experts it has replaced by those of the parameters they are in.
    for end in targets if isinstance(targets, tuple) else ():
        if end in (settings.target_modules or ()) and not any(f".{name}".endswith(f".{end}") for name in names):
            raise ConfigError(
                f"lora.target_modules={targets!r}: no layer's name ends in {end!r}: drop or correct it. Those of "
                f"linear layers end in {', '.join(sorted(linear))}"
            )
    return adapted


class BaseWeights:
    """The values of a model with adapters: the base's from the base's own source. A ``WeightSource``.

    Adapters are not in it: they begin as peft would have them, A random and B zero.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def __contains__(self, name: str) -> bool:
        base = base_name(name)
        return base is not None and base in self._source

    def fill(self, name: str, out: torch.Tensor) -> None:
        base = base_name(name)
        assert base is not None
        self._source.fill(base, out)
