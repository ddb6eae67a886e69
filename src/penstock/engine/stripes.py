"""The drives of a store: their weights in its stripe, by the machine's profile, else by a short measurement; and the
room that is left on them."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from penstock import files
from penstock.hardware.drives import in_proportion, spread, stripe_weights, weights_of
from penstock.hardware.machine import Drive, Machine
from penstock.hardware.profiles import file_system, find_profile
from penstock.hardware.sharing import drives_of
from penstock.ranks.group import ALONE, Ranks
from penstock.store import packed
from penstock.store.making import SMALL
from penstock.store.manifest import DATA
from penstock.store.pace import pace
from penstock.store.store import Store

log = logging.getLogger("penstock")


def weights_for(paths: Sequence[Path], machine: Machine | None, ranks: Ranks = ALONE) -> tuple[int, ...]:
    """The weights of a store in these directories, one of ``ranks``' where there are several. Empty: striped evenly.
    ``machine``: as all ranks see it; None: what is stored of this one counts, if anything is.

    Raises:
        StoreError: a drive that nobody has measured cannot be.
    """
    each = ranks.size // ranks.hosts
    return weights_of_rank(paths, () if machine is None else machine.drives, ranks.rank % each, each)


def weights_of_rank(paths: Sequence[Path], drives: Sequence[Drive], rank: int, ranks: int) -> tuple[int, ...]:
    """The weights of the store of one of several ranks on a host, whose ``drives`` are those of all. Empty: striped
    evenly."""
    if len(paths) < 2 or len({file_system(path) for path in paths}) == 1:
        return ()  # what is on one file system is one drive, whatever was measured of it
    own = drives_of(drives, rank, ranks)
    if len(own) != len(paths):
        found = find_profile(paths)
        own = () if found is None else found.drives
    weights = stripe_weights(own) if own else _measured(paths)
    if len(set(weights)) == 1:
        return ()
    log.info("striping %s over %s, as fast as these drives are", in_proportion(weights), ", ".join(map(str, paths)))
    return weights


def _measured(paths: Sequence[Path]) -> tuple[int, ...]:
    paces = [pace(files.nearest_folder(path)) for path in paths]
    rates = ", ".join(f"{path} {rate / 1e6:,.0f} MB/s" for path, rate in zip(paths, paces, strict=True))
    log.info("measured for a moment, as no machine profile has these drives (penstock doctor): %s", rates)
    return weights_of(paces)


def as_striped(machine: Machine | None, store: Store | None, ranks: int) -> Machine | None:
    """The machine with the weights that a store has for ever, which its predictions are of."""
    if machine is None or store is None or ranks > 1 or len(machine.drives) != len(store.weights):
        return machine
    pairs = zip(machine.drives, store.weights, strict=True)
    return replace(machine, drives=tuple(replace(drive, weight=weight) for drive, weight in pairs))


def users_of(store: Store | None, ranks: Ranks) -> tuple[int, ...]:
    """Of each directory of a rank's store, the number of those on its file system, of all ranks on its host. All ranks
    come here, which have made their stores."""
    own = [(ranks.host, path.stat().st_dev) for path in (() if store is None else store.paths)]
    every = [place for told in ranks.gather_objects("file systems", own) for place in told]
    return tuple(map(every.count, own))


def room_beside(store: Store, scratch: Sequence[Path], users: Sequence[int]) -> int:
    """Bytes that there may be in ``scratch`` directories beside a store: what is in them now, and of what is free on
    each file system an equal part for each of its ``users``."""
    free = [packed.free_bytes(path) // count - SMALL for path, count in zip(store.paths, users, strict=True)]
    there = (place / DATA for place in scratch)
    room = [max(0, n) + (file.stat().st_size if file.is_file() else 0) for n, file in zip(free, there, strict=True)]
    return int(max(spread(room, store.weights), spread(room, (1,) * len(room))))
