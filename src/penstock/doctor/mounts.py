"""The file system, the disk and the NUMA node that a directory is on.

``root`` is ``/`` but for tests.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.state.numa import node_of
from penstock.store.directory import IN_MEMORY, mounted

_ROOT = Path("/")
_NETWORK = re.compile(
    r"nfs\d*|cifs|smb\d*|9p|afs|ceph|lustre|beegfs\w*|gpfs|glusterfs|orangefs|ocfs2|gfs2"
    r"|fuse\.(?:sshfs|s3fs|gcsfuse|glusterfs|ceph\S*|rclone|juicefs|goofys|mount-s3|blobfuse2?)"
)

_VIRTUAL = re.compile(r"(?:vd|xvd)[a-z]+")  # of virtio and Xen

Kind = Literal["ssd", "hdd", "tmpfs", "network", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Mount:
    """The file system and the disk that hold a directory's bytes."""

    file_system: str
    """the file system's type, as the kernel writes it"""
    device: int
    """number of the file system: equal for directories on the same one"""
    disk: str
    """the kernel's name of the whole disk (``nvme0n1``); empty if none is to be seen (memory, network, overlay)"""
    spins: bool
    """true if the kernel takes the disk for a spinning one"""
    size: int
    free: int
    """bytes that may be used"""
    node: int | None

    def kind(self, read: float) -> Kind:
        """The kind of drive, given the rate at which it reads: no spinning disk reads 400 MB/s and more.

        A slow virtual disk is ``unknown``: the kernel takes it for a spinning one whatever it is on.
        """
        if self.file_system in IN_MEMORY:
            return "tmpfs"
        if _NETWORK.fullmatch(self.file_system):
            return "network"
        if not self.disk:
            return "unknown"
        if not self.spins or read >= 400e6:
            return "ssd"
        return "unknown" if _VIRTUAL.fullmatch(self.disk) else "hdd"

    @property
    def far(self) -> bool:
        """True if the files are on another machine."""
        return _NETWORK.fullmatch(self.file_system) is not None


def look(path: Path, root: Path = _ROOT) -> Mount:
    """The file system and the disk of an existing directory."""
    device = path.stat().st_dev
    space = os.statvfs(path)
    kind, source = mounted(device, root)
    block = _block_device(device, source, root)
    whole = None if block is None else _whole(block)
    rotational = None if whole is None else whole / "queue" / "rotational"
    return Mount(
        file_system=kind,
        device=device,
        disk="" if whole is None else whole.name,
        spins=rotational is not None and rotational.is_file() and rotational.read_text().strip() == "1",
        size=space.f_blocks * space.f_frsize,
        free=space.f_bavail * space.f_frsize,
        node=None if whole is None else node_of(whole),
    )


def _block_device(device: int, source: str, root: Path) -> Path | None:
    """The sysfs folder of the disk or partition below a file system; btrfs and others have numbers of their own."""
    numbers = [f"{os.major(device)}:{os.minor(device)}"]
    if source.startswith("/dev/"):
        try:
            special = (root / source.lstrip("/")).stat().st_rdev
            numbers.append(f"{os.major(special)}:{os.minor(special)}")
        except OSError:
            pass  # a name from outside a container
    for number in numbers:
        folder = root / "sys/dev/block" / number
        if folder.exists():
            return _drive_below(folder.resolve())
    return None


def _drive_below(block: Path) -> Path:
    """The drive or partition that a volume of LVM, LUKS or md is on, if it is on one drive; else the volume itself.

    sysfs links what a volume is made of from its folder ``slaves``; volumes are stacked on each other.
    """
    while True:
        below = {folder.resolve() for folder in (block / "slaves").glob("*")}
        if len({_whole(part) for part in below}) != 1:
            return block
        block = min(below)


def _whole(block: Path) -> Path:
    """The disk that a partition is on."""
    return block.parent if (block / "partition").exists() else block
