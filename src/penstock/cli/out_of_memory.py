"""Running out of memory in the middle of a run, in words: what to lower, what is safe, how to go on."""

import re
import shlex
from collections.abc import Sequence

from penstock.cli.launch import how_to_start
from penstock.config import TrainConfig
from penstock.engine.device import resolve_device
from penstock.errors import StoreError
from penstock.store.facts import facts_of_all

_PLACE = re.compile(r"^\[enforce fail at [^\]]*\] [^.]*\. ")
"""Torch's own line of code, which its CPU allocator begins with."""
_OF_THE_DEVICE = re.compile(r"cuda|\bhip\b|_STATUS_ALLOC_FAILED", re.IGNORECASE)


def explain(error: BaseException, config: TrainConfig, *, ranks: int, hosts: int = 1, begun: bool) -> str:
    """The message. ``ranks``: that train, on so many ``hosts``. ``begun``: the run has steps to go on from."""
    on_device = _OF_THE_DEVICE.search(str(error)) is not None
    keys = ["device"] if on_device else ["host"]
    if not on_device and resolve_device(config.device).type == "cpu":
        keys.insert(0, "device")  # there it is the same memory
    reason = _PLACE.sub("", " ".join(str(error).split()))[:300] or type(error).__name__
    return (
        f"out of memory on the {'device' if on_device else 'host'}: {reason.rstrip('.')}. "
        "A budget does not count Python, torch, the model's own code or other programs. "
        + (
            _go_on(config, keys, ranks, hosts)
            if begun
            else f"No step was done. {_lower(config, keys)}, or micro_batch_size"
        )
    )


def _go_on(config: TrainConfig, keys: Sequence[str], ranks: int, hosts: int) -> str:
    """The step that is safe on disk, and the command that goes on from it with smaller budgets."""
    try:
        facts = facts_of_all(config.budget.stores(ranks, hosts)[: ranks // hosts])
    except StoreError as error:
        return f"Whether the state on disk is whole cannot be said: {error}"
    if facts is None or facts.step is None:
        return "State was in memory, and what is on disk is not one step's state: go on from a snapshot, or start over"
    sizes = " ".join(f"--budget.{key} SIZE" for key in keys)
    again = f"{how_to_start(ranks, hosts)} resume {shlex.quote(config.run)} {sizes}"
    return f"The last commit, step {facts.step}, is intact. {_lower(config, keys)}, and go on from it: {again}"


def _lower(config: TrainConfig, keys: Sequence[str]) -> str:
    return "Lower " + " or ".join(f"budget.{key} (now {getattr(config.budget, key)})" for key in keys)
