"""What is asked of a family of schedules: how many of what, how large, and the options."""

from dataclasses import dataclass
from typing import Literal

GatherGroup = Literal["stage", "world"]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Amounts of memory, in any one unit (bytes on a machine, elements in the puzzles). What has size 0 is left out.

    Per layer and micro-batch: ``activation`` is what a layer puts out, ``activation_gradient`` the gradient with
    respect to it, ``saved`` what a forward keeps for its backward besides its input. Per layer: ``weights``,
    ``gradient`` (of the weights) and ``state`` (the optimizer's, with a master copy of the weights if there is one).

    What crosses a link is the same amount: ``Op.nbytes`` is in this unit, too.
    """

    activation: int
    activation_gradient: int
    weights: int
    gradient: int
    state: int
    saved: int = 0


@dataclass(frozen=True, kw_only=True)
class Request:
    """One schedule of a family. What is None or False is not asked for; asking it of a family that has no such option
    is an error.

    | field | meaning |
    |---|---|
    | ``micro_batches`` | of the step, over all ranks |
    | ``stage_ops`` | a pipeline stage is one op, as if it were one layer, whatever ``layers`` says |
    | ``virtual_stages`` | stages that a rank of a pipeline holds |
    | ``gather_group`` | who takes part in a gather of weights: the ranks of a stage, or all |
    | ``fused`` | the optimizer steps a layer as soon as its backward is done |
    | ``partition_activations`` | ZeRO-R: ranks of a model-parallel group, which keep one copy of each layer's input |
    | ``buffer_size`` | ZeRO-R: gradients cross the network in pieces of this amount, through one buffer |
    | ``lookahead`` | how far the network may run ahead: gathers before their turn, and buffers that the order alone
      does not need |
    """

    family: str
    layers: int
    ranks: int
    micro_batches: int
    sizes: Sizes
    stage_ops: bool = False
    virtual_stages: int | None = None
    gather_group: GatherGroup | None = None
    fused: bool = False
    partition_activations: int | None = None
    buffer_size: int | None = None
    lookahead: int = 0
