"""The weights of a new store's drives in its stripe: by the machine's profile, else by a short measurement."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from penstock import files
from penstock.hardware.drives import in_proportion, stripe_weights, weights_of
from penstock.hardware.machine import Drive, Machine
from penstock.hardware.profiles import file_system, find_profile
from penstock.hardware.sharing import drives_of
from penstock.ranks.group import ALONE, Ranks
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
