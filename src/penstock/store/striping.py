"""Cuts a logical address space over one file per directory, as in RAID 0."""

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.store.layout import ALIGN, round_up


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One request: ``nbytes`` at ``offset`` of file ``file``, from or to byte ``start`` of the caller's buffer."""

    file: int
    offset: int
    start: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Striping:
    """Stripe ``s`` (of ``stripe`` bytes) of the address space is stripe ``s // files`` of file ``s % files``."""

    files: int
    stripe: int

    def __post_init__(self) -> None:
        assert min(self.files, self.stripe) > 0, self
        assert self.stripe % ALIGN == 0, self

    def file_sizes(self, nbytes: int) -> tuple[int, ...]:
        """Bytes of each file that hold an address space of ``nbytes``; at least one block, so no file is empty."""
        full, tail = divmod(nbytes, self.stripe)
        sizes = [(full // self.files + (i < full % self.files)) * self.stripe for i in range(self.files)]
        sizes[full % self.files] += round_up(tail)
        return tuple(max(size, ALIGN) for size in sizes)

    def pieces(self, address: int, nbytes: int, request: int) -> Iterator[Piece]:
        """Cut ``[address, address + nbytes)`` at stripe boundaries and into requests of at most ``request`` bytes."""
        start = 0
        while start < nbytes:
            if self.files == 1:  # one file: the address space is the file, and stripes mean nothing
                file, offset, room = 0, address + start, nbytes
            else:
                number, within = divmod(address + start, self.stripe)
                file, offset = number % self.files, number // self.files * self.stripe + within
                room = self.stripe - within
            length = min(room, request, nbytes - start)
            yield Piece(file=file, offset=offset, start=start, nbytes=length)
            start += length
