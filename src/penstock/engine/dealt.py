"""The blocks of a model dealt out to the ranks of a pipeline, and its program as one of them has it: what blocks are
handed is refused where it cannot be sent; and the plans of all of them, which the first makes."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from penstock.compat.modules import buffers_of
from penstock.config import Family
from penstock.engine.probed import slowest_of
from penstock.errors import ConfigError, ModelError
from penstock.hardware.machine import Machine
from penstock.planner.dealt import Pace, fastest_of, plans_of
from penstock.planner.places import Asked, Plans
from penstock.planner.plan import Plan
from penstock.planner.request import Request
from penstock.planner.update_mode import seconds_back, steps_early
from penstock.ranks.group import Ranks
from penstock.ranks.share import Share
from penstock.schedule.dealt import (
    blocks_of,
    dealt_as,
    holders_of,
    in_one_piece,
    laid_out,
    names_of_blocks,
    program_of_rank,
)
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.ir.worlds import World
from penstock.schedule.lower.seat import pipeline_world
from penstock.schedule.mesh import Mesh
from penstock.schedule.place import Placement, Settings
from penstock.schedule.program import Dealt, GroupSpec, Program
from penstock.shape.model import StageTimes
from penstock.sim.result import Simulation
from penstock.state.parts import groups_of
from penstock.store.parts import HOLDERS
from penstock.store.successor import manifest_of
from penstock.tape.elsewhere import besides
from penstock.tape.facts import StageFacts
from penstock.tape.handed import HandedOn, refusal

T = TypeVar("T")

_SHARING = "ranks that share all state (without a pipeline)"


def deal_blocks(
    groups: Sequence[GroupSpec],
    blocks: Sequence[str],
    ranks: Ranks,
    counts: Sequence[int] | None,
    paths: Sequence[Path],
    family: Family,
    looked_up: Collection[int],
) -> tuple[list[int], list[int]]:
    """(the rank of a pipeline that has each block, the rank that has each group), by their places in it. All ranks come
    here. ``counts``: the number of each rank's blocks, if that is asked for; ``paths``: the directories of this rank's
    store, which a run goes on with as it was dealt; ``family``: the order of the ranks, which has them in one piece or
    in loops; ``looked_up``: groups of embeddings alone.

    Raises:
        ConfigError: there are too few blocks, the counts are none of theirs, or the store was dealt otherwise.
        StoreError: it cannot be read.
    """
    stages = ranks.stages
    if counts is not None and len(counts) != stages:
        raise ConfigError(f"deal={list(counts)} is for {len(counts)} ranks, and the pipeline has {stages}")
    kept = _kept(blocks, ranks, paths)
    if kept is None:
        dealt = None if counts is None else dealt_as(counts, len(blocks), family)
        return holders_of(groups, blocks, stages, dealt, family, looked_up)
    had = [kept.count(rank) for rank in range(stages)]
    if counts is not None and list(counts) != had:
        raise ConfigError(
            f"deal={list(counts)}, and the state in {paths[0]} was dealt as {had}: leave deal out to go on with it; or "
            "save a snapshot, and load it where there is no store yet"
        )
    if in_one_piece(family) != (kept == tuple(sorted(kept))) and not _as_dealt(kept, family):
        other = "'vertical' or 'interleaved-1f1b'" if in_one_piece(family) else "'1f1b' or 'zero-bubble'"
        raise ConfigError(
            f"schedule={family!r} has each rank's blocks {'in one piece' if in_one_piece(family) else 'in loops'}, and "
            f"the state in {paths[0]} was dealt as {list(kept)} (the rank of each block): give {other} to go on with "
            "it; or save a snapshot, and load it where there is no store yet"
        )
    return holders_of(groups, blocks, stages, kept)


def _as_dealt(kept: tuple[int, ...], family: Family) -> bool:
    """True if a family deals blocks so, by default or as asked for: with few blocks loops are one piece, too."""
    counts = [kept.count(rank) for rank in range(1 + max(kept))]
    return kept in (laid_out(len(kept), len(counts), counts[0], family), dealt_as(counts, len(kept), family))


def _kept(blocks: Sequence[str], ranks: Ranks, paths: Sequence[Path]) -> tuple[int, ...] | None:
    """The deal that the stores of the ranks were made for; None: there are none, or they are of no such pipeline, which
    is said when they are opened."""

    def look() -> list[int | None] | None:
        found = manifest_of(paths[0]) if paths else None
        return None if found is None else _dealt_in(found.model, blocks, ranks.stages)

    told = ranks.by_rank("deal of the blocks", look)
    dealt = next((found for found in told if found is not None), None)
    if dealt is None:
        return None
    found, last = list[int](), 0
    for rank in dealt:  # one without parameters goes with the one before it
        last = last if rank is None else rank
        found.append(last)
    return tuple(found)


def _dealt_in(model: Mapping[str, Any], blocks: Sequence[str], stages: int) -> list[int | None] | None:
    """The rank of each block by the groups of a store, whose moments may have another form, and so be in other groups.
    ``model``: what it is made for; None: no such pipeline. Of a block without parameters it is None."""
    holders, groups = model.get(HOLDERS), groups_of(model)
    if holders is None or len(holders) != len(groups) or max(holders) >= stages:
        return None
    if not set(names_of_blocks(groups)) <= set(blocks):
        return None
    dealt: list[int | None] = [None] * len(blocks)
    for holder, block in zip(holders, blocks_of(groups, blocks), strict=True):
        if block is not None:
            dealt[block] = holder
    return dealt


def dealt_program(
    program: Program,
    facts: Sequence[StageFacts],
    handed: Sequence[HandedOn],
    dealt: Sequence[int],
    share: Share,
    ranks: Ranks,
) -> Program:
    """The program of the rank of a pipeline whose ``share`` it is. ``handed``: of each shape of micro-batch; ``dealt``:
    the rank of each block. All ranks come here.

    Raises:
        ModelError: what a block is handed, or puts out, cannot be sent.
        ConfigError: two ranks would need the same parameters.
    """
    assert share.holders is not None
    of_stages = [0 if fact.site is None else dealt[fact.site.index] for fact in facts]
    refused: str | None = None
    try:
        _refuse_idle(of_stages, ranks.stages)
        _refuse_assigned(facts, of_stages)
        for of_shape in handed:
            _refuse(of_shape, facts, of_stages)
    except ModelError as error:
        refused = str(error)
    told = ranks.gather_objects("what cannot be sent", refused)  # of other pipelines' micro-batches, perhaps, alone
    if (said := refused or next(filter(None, told), None)) is not None:
        raise ranks.of_all(ModelError(said))
    sizes = [0] * len(program.stages)
    for of_shape in handed:
        for k, numbers in besides(of_shape, of_stages).items():
            sizes[k] = max(sizes[k], sum(of_shape.shared[n].kind.nbytes for n in numbers))
    of_all = ranks.gather_objects("sizes of what calls share", sizes)  # other pipelines' micro-batches are others
    most = [max(by_rank) for by_rank in zip(*of_all, strict=True)]
    program = Mesh(data=share.size).everyone().part(program)
    return program_of_rank(program, of_stages, share.place, ranks.stages, besides=most, holders=share.holders)


def _refuse_idle(of_stages: Sequence[int], ranks: int) -> None:
    """Raise ModelError where the model calls no block of one of so many ranks."""
    if idle := set(range(ranks)).difference(of_stages):
        raise ModelError(
            f"the model calls none of the blocks that rank {min(idle)} of the pipeline has: use fewer ranks, or say "
            "with deal how many blocks each has"
        )


def _refuse_assigned(facts: Sequence[StageFacts], of_stages: Sequence[int]) -> None:
    """Raise ModelError where one rank puts an attribute on a block that another rank has."""
    blocks = [(fact.site, of_stages[k]) for k, fact in enumerate(facts) if fact.site is not None]
    has = {
        (site, rank): {id(of) for module in site.module.modules() for of in (vars(module), buffers_of(module))}
        for site, rank in blocks
    }
    for k, fact in enumerate(facts):
        for holder in fact.assigned:
            owners = [(site, rank) for (site, rank), within in has.items() if id(holder.of) in within]
            if any(site is fact.site for site, _ in owners):
                continue
            for site, rank in owners:
                if rank != of_stages[k]:
                    who = "the model's own code" if fact.site is None else f"block {fact.site.name!r}"
                    raise ModelError(
                        f"{who} assigns attribute {holder.key!r} of block {site.name!r}, which another rank of the "
                        f"pipeline has: hand it to the block as an argument, or train with {_SHARING}"
                    )


def _refuse(handed: HandedOn, facts: Sequence[StageFacts], of_stages: Sequence[int]) -> None:
    """Raise ModelError where a pipeline cannot send what a block is handed, or puts out."""
    for k, call in enumerate(handed.calls):
        before = of_stages[k - 1]
        if call is None:  # the last one is sent what it is to have
            between = handed.calls[k - 1] if 0 < k < len(handed.calls) - 1 else None
            if between is not None and before:
                raise ModelError(
                    f"block {between.block!r}: the model's code computes with weights between it and the next block, "
                    f"and not on its rank: a pipeline cannot send that. Train with {_SHARING}"
                )
            continue
        if of_stages[k] or before:
            follows = before != 0
            why = refusal(call, direct=follows) if of_stages[k] else follows and refusal(call, direct=True)
            if why:
                raise ModelError(why)
            if facts[k - 1].offload != (call.of_input,):
                raise ModelError(
                    f"block {call.block!r}: what it is handed is read by others than it, or is no tensor of its own: "
                    f"a pipeline sends it away. Train with {_SHARING}"
                )
        if of_stages[k] and facts[k].buffers:
            raise ModelError(
                f"block {call.block!r} changes its buffer {facts[k].buffers[0][1]!r}, and of a pipeline each rank "
                f"would have its own. Train with {_SHARING}"
            )
    last = handed.calls[-2]
    if last is not None and of_stages[-2] and len(facts[-2].offload) != 1:
        raise ModelError(
            f"block {last.block!r}: what it puts out is no tensor of its own: a pipeline sends it away. Train with "
            + _SHARING
        )


def plan_among(ranks: Ranks, request: Request, keep: Placement | None, pace: Pace | None) -> Plan:
    """This rank's plan of a pipeline. The first makes all.

    Raises:
        BudgetError, ConfigError: on all ranks: see ``plans_of``.
    """
    asked = _of_places(ranks, "requests", Asked(request=request, keep=keep))

    def settings() -> tuple[Settings, ...]:
        plans = plans_of(asked) if pace is None else fastest_of(asked, pace).plans
        return tuple(plans.settings(rank) for rank in range(len(plans)))

    return request.plan(ranks.decided("settings of the plans", settings)[ranks.pipe.rank])


def _of_places(ranks: Ranks, what: str, value: T) -> list[T]:
    """The values of the ranks of the first pipeline, by their places. Those of others are alike."""
    return ranks.gather_objects(what, value)[:: ranks.each]


def schedules_of(ranks: Ranks, schedule: Schedule) -> World:
    """The world of the schedules of all ranks."""
    return pipeline_world(_of_places(ranks, "schedules", schedule))


def times_of_all(ranks: Ranks, own: StageTimes | None, dealt: Dealt) -> StageTimes | None:
    """The times of all stages, each as the rank that has it has measured it; None: nothing was measured."""
    found = ranks.gather_objects("stage times", own)
    if None in found:
        return None
    of_places = [slowest_of(found[first : first + ranks.each]) for first in range(0, ranks.size, ranks.each)]
    by_rank = [times for times in of_places if times is not None]
    of_stages = list(enumerate(dealt.of_stages))
    splits = all(times.weights for times in by_rank)
    return StageTimes(
        forward=tuple(by_rank[rank].forward[k] for k, rank in of_stages),
        backward=tuple(by_rank[rank].backward[k] for k, rank in of_stages),
        weights=tuple(by_rank[rank].weights[k] for k, rank in of_stages) if splits else (),
        again=tuple(by_rank[rank].again[k] for k, rank in of_stages),
        orthogonal=min((times.orthogonal for times in by_rank if times.orthogonal is not None), default=None),
    )


def repeat_of_all(ranks: Ranks, plan: Plan, machine: Machine | None) -> float | None:
    """Seconds in which the slowest rank takes back what a step has changed that is over the limit of the norm, before
    all run it again; None: no rank steps before the norm is known. ``machine``: None: nothing is predicted."""
    back = 0.0 if machine is None else seconds_back(plan, machine)
    own = back if steps_early(plan.program, plan.settings) else None
    return max((s for s in ranks.gather_objects("time of a repeat", own) if s is not None), default=None)


def predicted_of_all(ranks: Ranks, plan: Plan, pace: Pace) -> Simulation:
    """The simulation of the very steps that all ranks of a pipeline run, each by its plan."""
    plans = _of_places(ranks, "plans", plan)
    return ranks.once("prediction", lambda: pace.step(Plans.of(plans)).simulation)
