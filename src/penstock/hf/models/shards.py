"""Safetensors files, read piece by piece into memory that is already there.

The format is 8 bytes of length, a JSON header, and the tensors one after another. The package safetensors maps a file
or reads a tensor whole; either counts as resident memory, and an embedding is the largest array of a model. So the
bytes are read here, and a header is believed only where it agrees with its file.
"""

import math
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.documents.text import MalformedError, parse_json
from penstock.errors import ConfigError, ModelError, StoreError
from penstock.hf.models.folder import some
from penstock.store.packed import refused

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
PIECE = 8 << 20  # bytes of a file that are in memory at once
_LONGEST_HEADER = 100_000_000  # as the package safetensors has it
_MOST_DIMENSIONS = 64 + 2  # as torch has it, and two offsets
_MOST = 1 << 62  # more is no size of anything
_LFS = b"version https://git-lfs"


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor of a file. ``offset``: of its first byte in the file; ``stamp``: size and time of the file when its
    header was read.
    """

    name: str
    file: Path
    dtype: torch.dtype
    shape: torch.Size
    offset: int
    stamp: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def read_headers(files: Sequence[Path]) -> dict[str, Stored]:
    """All tensors of some files, by name.

    Raises:
        ConfigError: a file cannot be read, is damaged or cut off, or a tensor is in two of them.
    """
    found: dict[str, Stored] = {}
    for file in files:
        for tensor in _read_header(file):
            if tensor.name in found:
                raise ConfigError(f"{file}: tensor {tensor.name!r} is in {found[tensor.name].file.name} too")
            found[tensor.name] = tensor
    return found


def check_index(found: dict[str, Stored], index: dict[str, str], folder: Path) -> None:
    """Raises:
    ConfigError: a tensor is not where the index says.
    """
    lost = sorted(name for name in index if name not in found)
    if lost:
        files = sorted({index[name] for name in lost})
        raise ConfigError(f"{folder / some(files)}: the index says that {some(lost)} are there, but they are not")
    moved = next((name for name in sorted(index) if found[name].file.name != index[name]), None)
    if moved is not None:
        raise ConfigError(
            f"{found[moved].file}: it has {moved}, and the index says that this is in {index[moved]}: the folder is of "
            "two models, or of two versions of one. Get it again, whole"
        )


def _read_header(file: Path) -> Iterator[Stored]:
    try:
        with file.open("rb") as source:
            stat = os.fstat(source.fileno())
            start = source.read(8)
            if start == _LFS[:8]:
                raise _damaged(file, "it is a pointer of Git LFS, not the file itself: run git lfs pull")
            if len(start) < 8:
                raise _damaged(file, f"it has only {len(start)} bytes")
            (length,) = struct.unpack("<Q", start)
            if length > min(_LONGEST_HEADER, stat.st_size - 8):
                raise _damaged(file, f"its header would have {length} bytes, and the file has {stat.st_size}")
            text = source.read(length)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    try:
        header = parse_json(text)
    except MalformedError as error:
        raise _damaged(file, f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(file, "its header is no JSON object")
    data, end = 8 + length, 0
    stamp = (stat.st_size, stat.st_mtime_ns)
    entries = sorted((e for e in header.items() if e[0] != "__metadata__"), key=lambda e: _place(e[1]))
    for name, entry in entries:
        dtype, shape, first, end_of_it = _entry(file, name, entry)
        if first != end:
            raise _damaged(file, f"tensor {name!r} does not begin where the one before it ends")
        end = end_of_it
        yield Stored(name=name, file=file, dtype=dtype, shape=shape, offset=data + first, stamp=stamp)
    if stat.st_size != data + end:
        what = "cut off" if stat.st_size < data + end else "longer than that"
        raise _damaged(file, f"its header tells of {data + end} bytes, and it is {what}: it has {stat.st_size}")


def _place(entry: Any) -> list[int]:
    """The offsets of a tensor, by which they are in order: one without elements begins where the next one does."""
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    return offsets if isinstance(offsets, list) and all(isinstance(offset, int) for offset in offsets) else []


def _entry(file: Path, name: str, entry: Any) -> tuple[torch.dtype, torch.Size, int, int]:
    try:
        kind, sizes, (first, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*sizes, first, end]
    except (TypeError, KeyError, ValueError) as error:
        raise _damaged(file, f"its header does not describe tensor {name!r}") from error
    if (
        not isinstance(kind, str)
        or len(numbers) > _MOST_DIMENSIONS
        or not all(type(n) is int and 0 <= n < _MOST for n in numbers)
    ):
        raise _damaged(file, f"its header does not describe tensor {name!r}")
    if kind not in DTYPES:
        raise ConfigError(f"{file}: tensor {name!r} is {kind}, which cannot be trained: dequantise the model first")
    if end - first != math.prod(sizes) * DTYPES[kind].itemsize:
        raise _damaged(file, f"tensor {name!r} of {kind}{sizes} does not fit its place of {end - first} bytes")
    return DTYPES[kind], torch.Size(sizes), first, end


def _damaged(file: Path, why: str) -> ConfigError:
    return ConfigError(f"{file}: this is no whole safetensors file: {why}. Get it again")


def equal(one: Stored, other: Stored) -> bool:
    """True if two tensors have the same shape and values, whatever their dtypes. Needs a few ``PIECE`` of memory.

    Raises:
        StoreError: a file cannot be read, or is another than when its header was read.
    """
    if one.shape != other.shape:
        return False
    for (_, a), (_, b) in zip(_pieces(one, PIECE // 8), _pieces(other, PIECE // 8), strict=True):
        same = a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))  # NaN is said elsewhere
        if not same and not torch.equal(a.double(), b.double()):
            return False
    return True


def read_into(tensor: Stored, out: torch.Tensor) -> None:
    """Fill ``out``, contiguous, of the tensor's shape and any dtype, with ``PIECE`` bytes of memory besides.

    Raises:
        ModelError: a value is infinite or NaN, or is so in ``out``'s dtype.
        StoreError: the file cannot be read, or is another than when its header was read.
    """
    assert out.shape == tensor.shape
    assert out.is_contiguous()
    flat = out.view(-1)
    for start, piece in _pieces(tensor, PIECE // tensor.dtype.itemsize):
        part = flat[start : start + piece.numel()]
        part.copy_(piece)
        if out.is_floating_point() and not bool(part.isfinite().all()):
            bad = int((~part.isfinite()).nonzero()[0])
            raise ModelError(_not_finite(tensor, start + bad, piece[bad].item()))


def _pieces(tensor: Stored, most: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The elements of a tensor as they are in its file, ``most`` at a time, each with the place of its first one. A
    piece is there until the next one comes."""
    numel, size = tensor.shape.numel(), tensor.dtype.itemsize
    room = torch.empty(min(most, numel) * size, dtype=torch.uint8)
    with _opened(tensor) as fd:
        for start in range(0, numel, most):
            piece = room[: min(most, numel - start) * size]
            _read(fd, tensor, tensor.offset + start * size, piece.numpy().data)
            yield start, piece.view(tensor.dtype)


