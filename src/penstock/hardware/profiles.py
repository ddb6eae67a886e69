"""Finds and keeps machine profiles: those that ``penstock doctor`` has measured here, and those that ship.

    $XDG_CACHE_HOME or ~/.cache
      penstock/machines/HOST/PATHS-KIND-xxxxxxxx-yyyyyyyy.json    one for each kind of device (cpu, cuda), each set of
                                                                  directories that was measured together, and
                                                                  what of the host there was: cores, memory,
                                                                  the device, where the drives were mounted

A cache folder is often shared by the machines of a cluster, so profiles are kept by host. What a process with fewer
cores or less memory measures is kept beside what was measured with all of them, and each is found by those that it is
of: one of less memory only where no other has all directories. A drive is found again for any directory on its file
system, because a drive is as fast in one directory as in another.
"""

import difflib
import hashlib
import os
import re
import socket
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import get_args

from penstock.errors import ConfigError
from penstock.hardware.drives import part_of
from penstock.hardware.machine import DeviceKind, Drive, Machine, load_machine, parse_machine
from penstock.hardware.present import had_less, is_gone, outdated

_ROOM = 64 << 10
"""Bytes that a profile takes at most, by and large."""
_HOW = "penstock doctor --path DIR measures this machine"


def profile_folder() -> Path:
    """The folder of this host's profiles. The XDG standard says that a relative ``$XDG_CACHE_HOME`` does not count.

    Raises:
        ConfigError: there is none, as nobody says where the user's home is.
    """
    asked = Path(os.environ.get("XDG_CACHE_HOME", ""))
    cache = asked if asked.is_absolute() else Path(os.path.expanduser("~")) / ".cache"
    if not cache.is_absolute():  # a user without a name, as in a container
        raise ConfigError(
            "machine profiles have no folder, as this user has no home: set HOME, or XDG_CACHE_HOME to a folder that "
            "you may write"
        )
    return cache / "penstock" / "machines" / re.sub(r"[^\w.-]", "-", socket.gethostname())


def save_profile(machine: Machine) -> Path:
    """Write a measured profile to where ``find_profile`` looks; an older one of the same directories, kind of device
    and host is replaced. One of the same directories and kind of device that cannot be read stays, as it may be of a
    newer version, and no longer counts.

    Raises:
        ConfigError: the folder cannot be written.
    """
    stem = _stem([drive.path for drive in machine.drives], machine.device.kind)
    with _partial() as (fd, name):
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(machine.to_json())
        target = profile_folder() / f"{stem}-{_digest(_what_there_was(machine))}.json"
        Path(name).replace(target)
    return target


def check_can_be_saved() -> None:
    """Find out before a machine is measured, which takes a while, whether its profile can be kept.

    Raises:
        ConfigError: the folder cannot be written, or is full.
    """
    folder = profile_folder()
    missing = [place for place in (folder, *folder.parents) if not os.path.exists(place)]
    try:
        with _partial() as (fd, _), os.fdopen(fd, "wb") as file:
            file.write(bytes(_ROOM))
    finally:
        for place in missing:
            with suppress(OSError):
                place.rmdir()


@contextmanager
def _partial() -> Iterator[tuple[int, str]]:
    """A new file in the folder of profiles: its descriptor and its path. What is left of it at the end is removed.

    Raises:
        ConfigError: the folder cannot be written.
    """
    folder = profile_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(dir=folder, prefix=".", suffix=".tmp")
        try:
            yield fd, name
        finally:
            with suppress(OSError):
                os.unlink(name)
    except OSError as error:
        raise ConfigError(
            f"the profile cannot be stored in {folder}: {error.strerror}. Set XDG_CACHE_HOME to a folder you may "
            "write, with room in it"
        ) from error


def _stem(paths: Sequence[str], kind: DeviceKind) -> str:
    """The beginning of a file's name: readable, and different for different sets of directories and kinds of device."""
    words = "-".join(re.sub(r"[^A-Za-z0-9]+", "-", path).strip("-") for path in paths) or "no-disk"
    return f"{words[:80]}-{kind}-{_digest(sorted(paths))}"


def _what_there_was(machine: Machine) -> list[str]:
    """All by which ``outdated`` and ``is_gone`` tell that a profile is of another machine. Memory in whole GiB, as a
    kernel that reserves a little more makes no other one."""
    mounts = sorted(f"{drive.path} on {drive.mount}" for drive in machine.drives)
    return [str(machine.host.cores), str(round(machine.host.memory / 2**30)), machine.device.name, *mounts]


def _digest(words: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:8]


