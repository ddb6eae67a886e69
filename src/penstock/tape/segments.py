"""Makes a program of what a probe saw: segments of a forward become stages, with reads, saved activations, sizes.

A *segment* is what runs between two events: the model's code up to its first call, a call, the code behind it, and so
on. A stage is a segment, or a call together with the code behind it when that code touches no parameters.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress

import torch

from penstock.errors import ModelError
from penstock.schedule.place import end_to_end
from penstock.schedule.program import Stage
from penstock.schedule.work import NOTHING, BothWays, Work
from penstock.tape import trees
from penstock.tape.buffers import tensor_attributes
from penstock.tape.facts import Site, StageFacts
from penstock.tape.kept_graph import Footprint
from penstock.tape.places import Held, Holder
from penstock.tape.watch import Birth

BirthOf = Callable[[torch.Tensor], Birth | None]
"""The birth of a tensor; None: no op of the probe has made it."""


@dataclass(kw_only=True)
class Usage:
    """The groups that a segment read in one direction, its work, and live bytes at its start, its end and at most."""

    reads: set[int] = field(default_factory=set)
    work: Work = NOTHING
    start: int = 0
    end: int = 0
    peak: int = 0


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A tensor at a block's boundary. ``birth`` is None if no op of the probe made it (an input, a parameter)."""

    place: trees.Place
    birth: Birth | None
    nbytes: int
    movable: bool
    needs_grad: bool


@dataclass(frozen=True, kw_only=True)
class InTwo:
    """Bytes of a call's backward in two parts: those that are held from the first to the second, and of each the most
    with these, on top of what was there before."""

    held: int
    first: int
    second: int


@dataclass(kw_only=True)
class Segment:
    """A piece of the forward between two events: a call (of ``site``), or the model's own code (None).

    ``facts``: as far as they are known. Of a call: ``left``: the tensors that it has left on the block's modules, in
    words; ``reached`` says for each output whether a gradient came to it;
    ``in_two`` what its backward takes in two parts, None where it is run as a whole; ``graph`` the bytes that its graph
    takes if it is kept, None where it cannot be; ``products`` its matrix products, as of ``Watch``; ``own``: what the
    micro-batch's forward had left in attributes that it has read; ``overwritten``: what it writes to of tensors from
    before the forward, but for its own buffers, as it was. ``assigned``: as of ``StageFacts``.
    """

    site: Site | None
    forward: Usage = field(default_factory=Usage)
    backward: Usage = field(default_factory=Usage)
    gradients: set[int] = field(default_factory=set)
    inputs: list[Seen] = field(default_factory=list)
    outputs: list[Seen] = field(default_factory=list)
    facts: StageFacts = field(default_factory=StageFacts)
    left: list[tuple[str, Birth]] = field(default_factory=list)
    reached: tuple[bool, ...] = ()
    in_two: InTwo | None = None
    graph: int | None = None
    products: list[int] = field(default_factory=list)
    own: Held = ()
    overwritten: Held = ()
    assigned: set[Holder] = field(default_factory=set)


def left_on(
    site: Site, before: list[tuple[str, torch.Tensor]], outputs: set[int], birth_of: BirthOf
) -> list[tuple[str, Birth]]:
    """The tensors that the call just run has left on the block's modules and does not return."""
    old = {id(t) for _, t in before}
    found = []
    for what, tensor in tensor_attributes(site.module, site.name):
        birth = birth_of(tensor)
        if id(tensor) not in old and tensor.is_floating_point() and birth is not None and id(birth) not in outputs:
            found.append((what, birth))
    return found


def refuse_kept(segments: Sequence[Segment]) -> None:
    """Raise ModelError for a tensor that a block has left on its modules, and that other code reads."""
    for index, segment in enumerate(segments):
        for what, birth in segment.left:
            if any(segments[i].site is not segment.site for i in birth.touched - {index}):
                raise ModelError(
                    f"{what} is a tensor that the block computes and that "
                    "other code reads later. With several micro-batches under way it would be that of another one, "
                    "and its gradient would be lost: let the block return it"
                )


