"""Rates to compare a run's figures with: those measured of the machine, and what its drives are rated for."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock import files
from penstock.config import TrainConfig
from penstock.hardware.drives import TB, rated_bytes, together
from penstock.hardware.machine import DeviceKind, Machine
from penstock.hardware.profiles import file_system
from penstock.schedule.ir.lanes import Lane

DRIVE_WRITES = 0.3 * 365 * 5
"""Times that a drive is assumed to bear being written in full, where nothing says what it is rated for: 0.3 a day over
five years, what makers warrant of drives that are meant for reading."""


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """Rates to compare a run with. ``flops``: FLOP/s of a large matrix product in the run's precision; ``peak``: what
    the device's maker states for it, None where the profile has none; ``links``: bytes/s that each was measured to
    move; none without a machine profile. ``rated``: bytes that may be written to all drives of the run together in
    their life; None: there are none, or they do not wear. ``assumed``: that is a guess from their size. ``allowed``:
    bytes that they may be written in a day together (``budget.endurance``); None: any.
    """

    flops: float | None = None
    peak: float | None = None
    links: Mapping[Lane, float] = field(default_factory=dict)
    rated: float | None = None
    assumed: bool = False
    allowed: float | None = None


def yardstick(config: TrainConfig, machine: Machine | None, *, kind: DeviceKind, hosts: int = 1) -> Yardstick:
    """The yardstick of a run on a device of a ``kind``, but for what its drives may be written in a day. ``hosts``:
    that have such drives each.
    """
    of_host, assumed = _rated(config, machine)
    rated = None if of_host is None else of_host * hosts
    if machine is None:
        return Yardstick(rated=rated, assumed=assumed)
    device, drives = machine.device, machine.drives if config.budget.disk_paths else ()
    links: dict[Lane, float] = {"h2d": device.h2d, "d2h": device.d2h}
    if drives:
        links |= {"read": together(drives).read, "write": together(drives).write}
    precision = config.precision_on(kind)
    return Yardstick(
        flops=device.flops.get(precision),
        peak=device.peak.get(precision),
        links=links,
        rated=rated,
        assumed=assumed,
    )


def _rated(config: TrainConfig, machine: Machine | None) -> tuple[float | None, bool]:
    """(bytes of a host's drives, whether assumed): as the settings say, else the machine's profile, else from the
    drives' size."""
    paths = config.budget.disk_paths
    if not paths:
        return None, False
    drives = len({file_system(path) for path in paths})
    if config.drive_tbw is not None:
        return drives * config.drive_tbw * TB, False
    if machine is not None:
        if any(drive.kind in ("tmpfs", "network") for drive in machine.drives):
            return None, False
        if len(machine.drives) == len(paths) and (rated := rated_bytes(machine.drives)) is not None:
            return rated, False
    return drives * DRIVE_WRITES * min(map(_capacity, paths)), True


def _capacity(path: Path) -> int:
    """Bytes of the file system that a directory is on, or will be."""
    return shutil.disk_usage(files.nearest_folder(path)).total
