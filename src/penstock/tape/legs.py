"""From what a probe saw to a program: legs of a forward become stages, with their reads, checkpoints and sizes.

A *leg* is what runs between two events: the model's code up to its first call, a call, the code behind it, and so on.
A stage is a leg, or a call together with the code behind it when that code touches no parameters.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress

import torch
from torch import nn

from penstock.schedule.program import Stage
from penstock.tape import trees
from penstock.tape.passage import Facts, Site, StageFacts, has_own_memory
from penstock.tape.watch import Birth


@dataclass
class Usage:
    """What a leg read in one direction (groups), its FLOP, and live bytes at its start, at its end and at most."""

    reads: set[int] = field(default_factory=set)
    flops: int = 0
    start: int = 0
    end: int = 0
    peak: int = 0


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A tensor at a block's boundary. ``birth`` is None for what no op of the probe made (an input, a parameter)."""

    place: trees.Place
    birth: Birth | None
    nbytes: int
    movable: bool
    needs_grad: bool


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A tensor that a block's call left on one of its modules."""

    module: str
    attribute: str
    birth: Birth


@dataclass
class Leg:
    """A piece of the forward between two events: a call (of ``site``), or the model's own code (None).

    Of a call: ``changed`` are the buffers that it changed; for each output, ``needed`` says whether it depends on
    anything that trains, and ``reached`` whether a gradient came to it.
    """

    site: Site | None
    forward: Usage = field(default_factory=Usage)
    backward: Usage = field(default_factory=Usage)
    gradients: set[int] = field(default_factory=set)
    inputs: list[Seen] = field(default_factory=list)
    outputs: list[Seen] = field(default_factory=list)
    changed: tuple[tuple[nn.Module, str], ...] = ()
    kept_attributes: list["Kept"] = field(default_factory=list)
    reached: tuple[bool, ...] = ()


def see(place: trees.Place, tensor: torch.Tensor, birth: Birth | None) -> Seen:
    return Seen(
        place=place,
        birth=birth,
        nbytes=tensor.numel() * tensor.element_size(),
        movable=has_own_memory(tensor),
        needs_grad=tensor.requires_grad,
    )


