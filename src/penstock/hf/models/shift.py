"""Finds out if a language model compares a token with the next one, by running its own code without weights."""

import inspect
from typing import Any

import torch

from penstock.engine.labels import LabelCount
from penstock.errors import ModelError
from penstock.hf.models.shell import short
from penstock.tape.kv_cache import CachesOff
from penstock.tape.losses import Losses
from penstock.tape.values import Values

_WORDS = [[3, 5, 4, 7]]


def shifts(model: Any) -> bool | None:
    """True if the loss of a model on the meta device compares each position with the next label. None: that cannot be
    seen without weights (the model decides by their values how to go on); a run's first step shows it.

    Raises:
        ModelError: the model computes no loss for text alone, with what its forward raised.
    """
    values, count = Values("cpu"), LabelCount()
    losses = Losses(values.of)
    row = {"input_ids": torch.tensor(_WORDS), "labels": torch.tensor(_WORDS)}
    if "attention_mask" in inspect.signature(model.forward).parameters:
        row["attention_mask"] = torch.ones_like(row["input_ids"])
    given = values.give(row)
    training, caches = model.training, CachesOff(model)
    try:
        with torch.no_grad(), values, losses:
            model.eval()(**given)
    except (ModelError, RuntimeError):  # it asks for the value of an activation, or for an op without a meta kernel
        return None
    except Exception as error:  # whatever a model raises for text that is not for it
        raise ModelError(f"it computes no loss for text alone ({type(error).__name__}: {short(error)})") from error
    finally:
        model.train(training)
        caches.restore()
    count.learn(row, losses.seen, None)
    return None if count.known is None else count.known == "but the first"
