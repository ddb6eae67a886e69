"""A small program that stands for a large one: of stages in a row that are alike, the first two and the last two.

What an op of a group or a stage moves, and which phase it falls into, depends on the sizes and on what stands at the
two ends of the program: the first block's loads begin a step, the last one's weights stay for its backward, and of
matrices the first two blocks' steps end it. Where stages share nothing and are alike, those in between are as good as
each other, so that the second (with matrices, the third) stands for them all.
Those that share a group stay, and so do two on each side of them: weights that leave in between do so here, too.
The program of a rank of a pipeline stands for itself: it has few stages of its own.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from penstock.schedule.program import Program, Stage

_KEPT, _KEPT_OF_MATRICES = 2, 3
"""stages at either end that stand for themselves; where steps of matrices come one visit later, one more"""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A small program that stands for a large one. ``program``: the small one. ``groups``, ``stages``: of the large one
    -> which of the small one stands for it; -1 for a group that no stage has."""

    program: Program
    groups: tuple[int, ...]
    stages: tuple[int, ...]

    @staticmethod
    def of(program: Program) -> "Sample":
        if program.dealt is not None:  # what crosses, and with whom, is another at each place
            return Sample(
                program=program,
                groups=tuple(group.index if group.numel else -1 for group in program.groups),
                stages=tuple(range(len(program.stages))),
            )
        stands = _stands_for(program)
        kept = sorted(set(stands))
        number = {old: new for new, old in enumerate(kept)}
        used = sorted({g for k in kept for g in program.stages[k].groups})
        index = {old: new for new, old in enumerate(used)}
        groups = [index.get(g, -1) for g in range(len(program.groups))]
        for k, other in enumerate(stands):
            for g, like in zip(program.stages[k].groups, program.stages[other].groups, strict=True):
                groups[g] = index[like]
        small = Program(
            groups=tuple(replace(program.groups[g], index=i) for g, i in index.items()),
            stages=tuple(_renumbered(program.stages[k], number[k], index) for k in kept),
        )
        return Sample(program=small, groups=tuple(groups), stages=tuple(number[k] for k in stands))


def _stands_for(program: Program) -> list[int]:
    """Stage -> the stage that stands for it."""
    uses = Counter(g for stage in program.stages for g in stage.groups)
    calls = [stage.index for stage in program.stages if stage.kind == "call"]
    alike: dict[object, list[int]] = defaultdict(list)
    shared = 0  # stages so far that share a group: those before one never stand for those behind it
    for stage in program.stages:
        ends = stage.index in (0, len(program.stages) - 1)
        shares = any(uses[g] > 1 for g in stage.groups)
        shared += shares
        alike[stage.index if ends or shares else (shared, _likeness(program, stage, calls))].append(stage.index)
    stands = list(range(len(program.stages)))
    kept = _KEPT_OF_MATRICES if any(group.whole for group in program.groups) else _KEPT
    for found in alike.values():
        for k in found[kept:-kept]:
            stands[k] = found[kept - 1]
    return stands


def _likeness(program: Program, stage: Stage, calls: list[int]) -> object:
    """All that the ops of a stage that shares no group depend on, but for its place."""
    own = stage.groups
    kinds = (stage.forward_reads, stage.backward_reads, stage.gradients)
    return (
        stage.kind,
        bool(calls) and stage.index < calls[0],
        stage.activation,
        stage.gradient,
        tuple(replace(program.groups[g], index=0, name="") for g in own),
        tuple(tuple(own.index(g) for g in groups) for groups in kinds),
    )


def _renumbered(stage: Stage, number: int, index: dict[int, int]) -> Stage:
    forward, backward, gradients = (
        tuple(index[g] for g in groups) for groups in (stage.forward_reads, stage.backward_reads, stage.gradients)
    )
    return replace(stage, index=number, forward_reads=forward, backward_reads=backward, gradients=gradients, name="")


def without_activations(program: Program) -> Program:
    """The program with nothing but weights and what follows from them."""
    groups = tuple(replace(group, name="") for group in program.groups)
    stages = (
        replace(stage, activation=0, gradient=0, kept=0, forward_peak=0, backward_peak=0) for stage in program.stages
    )
    return replace(program, groups=groups, stages=tuple(stages))


def without_weights(program: Program) -> Program:
    """The program with nothing but compute and activations."""
    groups = tuple(replace(group, name="", trainable=0, frozen=0, whole=None) for group in program.groups)
    return replace(program, groups=groups, stages=tuple(replace(stage, gradients=()) for stage in program.stages))
