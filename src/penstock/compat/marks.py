"""Marks that transformers, accelerate and peft leave on modules, for rooms that work without these libraries.

Nothing is imported: a library that is not loaded has left nothing.
"""

import re
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


def buffer_dtypes(model: nn.Module, dtype: torch.dtype) -> dict[tuple[nn.Module, str], torch.dtype]:
    """The buffers, by module and name in it, that are to be in another dtype than they are beside weights in ``dtype``:
    those that transformers' models have in the dtype of their weights, such as sinusoids of positions, causal masks,
    and tables and scales that are saved. Rotary frequencies are fp32 in all, as are those that a model's class keeps in
    fp32 beside such weights; the running statistics of a batch norm stay as they are.

    Without: a model that was built in fp32 would meet weights in 16 bits with tables in fp32, which torch refuses.
    """
    library: Any = sys.modules.get("transformers.modeling_utils")
    within: set[nn.Module] = set()
    dtypes: dict[tuple[nn.Module, str], torch.dtype] = {}
    for module in model.modules() if library is not None else ():
        if not isinstance(module, library.PreTrainedModel) or module in within:
            continue
        within.update(module.modules())
        found = {
            f"{path}.{key}": (part, key)
            for path, part in module.named_modules()
            for key, buffer in buffers_of(part).items()
            if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype
            if not key.endswith("inv_freq")
            if key not in persistent_buffers(part) or not isinstance(part, nn.modules.batchnorm._NormBase)
        }
        twin = _twin(module, dtype) if found else {}
        dtypes |= {place: dtype for name, place in found.items() if name in twin and twin[name].dtype == dtype}
    return dtypes


def _twin(module: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The buffers of a model as transformers makes it in a dtype, on the meta device, without those saved ones that it
    reads in fp32 beside weights in that dtype."""
    try:
        with torch.device("meta"):
            made: Any = type(module)._from_config(deepcopy(module.config), dtype=dtype)
    except Exception:  # noqa: BLE001  a class of the user's, whose constructor may want more than a configuration
        return {}
    kept = [re.compile(pattern.replace("*", ".*")) for pattern in made._get_dtype_plan(dtype)]
    return {
        f"{path}.{key}": buffer
        for path, part in made.named_modules()
        for key, buffer in buffers_of(part).items()
        if buffer is not None
        if key not in persistent_buffers(part) or not any(pattern.search(f"{path}.{key}") for pattern in kept)
    }


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
