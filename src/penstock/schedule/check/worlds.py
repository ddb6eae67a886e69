"""Proves the schedules of all ranks safe together: each rank's own rules, and what they promise each other."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator

from penstock.errors import ScheduleError
from penstock.schedule.check.order import on_rank, run_orders
from penstock.schedule.check.rules import check_names, check_rules
from penstock.schedule.ir.ops import Op, Schedule
from penstock.schedule.ir.references import OpId, answer_to
from penstock.schedule.ir.worlds import World

Shared = tuple[Schedule, list[int]]
"""A schedule and the ranks that have it."""


def check_world(world: World) -> None:
    """Check every rule (they are listed in ``check``) on every rank. Ranks that share a schedule are checked once.

    Raises:
        ScheduleError: names the rank, the op, and what it waits for or collides with.
    """
    for fault in faults(world):
        raise fault


def violations(world: World) -> list[str]:
    """All that ``check_world`` refuses, in words: on each rank, not only the first; empty if the world is safe."""
    return [str(fault) for fault in faults(world)]


def faults(world: World) -> Iterator[ScheduleError]:
    """The errors that ``check_world`` raises the first of. Each stage of the check relies on the one before, so the
    check ends after the first stage that finds something.
    """
    by_identity: dict[int, Shared] = {}
    for rank, schedule in enumerate(world.ranks):
        by_identity.setdefault(id(schedule), (schedule, []))[1].append(rank)
    shared = list(by_identity.values())
    early = list(_on_each(world, shared, lambda schedule, _: check_names(schedule))) or list(_unmet(world, shared))
    if early:
        yield from early
        return
    try:
        orders = run_orders(world)
    except ScheduleError as error:
        yield error
        return
    yield from _on_each(world, shared, lambda schedule, rank: check_rules(schedule, orders[rank]))


def _on_each(world: World, shared: Iterable[Shared], rule: Callable[[Schedule, int], None]) -> Iterator[ScheduleError]:
    """The errors that a rule of one rank raises; it gets each schedule with the first rank that has it."""
    for schedule, ranks in shared:
        try:
            rule(schedule, ranks[0])
        except ScheduleError as error:
            yield ScheduleError(on_rank(world, ranks[0], str(error)), op=error.op, rank=ranks[0])


# ---- rule 8: what ranks promise each other


def _unmet(world: World, shared: Iterable[Shared]) -> Iterator[ScheduleError]:
    """Sends, receives and collectives that do not find each other."""
    for name, members in world.groups.items():
        if unknown := [rank for rank in members if rank not in range(len(world.ranks))]:
            yield ScheduleError(f"group {name} has rank {unknown[0]}, which does not exist", op=f"group {name}")
        if twice := [rank for rank, count in Counter(members).items() if count > 1]:
            yield ScheduleError(f"group {name} has rank {twice[0]} twice", op=f"group {name}")
    present: dict[tuple[OpId, str], list[int]] = defaultdict(list)  # (collective's id, its group) -> ranks that have it
    moved: dict[tuple[OpId, str], int] = {}  # and the bytes that the first of them has
    members_of = {name: frozenset(members) for name, members in world.groups.items()}
    for schedule, ranks in shared:
        joined = {name for name, members in members_of.items() if members.issuperset(ranks)}
        for op in schedule.ops:
            match op.id.lane:
                case "net" | "nic":
                    present[op.id, op.group] += ranks
                    if (first := moved.setdefault((op.id, op.group), op.nbytes)) != op.nbytes:
                        yield _fault(world, ranks[0], op, f"has {op.nbytes} bytes, and on another rank {first}")
                    if op.group not in joined:
                        yield _stranger(world, ranks, op)
                case "send" | "recv":
                    yield from _unanswered(world, ranks, op)
                case _ if op.group:
                    yield _fault(world, ranks[0], op, f"is of group {op.group}, but is no collective")
            if op.peer != -1 and op.id.lane not in ("send", "recv"):
                yield _fault(world, ranks[0], op, "has a peer, but neither sends nor receives")
    for (ident, group), there in present.items():
        members = world.groups.get(group, ())
        if len(there) < len(members) and (here := next((rank for rank in members if rank in there), None)) is not None:
            absent = next(rank for rank in members if rank not in there)
            message = f"waits for all of group {group}, and rank {absent} has no such op of that group"
            yield _fault(world, here, world.ranks[here].by_id[ident], message)


def _stranger(world: World, ranks: list[int], op: Op) -> ScheduleError:
    """A collective in a group that is not there, or not of this rank."""
    if not op.group:
        return _fault(world, ranks[0], op, "is a collective: write 'group NAME' for the ranks that share it")
    if op.group not in world.groups:
        return _fault(world, ranks[0], op, f"is of group {op.group}, which does not exist")
    rank = next((rank for rank in ranks if rank not in world.groups[op.group]), ranks[0])
    return _fault(world, rank, op, f"is of group {op.group}, which rank {rank} does not belong to")


def _unanswered(world: World, ranks: list[int], op: Op) -> Iterator[ScheduleError]:
    """The ranks on which a send has no recv, or the other way round."""
    other = answer_to(op.id)
    verb, there = ("sends to", "from") if op.id.lane == "send" else ("receives from", "to")
    for rank in ranks:
        if not 0 <= op.peer < len(world.ranks):
            peer = "no rank: write 'peer RANK'" if op.peer < 0 else f"rank {op.peer}, which does not exist"
            yield _fault(world, rank, op, f"{verb} {peer}")
            continue
        answer = world.ranks[op.peer].by_id.get(other)
        if answer is None or answer.peer != rank:
            yield _fault(world, rank, op, f"{verb} rank {op.peer}, which has no op {other} {there} rank {rank}")
        elif op.id.lane == "recv" and (op.nbytes, op.items) != (answer.nbytes, answer.items):
            sent = f"{answer.nbytes} bytes of {answer.items} micro-batches"
            yield _fault(world, rank, op, f"receives {op.nbytes} bytes of {op.items}, and rank {op.peer} sends {sent}")


def _fault(world: World, rank: int, op: Op, what: str) -> ScheduleError:
    return ScheduleError(on_rank(world, rank, f"op {op.id} {what}"), op=op.id, rank=rank)