def find_profile(
    paths: Sequence[Path] = (), *, kind: DeviceKind | None = None, device: str | None = None
) -> Machine | None:
    """The newest profile that was measured here, with a drive for each of ``paths``, in that order; None if there is
    none. One of other cores, another device or a drive that is gone is none, and any that was measured with as much
    memory as there is counts before one that was measured with less.

    A profile that has all directories is taken before several that have some each. Without ``paths``: the newest
    profile with its own drives. Directories need not exist yet, and share a drive as in ``by_directory``. ``kind``,
    ``device``: of the device that computes, and its name; None: any. What is damaged or from another version is left
    out with a warning, unless it is of just these directories.

    Raises:
        ConfigError: the stored profile of these directories is damaged or from another version: names it.
    """
    machines = _of_kind(paths, kind, device)
    if not paths:
        found = _with_its_drives(machines)
        return None if found is None else by_directory(found)
    if not machines:
        return None
    for machine in machines:
        drives = [drive for path in paths if (drive := _drive_for(path, machine.drives)) is not None]
        if len(drives) == len(paths):
            return by_directory(replace(machine, drives=tuple(drives)))
    found, missing = _known(machines, paths)
    return None if missing else by_directory(found)


def _with_its_drives(machines: Sequence[Machine]) -> Machine | None:
    return next((machine for machine in machines if not any(map(is_gone, machine.drives))), None)


def with_known_links(machine: Machine) -> Machine:
    """A machine that was just measured, with what is stored of its links that it does not tell: those of ranks
    (``network``, each number ``between``) and of hosts (``nic``), as the newest profile has them that does."""
    before: list[Machine] = []
    with suppress(ConfigError):  # of a user without a home
        before = [
            each
            for each in _stored(())
            if each.device.kind == machine.device.kind and outdated(each, device=machine.device.name) is None
        ]
    between = {one.ranks: one for each in (*reversed(before), machine) for one in each.between}
    first = [machine, *before]
    return replace(
        machine,
        network=next((each.network for each in first if each.network is not None), None),
        nic=next((each.nic for each in first if each.nic is not None), None),
        between=tuple(between[ranks] for ranks in sorted(between)),
    )


def by_directory(machine: Machine) -> Machine:
    """The machine with an equal part of a drive for each of its directories that are on one file system. They are one
    drive, whatever was measured in each: as fast as it is in the first."""
    paths = [Path(drive.path) for drive in machine.drives]
    systems, users = list(map(file_system, paths)), on_one_drive(paths)
    first = dict(zip(reversed(systems), reversed(machine.drives), strict=True))
    shared = (
        replace(part_of(first[system], n), path=drive.path, directories=n) if n > 1 else drive
        for system, n, drive in zip(systems, users, machine.drives, strict=True)
    )
    return replace(machine, drives=tuple(shared))


def find_parts(
    paths: Sequence[Path], *, kind: DeviceKind, device: str | None = None
) -> tuple[Machine | None, tuple[Path, ...]]:
    """The parts that are stored where there is no profile of this machine for all of ``paths``: the newest profile,
    with the directories' drives that any profile has, each as if it had the drive to itself, and the directories whose
    drives none has. Without ``paths``: the newest one whose drives are there, with these. Without any profile: (None,
    ``paths``).

    Raises:
        ConfigError: as ``find_profile``.
    """
    machines = _of_kind(paths, kind, device)
    if not paths and (whole := _with_its_drives(machines)) is not None:
        return whole, ()
    return _known(machines, paths) if machines else (None, tuple(paths))


def _known(machines: Sequence[Machine], paths: Sequence[Path]) -> tuple[Machine, tuple[Path, ...]]:
    every = [drive for machine in machines for drive in machine.drives]
    found = [(path, _drive_for(path, every)) for path in paths]
    drives = tuple(drive for _, drive in found if drive is not None)
    return replace(machines[0], drives=drives), tuple(path for path, drive in found if drive is None)


def _of_kind(paths: Sequence[Path], kind: DeviceKind | None, device: str | None) -> list[Machine]:
    """Every stored profile of a kind of device, or the one of a name, that is of this machine as it is now, newest
    first, and before those that were measured with less memory."""
    found = (machine for machine in _all_of_kind(paths, kind) if outdated(machine, device=device) is None)
    return sorted(found, key=had_less)


def _all_of_kind(paths: Sequence[Path], kind: DeviceKind | None) -> Iterator[Machine]:
    kinds: tuple[DeviceKind, ...] = get_args(DeviceKind) if kind is None else (kind,)
    asked = tuple(_stem([str(path.resolve()) for path in paths], one) for one in kinds)
    return (machine for machine in _stored(asked) if machine.device.kind in kinds)


def why_none(paths: Sequence[Path] = (), *, kind: DeviceKind | None = None, device: str | None = None) -> str | None:
    """The reason that a stored profile is not used, of the newest that is not of this machine as it is now or whose
    drive for one of these directories is gone; None: there is no such profile."""
    for machine in _all_of_kind(paths, kind):
        old = outdated(machine, device=device)
        drives = {Path(drive.path): drive for drive in machine.drives}
        asked = list(drives) if not paths else [path.resolve() for path in paths]
        gone = [drive.path for path in asked if (drive := drives.get(path)) is not None and is_gone(drive)]
        if old is None and gone:
            old = f"what was mounted for {gone[0]} when it was measured is gone"
        if old is not None:
            return f"the profile {machine.file} is not of this machine as it is now: {old}"
    return None


