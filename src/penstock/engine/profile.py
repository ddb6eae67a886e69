"""The profile of the machine that a run is on: the one that is stored, or what a short measurement finds.

``penstock doctor`` measures for a minute, ``penstock train`` for a quarter of that. This is for whoever calls ``wrap``
on a machine, or with a directory, that nobody has measured: a few seconds once, kept for the next time.
"""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from penstock import files
from penstock.config import format_size
from penstock.doctor import examine
from penstock.engine.device import kind_of, name_of
from penstock.errors import BudgetError, ConfigError
from penstock.hardware import system
from penstock.hardware.machine import Drive, Machine
from penstock.hardware.profiles import by_directory, file_system, find_parts, find_profile, save_profile
from penstock.hardware.sharing import knows_ranks
from penstock.ranks.axes import SHARD
from penstock.ranks.group import Ranks
from penstock.ranks.process_groups import Together, join
from penstock.tape.rng import RandomState

log = logging.getLogger("penstock")

_SWITCH = "PENSTOCK_MEASURE"
LEAST = 2 << 30
"""Bytes of memory that must be available: measuring takes a third of that for a moment."""
UNKEPT: dict[tuple[torch.device, tuple[Path, ...]], Machine] = {}
"""Profiles that could not be stored, kept for as long as this process lives."""


def profile_of(paths: Sequence[Path], device: torch.device, optimizer: str, ranks: int = 1) -> Machine | None:
    """The stored profile of this machine with these directories and this device. Of what it needs (the machine, each
    drive, what ``ranks`` processes that compute on its processors send each other, a GPU's steps of ``optimizer``)
    that which is not stored is measured, which is said in a line, and stored. What cannot be measured is said, too:
    None, or what is stored.

    Raises:
        ConfigError: the stored profile is damaged, or the environment's switch is neither "never" nor left out.
    """
    kind, name, may = kind_of(device), None if device.type == "cpu" else name_of(device), may_measure()
    unkept = UNKEPT.get((device, tuple(paths)))
    found = find_profile(paths, kind=kind, device=name) or unkept
    if found is not None and found.nic is None and unkept is not None:
        found = replace(found, nic=unkept.nic)
    among = (ranks,) if ranks > 1 and kind == "cpu" and (found is None or not knows_ranks(found, ranks)) else ()
    steps = kind != "cpu" and found is not None and optimizer not in found.device.optimizer
    if not may or (found is not None and not among and not steps):
        return found
    if system.look().available < LEAST:
        log.warning(
            "this machine has no profile for this run, and with less than %s of memory available it is not measured: "
            "penstock doctor does",
            format_size(LEAST),
        )
        return found
    known, missing = find_parts(paths, kind=kind, device=name)
    before, begun = RandomState.capture(device), time.perf_counter()
    try:
        machine = _measured(known, paths, missing, device, among, optimizer)
        if steps:
            rates = examine.device_steps(device, examine.BRIEF, optimizer)
            machine = replace(machine, device=replace(machine.device, optimizer={**machine.device.optimizer, **rates}))
    except (ConfigError, BudgetError, OSError, MemoryError, RuntimeError) as error:  # torch's: no memory, for one
        log.warning("this machine has no profile for this run, and could not be measured: %s", error)
        return found
    finally:
        before.restore()
        if device.type != "cpu":
            torch.accelerator.empty_cache()
    seconds = time.perf_counter() - begun
    what = [*map(str, missing), *(f"what {count} ranks send each other" for count in among)]
    what += [f"{optimizer} steps on the device"] if steps else []
    what = ["this machine"] if known is None else what
    found = by_directory(machine)
    try:
        kept = f"kept as {save_profile(machine)}"
    except ConfigError as error:
        UNKEPT[device, tuple(paths)] = found
        kept = f"not kept ({error})"
    log.warning("measured %s in %.1f s, %s; penstock doctor measures more closely", ", ".join(what), seconds, kept)
    return found


