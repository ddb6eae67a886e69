"""The state of a copy, taken over by ranks that have lost theirs: a host that is new, or whose drives are.

Where there are several copies of the state, the same part lies in the stores of several ranks, and one of those is
enough. Ranks without it get it from the first that has it, over the network, and commit it under the same number.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.errors import StoreError
from penstock.ranks.group import Ranks
from penstock.state.arrays import StateArrays
from penstock.state.memory import BOUNCE, HostSlab, numpy_bytes
from penstock.state.parts import Parts, buffers_of
from penstock.store.directory import is_there, mount_point
from penstock.store.facts import StoreFacts
from penstock.store.store import Store

log = logging.getLogger("penstock")


@dataclass(frozen=True, kw_only=True)
class Found:
    """A rank's finding where its store is to be. ``sequence``: the number of its newest commit; -1: no store."""

    sequence: int
    untouched: bool

    @staticmethod
    def of(facts: StoreFacts | None) -> "Found":
        if facts is None:
            return Found(sequence=-1, untouched=True)
        return Found(sequence=max(facts.records), untouched=facts.untouched)


def givers(found: Sequence[Found], parts: int) -> dict[int, int] | None:
    """By rank that has lost its part of the state, or all of it, the first that still has the same. Empty: nobody has,
    as the run begins; None: a part is lost. ``parts``: that a copy is cut into."""
    newest = max(one.sequence for one in found)
    # Ranks are at most one commit apart; one that is further behind has a store that a start before has just made.
    lost = [rank for rank, one in enumerate(found) if one.untouched and one.sequence < newest - 1]
    if all(one.untouched for one in found):
        return {}
    givers = {}
    for rank in lost:
        those = [other for other in range(rank % parts, len(found), parts) if other not in lost]
        if not those:
            return None
        givers[rank] = those[0]
    return givers


def drives_of(paths: Sequence[Path]) -> dict[str, str]:
    """By directory that the budget names, in which a rank has its own of ``paths``, where the file system is mounted
    that it is on."""
    return {str(path.parent): str(mount_point(path.parent)) for path in paths}


def require_drives(paths: Sequence[Path], rank: int, giver: int, theirs: Mapping[str, str]) -> None:
    """Check that directories in which nothing of a rank's store is left are on drives that are new, and not on none: a
    drive that is not mounted leaves an empty directory, or nothing.

    That is sure of a directory of the rank's own, which somebody has made; and of one that the budget names, on a file
    system that is mounted where ``theirs`` is, the giver's (``drives_of``), and that is there, or no part of the root.

    Raises:
        StoreError: it is not sure; says how to say so.
    """
    for path in paths:
        named, mount = path.parent, str(mount_point(path.parent))
        if is_there(path) or (theirs.get(str(named)) == mount and (mount != "/" or is_there(named))):
            continue
        raise StoreError(
            f"{path} is not there: is the drive mounted? ({named} is on what is mounted at {mount}.) If the drive is "
            f"new, or what was on it is gone for good, make the directory (mkdir -p {path}): rank {rank} then takes "
            f"the state over from rank {giver}"
        )


def take_over(
    givers: Mapping[int, int],
    ranks: Ranks,
    own: Store | None,
    make: Callable[[Mapping[str, Any]], Store],
) -> None:
    """Fill the stores of ranks that have lost theirs. All ranks come here.

    ``givers``: as the function of that name finds them. ``own``: this rank's store, as of the newest commit that all
    others have; None: it is lost, and ``make`` makes it anew, told what a giver's is made for.

    Raises:
        StoreError: a drive is full or fails.

    Where nothing has been committed, there is nothing to take over: the lost stores are made, and the run begins.
    """
    said = None if own is None else (own.model, own.last_commit(), own.commits.sequence)
    told: list[Any] = ranks.gather_objects("state to take over", said)
    begins = any(one is not None and one[1] is None for one in told)
    with ExitStack() as stack:
        if own is None:
            giver = givers[ranks.rank]
            own = stack.enter_context(make(told[giver][0]))
            if not begins:
                log.warning("%s: the state is taken over from rank %d", own.paths[0], giver)
        if begins:
            return
        (arrays,) = Parts([own]).arrays
        for rank, giver in sorted(givers.items()):
            _pass_on(arrays, own.model, ranks, giver, rank)
        if ranks.rank in givers:
            _, record, sequence = told[givers[ranks.rank]]
            own.commits.count_from(sequence - 1)
            own.commit({**record, "slots": arrays.slots.record()})
    ranks.gather_objects("end of what was taken over", None)


def _pass_on(arrays: StateArrays, model: Mapping[str, Any], ranks: Ranks, giver: int, taker: int) -> None:
    """All arrays and buffers of one rank to another. The rest of the ranks look on."""
    rank = ranks.rank
    with HostSlab(BOUNCE) as bounce:
        for name in arrays.parts:
            if rank == taker:
                arrays.begin(name)
            for start, piece in arrays.pieces(name, bounce):
                if rank == giver:
                    arrays.read(name, start, piece)
                ranks.lend(piece.view(torch.uint8), giver)
                if rank == taker:
                    arrays.write(name, start, piece)
            if rank == taker:
                arrays.flip(name)
        for name, nbytes in buffers_of(model):
            with HostSlab(nbytes) as slab:
                flat = slab.bytes[:nbytes]
                if rank == giver:
                    arrays.slots.read(name, 0, numpy_bytes(flat))
                ranks.lend(flat, giver)
                if rank == taker:
                    arrays.slots.write(name, 0, numpy_bytes(flat))
                    arrays.slots.flip((name,))