def _stored(needed: tuple[str, ...]) -> Iterator[Machine]:
    """Every stored profile that can be read, newest first. ``needed``: what the names of files begin with of which the
    newest must be readable. What cannot be read is passed over where there is a newer one of the same directories."""
    files = sorted(profile_folder().glob("*.json"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    superseded = set[str]()
    for file in files:
        directories = file.name.rpartition("-")[0]
        try:
            machine = load_machine(file)
        except ConfigError as error:
            if directories in superseded:
                continue
            if file.name.startswith(needed):
                raise
            warnings.warn(f"a stored machine profile is left out: {error}", stacklevel=3)
        else:
            superseded.add(directories)
            yield machine


def _drive_for(path: Path, drives: Sequence[Drive]) -> Drive | None:
    """The drive that was measured in this directory, or else on its file system; its path is then ``path``."""
    real = path.resolve()
    there = [drive for drive in drives if not is_gone(drive)]
    same = next((drive for drive in there if Path(drive.path) == real), None)
    if same is None:
        here = file_system(real)
        same = next((drive for drive in there if file_system(Path(drive.path)) == here), None)
    return None if same is None else replace(same, path=str(real))


def on_directories(machine: Machine, paths: Sequence[Path]) -> Machine:
    """A machine that was named, with as many of its drives as a budget has directories, in their order.

    A directory is on the drive that was measured there, else on one of its file system, else on the next that is left:
    the machine may be another one. Without ``paths`` the machine keeps its drives.

    Raises:
        ConfigError: it has fewer drives.
    """
    if not paths:
        return machine
    if len(paths) > len(machine.drives):
        there = f"{len(machine.drives) or 'no'} drive{'s' * (len(machine.drives) != 1)}"
        wanted = "a directory is" if len(paths) == 1 else f"{len(paths)} directories are"
        raise ConfigError(
            f"the profile of {machine.name} has {there}, but {wanted} given as budget.disk: give one directory for "
            "each drive, or plan for a machine with more drives"
        )
    left, found = list(machine.drives), dict[int, Drive]()
    for fits in (_is_there, _is_beside, lambda path, drive: True):
        for i, path in enumerate(paths):
            drive = next((drive for drive in left if i not in found and fits(path.resolve(), drive)), None)
            if drive is not None:
                left.remove(drive)
                found[i] = replace(drive, path=str(path.resolve()))
    return replace(machine, drives=tuple(found[i] for i in range(len(paths))))


def _is_there(path: Path, drive: Drive) -> bool:
    return Path(drive.path) == path


def _is_beside(path: Path, drive: Drive) -> bool:
    return Path(drive.path).is_dir() and file_system(Path(drive.path)) == file_system(path)


def check_device(machine: Machine, device: str) -> None:
    """Refuse to plan for a machine that computes on another kind of device than ``device`` (``"cpu"``, ``"cuda:0"``).

    Raises:
        ConfigError: it does.
    """
    if device.partition(":")[0] != machine.device.kind:
        raise ConfigError(
            f"device={device!r}, but the profile of {machine.name} is of a machine that computes on "
            f"{machine.device.kind}: choose another device or another machine"
        )


def file_system(path: Path) -> int | None:
    """The number of the file system that a directory is on, or will be on once it is made."""
    for folder in (path, *path.parents):
        with suppress(OSError):
            return folder.stat().st_dev
    return None


def on_one_drive(paths: Sequence[Path]) -> list[int]:
    """For each of some directories, the number of them that are on its file system."""
    systems = list(map(file_system, paths))
    return list(map(systems.count, systems))


def shipped_names() -> tuple[str, ...]:
    """The machines whose profiles ship with the package."""
    folder = resources.files("penstock.hardware") / "machines"
    return tuple(sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json")))


def shipped_machine(name: str) -> Machine:
    """A shipped profile by its name, such as ``a100-40g``. What its figures are from: docs/machines.md.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in shipped_names():
        near = difflib.get_close_matches(name, shipped_names(), n=1)
        meant = f": did you mean {near[0]}?" if near else "."
        raise ConfigError(f"there is no machine {name!r}{meant} Known: {', '.join(shipped_names())}; {_HOW}")
    text = (resources.files("penstock.hardware") / "machines" / f"{name}.json").read_text(encoding="utf-8")
    return parse_machine(text, f"machine {name}")


def machine_named(word: str) -> Machine:
    """The machine that ``--machine`` names: a profile's file, if there is one or the word looks like one, else a
    shipped name.

    Raises:
        ConfigError: neither, or the file is no profile.
    """
    if word.endswith(".json") or "/" in word or Path(word).is_file():
        return load_machine(Path(word))
    return shipped_machine(word)
