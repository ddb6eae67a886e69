"""Weights and inputs that stay on the device from one visit to another: they are not given back and brought again.

*Weights* stay from one visit that reads them to the next where at most one visit in between reads any: those of the
last block from its forward through the epilogue to its backward; micro-batch by micro-batch, those of the first block
from its backward to its forward of the next; and what consecutive visits share.

Where ranks gather weights once a step (``throughout``), all stay from the first visit that reads them to the last, and
each takes a buffer of its own.

*The inputs of the last block* stay until its backward as far as there is room for them in the pool of activations,
which has buffers for the micro-batches under way and ``Depths.inputs`` more: beside the last block's outputs, those of
as many micro-batches, the last ones, as all others have left for an output by then. A plan gives the pool what the
budget of the device has left in the end, up to all of them (``Request.roomiest``); two there are in any case.

Weights that stay take no buffer more. A pool of weights has buffers for the visit that needs most of it and, from depth
2 on, one more. So one group may stay through a visit that reads others, the largest that asks for it, and with depth 1
none. What is kept is there in place of its own next load, and holds nothing up: only the weights of the one visit in
between are loaded meanwhile, and they have their buffers.

What lives where does not count in any of this, so that a planner can tell what a step moves before it has placed
anything: groups are counted as if all of them moved.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from penstock.schedule.program import Program


class Stay:
    """The weights that stay, given each visit's reads in order and the depth of the weights' pools.

    | attribute | meaning |
    |---|---|
    | ``source`` | (group, visit that reads it) -> the visit whose load it reads |
    | ``loads`` | group -> indices of the visits that load it |
    | ``gives`` | (group, visit) after which its buffer is given back |
    """

    def __init__(
        self,
        program: Program,
        reads: Sequence[tuple[int, ...]],
        readers: Mapping[int, Sequence[int]],
        *,
        at_once: int,
        depth: int,
        throughout: bool = False,
    ) -> None:
        """``at_once``: micro-batches under way. ``depth`` 0: nothing stays."""
        self._stages, self._at_once = program.stages, at_once
        reading = [v for v, groups in enumerate(reads) if groups]
        place = {v: n for n, v in enumerate(reading)}
        kept: set[tuple[int, int]] = set()
        """(group, visit) from which it stays until its next reader"""
        through: dict[int, tuple[int, int]] = {}
        """visit that reads others -> (group, visit) that stays through it"""
        for g in sorted(readers, key=lambda g: (-program.groups[g].numel, g)):
            for i, j in pairwise(readers[g]):
                between = reading[place[i] + 1 : place[j]]
                if throughout or (not between and depth):
                    kept.add((g, i))
                elif len(between) == 1 and depth > 1:
                    through.setdefault(between[0], (g, i))
        kept |= set(through.values())
        self.gives = {(g, i) for g, visits in readers.items() for i in visits} - kept
        self.source: dict[tuple[int, int], int] = {}
        self.loads: dict[int, list[int]] = {g: [] for g in readers}
        for g, visits in readers.items():
            before = -1
            for i in visits:
                if (g, before) not in kept:
                    self.loads[g].append(i)
                self.source[g, i] = self.loads[g][-1]
                before = i

    def leaving(self, stage: int, inputs: int) -> int:
        """The number of micro-batches under way, the first ones, whose saved activation of a stage leaves the device
        where saved activations do. None of the last block's does: they are used at once. ``inputs``: of the last block
        that may stay.
        """
        stages = self._stages
        if stage < 0 or not stages[stage].activation or stage > len(stages) - 3:
            return 0
        return max(self._at_once - inputs, 0) if stage == len(stages) - 3 else self._at_once
