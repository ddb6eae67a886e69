"""Which bytes live where in a store's logical address space."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from penstock.errors import StoreError

ALIGN = 4096  # bytes; direct I/O needs address, offset and length in multiples of the drive's block size
FORMAT = 1


def round_up(nbytes: int) -> int:
    """``nbytes`` rounded up to whole ``ALIGN`` blocks."""
    return -(-nbytes // ALIGN) * ALIGN


@dataclass(frozen=True, kw_only=True)
class Extent:
    """A named run of bytes with one or more slots, each padded to ``ALIGN`` and starting on it."""

    name: str
    offset: int
    nbytes: int
    slots: int = 1

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next: ``nbytes`` padded to ``ALIGN``. All of them may be read and written."""
        return round_up(self.nbytes)

    @property
    def end(self) -> int:
        return self.offset + self.slots * self.stride

    def address(self, offset: int, nbytes: int, slot: int) -> int:
        """Logical address of ``nbytes`` at ``offset`` within ``slot``; the range must lie within the slot."""
        assert 0 <= slot < self.slots, f"{self.name}: slot {slot} of {self.slots}"
        assert 0 <= offset <= offset + nbytes <= self.stride, f"{self.name}: [{offset}, +{nbytes}) of {self.stride}"
        assert offset % ALIGN == nbytes % ALIGN == 0, f"{self.name}: [{offset}, +{nbytes}) is not aligned"
        return self.offset + slot * self.stride + offset


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All extents, in order of their offset, without overlap and without holes other than padding."""

    extents: tuple[Extent, ...]

    @staticmethod
    def build(entries: Iterable[tuple[str, int, int]]) -> "Layout":
        """Place ``(name, bytes, slots)`` entries one after another, in the order given."""
        extents: list[Extent] = []
        offset = 0
        for name, nbytes, slots in entries:
            assert min(nbytes, slots) > 0, f"{name}: {nbytes} bytes in {slots} slots"
            extents.append(Extent(name=name, offset=offset, nbytes=nbytes, slots=slots))
            offset = extents[-1].end
        assert len({e.name for e in extents}) == len(extents), "extent names must differ"
        return Layout(extents=tuple(extents))

    @property
    def nbytes(self) -> int:
        """Size of the logical address space, padding included."""
        return self.extents[-1].end if self.extents else 0

    @cached_property
    def _by_name(self) -> dict[str, Extent]:
        return {e.name: e for e in self.extents}

    def __getitem__(self, name: str) -> Extent:
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def to_json(self) -> dict[str, object]:
        return {"format": FORMAT, "extents": [[e.name, e.offset, e.nbytes, e.slots] for e in self.extents]}

    @staticmethod
    def from_json(data: object) -> "Layout":
        """Inverse of ``to_json``.

        Raises:
            StoreError: unknown format, or not a layout that ``build`` would make.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else None
            raise StoreError(f"layout has format {found!r}, this version of penstock reads format {FORMAT}")
        try:
            rows = [
                (str(name), int(offset), int(nbytes), int(slots)) for name, offset, nbytes, slots in data["extents"]
            ]
        except (KeyError, TypeError, ValueError) as e:
            raise StoreError(f"layout is damaged: {e}") from e
        if any(min(nbytes, slots) <= 0 for _, _, nbytes, slots in rows) or len({row[0] for row in rows}) != len(rows):
            raise StoreError("layout is damaged: an extent is empty or appears twice")
        layout = Layout.build((name, nbytes, slots) for name, _, nbytes, slots in rows)
        if [e.offset for e in layout.extents] != [offset for _, offset, _, _ in rows]:
            raise StoreError("layout is damaged: the offsets do not follow from the sizes")
        return layout
