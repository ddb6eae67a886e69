"""Pipelines whose ranks stream: a model's blocks are dealt out in loops, and each rank has its own on its own tiers.

    rank 0   code  b0        b4        b8   ...  code     F, then back
    rank 1             b1        b5
    rank 2               b2        b6
    rank 3                 b3        b7

Each rank goes breadth first: all micro-batches through one of its blocks before its next one, so that the weights of a
block come to the device twice a step, whatever the number of micro-batches (Lamy-Poirier, arXiv 2211.05953). While one
rank is at block b for micro-batch m, the next one is at block b + 1 for micro-batch m - 1: with at least as many
micro-batches as ranks, nobody waits but at the two ends. It has to be looped: with contiguous stages a rank would be
idle while all micro-batches go through the others' blocks.

Only activations and their gradients cross, and each rank's partial sums of the norm. T tokens of a model of hidden size
h with L blocks on P ranks: where every block's output crosses, 2 T h L elements in all, so that in bf16 a rank sends
4 T h L / P bytes on average.

Rank 0 runs the model's own code, and has the ends' parameters: it gets as many blocks fewer as those are worth, by what
they compute, which is what a step with many tokens waits for. Rows of an embedding are looked up, and count nothing.

Where ranks take turns with forwards and backwards of one micro-batch (``in_turn``), nobody waits for all of them, and
in 1F1B and zero bubble each rank has its blocks in one piece: less crosses, and fewer micro-batches are under way.

    rank 0   code  b0  b1  b2                                      code
    rank 1                     b3  b4  b5
    rank 2                                 b6  b7  b8
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import cycle, islice

from penstock.config import Family
from penstock.config.step import IN_ONE_PIECE, SPLIT
from penstock.errors import ConfigError
from penstock.schedule.place import page_up
from penstock.schedule.program import ALIGN, ELEMENTWISE, EXACT, OF_BLOCK, Dealt, GroupSpec, Program, Stage

MESSAGE_PIECE = 8 << 20
"""Bytes of a message that are in host memory at once, where it comes from an accelerator and goes to one."""


def message_piece(program: Program) -> int:
    """``MESSAGE_PIECE``, or the bytes of the largest message where none is as large; the same on all ranks."""
    dealt = program.dealt
    if dealt is None:
        return 0
    crossing = [stage for stage in program.stages[:-1] if dealt.crosses(stage.index)]
    largest = max((n for stage in crossing for n in (stage.activation, stage.gradient)), default=0)
    return min(page_up(max(largest, *dealt.besides)), MESSAGE_PIECE)


def message_bytes(program: Program) -> int:
    """Bytes of host memory that messages pass through on an accelerator's rank: two pieces each way."""
    return 4 * message_piece(program)


def in_one_piece(family: Family) -> bool:
    """True if each rank's blocks follow each other in the model; otherwise they are dealt out in loops."""
    return family in IN_ONE_PIECE


def check_split(stages: Sequence[Stage], family: Family) -> None:
    """Raises:
    ConfigError: backwards are to be run in two parts, and none can be.
    """
    if family in SPLIT and all(stage.split is None for stage in stages):
        raise ConfigError(
            f"schedule={family!r} runs the backward of blocks in two parts, and none of this model's can be: that "
            "takes products of matrices (linear layers) with weights that train. Give '1f1b'"
        )


def dealt_out(blocks: int, ranks: int, ends: float, family: Family = "vertical") -> tuple[int, ...]:
    """The rank of each block, in the order of the model, so that the rank with the most work has as little as can be.
    ``ends``: the work outside all blocks, in blocks.

    Raises:
        ConfigError: there are not enough blocks for each rank to have one, but for the first.
    """
    if blocks < ranks - 1:
        raise ConfigError(
            f"a pipeline of {ranks} ranks deals out blocks, and the model has {blocks}: use at most {blocks + 1} ranks"
        )

    def works(first: int) -> tuple[float, float, int]:
        """The most of a rank, the sum of all squares, and what the first has, which has the ends in memory."""
        each, more = divmod(blocks - first, ranks - 1)
        of_all = [first + ends, *[each + 1] * more, *[each] * (ranks - 1 - more)]
        return max(of_all), sum(work**2 for work in of_all), first

    return laid_out(blocks, ranks, min(range(blocks - ranks + 2), key=works), family)


