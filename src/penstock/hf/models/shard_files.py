"""Safetensors files, written piece by piece: laid out first, then filled in any order, never whole in memory.

Byte for byte what the package safetensors writes: tensors by size of their elements, then by name.
"""

import json
import os
import struct
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock import files
from penstock.config import format_size
from penstock.errors import StoreError
from penstock.hf.models.shards import DTYPES
from penstock.store import packed

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"),
)
"""The order of dtypes within a file."""
_ADVICE = dict.fromkeys(packed.FULL, "free some space, or give another folder")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout of one file. ``offsets``: the first byte of each tensor in it."""

    header: bytes
    offsets: Mapping[str, int]
    nbytes: int


def lay_out(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """The layout of a file of some tensors, here on the meta device."""
    dtypes = {name: _NAMES[t.dtype] for name, t in tensors.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name in sorted(tensors, key=lambda name: (_ORDER.index(dtypes[name]), name)):
        tensor, offsets[name] = tensors[name], end
        end += tensor.numel() * tensor.itemsize
        header[name] = {"dtype": dtypes[name], "shape": list(tensor.shape), "data_offsets": [offsets[name], end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return Layout(
        header=struct.pack("<Q", len(text)) + text,
        offsets={name: start + offset for name, offset in offsets.items()},
        nbytes=start + end,
    )


class ShardFiles:
    """The files of a folder, open to be filled until ``close``.

    All space is reserved first, so that a disk that is too small is found before the first value is read.
    """

    def __init__(self, folder: Path, layouts: Mapping[str, Layout]) -> None:
        """``layouts``: by file name.

        Raises:
            StoreError: there is no room, or the files cannot be made; the caller removes the folder.
        """
        self._where = {name: (file, offset) for file, one in layouts.items() for name, offset in one.offsets.items()}
        self._folder = folder
        need = sum(layout.nbytes for layout in layouts.values())
        if need > (free := packed.free_bytes(folder)):
            raise StoreError(
                f"{folder.parent}: the export needs {format_size(need)}, and {format_size(free)} are free: free some "
                "space, or give another folder"
            )
        self._fds: dict[str, int] = {}
        with ExitStack() as undo:
            undo.callback(self.close)
            for file, layout in layouts.items():
                with writing(folder / file):
                    self._fds[file] = files.descriptor(
                        folder / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, private=False
                    )
                    os.posix_fallocate(self._fds[file], 0, layout.nbytes)
                self._write(file, 0, layout.header)
            undo.pop_all()

    def write(self, name: str, start: int, piece: torch.Tensor) -> None:
        """Write ``piece``, 1-D, as the elements of a tensor from ``start`` on.

        Raises:
            StoreError: the disk is full or fails.
        """
        file, offset = self._where[name]
        self._write(file, offset + start * piece.itemsize, piece.contiguous().view(torch.uint8).numpy().data)

    def _write(self, file: str, offset: int, data: "bytes | memoryview") -> None:
        view, done = memoryview(data), 0
        with writing(self._folder / file):
            while done < len(view):
                done += os.pwrite(self._fds[file], view[done:], offset + done)

    def finish(self) -> None:
        """Return when everything is on the drive.

        Raises:
            StoreError: it could not be put there.
        """
        for file, fd in self._fds.items():
            with writing(self._folder / file):
                os.fsync(fd)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])


def writing(path: Path) -> AbstractContextManager[None]:
    """Inside, an error of the system is one of a folder, or a file, of a model that cannot be written."""
    return packed.refused(f"{path}: cannot be written", "check the drive", _ADVICE)
