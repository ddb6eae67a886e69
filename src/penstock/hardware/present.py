"""Tells profiles that were measured on this machine as it is now from others, by cores, memory, device and drives."""

from pathlib import Path

from penstock.config import format_size
from penstock.hardware import system
from penstock.hardware.machine import Device, Drive, Machine

_ROOT = Path("/")
_SLICE = " MIG "
"""Mark in torch's name for a slice of a GPU: the text before it is the GPU's own name."""
_LESS = 0.95
"""Share of its memory with which a machine is the one that it was: what is reserved differs a little."""


def outdated(machine: Machine, root: Path = _ROOT, *, device: str | None = None) -> str | None:
    """The reason that a stored profile is not of this machine as it is now; None: it is. ``device``: the name of the
    one to compute on; None: any that is there."""
    if machine.measured is None:
        return "it is from before profiles said when they were measured and where their drives were mounted"
    if machine.device.copy is None:
        return "it is from before profiles said how fast a copy in the device's memory is"
    now = system.look(root)
    if now.cores != machine.host.cores:
        return f"it was measured with {_cores(machine.host.cores)}, and this process may use {now.cores}"
    if now.memory < _LESS * machine.host.memory:
        return (
            f"it was measured with {format_size(machine.host.memory)} of memory, and this process may use "
            f"{format_size(now.memory)}"
        )
    if device is not None and machine.device.name != device:
        return f"it was measured on {machine.device.name}, and this run computes on {device}"
    there = _devices(machine.device, root)
    if there is not None and machine.device.name.partition(_SLICE)[0] not in there:
        return f"it was measured on {machine.device.name}, and this machine has {' and '.join(sorted(there)) or 'none'}"
    return None


def had_less(machine: Machine, root: Path = _ROOT) -> bool:
    """True if the process that measured a profile might use less memory than this one may."""
    return machine.host.memory < _LESS * system.look(root).memory


def is_gone(drive: Drive) -> bool:
    """True if what was measured in a drive's directory is no longer mounted there, as far as its profile tells."""
    return drive.mount is not None and mount_point(Path(drive.path)) != drive.mount


def mount_point(path: Path) -> str:
    """The mount point of the file system that a directory is on, or will be on once it is made."""
    real = path.resolve()
    return str(next(folder for folder in (real, *real.parents) if folder.is_mount()))


def _devices(device: Device, root: Path) -> set[str] | None:
    """The names of the devices of this kind that are there; None: that cannot be told without the device's library."""
    if device.kind == "cpu":
        return {system.cpu_name(root)}
    if not device.name.startswith("NVIDIA") or (root / "dev/dxg").exists():
        return None
    return system.nvidia_names(root) or None  # a container may not show what the driver says of them


def _cores(count: int) -> str:
    return f"{count} core{'s' * (count != 1)}"