def laid_out(blocks: int, ranks: int, first: int, family: Family = "vertical") -> tuple[int, ...]:
    """The rank of each block, in the order of the model, of which the first rank has so many and the others as many as
    each other, or one more."""
    rounds = -(-(blocks - first) // (ranks - 1))
    others = cycle(range(1, ranks))
    dealt: list[int] = []
    for turn in range(rounds):
        if -(-(turn + 1) * first // rounds) > -(-turn * first // rounds):
            dealt.append(0)
        left = blocks - first - turn * (ranks - 1)
        dealt += islice(others, min(ranks - 1, left))
    return tuple(sorted(dealt) if in_one_piece(family) else dealt)


def _work_of_ends(ends: int, in_blocks: int, blocks: int) -> float:
    """Of so many parameters outside all blocks, in blocks. A forward and a backward, which takes twice as long; that of
    a block runs its forward again."""
    return 3 / 4 * ends * blocks / max(in_blocks, 1)


def blocks_of(groups: Sequence[GroupSpec], blocks: Sequence[str]) -> list[int | None]:
    """The number of the block that each group's parameters are of, by the groups' names; None: they are in no block, or
    in several. ``blocks``: their names."""
    number = {name: n for n, name in enumerate(blocks)}
    return [number.get(_block_in(group.name) or "") for group in groups]


def names_of_blocks(groups: Sequence[GroupSpec]) -> list[str]:
    """The names of the blocks that have groups of their own, in the order of these."""
    return list(dict.fromkeys(name for group in groups if (name := _block_in(group.name)) is not None))


def _block_in(name: str) -> str | None:
    """The block whose group has a name."""
    of_block = name.removesuffix(EXACT).removesuffix(ELEMENTWISE)
    return of_block.removeprefix(OF_BLOCK) if of_block.startswith(OF_BLOCK) else None


def holders_of(
    groups: Sequence[GroupSpec],
    blocks: Sequence[str],
    ranks: int,
    dealt: Sequence[int] | None = None,
    family: Family = "vertical",
    looked_up: Collection[int] = (),
) -> tuple[list[int], list[int]]:
    """(the rank of each block, the rank that has each group): that of its block, and of what is in no block the first.
    ``blocks``: their names; ``dealt``: the rank of each, if not as much on each, as the ``family`` has them;
    ``looked_up``: groups of embeddings alone.

    Raises:
        ConfigError: as ``dealt_out``.
    """
    of_block = blocks_of(groups, blocks)
    in_blocks = sum(g.numel for g, block in zip(groups, of_block, strict=True) if block is not None)
    ends = sum(g.numel for g, block in zip(groups, of_block, strict=True) if block is None and g.index not in looked_up)
    if dealt is None:
        dealt = dealt_out(len(blocks), ranks, _work_of_ends(ends, in_blocks, len(blocks)), family)
    return list(dealt), [0 if block is None else dealt[block] for block in of_block]


def dealt_as(counts: Sequence[int], blocks: int, family: Family = "vertical") -> tuple[int, ...]:
    """The rank of each block, in the order of the model, where rank r is to have ``counts[r]`` of them: each rank's are
    spread evenly over the model, in loops; or follow each other.

    Raises:
        ConfigError: they are not so many in all; or a rank has none, but for the first.
    """
    if sum(counts) != blocks or min(counts) < 0 or 0 in counts[1:]:
        raise ConfigError(
            f"deal={list(counts)} says how many of the model's {blocks} blocks each rank of a pipeline has: the sum "
            "must be that, and each rank but the first needs one"
        )
    places = ((Fraction(2 * i + 1, 2 * count), rank) for rank, count in enumerate(counts) for i in range(count))
    dealt = [rank for _, rank in sorted(places)]
    return tuple(sorted(dealt) if in_one_piece(family) else dealt)


def stages_dealt(
    program: Program, ranks: int, counts: Sequence[int] | None = None, family: Family = "vertical"
) -> tuple[int, ...]:
    """The rank of each stage of a program whose blocks are each called once: its model's own code is rank 0's.
    ``counts``: blocks of each rank; None: as much on each. Raises as ``dealt_out``, ``dealt_as`` and
    ``check_split``."""
    calls = [stage for stage in program.stages if stage.kind == "call"]
    in_blocks = {g for stage in calls for g in stage.groups}
    blocks = sum(program.groups[g].numel for g in in_blocks)
    ends = sum(program.groups[g].numel for g in {*program.stages[-1].forward_reads} - in_blocks)
    check_split(program.stages, family)
    if counts is not None and len(counts) != ranks:
        raise ConfigError(f"deal={list(counts)} is for {len(counts)} ranks, and the pipeline has {ranks}")
    if counts is None:
        found = dealt_out(len(calls), ranks, _work_of_ends(ends, blocks, len(calls)), family)
    else:
        found = dealt_as(counts, len(calls), family)
    dealt = iter(found)
    return tuple(next(dealt) if stage.kind == "call" else 0 for stage in program.stages)


def program_of_rank(
    program: Program,
    of_stages: Sequence[int],
    rank: int,
    ranks: int,
    *,
    besides: Sequence[int] = (),
    holders: Sequence[int] | None = None,
) -> Program:
    """As ``programs_of_ranks``, of one of them."""
    return programs_of_ranks(program, of_stages, ranks, wanted=[rank], besides=besides, holders=holders)[0]


def programs_of_ranks(
    program: Program,
    of_stages: Sequence[int],
    ranks: int,
    *,
    wanted: Iterable[int] | None = None,
    besides: Sequence[int] = (),
    holders: Sequence[int] | None = None,
) -> list[Program]:
    """A program as each rank of a pipeline has it, or each one ``wanted``: stages of others take and read nothing,
    groups of others are empty. ``of_stages``, ``besides``: as of ``Dealt``. ``holders``: the rank that has each group;
    None: that of its stages.

    Raises:
        ConfigError: two ranks would need one group.
    """
    used = users_of(program, of_stages)
    holders = [used.get(g.index, 0) for g in program.groups] if holders is None else holders
    for g, user in used.items():
        if holders[g] != user:
            raise ConfigError(
                f"parameters {program.groups[g].name!r} are rank {holders[g]}'s, and rank {user} of the pipeline has a "
                f"block that uses them: {_NOT_CROSSING}"
            )
    sums = [0] * ranks
    for group, holder in zip(program.groups, holders, strict=True):
        sums[holder] += group.trainable
    partials, sent = max(sums) // ALIGN, tuple(besides) or (0,) * len(program.stages)
    whole = _summed_later(program.stages)
    here = [replace(s, split=None, split_peak=0) if s.index in whole else s for s in program.stages]
    # Once for all: of 1,024 ranks each has 1,023 others.
    elsewhere, empty = [_elsewhere(stage) for stage in here], [emptied(group) for group in program.groups]
    found: list[Program] = []
    for rank in range(ranks) if wanted is None else wanted:
        dealt = Dealt(rank=rank, ranks=ranks, of_stages=tuple(of_stages), besides=sent, partials=partials)
        groups = tuple(
            group if holder == rank else none
            for group, none, holder in zip(program.groups, empty, holders, strict=True)
        )
        stages = tuple(
            replace(stage, kept=stage.kept + dealt.besides[stage.index]) if holder == rank else other
            for stage, other, holder in zip(here, elsewhere, of_stages, strict=True)
        )
        found.append(Program(groups=groups, stages=stages, dealt=dealt))
    return found


def _elsewhere(stage: Stage) -> Stage:
    """A stage as the other ranks have it."""
    found = replace(stage, forward_reads=(), backward_reads=(), gradients=(), kept=0)
    return replace(found, forward_peak=0, backward_peak=0, split_peak=0)


def _summed_later(stages: Sequence[Stage]) -> set[int]:
    """Stages that make gradients for what an earlier one does, too: a second part of their backward could come after
    that one's, and the sum would have another order."""
    found, seen = set[int](), set[int]()
    for stage in stages:
        if not seen.isdisjoint(stage.gradients):
            found.add(stage.index)
        seen.update(stage.gradients)
    return found


def emptied(group: GroupSpec) -> GroupSpec:
    """A group as those ranks of a pipeline have it that do not hold it."""
    return replace(group, trainable=0, frozen=0)


def users_of(program: Program, of_stages: Sequence[int]) -> dict[int, int]:
    """The rank of the stages that use each group, for all groups that are used.

    Raises:
        ConfigError: two ranks would need one group.
    """
    found: dict[int, Stage] = {}
    for stage in program.stages:
        for g in (*stage.forward_reads, *stage.backward_reads, *stage.gradients):
            before = found.setdefault(g, stage)
            if of_stages[before.index] != of_stages[stage.index]:
                raise ConfigError(
                    f"parameters {program.groups[g].name!r} are used by {before.name!r} and by {stage.name!r}, which "
                    f"ranks {of_stages[before.index]} and {of_stages[stage.index]} of the pipeline have: "
                    f"{_NOT_CROSSING}"
                )
    return {g: of_stages[stage.index] for g, stage in found.items()}


_NOT_CROSSING = "in a pipeline parameters do not cross. Train with ranks that share all state (without a pipeline)"
