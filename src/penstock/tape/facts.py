"""Blocks where they stand, and the facts about stages that the probe has learned and a run has to know beforehand."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock.tape import trees
from penstock.tape.early_stop import LastProduct
from penstock.tape.holders import Holder


@dataclass(frozen=True, kw_only=True)
class Site:
    """A block with its own forward, which the boundary stands in front of. ``buffered``: its modules with buffers."""

    index: int
    name: str
    module: nn.Module
    forward: Callable[..., Any]
    trainable: bool
    buffered: tuple[nn.Module, ...]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about one block call that the probe has learned and a run has to know beforehand.

    Not which outputs need a gradient: that may depend on the data, and an output without one would lose another
    micro-batch's. ``buffers``: the buffers that the call changes, as (module, name). ``written``: parameters that it
    writes to, and that are to be what they were. ``trains``: it reads parameters that train, be they the block's own.
    ``reachable``: its graph may have tensors that others reach, besides weights, inputs and what it returns: from
    before the call, or such as it leaves behind. ``finds``: the places of values that earlier stages assign for it.
    ``last``: the product that its recomputation can do without.
    """

    buffers: tuple[tuple[nn.Module, str], ...] = ()
    written: tuple[nn.Parameter, ...] = ()
    trains: bool = False
    reachable: bool = False
    finds: tuple[Holder, ...] = ()
    last: LastProduct | None = None


@dataclass(frozen=True, kw_only=True)
class StageFacts:
    """Facts about a stage that the probe has learned and no schedule needs.

    ``site``: the block of a call, None for the model's own code. ``offload``: which tensors are the stage's saved
    activation, by their places among the next call's inputs, or (before the epilogue) in the order of this call's
    outputs. Places and not numbers, as another micro-batch may have no tensor where this one has a mask.
    ``assigned``: the places of values that its forward assigns for later stages.
    """

    site: Site | None
    call: Facts
    offload: tuple[trees.Place, ...]
    assigned: tuple[Holder, ...] = ()
