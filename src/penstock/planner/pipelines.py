"""Steps of the ranks of several hosts that are a pipeline, and how many blocks each of them should have.

The ranks' plans are those of a run (``dealt``), and the whole world is simulated, every rank on its own host. Ways
to cut the batch and to deal the blocks are compared by the order of preference, and then the plans are improved.

Blocks are dealt as a run deals them, by what they compute; and by what each takes of its rank's lanes, the drive's
among them: the next one goes to the rank whose busiest lane is then done first, with what the ends take of the first
rank. The faster deal of the two is the outcome. Where hosts differ and places are few, the rank that has most to do
then gives a block to the one that has least, as long as that is faster.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from heapq import heapify, heapreplace

from penstock.config import format_size
from penstock.errors import BudgetError, ConfigError
from penstock.hardware.hosts import Hosts
from penstock.hardware.machine import Machine, Network
from penstock.hardware.sharing import leaving, of_pipeline, within_host
from penstock.planner.batches import cuts
from penstock.planner.dealt import Pace, Pipeline, programs_of
from penstock.planner.layouts import Asked, Layout, OfHost, Outcome, check_memory, slowest
from penstock.planner.places import Plans
from penstock.planner.update_mode import expected_repeats
from penstock.schedule.dealt import stages_dealt
from penstock.schedule.ir.lanes import Lane
from penstock.shape.model import stage_times

MOST_OPS = 2_000_000
"""Ops of the largest world of a pipeline that is simulated."""
_TRIED = 2
"""Ways to cut the batch that are simulated."""
_FEW_PLACES = 16
"""Places up to which blocks are handed from one to another, each time with a simulation."""
_HANDED = 8
"""Times that this is tried at most."""


def pipeline(asked: Asked, layout: Layout) -> Outcome:
    """The outcome of a pipeline, or of several beside each other, with the faster deal of its blocks.

    Raises:
        BudgetError: it does not fit.
        ConfigError: it has too few blocks or micro-batches, or something else that is asked for cannot be.
    """
    views, wanted, check = views_of(asked, layout), asked.task.deal, partial(_check_memory, asked.hosts)
    found = _first(asked, layout, views)
    by_compute = found
    if wanted is None:
        with suppress(BudgetError):  # more blocks on some rank, which its memory or drives may not hold
            counts = _deal(asked, layout, found)
            if counts != found.blocks:
                other = simulated(asked, layout, views, found.size, counts)
                found = min(found, other, key=lambda one: one.step.seconds)
        if len(asked.hosts.kinds) > 1 and len(found.requests) <= _FEW_PLACES:
            counts = found.blocks if found is by_compute else _after_handing_over(found)
            found = _handed_over(asked, layout, views, found, counts)
    changed = found is not by_compute
    found, by_compute = found.improved(check), by_compute.improved(check) if changed else by_compute
    return Outcome(
        layout=layout,
        seconds=found.step.seconds,
        tokens=found.tokens,
        micro_batches=found.count,
        micro_batch_size=found.size,
        hosts=tuple(_of_kind(asked.hosts, found, kind) for kind in range(len(views))),
        deal=found.blocks if changed or wanted is not None else (),
        by_compute=by_compute.step.seconds if changed else None,
    )


def views_of(asked: Asked, layout: Layout) -> list[Machine]:
    """The machine as each rank sees it, by kind of host. Pipelines beside each other share the state of their places,
    each on one host or on several that are alike."""
    hosts, beside = asked.hosts, layout.beside
    assert hosts.alike or beside <= hosts.each
    found: list[Machine] = []
    for view, kind in zip(asked.views(), hosts.kinds, strict=True):
        seen = of_pipeline(kind.machine, hosts.ranks, hosts=hosts.count, beside=beside)
        network, across = (view.network, view.across) if beside == 1 else (seen.network, None)
        found.append(replace(view, network=network, across=across, contention=seen.contention))
    return found


def _first(asked: Asked, layout: Layout, views: Sequence[Machine]) -> Pipeline:
    """The pipeline as a run deals it, by the faster of the ways to cut the batch that are worth a look."""
    refusal: BudgetError | None = None
    found: list[Pipeline] = []
    for size in _sizes(asked, layout):
        try:
            found.append(simulated(asked, layout, views, size, asked.task.deal))
        except BudgetError as error:
            refusal = error
        if len(found) == _TRIED:
            break
    if not found:
        assert refusal is not None
        raise refusal
    return min(found, key=lambda one: one.step.seconds)


def _sizes(asked: Asked, layout: Layout) -> Iterator[int]:
    """Sequences in a micro-batch, the largest first of those that leave every rank something to do; else the smallest.
    None are so small that the step is not simulated.

    Raises:
        ConfigError: the batch cannot be cut into so few micro-batches as are planned.
    """
    each = layout.sharing(asked.batch, asked.size, asked.task.strands)
    if asked.size is not None:
        yield asked.size
        return
    found = cuts(each)
    if not found:
        raise ConfigError(f"{each} sequences cannot be cut into few enough micro-batches: give another batch")
    found = [(size, count) for size, count in found if count <= _most_micro_batches(asked)] or found[-1:]
    enough = [size for size, count in reversed(found) if count >= layout.stages]
    yield from enough or [found[0][0]]


def _most_micro_batches(asked: Asked) -> int:
    """The most micro-batches of a pipeline that are simulated."""
    stages = asked.task.profile(asked.size or 1).program.stages
    return MOST_OPS // (_OPS_OF_BLOCK * sum(stage.kind == "call" for stage in stages))


def simulated(
    asked: Asked, layout: Layout, views: Sequence[Machine], size: int, counts: Sequence[int] | None = None
) -> Pipeline:
    """A pipeline in micro-batches of ``size`` sequences, by the order of preference. ``counts``: of each rank; None: by
    compute.

    Raises:
        BudgetError: it does not fit.
        ConfigError: it has too few blocks or too many ops, or a profile lacks a rate.
    """
    ranks, beside, hosts = layout.stages, layout.beside, asked.hosts
    task = asked.of_rank(views[0], families=("vertical",), stage=None)
    profile = task.profile(size)
    request = task.question(size, layout.sharing(asked.batch, asked.size, task.strands) // size).request
    of_stages = stages_dealt(request.program, ranks, counts)
    calls = [of_stages[stage.index] for stage in request.program.stages if stage.kind == "call"]
    if (ops := len(calls) * request.micro_batches * _OPS_OF_BLOCK) > MOST_OPS:
        raise ConfigError(
            f"{request.micro_batches} micro-batches of {len(calls)} blocks make some {ops:,} ops, and {MOST_OPS:,} are "
            "simulated at most: use larger micro-batches or a smaller batch"
        )
    programs = programs_of(request.program, ranks, counts, beside=beside)
    requests = [replace(request, program=program, ranks=beside) for program in programs]
    times = [stage_times(profile, view, str(task.precision)) for view in views]

    def kind_of(rank: int) -> int:
        return hosts.kind_of(rank * beside)

    pace = Pace(
        machine=lambda rank: views[kind_of(rank)],
        times=lambda rank: times[kind_of(rank)],
        optimizer=task.rate_name,
        link=partial(_link, hosts, beside),
        disk_free=task.disk_free,
        repeats=expected_repeats(task),
    )
    found = Pipeline.by_preference(size, profile, requests, pace)
    for rank, space in enumerate(found.disk_bytes):
        if space > task.disk_free:
            raise BudgetError(
                f"rank {rank}: its state and what waits on disk take {format_size(space)}, and its part of what is "
                f"free is {format_size(task.disk_free)}: give more drives or host memory"
            )
    _check_memory(hosts, found)
    return found


def _check_memory(hosts: Hosts, found: Pipeline) -> None:
    check_memory(hosts, [_of_kind(hosts, found, kind) for kind in range(len(hosts.kinds))])


_OPS_OF_BLOCK = 6


def _link(hosts: Hosts, beside: int, place: int, to: int) -> Network:
    """The link from a rank to another, by their places in a pipeline: to one of another host, the slower of both hosts'
    links, which as many pipelines use as are ``beside`` each other and have ranks on it."""
    rank, peer = place * beside, to * beside
    here, there = (hosts.kinds[hosts.kind_of(one)].machine for one in (rank, peer))
    if rank // hosts.each == peer // hosts.each:
        return within_host(here, hosts.each)
    found = slowest([here.nic, there.nic])
    assert found is not None
    return replace(found, bandwidth=found.bandwidth / min(beside, hosts.each))


def _deal(asked: Asked, layout: Layout, now: Pipeline) -> tuple[int, ...]:
    """Blocks of each rank by what they take of its lanes.

    Raises:
        BudgetError: the first rank is the only one of its kind, and as many blocks as others have do not fit there.
    """
    hosts, had, simulation, places = asked.hosts, now.blocks, now.step.simulation, len(now.requests)

    def kind_of(place: int) -> int:
        return hosts.kind_of(place * now.beside)

    each = {kind_of(rank): _of_block(now, rank) for rank in range(1, places)}
    if kind_of(0) not in each:
        alike = replace(asked, hosts=replace(hosts, kinds=(replace(hosts.kinds[kind_of(0)], count=hosts.count),)))
        each[kind_of(0)] = _of_block(simulated(alike, layout, views_of(alike, layout), now.size), 1)
    per_block = [each[kind_of(rank)] for rank in range(places)]
    ends: dict[Lane, float] = defaultdict(float)
    for lane, seconds in simulation.work(0).items():
        ends[lane] = max(seconds - had[0] * per_block[0].get(lane, 0.0), 0.0)
    counts = [0] + [1] * (places - 1)

    def then(rank: int) -> tuple[float, int]:
        """Seconds of the rank's busiest lane with one block more, and the rank."""
        own = per_block[rank]
        return max((counts[rank] + 1) * own[lane] + (ends[lane] if rank == 0 else 0.0) for lane in own), rank

    next_ones = [then(rank) for rank in range(places)]
    heapify(next_ones)
    for _ in range(sum(had) - sum(counts)):
        _, rank = next_ones[0]
        counts[rank] += 1
        heapreplace(next_ones, then(rank))
    return tuple(counts)


