"""A model from its Hugging Face configuration, on the meta device: the engine fills it group by group."""

from copy import deepcopy
from numbers import Number
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from penstock.compat.transformers import get_class_from_dynamic_module, maker_of
from penstock.config import check_parts
from penstock.errors import ConfigError, ModelError
from penstock.hf.models.folder import CONFIG, read_json

REFUSED = (
    *(ValueError, TypeError, LookupError, ImportError, AttributeError, OSError, StrictDataclassError),
    *(RuntimeError, ArithmeticError),  # of torch: sizes that are negative, too large, or divided by zero
)
"""The errors that transformers raises for a configuration of which it cannot make a model."""

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def config_of(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The configuration in a model's folder, as transformers reads it.

    Raises:
        ConfigError: there is none, transformers does not know the type, or it needs code that is not trusted.
    """
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder}: it has no {CONFIG}: give the folder of a Hugging Face model")
    given = read_json(folder / CONFIG)
    check_parts(given, str(folder / CONFIG))
    if given.get("auto_map") and not trust_remote_code and given.get("model_type") not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"{folder}: this model runs Python code of its own. Read it, and if you trust it, set "
            "model.trust_remote_code: true"
        )
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # whatever transformers makes of what somebody wrote into it
        raise ConfigError(f"{folder / CONFIG}: transformers cannot read it: {short(error)}") from error


def dtype_of(config: Any) -> torch.dtype | None:
    """The dtype that a configuration says its weights have; None: it does not say."""
    dtype = getattr(config, "dtype", None)
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    return found if isinstance(found, torch.dtype) else None


def class_of(config: Any, folder: Path | None, *, trust_remote_code: bool) -> Any:
    """The class that a configuration names, or the causal language model of its type.

    Raises:
        ConfigError: it is a class without a head, and so without a loss.
    """
    named = (getattr(config, "architectures", None) or [None])[0]
    if trust_remote_code and folder is not None:
        reference = next((ref for ref in (config.auto_map or {}).values() if str(ref).endswith(f".{named}")), None)
        if reference is not None:
            return get_class_from_dynamic_module(reference, folder)
    found = getattr(transformers, named, None) if isinstance(named, str) else None
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        return AutoModelForCausalLM
    base: Any = transformers.MODEL_MAPPING.get(type(config), None)
    if found is base:
        raise ConfigError(
            f"{folder or 'this configuration'}: {named} has no head, and so no loss to train: give the folder of a "
            "model with one, such as a ...ForCausalLM"
        )
    return found


def build(config: Any, cls: Any = AutoModelForCausalLM, *, dtype: torch.dtype = torch.float32) -> Any:
    """A model without memory, with a configuration of its own.

    Raises:
        ConfigError: transformers cannot build it.
    """
    own = deepcopy(config)
    try:
        with torch.device("meta"), _Counts():
            model = maker_of(cls)(own, dtype=dtype)
    except REFUSED as error:
        raise ConfigError(f"Hugging Face cannot build this {config.model_type} model: {short(error)}") from error
    _give_away(model)
    return model


class _Counts(TorchFunctionMode):
    """Single integers have values, on the CPU: what a constructor computes of them (a padding, of a kernel's size and a
    stride) and keeps on a module could not be computed later, as it is neither parameter nor buffer.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        data = args[0] if args else kwargs.get("data")
        known = isinstance(data, Number) or (isinstance(data, torch.Tensor) and not data.is_meta)
        if func is torch.tensor and known and kwargs.get("device") is None:
            value = func(*args, **{**kwargs, "device": "cpu"})
            if value.dim() == 0 and not value.is_floating_point():
                return value
        return func(*args, **kwargs)


def _give_away(model: nn.Module) -> None:
    """Put on the meta device the parameters that were made elsewhere, as ``torch.Tensor(...)`` makes them. Tied ones
    stay tied.
    """
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if not parameter.is_meta:
                empty = torch.empty_like(parameter, device="meta")
                made = moved.setdefault(id(parameter), nn.Parameter(empty, requires_grad=parameter.requires_grad))
                setattr(module, name, made)


def parts(config: Any) -> list[Any]:
    """A configuration and those of the models within the model."""
    within = (getattr(config, key, None) for key in config.sub_configs)
    return [config, *(part for part in within if part is not None)]


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as a configuration names it."""
    return str(dtype).removeprefix("torch.")


def cast(values: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """The values of ``name`` in the dtype that they are written in.

    Raises:
        ModelError: a value is too large for the dtype.
    """
    found = values.to(dtype)
    if dtype.is_floating_point and found.dtype != values.dtype and not bool(found.isfinite().all()):
        where = found.isfinite().logical_not_()
        worst = values[where].flatten()[0].item()
        raise ModelError(f"{name} has {worst:g}, which is too large for {dtype_name(dtype)}: export in bf16 or fp32")
    return found


def short(error: BaseException) -> str:
    """An error of a library in one line."""
    return " ".join(str(error).split())[:400]


def first_names(model: nn.Module) -> dict[str, str]:
    """All names of a model's parameters and buffers, with the first one of each: tied ones have several."""
    every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    first: dict[int, str] = {}
    return {name: first.setdefault(id(value), name) for name, value in every}


def parameter_count(model: nn.Module) -> int:
    """Parameters, tied ones counted once."""
    return sum(p.numel() for p in model.parameters())
