"""Processes that are one pipeline: all of them run the loop, on the same data; the first of them has the model's own
code, and tells the others what the loop asks for."""

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from penstock.errors import ModelError
from penstock.fabric.deferred import Deferred, known_numbers, settle_numbers
from penstock.ranks.group import Ranks
from penstock.tape import trees


def told_by_first(ranks: Ranks, what: str, value: Any, device: torch.device) -> Any:
    """The ``value`` that the first process of this one's pipeline has, with its tensors on the ``device``; what others
    give is nothing. All processes come here.

    Raises:
        ModelError: it cannot be told: it holds an object that cannot be pickled.
    """
    with ranks.together(what):
        sent = _packed(what, value) if ranks.pipe.rank == 0 else b""
        found = ranks.gather_objects(what, sent)[ranks.sharing.rank]
    return value if ranks.pipe.rank == 0 else trees.replace(pickle.loads(found), lambda tensor: tensor.to(device))


def tell_numbers(ranks: Ranks, roots: Sequence[Deferred], device: torch.device) -> None:
    """Let the numbers that were part of losses be known to all processes of a pipeline, of a step just taken."""
    own = [known_numbers(root) for root in roots]
    for root, numbers in zip(roots, told_by_first(ranks, "optimizer.step", own, device), strict=True):
        settle_numbers(root, numbers)


def _packed(what: str, value: Any) -> bytes:
    try:
        return pickle.dumps(trees.replace(value, lambda tensor: tensor.detach().to("cpu", copy=True)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # all that Python has for it
        raise ModelError(
            f"{what}: of a pipeline the first process has the model's outputs, and tells the others: they hold a value "
            f"that cannot be told ({error}). Let the model return tensors, in containers or a class of a module"
        ) from error