def _handed_over(
    asked: Asked, layout: Layout, views: Sequence[Machine], found: Pipeline, counts: tuple[int, ...]
) -> Pipeline:
    """The pipeline after ranks have handed blocks over, as long as a step gets shorter: lanes that wait for each other
    take longer than any by itself, so that each deal is simulated. ``counts``: the first one; a deal by compute with as
    many blocks counted out may be another one."""
    for _ in range(_HANDED):
        if min(counts[1:]) < 1 or counts[0] < 0:
            return found
        try:
            other = simulated(asked, layout, views, found.size, counts)
        except (BudgetError, ConfigError):  # more blocks than a rank has room for
            return found
        if other.step.seconds < found.step.seconds:
            found = other
        elif counts != found.blocks:
            return found
        following = _after_handing_over(found)
        if following == counts:
            return found
        counts = following
    return found


def _after_handing_over(of: Pipeline) -> tuple[int, ...]:
    """Blocks of each rank after the one whose busiest lane works longest has given one to the one whose works shortest;
    as they are, where all work as long."""
    busy = [max(of.step.simulation.work(rank).values()) for rank in range(len(of.requests))]
    most, least = busy.index(max(busy)), busy.index(min(busy))
    return tuple(n - (rank == most) + (rank == least) for rank, n in enumerate(of.blocks))


