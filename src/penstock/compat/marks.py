"""Marks that transformers, accelerate and peft leave on modules, for rooms that work without these libraries.

Nothing is imported: a library that is not loaded has left nothing.
"""

import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from penstock.compat.modules import buffers_of, persistent_buffers


def initialiser_of(module: nn.Module) -> Callable[[nn.Module], None] | None:
    """``PreTrainedModel._init_weights``, which fills one module the way the model's authors do; None of others.

    Without: transformers' models could not begin with random values on the meta device.
    """
    library = sys.modules.get("transformers.modeling_utils")
    if library is None or not isinstance(module, library.PreTrainedModel):
        return None
    found: Callable[[nn.Module], None] = module._init_weights
    return found


def buffers_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert to ``dtype`` the buffers that transformers' models make in the dtype of their weights: sinusoids of
    positions, causal masks. Rotary frequencies are fp32 in all; buffers that are state stay as they are.

    Without: a model that was built in fp32 would meet weights in 16 bits with tables in fp32, which torch refuses.
    """
    library: Any = sys.modules.get("transformers.modeling_utils")
    within: set[nn.Module] = set()
    for module in model.modules() if library is not None else ():
        if not isinstance(module, library.PreTrainedModel) or module in within:
            continue
        within.update(module.modules())
        found = {
            f"{path}.{key}": (buffers_of(part), key, buffer)
            for path, part in module.named_modules()
            for key, buffer in buffers_of(part).items()
            if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype
            if key not in persistent_buffers(part) and not key.endswith("inv_freq")
        }
        twin = _twin(module, dtype) if found else {}
        for name, (buffers, key, buffer) in found.items():
            if name in twin and twin[name].dtype == dtype:
                buffers[key] = buffer.to(dtype)


def _twin(module: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The buffers of a model as transformers makes it in a dtype, on the meta device."""
    try:
        with torch.device("meta"):
            made: nn.Module = type(module)._from_config(deepcopy(module.config), dtype=dtype)
    except Exception:  # noqa: BLE001  a class of the user's, whose constructor may want more than a configuration
        return {}
    return {name if "." in name else f".{name}": buffer for name, buffer in made.named_buffers(remove_duplicate=False)}


def class_of_caches() -> type | None:
    """``transformers.Cache``, of which key-value caches are made; None: nobody has made one.

    Without: a cache handed to a block would be missed, or be looked for in an import of seconds.
    """
    library = sys.modules.get("transformers.cache_utils")
    return None if library is None else library.Cache


def set_initialised(parameter: nn.Parameter, value: bool) -> None:
    """The mark by which transformers' initialisers leave alone what has its values.

    Without: they would skip what is to be filled, or spend time on stand-ins.
    """
    if value or hasattr(parameter, "_is_hf_initialized"):
        parameter.__dict__["_is_hf_initialized"] = value


def has_adapters(module: nn.Module) -> bool:
    """True if a layer has low-rank adapters of peft. Without: they would begin as the linear layers that they are."""
    library = sys.modules.get("peft.tuners.lora.layer")
    return library is not None and isinstance(module, library.LoraLayer)


def is_moved(module: nn.Module) -> bool:
    """True if accelerate moves a module's weights (``device_map``, offloading).

    Without: two would move them, and the model would compute with what is not there.
    """
    return hasattr(module, "_hf_hook")


def carries_state(model: nn.Module) -> bool:
    """True if a model of transformers hands a state from each token to the next, as state-space models do.

    Without: packed documents would run into each other in such models.
    """
    return bool(getattr(model, "_is_stateful", False))
