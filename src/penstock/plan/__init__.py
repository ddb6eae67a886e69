"""Decides how a model is trained on a machine, and tells what to expect. Nothing here imports torch at module level.

``penstock.plan(...)`` is ``ask.plan``: this package is callable, because its name is also the name of what it does.

    machine, profiles, costs       what a machine can do, and what an op costs on it
    model, shipped, transformer,   what a model computes, and how large its groups and activations are
    meta, layer_costs
    means                          waiting for the norm, speculating, delaying: what is possible
    fit, own_schedule              a plan that fits, by a fixed order of preference; a schedule of the user's own in it
    lane_loads, placement_lp,      the linear program over tiers, whole groups from its shares, what the programs
    rounding, proposals, search    propose, and the search that lets the simulator decide
    alternatives                   a plan's means beside those that it could have had instead
    task, batches, forecast,       what is asked, how large a step should be, what follows from a plan, what would help
    roofline, advice, ask

May import: ``config``, ``errors``, ``schedule``, ``sim``; ``tape`` when a model is run on the meta device.
"""

import sys
from inspect import Signature, signature
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A package that can be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from penstock.plan.ask import plan

        return plan(*args, **kwargs)

    @property
    def __signature__(self) -> Signature:
        from penstock.plan.ask import plan

        return signature(plan)


sys.modules[__name__].__class__ = _Callable