def _of_block(of: Pipeline, rank: int) -> dict[Lane, float]:
    """Seconds of a block on each lane of a rank that has blocks and nothing else."""
    return {lane: seconds / of.blocks[rank] for lane, seconds in of.step.simulation.work(rank).items()}


def _of_kind(hosts: Hosts, found: Pipeline, kind: int) -> OfHost:
    """The most that any host of a kind has and moves."""
    each, simulation, beside, plans = hosts.each, found.step.simulation, found.beside, found.step.plans
    of_kind = [host for host in range(hosts.count) if hosts.kind_of(host * each) == kind]
    ranks_of = [[rank // beside for rank in range(host * each, (host + 1) * each)] for host in of_kind]
    """by host, the place of each of its ranks"""
    moved = {first: plans[first].schedule.bytes_per_lane() for first in plans.firsts}
    lane, work = max(
        (item for ranks in ranks_of for rank in ranks for item in simulation.work(rank).items()),
        key=lambda item: item[1],
    )
    space, blocks, twin = found.disk_bytes, found.blocks, plans.twin
    return OfHost(
        machine=hosts.kinds[kind].name,
        hosts=hosts.kinds[kind].count,
        device=max(plans.figures(rank).device_bytes for ranks in ranks_of for rank in ranks),
        host=max(sum(plans.figures(rank).host_bytes for rank in ranks) for ranks in ranks_of),
        disk=max(sum(space[rank] for rank in ranks) for ranks in ranks_of),
        read=max(sum(moved[twin[rank]].get("read", 0) for rank in ranks) for ranks in ranks_of),
        written=max(sum(moved[twin[rank]].get("write", 0) for rank in ranks) for ranks in ranks_of),
        sent=max(sum(_leaves(plans, place, beside, each) for place in ranks) for ranks in ranks_of),
        lane=lane,
        work=work,
        blocks=max(sum(blocks[place] for place in set(ranks)) for ranks in ranks_of),
    )


def _leaves(plans: Plans, place: int, beside: int, each: int) -> int:
    """Bytes that a rank sends to ranks of other hosts, but for its part of the norm: messages, and what leaves the host
    of the collectives of a place that is on several."""
    here = place * beside // each
    messages = sum(n for peer, n in plans.sent(place).items() if peer * beside // each != here)
    if beside <= each:
        return messages
    schedule = plans.figures(place).schedule
    gathered = sum(op.nbytes for op in schedule.lanes["net"] if op.id.kind != "AN")
    return messages + round(gathered * leaving(beside, beside // each, levels=False))
