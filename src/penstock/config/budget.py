"""Settings of the memory that a run may take, of the disk that has the rest, and of its durability."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from penstock.config.checked import check_fields
from penstock.config.endurance import Endurance
from penstock.config.quantities import parse_duration
from penstock.config.sizes import MEMORY_LEAST, check_size, parse_size
from penstock.documents.typed import shown
from penstock.errors import ConfigError

Tier = Literal["device", "host", "disk"]
TIERS: tuple[Tier, ...] = ("device", "host", "disk")
Precision = Literal["fp32", "bf16", "fp16"]
GradDtype = Literal["fp32", "bf16"]
Durability = Literal["step", "interval", "none"]

INTERVAL = "5min"
"""Time of training that a kill costs at most where nothing else is asked for, and not every step is durable."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The memory of each tier that training may take, and the directories on disk that have the rest.

    | field | meaning |
    |---|---|
    | ``device`` | bytes (``"24GiB"``, ``"24G"``) of the accelerator's memory; on the CPU, of the memory that computes |
    | ``host`` | bytes of host memory for buffers and whatever state is kept there |
    | ``disk`` | a directory, or several that are striped; None: nothing goes to disk |
    | ``weights``, ``state``, ``gradients``, ``activations`` | the tier that this lives on; None: the planner chooses |
    | ``slots`` | copies of the state on disk: with 2 a run that is killed goes on from its last step; 1 takes half |
    | ``durability`` | what a kill may cost. ``step``: the step in flight; needs ``disk``, 2 ``slots``, and all that is
    trained on disk. ``interval``: the steps since the last commit of state that may live in memory. ``none``: the whole
    run. None: with ``disk``, ``step``, unless ``penstock train`` predicts that ``interval`` takes 10% off a step |
    | ``interval`` | with durability ``interval``, what a kill may cost at most: steps (``100``), or time (``"5min"``,
    also ``"90s"`` and ``"1h"``); None: 5 minutes |
    | ``endurance`` | section: what each drive may be written in a day, ``{per_day: 3TB}``, or ``{tbw: 1200TB, days:
    365}``. Plans stay within it; None: they do not look |
    """

    device: str | int | float
    host: str | int | float
    disk: str | Path | Sequence[str | Path] | None = None
    weights: Tier | None = None
    state: Tier | None = None
    gradients: Literal["host", "disk"] | None = None
    activations: Tier | None = None
    slots: Literal[1, 2] = 2
    durability: Durability | None = None
    interval: int | str | None = None
    endurance: Endurance | None = None

    @property
    def memory(self) -> Mapping[Tier, int]:
        """Bytes of device and host."""
        return {"device": self.device_bytes, "host": self.host_bytes}

    @cached_property
    def device_bytes(self) -> int:
        return parse_size(self.device)

    @cached_property
    def host_bytes(self) -> int:
        return parse_size(self.host)

    @cached_property
    def disk_paths(self) -> tuple[Path, ...]:
        return tuple(Path(os.path.expanduser(path)) for path in _each(self.disk))

    def __post_init__(self) -> None:
        check_fields(self, "budget")
        for key in ("device", "host"):
            check_size(f"budget.{key}", getattr(self, key))
        if any("\0" in str(path) or not str(path) for path in _each(self.disk)):
            raise ConfigError(f"budget.disk={shown(self.disk)}: give directories, or None")
        for kind in ("weights", "state", "gradients", "activations"):
            if getattr(self, kind) == "disk" and not self.disk_paths:
                raise ConfigError(f"budget.{kind}='disk' needs budget.disk, a directory")
        for place, path in enumerate(self.disk_paths):
            if os.path.abspath(path) in map(os.path.abspath, self.disk_paths[:place]):
                raise ConfigError(f"budget.disk has {path} twice: give each directory once")
        if self.slots == 1 and not self.disk_paths:
            raise ConfigError("budget.slots=1 has no effect without budget.disk, where slots are: leave it at 2")
        self._check_durability()
        if self.disk is not None and not self.disk_paths:
            raise ConfigError("budget.disk is an empty list: give a directory or None")
        if self.endurance is not None and not self.disk_paths:
            raise ConfigError("budget.endurance has no effect without budget.disk, as nothing is written: drop it")

    def check_units(self) -> None:
        """Look at sizes as somebody has given them; the planner varies them byte by byte.

        Raises:
            ConfigError: a unit was left out.
        """
        for key in ("device", "host"):
            check_size(f"budget.{key}", getattr(self, key), MEMORY_LEAST)
        for key in ("per_day", "tbw"):
            if (size := getattr(self.endurance, key, None)) is not None:
                check_size(f"budget.endurance.{key}", size, MEMORY_LEAST)

    def of_rank(self, rank: int, ranks: int, hosts: int = 1) -> "Budget":
        """The budget of one of several ranks: its share of its host's memory and drives, and directories of its own.
        Where there are at least as many directories as ranks on a host, each has some of them, else a folder in one.
        ``hosts``: that have as many neighbouring ranks each; what the budget gives, each of them has.
        """
        if ranks == 1:
            return self
        each, disks = ranks // hosts, self.disk_paths
        place = rank % each
        paths, users = disks[place::each] if len(disks) >= each else (), 1
        if disks and not paths:
            own = place % len(disks)
            paths, users = (disks[own],), len(range(own, each, len(disks)))
        disk = [folder_of_rank(path, rank) for path in paths] or None
        endurance = None if self.endurance is None else self.endurance.shared(users)
        return replace(self, host=f"{self.host_bytes // each}B", disk=disk, endurance=endurance)

    def stores(self, ranks: int, hosts: int = 1) -> tuple[tuple[Path, ...], ...]:
        """The directories of each rank's store, by rank; empty without a disk."""
        return tuple(self.of_rank(rank, ranks, hosts).disk_paths for rank in range(ranks)) if self.disk_paths else ()

    @property
    def interval_steps(self) -> int | None:
        """Steps from one commit of what is in memory to the next, where they are counted in steps."""
        return self.interval if isinstance(self.interval, int) else None

    @property
    def interval_seconds(self) -> float | None:
        """Seconds that a kill may cost, where commits of what is in memory follow the clock."""
        if self.durability != "interval" or isinstance(self.interval, int):
            return None
        return parse_duration(INTERVAL if self.interval is None else self.interval)

    @property
    def may_keep_every_step(self) -> bool:
        """True if every step could be durable: there is a disk, with room for two slots, and no pin is in the way."""
        return bool(self.disk_paths) and self.slots == 2 and self.state in (None, "disk")

    def by_default(self) -> "Budget":
        """The budget with the durability that counts where none is named: every step, where that can be."""
        if self.durability is None and self.may_keep_every_step:
            return replace(self, durability="step")
        return self

    def with_pins(self) -> "Budget":
        """The budget with what its durability asks for pinned: for ``step`` all state is on disk."""
        return replace(self, state="disk") if self.durability == "step" else self

    def _check_durability(self) -> None:
        asked = f"budget.durability={self.durability!r}"
        if isinstance(self.interval, int) and self.interval < 1:
            raise ConfigError(f"budget.interval={self.interval}: must be at least 1 step")
        if isinstance(self.interval, str):
            try:
                parse_duration(self.interval)
            except ConfigError as error:
                raise ConfigError(f"budget.interval: {error}") from None
        if self.interval is not None and self.durability != "interval":
            raise ConfigError(
                f"{asked} with budget.interval={self.interval!r}: give both, as durability='interval' and "
                "interval=100 (steps) or interval='5min', or neither"
            )
        if self.durability in ("step", "interval") and not self.disk_paths:
            raise ConfigError(f"{asked} needs budget.disk, a directory to keep the state in")
        if self.durability in ("step", "interval") and self.slots == 1:
            raise ConfigError(f"{asked} needs budget.slots=2: a commit must not overwrite the one before")
        if self.durability == "step" and self.state not in (None, "disk"):
            raise ConfigError(f"{asked} needs the state on disk, not budget.state={self.state!r}: use 'interval'")


_OF_RANK = "rank-"


def folder_of_rank(path: Path, rank: int) -> Path:
    """The directory of one of several ranks in one that a budget names."""
    return path / f"{_OF_RANK}{rank}"


def is_of_rank(path: Path) -> bool:
    """True if a directory has the name of one that a rank has (``Budget.of_rank``)."""
    return path.name.removeprefix(_OF_RANK).isdecimal() and path.name.startswith(_OF_RANK)


def _each(disk: str | Path | Sequence[str | Path] | None) -> Sequence[str | Path]:
    if disk is None:
        return ()
    return (disk,) if isinstance(disk, str | Path) else disk
