"""Placement of each group's bytes, and their cut into chunks: the decisions a schedule is built from. Plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import ceil
from typing import Literal

from penstock.config import TIERS, GradDtype, Precision, Tier, ZeroStage
from penstock.config.optimizer import Moments, Orthogonal
from penstock.schedule.program import ALIGN, GroupSpec, Program

FP32, BF16 = 4, 2
"""bytes of an element"""
NORM_BYTES = 8
"""bytes of one partial sum of squares, of ``ALIGN`` elements of a gradient"""

Side = Literal["device", "host"]
"""Side of the link between the two that rounds."""

PAGE = 4096
"""Bytes to which everything that goes to disk is padded."""
BOUNCE = 8 << 20
"""Bytes that are moved at a time between tiers, outside of steps."""
GRAIN = 1 << 16
"""Elements under one checksum on disk (256 KiB of fp32), and so the smallest chunk, of a large part of a group."""
CHECKSUM = 8
"""Bytes of one checksum."""
TENSOR = 512
"""Bytes that torch's allocator aligns tensors by."""
LARGE_PART = 1 << 20
"""Elements from which on a part of a group is large; smaller ones have a checksum for each ``ALIGN`` elements."""


def page_up(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def end_to_end(sizes: Sequence[int]) -> list[int]:
    """The first byte of each of several tensors of one saved activation, of these sizes, that lie one behind the other.

    As aligned as in memory of torch's own: kernels go by that, and another one may sum in another order.
    """
    return list(accumulate((-(-size // TENSOR) * TENSOR for size in sizes[:-1]), initial=0))[: len(sizes)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Elements ``[start, start + numel)`` of a group's flat buffer; all of them trainable or none."""

    index: int
    start: int
    numel: int
    trainable: bool


def grain(numel: int) -> int:
    """Elements under one checksum on disk, of the trainable or the frozen part of a group that has ``numel`` of them.

    What is read or written begins at a multiple of it within the part, and ends at one or at the part's end. Stores on
    disk are cut so: another rule needs another number of their format.
    """
    return GRAIN if numel >= LARGE_PART else ALIGN


def checksum_bytes(groups: Sequence[GroupSpec], form: "Format", copies: int) -> int:
    """Bytes on disk of the checksums of ``copies`` of all weights and of what else there is of what is trained."""

    def blocks(numel: int, unit: int) -> int:
        return -(-numel // unit)

    count = sum(
        (1 + len(form.array_sizes(g))) * blocks(g.trainable, trained_grain(g)) + blocks(g.frozen, grain(g.frozen))
        for g in groups
    )
    return page_up(CHECKSUM * copies * count)


def trained_grain(group: GroupSpec) -> int:
    """``grain`` of a group's trainable part: of a compact one so many elements that their scales are whole pages."""
    return GRAIN if group.compact else grain(group.trainable)


def chunk_count(numel: int, largest: int, unit: int | None = None) -> int:
    """The number of chunks that ``numel`` elements are cut into. ``unit``: their grain; None: that of so many."""
    if numel <= largest:
        return min(numel, 1)
    unit = _unit(grain(numel) if unit is None else unit, largest)
    blocks = -(-numel // unit)
    return -(-blocks // (largest // unit))


def trained_chunks(group: GroupSpec, largest: int) -> int:
    """The number of chunks that the trained part of a group is cut into."""
    return chunk_count(group.trainable, largest, trained_grain(group))


def _unit(unit: int, largest: int) -> int:
    """Elements that the chunks of a part are multiples of: its grain, unless that is larger than a chunk may be."""
    return unit if largest >= unit else ALIGN


def on_grain(group: GroupSpec, largest: int) -> bool:
    """True if chunks of at most ``largest`` elements begin and end where the disk's checksums do."""
    parts = ((group.trainable, trained_grain(group)), (group.frozen, grain(group.frozen)))
    return all(n <= largest or unit <= largest for n, unit in parts)


def chunks(group: GroupSpec, largest: int) -> tuple[Chunk, ...]:
    """Cut a group into the fewest, most even chunks of at most ``largest`` elements, each a multiple of the part's
    ``grain`` but for the last; or of ``ALIGN`` where ``largest`` is below the grain, which no store can take
    (``on_grain``): only schedules that are simulated have such chunks.
    """
    assert largest >= ALIGN
    assert largest % ALIGN == 0
    cut: list[Chunk] = []
    for begin, numel, trainable in ((0, group.trainable, True), (group.trainable, group.frozen, False)):
        own = trained_grain(group) if trainable else grain(numel)
        count, unit = chunk_count(numel, largest, own), _unit(own, largest)
        blocks = -(-numel // unit)
        edges = [min(blocks * i // count * unit, numel) for i in range(count + 1)] if count else []
        for start, stop in pairwise(edges):
            cut.append(Chunk(index=len(cut), start=begin + start, numel=stop - start, trainable=trainable))
    return tuple(cut)


@lru_cache(maxsize=1 << 10)
def strand_ends(micro_batches: int, strands: int) -> Mapping[int, int]:
    """The last micro-batch of each strand that has any -> the strand: strand s of S has those from s M / S on."""
    edges = [s * micro_batches // strands for s in range(strands + 1)]
    return {last - 1: s for s, (first, last) in enumerate(pairwise(edges)) if first < last}


@lru_cache(maxsize=1 << 10)
def strand_sums(micro_batches: int, strands: int) -> Mapping[int, Sequence[tuple[int, int]]]:
    """The last micro-batch of each strand -> what is added up once it is there: (strand, strand that is added to it).

    A binary tree over all strands: the first 1, 2, 4, ... that are fewer than all, and the rest. Strands without a
    micro-batch are left out of it. Ranks whose number is the strands', or that divided by a power of two, have whole
    branches, and add up what they have in the rest of the tree (``ranks.order``).
    """
    last_of = {strand: last for last, strand in strand_ends(micro_batches, strands).items()}
    found: dict[int, list[tuple[int, int]]] = {last: [] for last in last_of.values()}

    def branch(first: int, end: int) -> tuple[int, int]:
        """The strand that has the sum of those from ``first`` to ``end``, and the micro-batch after which; -1: none."""
        if end - first == 1:
            return (first, last_of[first]) if first in last_of else (-1, -1)
        middle = first + (1 << (end - first - 1).bit_length() - 1)
        (into, before), (what, last) = branch(first, middle), branch(middle, end)
        if into >= 0 and what >= 0:
            found[last].append((into, what))
        return (into, max(before, last)) if into >= 0 else (what, last)

    branch(0, strands)
    return found


@lru_cache(maxsize=1 << 10)
def strand_firsts(micro_batches: int, strands: int) -> Mapping[int, int]:
    """Each strand that has any micro-batch -> the first of them."""
    ends = strand_ends(micro_batches, strands)
    return dict(zip(ends.values(), (0, *(last + 1 for last in ends)), strict=False))


@lru_cache(maxsize=1 << 10)
def most_sums(micro_batches: int, strands: int, *, staged: bool = False) -> int:
    """The most sums that there are at once: those that wait for another one, and the one that is being made. It is at
    most one more than the binary logarithm of the strands.

    ``staged``: a strand of one micro-batch that is added to another one at once takes no buffer of a sum.
    """
    now = most = 0
    ends, firsts = strand_ends(micro_batches, strands), strand_firsts(micro_batches, strands)
    for last, pairs in strand_sums(micro_batches, strands).items():
        at_once = staged and bool(pairs) and firsts[ends[last]] == last
        now += not at_once
        most = max(most, now)
        now -= len(pairs) - at_once
    return most


@lru_cache(maxsize=1 << 14)
def delayed_share(first: int, count: int, share: float) -> frozenset[int]:
    """Indices of those of ``count`` chunks that are delayed, when ``first`` others come before them: as evenly spread
    as can be.

    This is for the groups besides ``Program.last_stepped``, which are delayed whole.

    Of the first n chunks of all groups together, n times ``share`` are delayed, rounded up: a share above 0 delays one.
    """
    # 0.07 x 100 is 7.000000000000001
    until = [ceil(n * share - 1e-9) for n in range(first, first + count + 1)]
    return frozenset(i for i, (before, then) in enumerate(pairwise(until)) if then > before)


@dataclass(frozen=True, kw_only=True)
class Format:
    """The sizes of all that moves of each element. The fp32 master copy is what the weights and the *rest* have
    together: in fp32 the weights are it, in bf16 they are its upper half and the rest is the lower one, and in fp16 the
    rest is all of it (see docs/numerics.md). The state is the rest and the moments.
    """

    weight_bytes: Literal[2, 4]
    rest_bytes: Literal[0, 2, 4]
    moments: int

    form: Moments = "fp32"
    """The form that moments of groups that are compact are kept in."""
    whole: Orthogonal | None = None
    """The rule of steps that take matrices whole, where blocks have groups of them. ``moments`` are of other groups."""

    @staticmethod
    def of(precision: Precision, moments: int, form: Moments = "fp32", whole: Orthogonal | None = None) -> "Format":
        """The format of a precision, with so many moments."""
        weight_bytes, rest_bytes = _WIDTHS[precision]
        return Format(weight_bytes=weight_bytes, rest_bytes=rest_bytes, moments=moments, form=form, whole=whole)

    @property
    def is_compact(self) -> bool:
        """True if some moments are kept in less than fp32."""
        return self.form != "fp32"

    @property
    def steps_weights(self) -> bool:
        """True if a step reads the weights, and not only makes them anew."""
        return self.rest_bytes < FP32

    def form_of(self, group: GroupSpec) -> Moments:
        """The form of a group's moments."""
        return self.form if group.compact else "fp32"

    def moments_of(self, group: GroupSpec) -> int:
        """The number of moments of a trained group."""
        return 1 if group.whole else self.moments

    def array_sizes(self, group: GroupSpec, numel: int | None = None) -> tuple[int, ...]:
        """Bytes of each array of a group's state, or of what they have of ``numel`` of its elements: what the master
        copy has besides the weights, the moments, the scales of moments. Scales are padded to whole pages."""
        n = group.trainable if numel is None else numel
        if not n:
            return ()
        return ((self.rest_bytes * n,) if self.rest_bytes else ()) + self._moment_sizes(group, n)

    def _moment_sizes(self, group: GroupSpec, n: int) -> tuple[int, ...]:
        form, count = self.form_of(group), self.moments_of(group)
        scales = (page_up(n // SCALED * SCALE_BYTES),) * count if form == "int8" else ()
        return (MOMENT_BYTES[form] * n,) * count + scales

    def momentum_bytes(self, group: GroupSpec, numel: int) -> int:
        """Bytes of what ``numel`` elements of a group of matrices have of its momentum, which moves by itself."""
        return sum(self._moment_sizes(group, numel))

    def passed_bytes(self, group: GroupSpec, numel: int) -> int:
        """Bytes of state that the step of a chunk of ``numel`` elements reads and writes: all, or of a group of
        matrices all but the momentum."""
        return self.rest_bytes * numel if group.whole else self.state_bytes(group, numel)

    def state_bytes(self, group: GroupSpec, numel: int | None = None) -> int:
        """Bytes of a group's state, or of that of ``numel`` of its elements."""
        return sum(self.array_sizes(group, numel))

    @property
    def per_element(self) -> float:
        """Bytes per element of the state of a group that is compact, if any is."""
        scales = SCALE_BYTES / SCALED if self.form == "int8" else 0.0
        return self.rest_bytes + self.moments * (MOMENT_BYTES[self.form] + scales)

    def step_bytes(self, group: GroupSpec, numel: int, gradient: int = FP32) -> int:
        """Bytes that a step of ``numel`` elements touches: ``gradient`` of each, then weights and state, read and
        written."""
        if group.whole:
            gradient = BF16  # the update, which is orthogonal
        each = gradient + self.weight_bytes * (1 + self.steps_weights)
        return each * numel + 2 * self.passed_bytes(group, numel)

    def momentum_step_bytes(self, group: GroupSpec, numel: int, gradient: int = FP32) -> int:
        """Bytes touched where an update of ``numel`` elements is made of a ``gradient`` and the momentum."""
        return (gradient + BF16) * numel + 2 * self.momentum_bytes(group, numel)

    def step_bytes_each(self, gradient: int = FP32) -> float:
        """Bytes that a step of one element of a compact group touches, if any is."""
        return gradient + self.weight_bytes * (1 + self.steps_weights) + 2 * self.per_element


_WIDTHS: Mapping[Precision, tuple[Literal[2, 4], Literal[0, 2, 4]]] = {"fp32": (4, 0), "bf16": (2, 2), "fp16": (2, 4)}
"""Bytes of an element of weights, and of the rest of the master copy, in each precision."""
MOMENT_BYTES: Mapping[Moments, int] = {"fp32": FP32, "bf16": BF16, "int8": 1}
"""Bytes of one number of a moment in each form."""
SCALED, SCALE_BYTES = 32, 2
"""Numbers of a moment in 8 bits that share a scale, and bytes of one (``optim.codes``)."""


def home_of_weights(weights: Tier, state: Tier) -> Tier:
    """The tier that has the weights of a trained group as a step leaves them: the lower one."""
    return _LOWER[weights, state]


_LOWER: Mapping[tuple[Tier, Tier], Tier] = {(a, b): max(a, b, key=TIERS.index) for a in TIERS for b in TIERS}
"""The lower of two tiers. Comparing them anew took 2% of a search."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The tier on which stages find each group's weights, and the home tiers of its state, of waiting gradients, and of
    saved activations.

    A step changes weights and state together, so weights of a trained group are at home where its state is, or below.
    Where stages find them above that, they are a copy, which each step makes new.
    """

    weights: tuple[Tier, ...]
    state: tuple[Tier, ...]
    gradients: Literal["host", "disk"]
    activations: Tier

    def check(self, program: Program) -> None:
        assert len(self.weights) == len(self.state) == len(program.groups)
        for group in program.groups:
            assert (why := self.fault(group)) is None, (group, why)

    def fault(self, group: GroupSpec) -> str | None:
        """The reason that a group's weights and state cannot be where they are; None: they can."""
        if group.trainable and self.state[group.index] == "device" and self.weights[group.index] != "device":
            return "state on the device needs weights that live there"
        return None

    def home(self, group: GroupSpec) -> Tier:
        """The tier that has a group's weights as a step leaves them."""
        weights, state = self.weights[group.index], self.state[group.index]
        return home_of_weights(weights, state) if group.trainable else weights

    def copied(self, group: GroupSpec) -> bool:
        """True if stages find a copy of a group's weights above their home."""
        return self.home(group) != self.weights[group.index]

    def stepped_in_passing(self, group: GroupSpec) -> bool:
        """True if the weights that a step on the host changes come from disk, or go there, through a buffer: they are
        at home there, and host memory has no copy."""
        return self.home(group) == "disk" and self.weights[group.index] != "host"

    def all_on_disk(self, group: int) -> bool:
        """True if all of a group's master copy and moments is at home on disk."""
        return self.state[group] == "disk"


@dataclass(frozen=True, kw_only=True)
class Depths:
    """Numbers of buffers, which bound how far the lanes may run ahead of each other."""

    weights: int = 2
    """device buffers for weights of groups of one size"""
    gradients: int = 2
    """device buffers for gradients of groups of one size"""
    stage_in: int = 4
    """host chunks between disk and device"""
    stage_out: int = 4
    """host chunks between device and optimizer"""
    state: int = 4
    """host chunks of optimizer state in flight"""
    activations: int = 4
    """host buffers for saved activations on their way to or from disk"""
    inputs: int = 2
    """device buffers for activations besides those of the micro-batches under way: one on its way out, one on its way
    in, and so many inputs of the last block stay there for its backward; at least 2"""
    graphs: int = 0
    """device buffers for graphs that are kept from a call's forward to its backward (``lower.graphs``)"""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that a schedule depends on besides the program."""

    micro_batches: int
    chunk: int
    form: Format
    place: Placement
    depths: Depths
    wait: bool
    """True if the numbers of a step depend on the global gradient norm (clipping, or fp16's overflow check)."""
    speculate: bool = False
    """True if groups whose state is on disk step before that norm is known, beside what the last commit names: a step
    that should have been another one is dropped, and run again. Groups with state in memory wait all the same."""
    train: bool = True
    delay: float = 0.0
    """The delay ratio, 0 to 1: which share of the chunks that step in host memory takes its step in the next step's
    forward, before the chunk's weights are loaded for the first time. Where it is not 0, the groups that the backward
    is done with last (the embedding) are delayed whole: at the end of a step nothing runs beside theirs. Only for the
    vertical schedule."""
    grad_dtype: GradDtype = "fp32"
    """The dtype that each group's complete gradient is rounded to, once, before norm and optimizer: see
    docs/numerics.md."""
    cast: Side = "host"
    """The side on which a gradient that is complete on the device is rounded to ``grad_dtype``: on the device, so that
    it crosses in bf16, or by those who read it on the host. Changes no bit, and nothing at all in fp32. What is summed
    on the host is rounded there."""
    stage: ZeroStage = 3
    """Stage of ZeRO: the tensors that several ranks have parts of. Changes no bit."""
    secondary: bool = False
    """True if weights that ranks of several hosts gather cross between these once a step: what has crossed stays in the
    host memory of those who got it until the group's last use. ZeRO++ (arXiv 2306.10209) has this secondary partition
    on the device. Only in stage 3. Changes no bit."""
    keep: bool = False
    """True if weights on disk stay in host memory from the last load before their step until it, so that the optimizer
    does not read them again (``lower.kept``). Changes no bit."""
    strands: int = 1
    """The number of strands in which the gradients of all micro-batches are summed, a power of two; strands are then
    added up in pairs: on the device where one visit has all of them, else on the host."""

    @property
    def casts_on_device(self) -> bool:
        """True if gradients that are complete on the device are rounded there."""
        return self.grad_dtype == "bf16" and self.cast == "device"

    def waits(self, group: int) -> bool:
        """True if a group's optimizer step waits for the global gradient norm."""
        return self.waits_with(self.place.state[group])

    def waits_with(self, state: Tier) -> bool:
        """True if the step of any group with its state on this tier waits for the norm."""
        return self.wait and not (self.speculate and state == "disk")
