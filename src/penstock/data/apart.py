"""Refuses packing for models that do not keep packed documents apart.

Hugging Face's decoders build their attention masks in ``transformers.masking_utils``, which takes positions that begin
anew for the beginning of another document, and masks what is before. That holds for every layer that attends by such a
mask, with a sliding window too; not for models that carry a state from token to token, nor for those that build
masks of their own. Which it is is found out by running the model's own code, without weights, up to the masks.
"""

import inspect
from contextlib import nullcontext
from typing import NoReturn

import torch
from torch import nn

from penstock.compat.marks import carries_state
from penstock.compat.transformers import ReachedError, noticed
from penstock.errors import ConfigError
from penstock.tape.kv_cache import CachesOff
from penstock.tape.values import Values

_REMEDY = "Set data.packing to false (one document in a sequence), or to continuous (documents attend to those before)"


_MASKED = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers (``config.layer_types``) that attend by masks."""


def check_keeps_apart(model: nn.Module) -> None:
    """Raise ConfigError unless a document in a packed sequence is to ``model`` what it is alone."""
    name = type(model).__name__
    inner = _innermost(model)
    if "position_ids" not in inspect.signature(inner.forward).parameters:
        _refuse(f"{name} takes no position_ids, from which it could tell packed documents apart")
    if carries_state(inner) or _other_layers(inner):
        _refuse(f"{name} carries a state from each token to the next, over the ends of documents")
    reached, reason = _asks(inner)
    if not reached:
        _refuse(f"{name} does not look at position_ids for where documents begin{reason}")


def _other_layers(model: nn.Module) -> list[str]:
    """Kinds of layers that do not attend by a mask: convolutions, linear attention and the like."""
    config = getattr(model, "config", None)
    kinds = getattr(config.get_text_config(), "layer_types", None) if config is not None else None
    return [kind for kind in kinds or () if kind not in _MASKED]


def _innermost(model: nn.Module) -> nn.Module:
    """The model within what adapters put around it."""
    get = getattr(model, "get_base_model", None)
    return get() if callable(get) else model


def _asks(model: nn.Module) -> tuple[bool, str]:
    """Run the model up to its masks. Returns if it asks which tokens belong together, and words on what it raised."""
    device = next(model.parameters()).device
    words = {"input_ids": torch.zeros((1, 4), dtype=torch.int64), "position_ids": torch.tensor([[0, 1, 0, 1]])}
    values = Values("cpu") if device.type == "meta" else None  # some models look at token ids before their masks
    given = {name: value.to(device) for name, value in words.items()} if values is None else values.give(words)
    training, caches = model.training, CachesOff(model)  # beside a cache, models take all for one document
    try:
        with values or nullcontext(), noticed(), torch.no_grad():
            model.eval()(**given)
    except ReachedError:
        return True, ""
    except Exception as error:  # noqa: BLE001  whatever a model makes of a run without weights
        return False, f", as far as can be seen ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    finally:
        model.train(training)
        caches.restore()
    return False, ""


def _refuse(why: str) -> NoReturn:
    raise ConfigError(f"data.packing: {why}. {_REMEDY}")
