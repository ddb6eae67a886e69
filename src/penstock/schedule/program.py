"""The computation of a step, before any decision about order, place or overlap. Plain data.

A *program* is what the tape learned about a model from one probe: a list of stages that every
micro-batch goes through, and the param groups that each stage reads and produces gradients for.

    stage 0     segment   the model's own code up to its first block call (embedding): the prologue
    stage 1..   call      one call of a block; or a segment between two calls that touches parameters
    stage K     segment   the code after the last call (norm, head, loss): the epilogue, whose backward
                          runs at once after its forward, micro-batch by micro-batch
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

ALIGN = 4096
"""Elements to which each part of a group's flat buffer is padded; also one block of the gradient norm."""

VIEW_ALIGN = 64
"""Elements to which each parameter in a group's flat buffer is padded; keeps its view aligned to cache lines."""

LARGE_END = 1 << 18
"""Elements (1 MiB in fp32) of a module's own parameters from which on it is an end group by itself."""


OF_BLOCK = "blocks."
"""The beginning of the names of groups whose parameters are of one block; its name follows."""

EXACT = ".exact"
"""The ending of the name of a group of small parameters that are cut off another group, whose name comes before it."""

ELEMENTWISE = ".adamw"
"""The ending of the name of a group of parameters that are cut off a block's group because they are no matrices
(``matrices``). It follows the name of the block's group, and comes before ``EXACT``."""

COMPACT_FROM = 1 << 12
"""Elements of a parameter from which on its moments may be kept in less than fp32."""


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def flat_numel(sizes: Iterable[int]) -> int:
    """Elements of a part of a flat buffer that holds parameters of these many elements."""
    return round_up(sum(round_up(n, VIEW_ALIGN) for n in sizes), ALIGN)


@dataclass(frozen=True, kw_only=True)
class Whole:
    """The cost of making the updates of a group's matrices orthogonal: FLOP, and on the device bytes of temporaries."""

    flop: int
    scratch: int


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """A param group: parameters that move together as one flat buffer.

    ``[0, trainable)`` are the elements with gradient and optimizer state, ``[trainable, trainable + frozen)``
    those without. Both counts are padded to multiples of ``ALIGN`` elements. ``compact``: all that is trained has its
    moments in the form that the settings ask for; of other groups they are fp32. ``whole``: all that is trained are
    matrices, whose steps take them whole, and which have one moment (Muon); None: steps go element by element.
    """

    index: int
    name: str
    trainable: int
    frozen: int
    compact: bool = False
    whole: Whole | None = None

    @property
    def numel(self) -> int:
        return self.trainable + self.frozen


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One step of every micro-batch's path through the model. Sizes are bytes for one micro-batch.

    ``forward_reads`` / ``backward_reads``: groups whose weights the forward / backward needs on the device.
    ``gradients``: groups (ascending) that the backward of this stage produces gradients for.
    ``activation``: bytes of the outputs of this stage that only the next stage reads, and that may
    therefore leave the device until the next stage's backward. ``gradient``: bytes of the gradients
    with respect to those outputs. ``kept``: bytes that stay on the device from this stage's forward
    until its backward (outputs with other readers, autograd graphs of segments).
    ``forward_peak`` / ``backward_peak``: bytes of temporaries on top of all that.
    ``split``: bytes that a backward in two parts holds from the first, which makes the gradients of the
    stage's input, to the second, which makes those of its weights, ``split_peak``: as ``backward_peak``, in two
    parts, with what is held among it. None: it can only be run as a whole, or nobody has asked.
    ``graph``: bytes that autograd's graph of a call, kept from its forward to its backward, holds besides weights
    and the call's input. None: it cannot be kept, and the backward computes the block again.
    """

    index: int
    kind: Literal["segment", "call"]
    name: str
    forward_reads: tuple[int, ...]
    backward_reads: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    activation: int = 0
    gradient: int = 0
    kept: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    split: int | None = None
    split_peak: int = 0
    graph: int | None = None

    @property
    def groups(self) -> list[int]:
        """The groups that it uses, ascending."""
        return sorted({*self.forward_reads, *self.backward_reads, *self.gradients})

    def peak(self, *, split: bool) -> int:
        """Bytes of temporaries at most. ``split``: beside what a backward in two parts holds, where it can be."""
        back = self.backward_peak if self.split is None or not split else self.split_peak - self.split
        return max(self.forward_peak, back)


@dataclass(frozen=True, kw_only=True)
class Dealt:
    """A rank's place in a pipeline whose blocks are dealt out to its ranks.

    | field | meaning |
    |---|---|
    | ``rank``, ``ranks`` | this one, of so many |
    | ``of_stages`` | the rank that has each stage; rank 0 has the model's own code |
    | ``besides`` | by stage, bytes for one micro-batch of what rank 0 sends to the stage's rank besides the stage's
    input, as that has not had it before: masks, position embeddings |
    | ``partials`` | the most partial sums of squares of gradients that any rank has |
    """

    rank: int
    ranks: int
    of_stages: tuple[int, ...]
    besides: tuple[int, ...]
    partials: int

    @cached_property
    def own(self) -> tuple[int, ...]:
        """The stages that are this rank's, ascending."""
        return tuple([stage for stage, rank in enumerate(self.of_stages) if rank == self.rank])

    def has(self, stage: int) -> bool:
        """True if a stage is this rank's."""
        return self.of_stages[stage] == self.rank

    def crosses(self, stage: int) -> bool:
        """True if what a stage puts out goes to another rank than the one that has it."""
        return stage + 1 < len(self.of_stages) and self.of_stages[stage] != self.of_stages[stage + 1]

    def others_after(self, stage: int) -> range:
        """The stages behind a stage that other ranks have than the one that has it, up to that one's next."""
        following = range(stage + 1, len(self.of_stages))
        own = (k for k in following if self.of_stages[k] == self.of_stages[stage])
        return range(stage + 1, next(own, len(self.of_stages)))


@dataclass(frozen=True, kw_only=True, repr=False)
class Program:
    """A model's stages and groups. The last stage is the epilogue; every stage of every micro-batch runs once.

    ``dealt``: it is that of one rank of a pipeline, in which what other ranks have takes nothing; None: one rank has
    all stages, or all ranks have the same ones.
    """

    groups: tuple[GroupSpec, ...]
    stages: tuple[Stage, ...]
    dealt: Dealt | None = None

    def __repr__(self) -> str:
        elements = sum(g.numel for g in self.groups)
        return f"<Program: {len(self.groups)} groups of {elements:,} elements, {len(self.stages)} stages>"

    def __post_init__(self) -> None:
        assert [g.index for g in self.groups] == list(range(len(self.groups)))
        assert [s.index for s in self.stages] == list(range(len(self.stages)))
        assert len(self.stages) >= 2
        assert self.stages[0].kind == self.stages[-1].kind == "segment"

    def has(self, stage: int) -> bool:
        """True if a stage is run by the rank whose program this is."""
        return self.dealt is None or self.dealt.has(stage)

    @cached_property
    def last_stepped(self) -> frozenset[int]:
        """Trained groups that the backward is done with last: no compute is left that their steps could run beside."""
        until: dict[int, int] = {}
        for stage in reversed(self.stages):
            until |= dict.fromkeys((*stage.backward_reads, *stage.gradients), stage.index)
        trained = {g: until[g] for stage in self.stages for g in stage.gradients}
        return frozenset(g for g, stage in trained.items() if stage == min(trained.values()))
