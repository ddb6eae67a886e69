"""The state of a copy, taken over by ranks that have lost theirs: a host that is new, or whose drives are.

Where there are several copies of the state, the same part lies in the stores of several ranks, and one of those is
enough. Ranks without it get it from the first that has it, over the network, and commit it under the same number.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from penstock.errors import StoreError
from penstock.ranks.group import Ranks
from penstock.state.arrays import StateArrays
from penstock.state.memory import BOUNCE, HostSlab, numpy_bytes
from penstock.state.parts import Parts, buffers_of
from penstock.store.directory import is_there, mount_point
from penstock.store.store import Store

log = logging.getLogger("penstock")


def givers(lost: Collection[int], drives: Sequence[Sequence["Drive"]], parts: int) -> dict[int, int]:
    """By rank that has ``lost`` its part of the state, or all of it, the first that still has the same, if one has.

    ``drives``: of each rank's store. ``parts``: that a copy of the state is cut into.

    Raises:
        StoreError: of some ranks that others would give it to, it is not sure that their drives are new ones; names all
            of these, and says how to say so.
    """
    found: dict[int, int] = {}
    doubtful: list[tuple[int, Drive]] = []
    for rank in lost:
        those = [other for other in range(rank % parts, len(drives), parts) if other not in lost]
        if those:
            found[rank] = those[0]
            doubtful += [(rank, drive) for drive in doubts(drives[rank], drives[those[0]])]
    if doubtful:
        paths = [str(drive.path) for _, drive in doubtful]
        mounts = dict.fromkeys(f"{drive.named} is on what is mounted at {drive.mount}" for _, drive in doubtful)
        are, directories = ("is", "directory") if len(paths) == 1 else ("are", "directories")
        first, *others = dict.fromkeys(rank for rank, _ in doubtful)
        then = f"rank {first} then takes the state over from rank {found[first]}"
        raise StoreError(
            f"{', '.join(paths)} {are} not there: is the drive mounted? ({', '.join(mounts)}.) If the drive is new, or "
            f"what was on it is gone for good, make the {directories} (mkdir -p {' '.join(paths)}): "
            + ", ".join([then, *(f"rank {rank} from rank {found[rank]}" for rank in others)])
        )
    return found


def no_store(path: Path) -> StoreError:
    """The error for a rank that has no store, and the only one of its part. ``path``: where it should be."""
    return StoreError(
        f"{path} holds no store, and other ranks have theirs: is the drive mounted? Give each its own again"
    )


class Drive(NamedTuple):
    """The drive of one of a rank's directories, ``path``. ``named``: the directory that the budget names, in which that
    is; ``mount``: where the file system is mounted that it is on."""

    path: Path
    is_there: bool
    named: Path
    named_is_there: bool
    mount: Path


def drives_of(paths: Sequence[Path]) -> tuple[Drive, ...]:
    """Raises:
    StoreError: a directory may not be looked at.
    """
    return tuple(Drive(p, is_there(p), p.parent, is_there(p.parent), mount_point(p.parent)) for p in paths)


def doubts(own: Sequence[Drive], theirs: Sequence[Drive]) -> list[Drive]:
    """Of directories in which nothing of a rank's store is left, those of which it is not sure that they are on drives
    that are new, and not on none: a drive that is not mounted leaves an empty directory, or nothing.

    It is sure of a directory of the rank's own, which somebody has made; and of one that the budget names, on a file
    system that is mounted where that of the giver is (``theirs``), and that is there, or no part of the root.
    """
    mounts = {drive.named: drive.mount for drive in theirs}
    return [
        drive
        for drive in own
        if not drive.is_there
        and (mounts.get(drive.named) != drive.mount or (drive.mount == Path("/") and not drive.named_is_there))
    ]


def take_over(givers: Mapping[int, int], ranks: Ranks, own: Store, sequence: int) -> None:
    """Fill the stores of ranks that have lost theirs. All ranks come here.

    ``givers``: as the function of that name finds them. ``own``: this rank's store, as of the commit number
    ``sequence``; or where it is lost, a new one.

    Raises:
        StoreError: a drive is full or fails.
    """
    told: list[Any] = ranks.gather_objects("state to take over", own.last_commit())
    (arrays,) = Parts([own]).arrays
    for taker, giver in sorted(givers.items()):
        _pass_on(arrays, own.model, ranks, giver, taker)
    if ranks.rank in givers:
        log.warning("%s: the state is taken over from rank %d", own.paths[0], givers[ranks.rank])
        own.commits.count_from(sequence - 1)
        own.commit({**told[givers[ranks.rank]], "slots": arrays.slots.record()})
    ranks.gather_objects("end of what was taken over", None)


def _pass_on(arrays: StateArrays, model: Mapping[str, Any], ranks: Ranks, giver: int, taker: int) -> None:
    """All arrays and buffers of one rank to another. The rest of the ranks look on."""
    rank = ranks.rank
    with HostSlab(BOUNCE) as bounce:
        for name in arrays.parts:
            if rank == taker:
                arrays.begin(name)
            for start, piece in arrays.pieces(name, bounce.bytes):
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