class Stages:
    """The stages that legs make up: ``members[stage]`` are the indices of its legs."""

    def __init__(self, legs: Sequence[Leg]) -> None:
        self._legs = legs
        self.members: list[list[int]] = []
        for index, leg in enumerate(legs):
            joins = leg.site is None and not leg.forward.reads and 0 < index < len(legs) - 1
            if joins:
                self.members[-1].append(index)
            else:
                self.members.append([index])
        self._stage_of = {leg: stage for stage, members in enumerate(self.members) for leg in members}
        self._offload = [self._checkpoint(stage) for stage in range(len(self.members))]

    def stages(self) -> tuple[Stage, ...]:
        return tuple(self._stage(index) for index in range(len(self.members)))

    def flops(self) -> tuple[tuple[int, int], ...]:
        """Of each stage's forward and backward. The epilogue's backward is part of its forward."""
        found = []
        for members in self.members:
            legs = [self._legs[i] for i in members]
            found.append((sum(leg.forward.flops for leg in legs), sum(leg.backward.flops for leg in legs)))
        return tuple(found)

    def facts(self) -> tuple[StageFacts, ...]:
        found = []
        for stage, members in enumerate(self.members):
            leg = self._legs[members[0]]
            call = Facts(buffers=leg.changed)
            boundary = self._boundary(stage)
            offload = tuple(boundary[p].place for p in self._offload[stage])
            found.append(StageFacts(site=leg.site, call=call, offload=offload))
        return tuple(found)

    # -- which tensors may leave the device -------------------------------------------------------------------------

    def _boundary(self, stage: int) -> list[Seen]:
        """The tensors between a stage and the next: the next call's inputs, or the last call's outputs."""
        if stage + 1 >= len(self.members):
            return []
        reader = self._legs[self.members[stage + 1][0]]
        if reader.site is not None:
            return reader.inputs
        is_last = stage + 2 == len(self.members)
        return self._legs[self.members[stage][0]].outputs if is_last else []

    def _checkpoint(self, stage: int) -> list[int]:
        """Positions in the boundary of what only the next stage reads."""
        boundary = self._boundary(stage)
        births = [seen.birth for seen in boundary]
        return [
            position
            for position, seen in enumerate(boundary)
            if seen.movable and births.count(seen.birth) == 1 and self._only_next_reads(stage, seen.birth)
        ]

    def _only_next_reads(self, stage: int, birth: Birth | None) -> bool:
        if birth is None or self._stage_of[birth.leg] != stage:
            return False
        epilogue = len(self.members) - 1
        touched = {self._stage_of[leg] for leg in birth.touched}
        # A graph that saved it needs it until its own backward; the epilogue's runs at once.
        saved = {self._stage_of[leg] for leg in birth.saved} - ({epilogue} if stage + 1 == epilogue else set())
        return touched <= {stage, stage + 1} and not saved

    def _kept_gradients(self, stage: int) -> int:
        """Bytes of gradients that collect, until the stage's backward, at what it made and cannot be moved."""
        moved = {id(seen.birth) for p, seen in enumerate(self._boundary(stage)) if p in self._offload[stage]}
        found: dict[int, int] = {}
        for leg in self._legs:
            made_by_code = [s for s in leg.inputs if s.birth is not None and self._legs[s.birth.leg].site is None]
            for seen in made_by_code + list(compress(leg.outputs, leg.reached)):
                birth = seen.birth
                if not seen.needs_grad or birth is None or id(birth) in moved:
                    continue
                if self._stage_of[birth.leg] == stage:
                    found[id(birth)] = max(found.get(id(birth), 0), seen.nbytes)
        return sum(found.values())

    # -- sizes ------------------------------------------------------------------------------------------------------

    def _sizes(self, stage: int) -> tuple[int, int]:
        """Bytes of the stage's checkpoint, and of the gradients with respect to it."""
        moved = [self._boundary(stage)[p] for p in self._offload[stage]]
        return sum(s.nbytes for s in moved), sum(s.nbytes for s in moved if s.needs_grad)

    def _stage(self, index: int) -> Stage:
        legs = [self._legs[i] for i in self.members[index]]
        site = legs[0].site
        last = len(self.members) - 1
        checkpoint, gradient = self._sizes(index)
        gradient_below = self._sizes(index - 1)[1] if index > 0 else 0
        start = legs[0].forward.start
        stays = max(0, legs[-1].forward.end - start - checkpoint) if index < last else gradient_below
        return Stage(
            index=index,
            kind="segment" if site is None else "call",
            name=_name(index, last, self._legs, self.members),
            forward_reads=_ascending(leg.forward.reads for leg in legs),
            backward_reads=_ascending(leg.backward.reads for leg in legs),
            gradients=_ascending(leg.gradients for leg in legs),
            checkpoint=checkpoint,
            gradient=gradient,
            kept=0 if index == last else stays + self._kept_gradients(index),
            forward_peak=max(0, max(leg.forward.peak for leg in legs) - start - checkpoint - stays),
            backward_peak=max(0, max(leg.backward.peak for leg in legs) - legs[-1].backward.start - gradient_below),
        )


def _ascending(groups: Iterable[set[int]]) -> tuple[int, ...]:
    return tuple(sorted(set().union(*groups)))


def _name(index: int, last: int, legs: Sequence[Leg], members: Sequence[Sequence[int]]) -> str:
    site = legs[members[index][0]].site
    if site is not None:
        return site.name
    if index in (0, last):
        return "epilogue" if index else "prologue"
    previous = next(leg.site for i in range(index - 1, -1, -1) if (leg := legs[members[i][0]]).site is not None)
    return f"after {previous.name}"