def _not_finite(tensor: Stored, at: int, value: float) -> str:
    where = list(map(int, torch.unravel_index(torch.tensor(at), tensor.shape))) if tensor.shape else []
    if math.isfinite(value):
        return f"{tensor.file}: {tensor.name} has {value:g} at {where}, which is too large for fp32"
    return f"{tensor.file}: {tensor.name} has {value} at {where}: such weights cannot be trained: get the file again"


def read_whole(tensor: Stored) -> torch.Tensor:
    """A new tensor of the file's dtype.

    Raises: as ``read_into``.
    """
    out = torch.empty(tensor.shape, dtype=tensor.dtype)
    read_into(tensor, out)
    return out


@contextmanager
def _opened(tensor: Stored) -> Iterator[int]:
    try:
        fd = os.open(tensor.file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(f"{tensor.file}: cannot be opened any more: {error.strerror}") from error
    try:
        stat = os.fstat(fd)
        if (stat.st_size, stat.st_mtime_ns) != tensor.stamp:
            raise StoreError(f"{tensor.file}: it was changed while it was being read: start again when it is whole")
        yield fd
    finally:
        os.close(fd)


def _read(fd: int, tensor: Stored, offset: int, view: memoryview) -> None:
    done = 0
    with refused(f"{tensor.file}: read of {tensor.name} failed", "check the drive", {}):
        while done < len(view):
            moved = os.preadv(fd, [view[done:]], offset + done)
            if moved == 0:
                raise StoreError(f"{tensor.file}: it became shorter while it was being read")
            done += moved