def graph_of(footprint: Footprint, segment: Segment) -> int | None:
    """Bytes of a call's graph, if it can be kept: with what a forward that makes it takes more than one that does
    not. Where torch takes another product for a weight that has a graph (``matmul`` of one that a block computes), bits
    may be others, if not for this micro-batch then for one of another shape."""
    if footprint.nbytes is None or footprint.products != segment.products:
        return None
    forward, recomputed = segment.forward.peak - segment.forward.start, footprint.peak - segment.backward.start
    return max(footprint.nbytes, recomputed - forward, 1)


class Stages:
    """The stages that segments make up: ``members[stage]`` are the indices of its segments."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self.members: list[list[int]] = []
        for index, segment in enumerate(segments):
            joins = segment.site is None and not segment.forward.reads and 0 < index < len(segments) - 1
            if joins:
                self.members[-1].append(index)
            else:
                self.members.append([index])
        self._stage_of = {segment: stage for stage, members in enumerate(self.members) for segment in members}
        self._handed: dict[int, set[int]] = {}
        """birth, by identity -> the stages whose calls are handed that"""
        for index, segment in enumerate(segments):
            for seen in segment.inputs:
                self._handed.setdefault(id(seen.birth), set()).add(self._stage_of[index])
        self._offload = [self._activation(stage) for stage in range(len(self.members))]

    def load_stepped(self) -> None:
        """Have the weights of groups that get a gradient, and that nothing reads, as of a function of the model's own
        whose forward looks at a parameter's shape alone, loaded for that: the optimizer steps what has been there.
        """
        read = set[int]().union(*(usage.reads for s in self._segments for usage in (s.forward, s.backward)))
        for segment in self._segments:
            segment.backward.reads |= segment.gradients - read

    def stages(self) -> tuple[Stage, ...]:
        return tuple(self._stage(index) for index in range(len(self.members)))

    def work(self) -> tuple[BothWays, ...]:
        """The work of each stage."""
        all_of = [[self._segments[i] for i in members] for members in self.members]
        return tuple(
            (sum((s.forward.work for s in own), NOTHING), sum((s.backward.work for s in own), NOTHING))
            for own in all_of
        )

    def facts(self) -> tuple[StageFacts, ...]:
        found = []
        for stage, members in enumerate(self.members):
            segment, boundary = self._segments[members[0]], self._boundary(stage)
            offload = tuple(boundary[p].place for p in self._offload[stage])
            assigned = tuple(dict.fromkeys(a for index in members for a in self._segments[index].assigned))
            found.append(replace(segment.facts, site=segment.site, offload=offload, assigned=assigned))
        return tuple(found)

    # -- which tensors may leave the device -------------------------------------------------------------------------

    def _boundary(self, stage: int) -> list[Seen]:
        """The tensors between a stage and the next: the next call's inputs, or the last call's outputs."""
        if stage + 1 >= len(self.members):
            return []
        reader = self._segments[self.members[stage + 1][0]]
        if reader.site is not None:
            return reader.inputs
        is_last = stage + 2 == len(self.members)
        return self._segments[self.members[stage][0]].outputs if is_last else []

    def _activation(self, stage: int) -> list[int]:
        """Positions in the boundary of the tensors that only the next stage reads, or is handed: in a pipeline what
        later calls are handed is sent to other ranks, whether they read it or not."""
        boundary = self._boundary(stage)
        births = [seen.birth for seen in boundary]
        return [
            position
            for position, seen in enumerate(boundary)
            if seen.movable and births.count(seen.birth) == 1 and self._only_next_reads(stage, seen.birth)
        ]

    def _only_next_reads(self, stage: int, birth: Birth | None) -> bool:
        if birth is None or self._stage_of[birth.segment] != stage:
            return False
        epilogue = len(self.members) - 1
        touched = self._handed.get(id(birth), set()) | {self._stage_of[segment] for segment in birth.touched}
        # A graph that saved it needs it until its own backward; the epilogue's runs at once.
        saved = {self._stage_of[segment] for segment in birth.saved} - ({epilogue} if stage + 1 == epilogue else set())
        return touched <= {stage, stage + 1} and not saved

    def _kept_gradients(self, stage: int) -> int:
        """Bytes of gradients that collect, until the stage's backward, at what it made and cannot be moved."""
        moved = {id(seen.birth) for p, seen in enumerate(self._boundary(stage)) if p in self._offload[stage]}
        found: dict[int, int] = {}
        for segment in self._segments:
            made_by_code = [
                s for s in segment.inputs if s.birth is not None and self._segments[s.birth.segment].site is None
            ]
            for seen in made_by_code + list(compress(segment.outputs, segment.reached)):
                birth = seen.birth
                if not seen.needs_grad or birth is None or id(birth) in moved:
                    continue
                if self._stage_of[birth.segment] == stage:
                    found[id(birth)] = max(found.get(id(birth), 0), seen.nbytes)
        return sum(found.values())

    # -- sizes ------------------------------------------------------------------------------------------------------

    def _sizes(self, stage: int) -> tuple[int, int]:
        """Bytes of the stage's saved activation, and of the gradients with respect to it."""
        moved = [self._boundary(stage)[p] for p in self._offload[stage]]
        sizes = [s.nbytes for s in moved]
        activation = end_to_end(sizes)[-1] + sizes[-1] if sizes else 0
        return activation, sum(s.nbytes for s in moved if s.needs_grad)

    def _stage(self, index: int) -> Stage:
        segments = [self._segments[i] for i in self.members[index]]
        site = segments[0].site
        last = len(self.members) - 1
        activation, gradient = self._sizes(index)
        gradient_below = self._sizes(index - 1)[1] if index > 0 else 0
        start = segments[0].forward.start
        stays = max(0, segments[-1].forward.end - start - activation) if index < last else gradient_below
        in_two = segments[0].in_two
        parts = [] if in_two is None else [in_two.first - gradient_below, in_two.second]
        if in_two is not None and len(segments) > 1:  # the code behind the call is run back first
            behind = max(segment.backward.peak for segment in segments[1:])
            parts.append(behind - segments[-1].backward.start - gradient_below)
        return Stage(
            index=index,
            kind="segment" if site is None else "call",
            name=_name(index, last, self._segments, self.members),
            forward_reads=_ascending(segment.forward.reads for segment in segments),
            backward_reads=_ascending(segment.backward.reads for segment in segments),
            gradients=_ascending(segment.gradients for segment in segments),
            activation=activation,
            gradient=gradient,
            kept=0 if index == last else stays + self._kept_gradients(index),
            forward_peak=max(0, max(segment.forward.peak for segment in segments) - start - activation - stays),
            backward_peak=max(
                0, max(segment.backward.peak for segment in segments) - segments[-1].backward.start - gradient_below
            ),
            split=None if in_two is None else max(in_two.held, 1),
            split_peak=max(0, *parts) if parts else 0,
            graph=None if segments[0].facts.buffers or segments[0].facts.written else segments[0].graph,
        )


def _ascending(groups: Iterable[set[int]]) -> tuple[int, ...]:
    return tuple(sorted(set().union(*groups)))


def _name(index: int, last: int, segments: Sequence[Segment], members: Sequence[Sequence[int]]) -> str:
    site = segments[members[index][0]].site
    if site is not None:
        return site.name
    if index in (0, last):
        return "epilogue" if index else "prologue"
    previous = next(
        segment.site for i in range(index - 1, -1, -1) if (segment := segments[members[i][0]]).site is not None
    )
    return f"after {previous.name}"
