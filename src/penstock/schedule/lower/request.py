"""The request to a family of schedules: how many of what, how large, and the options."""

from dataclasses import dataclass, field
from typing import Literal

from penstock.config import Tier, ZeroStage
from penstock.config.step import check_delay
from penstock.schedule.place import Depths, Format
from penstock.schedule.program import Program

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
class LayerOptions:
    """Options of families that compute whole layers: each knows some of them.

    | field | meaning |
    |---|---|
    | ``virtual_stages`` | stages that a rank of a pipeline holds |
    | ``gather_group`` | who takes part in a gather of weights: the ranks of a stage, or all (world, which is what
    pipeline-fsdp does if not told) |
    | ``fused`` | the optimizer steps a layer as soon as its backward is done |
    | ``partition_activations`` | ZeRO-R: N ranks of a model-parallel group keep one copy of each layer's input |
    """

    virtual_stages: int | None = None
    gather_group: GatherGroup | None = None
    fused: bool = False
    partition_activations: int | None = None


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """Options of families that offload: each knows some of them.

    | field | meaning |
    |---|---|
    | ``delay`` | share of the optimizer's work that is done during the next step's forward, 0 to 1 |
    | ``wait`` | the optimizer waits for the norm of all gradients |
    | ``weights`` | the tier of all weights |
    | ``state`` | the tier of all state of the optimizer |
    | ``activations`` | the tier of all saved activations |
    | ``gradients`` | the tier of gradients that wait |
    | ``device_blocks`` | blocks whose optimizer state lives on the device, those whose gradients come last |
    | ``stage`` | of ZeRO: what several ranks have parts of, 0 (nothing) to 3 (all) |
    | ``chunks`` | pieces that a block is moved and stepped in |
    """

    delay: float | None = None
    wait: bool = False
    weights: Tier | None = None
    state: Tier | None = None
    activations: Tier | None = None
    gradients: Literal["host", "disk"] | None = None
    device_blocks: int | None = None
    stage: ZeroStage | None = None
    chunks: int | None = None

    def __post_init__(self) -> None:
        check_delay(self.delay)


@dataclass(frozen=True, kw_only=True)
class FamilyRequest(StreamOptions, LayerOptions):
    """One world of a family: of ``layers`` that are alike, of the given ``sizes``, or where the family offloads of a
    ``program`` in a ``form``. What is None or False is not asked for: the family does what it does. Asking it of a
    family that has no such option is an error.

    | field | meaning |
    |---|---|
    | ``micro_batches`` | of the step, over all ranks |
    | ``stage_ops`` | a pipeline stage is one op, as if it were one layer, whatever ``layers`` says |
    | ``buffer_size`` | ZeRO-R: gradients cross the network in pieces of this amount, through one buffer |
    | ``lookahead`` | how far the network may run ahead: gathers before their turn, and buffers that the order alone
      does not need |
    | ``depths`` | how far the lanes may run ahead, of a family that offloads |
    """

    family: str
    micro_batches: int
    ranks: int = 1
    layers: int = 1
    sizes: Sizes = Sizes(activation=0, activation_gradient=0, weights=0, gradient=0, state=0)
    stage_ops: bool = False
    program: Program | None = None
    form: Format = field(default_factory=lambda: Format.of("bf16", 2))
    buffer_size: int | None = None
    lookahead: int = 0
    depths: Depths | None = None