def with_link(found: Machine | None, ranks: Ranks, paths: Sequence[Path], device: torch.device) -> Machine | None:
    """``found``, the stored profile of this machine with these directories, with the link between the hosts that the
    ranks are on. All ranks come here, with what rank 0 has ``found`` or without. What the profile does not tell is
    measured by them together, which rank 0 says in a line, and stores. What cannot be measured is said, too.

    Raises:
        ConfigError: the environment's switch is neither "never" nor left out.
        RankError: another rank is gone.
    """

    def is_missing() -> bool:
        return found is not None and found.nic is None and may_measure()

    if ranks.hosts == 1 or not ranks.decided("link between hosts", is_missing):
        return found
    if not all(ranks.gather_objects("room for a measurement", system.look().available >= LEAST)):
        if ranks.rank == 0:
            log.warning(
                "what %d hosts send each other is not measured: one of them has less than %s of memory available",
                ranks.hosts,
                format_size(LEAST),
            )
        return found
    before, begun = RandomState.capture(device), time.perf_counter()
    try:
        with _sharing_all(ranks, device) as flat:
            link = examine.link(flat, device, examine.BRIEF, _quietly)
    except (ConfigError, BudgetError) as error:  # the same on all ranks
        if ranks.rank == 0:
            log.warning("what %d hosts send each other could not be measured: %s", ranks.hosts, error)
        return found
    finally:
        before.restore()
        if device.type != "cpu":
            torch.accelerator.empty_cache()
    if found is None:
        return None
    linked = replace(found, nic=link)
    if ranks.rank == 0:
        seconds = time.perf_counter() - begun
        try:
            known, _ = find_parts(paths, kind=kind_of(device), device=found.device.name)
            kept = f"kept as {save_profile(replace(known or found, nic=link))}"
        except ConfigError as error:
            UNKEPT[device, tuple(paths)] = linked
            kept = f"not kept ({error})"
        log.warning("measured what %d hosts send each other in %.1f s, %s", ranks.hosts, seconds, kept)
    return linked


@contextmanager
def _sharing_all(ranks: Ranks, device: torch.device) -> Iterator[Ranks]:
    """The same ranks as such that share all state, whose first ones on each host can move things between them."""
    if ranks.copies == ranks.stages == 1:
        yield ranks
        return
    assert isinstance(ranks, Together)
    mesh = DeviceMesh.from_group(ranks.control, device.type, mesh_dim_names=(SHARD,))  # others may not be in theirs
    flat = join(mesh, device)
    try:
        with flat.together("the measurement"):
            yield flat
    finally:
        flat.close()


def may_measure() -> bool:
    """True unless the environment's switch says that no machine is measured.

    Raises:
        ConfigError: it is neither "never" nor left out.
    """
    asked = os.environ.get(_SWITCH, "")
    if asked not in ("", "never"):
        raise ConfigError(f"environment {_SWITCH}={asked!r}: must be 'never', or not set")
    return not asked


def _measured(
    known: Machine | None,
    paths: Sequence[Path],
    missing: Sequence[Path],
    device: torch.device,
    among: Sequence[int],
    optimizer: str,
) -> Machine:
    """The machine with a drive for each of ``paths``, in that order; without these, with those that it has.
    ``missing``: those of ``paths`` of which ``known`` has none."""
    folders = {file_system(folder): folder for folder in map(files.nearest_folder, missing)}  # each file system once
    asked, had = list(folders.values()), dict[Path, Drive]()
    if known is None:
        machine = examine.examine(asked, examine.BRIEF, device, _quietly, among, optimizer)
        drives = machine.drives
    else:
        drives, between = examine.more_of(known, asked, examine.BRIEF, _quietly, among)
        machine = replace(known, between=(*known.between, *between))
        had = {Path(drive.path): drive for drive in known.drives}
    measured = dict(zip(folders, drives, strict=True))
    real = [path.resolve() for path in paths]
    found = (had.get(path) or replace(measured[file_system(path)], path=str(path)) for path in real)
    return replace(machine, drives=tuple(found)) if paths else machine


def _quietly(what: str) -> nullcontext[None]:
    """Progress of a measurement that is not shown: one line at the end tells of it."""
    return nullcontext()
