"""Blocks where they stand, and the facts about stages that the probe has learned and a run has to know beforehand."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock.schedule.program import Stage
from penstock.schedule.work import BothWays
from penstock.tape import trees
from penstock.tape.early_stop import LastProduct
from penstock.tape.handed import HandedOn
from penstock.tape.losses import Compared
from penstock.tape.places import Holder
from penstock.tape.waits import Wait


@dataclass(frozen=True, kw_only=True)
class Site:
    """A block with its own forward, which the boundary stands in front of. ``buffered``: its modules with buffers."""

    index: int
    name: str
    module: nn.Module
    forward: Callable[..., Any]
    trainable: bool
    buffered: tuple[nn.Module, ...]


@dataclass(kw_only=True)
class StageFacts:
    """Facts about a stage that the probe has learned, a run has to know beforehand, and no schedule needs.

    ``site``: the block of a call, None for the model's own code. ``offload``: which tensors are the stage's saved
    activation, by their places among the next call's inputs, or (before the epilogue) in the order of this call's
    outputs. Places and not numbers, as another micro-batch may have no tensor where this one has a mask.
    ``assigned``: the places of values that its forward assigns for later stages.

    Of a call alone, and not which outputs need a gradient: that may depend on the data, and an output without one would
    lose another micro-batch's. ``buffers``: the buffers that the call changes, as (module, name). ``written``:
    parameters that it writes to, and that are to be what they were. ``trains``: it reads parameters that train, be they
    the block's own. ``reachable``: its graph may have tensors that others reach, besides weights, inputs and what it
    returns: from before the call, or such as it leaves behind. ``finds``: places that are to hold in its recomputation
    what they do in the call: attributes that earlier stages assign for it, and places outside of modules and arguments
    that forwards change; ``undoes``: those that the call changes, and its recomputation is not to. ``last``: the
    product that its recomputation can do without.
    """

    site: Site | None = None
    offload: tuple[trees.Place, ...] = ()
    assigned: tuple[Holder, ...] = ()
    buffers: tuple[tuple[nn.Module, str], ...] = ()
    written: tuple[nn.Parameter, ...] = ()
    trains: bool = False
    reachable: bool = False
    finds: tuple[Holder, ...] = ()
    undoes: tuple[Holder, ...] = ()
    last: LastProduct | None = None


@dataclass(frozen=True, kw_only=True)
class Learned:
    """All that one probe has learned, of the model and of the micro-batch that it ran.

    | field | meaning |
    |---|---|
    | ``stages`` | the model's stages, for schedules |
    | ``facts`` | of each stage, for the tape that runs it |
    | ``work`` | of each stage |
    | ``handed`` | the arguments of the calls of blocks |
    | ``waits`` | the waits of the forward for the device |
    | ``losses`` | calls of torch's losses by the model's own code |
    | ``loss`` | the value of the model's loss; None: it has none |
    | ``carried`` | the tensor that passes from one micro-batch to the next through several stages, in words; or None |
    """

    stages: tuple[Stage, ...]
    facts: tuple[StageFacts, ...]
    work: tuple[BothWays, ...]
    handed: HandedOn
    waits: tuple[Wait, ...]
    losses: tuple[Compared, ...]
    loss: float | None
    carried: str | None
