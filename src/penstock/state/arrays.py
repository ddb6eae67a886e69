"""The weights and the optimizer state of each group: arrays in device or host memory, or extents of the store.

Each array has one home. Where stages find a group's weights above that, they have a *copy* besides, which is made from
what is at home and made new by each step. A group's arrays move between tiers only here, between steps, chunk by
chunk, so that no tier ever holds more than it has to.

On disk an array has one slot or two (``state.slots``), and what is written of it is noted there. Whoever writes all of
an array does so between ``begin`` and ``flip``; a step that has been taken says so with ``flip_step``.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.config import Tier
from penstock.errors import StoreError
from penstock.schedule.moving import move_order
from penstock.schedule.place import FP32, Format, Placement
from penstock.schedule.program import GroupSpec
from penstock.state.layout import Part, Read, fetch, moments_of, parts_of, scales_of
from penstock.state.memory import BOUNCE, DeviceSlab, HostSlab, numpy_bytes
from penstock.state.numa import near
from penstock.state.slots import Slots
from penstock.store.store import Store

Late = Mapping[int, Sequence[range]]
"""Elements of groups that a step leaves to the next one: delayed chunks."""


class Changes(Protocol):
    """Somebody who is still reading arrays in memory."""

    def before_change(self, name: str, start: int, numel: int) -> None:
        """Returns when elements ``[start, start + numel)`` of an array may be changed."""


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """A group's weights above their home, in ``slab``."""

    tier: Tier
    slab: HostSlab | DeviceSlab
    array: torch.Tensor


class StateArrays:
    """All arrays of all groups, each in one home, and copies of weights.

    ``tier_of`` says where an array is at home, ``array`` gives it when that is in memory, and ``read`` / ``write`` work
    on a range of elements wherever it is. ``found_on`` and ``weights`` are about where stages find weights.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        form: Format,
        dtype: torch.dtype,
        device: torch.device,
        store: Store | None,
        slots: Slots,
        *,
        host_bytes: int,
    ) -> None:
        """``slots``: of the store's extents. ``host_bytes``: what may start in host memory where there is no store; the
        rest starts on the device.
        """
        self.groups = tuple(groups)
        self.form = form
        self.dtype = dtype
        self.device = device
        self.store = store
        self.slots = slots
        self.of_group = {group.index: parts_of(group, form, dtype) for group in groups}
        """a group's arrays, weights first"""
        self.parts = {part.name: part for own in self.of_group.values() for part in own}
        self._trained = [part.name for group in groups if group.trainable for part in self.of_group[group.index]]
        self._copies: dict[int, _Copy] = {}
        """group -> the copy of its weights that stages find above their home"""
        self.background: Changes | None = None
        """the writer that has to know before an array in memory is changed"""
        self._changed: set[str] = set()
        """arrays at home in memory that the step under way has changed"""
        self._renewed: set[int] = set()
        """groups of whose weights it has changed the copy"""
        self._late: set[int] = set()
        """groups of which it has stepped what the step before had left to it"""
        self._kept: set[str] = set()
        """arrays in memory whose frozen part is in their extent's current slot as well"""
        self._arrays: dict[str, torch.Tensor] = {}
        self.slabs: dict[str, HostSlab | DeviceSlab] = {}
        """the memory of arrays that are in memory"""
        self._bounce: HostSlab | None = None
        """memory of ``bounce`` that is kept"""
        try:
            if store is None:
                self._begin_in_memory(host_bytes)
            if device.type != "cpu":
                with near(device):
                    self._bounce = HostSlab(BOUNCE, beside=device)
        except BaseException:
            self.close()
            raise

    def _begin_in_memory(self, host_bytes: int) -> None:
        room = host_bytes
        for name, part in self.parts.items():
            fits = part.nbytes <= room
            room -= part.nbytes * fits
            self.slabs[name], self._arrays[name] = self._allocate(name, "host" if fits else "device")

    def tier_of(self, name: str) -> Tier:
        if name not in self._arrays:
            return "disk"
        return "host" if isinstance(self.slabs[name], HostSlab) else "device"

    def array(self, name: str) -> torch.Tensor:
        """An array whose home is in memory, flat, in its dtype, on the host or on the device."""
        return self._arrays[name]

    def found_on(self, g: int) -> Tier:
        """The tier on which stages find a group's weights."""
        return self._copies[g].tier if g in self._copies else self.tier_of(f"weights.{g}")

    def weights(self, g: int) -> torch.Tensor:
        """A group's weights where stages find them, which is in memory: flat, in their dtype."""
        return self._copies[g].array if g in self._copies else self._arrays[f"weights.{g}"]

    def read(self, name: str, start: int, out: torch.Tensor, *, before: bool = False) -> None:
        """Copy elements from ``start`` on into ``out``, a page-aligned host tensor of the array's dtype.

        ``before``: on disk, of what a step has left to the next one: as it was before that step.
        """
        if name in self._arrays:
            out.copy_(self._arrays[name][start : start + out.numel()])
        else:
            self.slots.read(name, start * out.itemsize, numpy_bytes(out), before=before)

    def write(self, name: str, start: int, data: torch.Tensor) -> None:
        """The opposite of ``read``. On disk with two slots it goes beside what ``read`` gives, until ``flip``."""
        if name in self._arrays:
            self._arrays[name][start : start + data.numel()].copy_(data)
            if start + data.numel() > self.parts[name].trainable:
                self._kept.discard(name)
        else:
            self.slots.write(name, start * data.itemsize, numpy_bytes(data))

    def parts_of_state(self, g: int) -> tuple[str, ...]:
        """The arrays of a group besides its weights."""
        return tuple(part.name for part in self.of_group[g][1:])

    def parts_of_momentum(self, g: int) -> tuple[str, ...]:
        """The arrays of a group of matrices that its steps do not take: its momentum, and the scales of that; of others
        none."""
        group = self.groups[g]
        return (*moments_of(group, self.form), *scales_of(group, self.form)) if group.whole else ()

    def parts_of_step(self, g: int) -> tuple[str, ...]:
        """The arrays of a group besides its weights that its steps take."""
        apart = self.parts_of_momentum(g)
        return tuple(name for name in self.parts_of_state(g) if name not in apart)

    def begin(self, name: str) -> None:
        """Prepare to write all of an array, whatever was written of it before."""
        if name in self.slots:
            self.slots.drop((name,))

    def flip(self, name: str) -> None:
        """Have an array that is on disk read from where it has been written since ``begin``: all of it, else it is a
        StoreError."""
        if name in self.slots:
            self.slots.flip((name,))

    def zero(self, name: str) -> None:
        """Make an array zeros."""
        if name in self._arrays:
            self._arrays[name].zero_()
        else:
            self.begin(name)
            self.slots.zero(name)
            self.flip(name)

    def begin_step(self) -> None:
        """A step is about to change the arrays: what it changes is noted from here on."""
        self.slots.drop(self._trained_on_disk())
        self._changed.clear()
        self._renewed.clear()
        self._late.clear()

    def note_step(self, g: int, *, late: bool) -> None:
        """Some of a group is about to be stepped, by the step under way or (``late``) for the one before. What follows
        on disk is noted where it is written.
        """
        if late:
            self._late.add(g)
        else:
            self._changed.update(part.name for part in self.of_group[g] if part.name in self._arrays)
            if g in self._copies:
                self._renewed.add(g)

    def complete_late(self) -> None:
        """Count the chunks that the step before had left as stepped: they are part of the state from here on.

        Raises:
            StoreError: some of it was not written.
        """
        self.slots.complete_owed()
        # The step under way has written nothing of these yet: it writes after what it completes is committed.
        self.slots.settle(name for name in self._trained_on_disk() if self.parts[name].group in self._late)
        self._late.clear()

    @property
    def droppable(self) -> bool:
        """True if all that was changed since ``begin_step`` can be taken back: on disk it lies beside what counts, and
        in memory it is copies of what is on disk.
        """
        return not (self._late or self._changed or self.slots.in_place(self._trained_on_disk()))

    def drop_step(self) -> int:
        """Take back what a step has changed, which is ``droppable``. Returns the bytes that are read for it.

        Raises:
            StoreError: copies of weights could not be read back; it can be tried again.
        """
        self.slots.drop(self._trained_on_disk())
        self.renew_copies(self._renewed)
        nbytes = sum(self._copies[g].array.nbytes for g in self._renewed)
        self._renewed.clear()
        return nbytes

    def complete_step(self, late: Late) -> None:
        """Bring what a step has not written of the arrays that it has written, such as their frozen parts, so that
        ``flip_step`` may follow. ``late``: what it leaves to the next one.

        Raises:
            StoreError: the drive failed. What is read is what was read before.
        """
        lacking = {
            name: later for name in self._written(late) if self.slots.lacks(name, later := self._late_bytes(name, late))
        }
        if not lacking:
            return
        with self.bounce() as bounce:
            for name, later in lacking.items():
                self.slots.complete(name, numpy_bytes(bounce), later)

    def flip_step(self, late: Late, reached: Collection[int]) -> None:
        """A step counts: arrays on disk that it has written, or leaves to the next one, are read from there, and the
        others from where they were. ``reached``: groups with a gradient in this step.

        Raises:
            StoreError: a group was reached, and nothing of it was written; or not all of an array was. Nothing counts.
        """
        written = self._written(late)
        for name in self._trained_on_disk():
            if self.parts[name].group in reached and name not in written:
                raise StoreError(f"{name}: the step has a gradient for it, and has not written it")
        self.slots.flip(written, {name: self._late_bytes(name, late) for name in written})

    def _trained_on_disk(self) -> list[str]:
        """Arrays on disk that a step may write."""
        return [name for name in self._trained if self.tier_of(name) == "disk"]

    def _written(self, late: Late) -> list[str]:
        """Arrays on disk that a step has written some of, or leaves to the next one."""
        return [
            name for name in self._trained_on_disk() if self.parts[name].group in late or self.slots.is_touched(name)
        ]

    def _late_bytes(self, name: str, late: Late) -> list[range]:
        part = self.parts[name]
        size, own = part.dtype.itemsize, [part.own(r.start, len(r)) for r in late.get(part.group, ())]
        return [range(r.start * size, r.stop * size) for r in own]

    def is_kept(self, part: Part) -> bool:
        """True if a commit of what is in memory finds all of an array on disk already: no step changes any of it."""
        return part.trainable == 0 and part.name in self._kept

    def keep(self, names: Iterable[str]) -> None:
        """Note that all of these arrays, which are in memory, has been written to the extents that are read from now
        on."""
        self._kept.update(names)

    def keep_frozen(self) -> None:
        """Write what no step changes, of what is in memory, where its extent has something else.

        Raises:
            StoreError: the drive failed. What is read is what was read before.
        """
        changed = [n for n in self._arrays if self.parts[n].trainable < self.parts[n].numel and n not in self._kept]
        if changed:
            self._write_extents(changed)

    def about_to_change(self, g: int, start: int, numel: int) -> None:
        """Elements of a group's arrays are about to be changed: what is written in the background comes first."""
        if self.background is not None:
            for part in self.of_group[g]:
                own = part.own(start, numel)
                self.background.before_change(part.name, own.start, own.stop - own.start)

    def state_on_disk(self) -> bool:
        """True if all that is trained is at home on disk."""
        return all(self.tier_of(name) == "disk" for name in self._trained)

    def any_state_on_disk(self) -> bool:
        """True if any array that a step changes lives on disk."""
        return bool(self._trained_on_disk())

    def renew_copies(self, groups: Iterable[int] | None = None) -> None:
        """Make copies of weights what is at home. ``groups``: whose; None: all that there are.

        Raises:
            StoreError: the drive failed; it can be tried again.
        """
        for g in sorted(self._copies if groups is None else groups):
            self._read_all(f"weights.{g}", self._copies[g].array)

    def _read_all(self, name: str, into: torch.Tensor) -> None:
        with self.bounce() as bounce:
            for start, piece in self.pieces(name, bounce):
                self.read(name, start, piece)
                into[start : start + piece.numel()].copy_(piece)

    def fetch(self, names: Sequence[str], offset: int, flat: torch.Tensor) -> None:
        """Fill ``flat``, 1-D, with what an array, or ``values_of`` a group, has for the group's elements from
        ``offset`` on, all trainable or all frozen; reads all that has a checksum with some of it."""
        fetch([self.parts[name] for name in names], self.read, offset, flat)

    def settle(self, place: Placement) -> None:
        """Move every array to the tier that a placement gives it, in an order that fills no tier more than it was, or
        will be, if there is one; then make the copies of weights that it asks for."""
        wanted: dict[str, Tier] = {}
        copied: dict[int, Tier] = {}
        for group in (group for group in self.groups if group.numel):
            first, *state = self.of_group[group.index]
            wanted[first.name] = place.home(group)
            if place.copied(group):
                copied[group.index] = place.weights[group.index]
            wanted |= {part.name: place.state[group.index] for part in state}
        for g in [g for g, copy in self._copies.items() if copied.get(g) != copy.tier]:
            self._copies.pop(g).slab.close()
        names = list(wanted)
        sizes = [self.parts[name].nbytes for name in names]
        for i in move_order(sizes, [self.tier_of(name) for name in names], list(wanted.values())):
            self._move(names[i], wanted[names[i]])
        for g in sorted(copied.keys() - self._copies.keys()):
            slab, array = self._filled(f"weights.{g}", copied[g])
            self._copies[g] = _Copy(tier=copied[g], slab=slab, array=array)

    def to_disk(self) -> None:
        """Write what is in memory to its extents, and keep it in memory. Needs a store."""
        self._write_extents([name for name in self._arrays if not self.is_kept(self.parts[name])])

    def _write_extents(self, names: Sequence[str]) -> None:
        with self.bounce() as bounce:
            for name in names:
                array = self._arrays[name]
                self.begin(name)
                for start, piece in self.pieces(name, bounce):
                    piece.copy_(array[start : start + piece.numel()])
                    self.slots.write(name, start * piece.itemsize, numpy_bytes(piece))
                self.flip(name)
        self.keep(names)

    @contextmanager
    def bounce(self) -> Iterator[torch.Tensor]:
        """8 MiB that arrays pass through on their way between tiers.

        Beside an accelerator they are page-locked, and kept from the start on: state that is to be saved does not find
        that no more pages can be locked.
        """
        kept, self._bounce = self._bounce, None
        slab = HostSlab(BOUNCE, beside=self.device) if kept is None else kept
        try:
            yield slab.bytes
        finally:
            if kept is None:
                slab.close()
            else:
                self._bounce = kept

    def pieces(self, name: str, bounce: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Cut an array into ranges that fit the bounce buffer, uint8: (first element, a view to fill or to read)."""
        part, step = self.parts[name], bounce.nbytes // FP32
        for span in part.spans:
            assert step % span.step == 0, f"{bounce.nbytes} bytes are less than what has one checksum"
            for start in range(span.start, span.stop, step):
                numel = min(step, span.stop - start)
                yield start, bounce[: numel * part.dtype.itemsize].view(part.dtype)

    def fill(self, read: Read, show: Callable[[int], None] = lambda nbytes: None) -> None:
        """Overwrite all arrays, wherever they are at home. ``show``: told the bytes of each piece that is written.

        Raises:
            StoreError: a drive failed. Some of the arrays are then as they were.
        """
        with self.bounce() as bounce:
            for name in self.parts:
                self.begin(name)
                for start, piece in self.pieces(name, bounce):
                    read(name, start, piece)
                    self.write(name, start, piece)
                    show(piece.nbytes)
                if self.tier_of(name) == "disk":
                    self.flip(name)

    def _move(self, name: str, tier: Tier) -> None:
        """Copy an array to another tier, and only then let go of where it was: an error on the way loses nothing."""
        if self.tier_of(name) == tier:
            return
        old = self.slabs.get(name)
        if tier == "disk":
            self._write_extents([name])
            del self._arrays[name], self.slabs[name]
        else:
            self.begin(name)
            self.slabs[name], self._arrays[name] = self._filled(name, tier)
            if old is None:
                self.keep((name,))
        if old is not None:
            old.close()

    def _filled(self, name: str, tier: Tier) -> tuple[HostSlab | DeviceSlab, torch.Tensor]:
        """Memory for an array, and its view as the array, with what the array has where it is at home."""
        slab, array = self._allocate(name, tier)
        try:
            self._read_all(name, array)
        except BaseException:
            slab.close()
            raise
        return slab, array

    def _allocate(self, name: str, tier: Tier) -> tuple[HostSlab | DeviceSlab, torch.Tensor]:
        """Memory for an array, and its view as the array."""
        part = self.parts[name]
        with near(self.device):
            slab = HostSlab(part.nbytes, beside=self.device) if tier == "host" else DeviceSlab(part.nbytes, self.device)
        array = slab.bytes[: part.nbytes].view(part.dtype)
        if tier == "device":
            array.zero_()
        return slab, array

    def close(self) -> None:
        self._arrays.clear()
        for slab in (*self.slabs.values(), *(copy.slab for copy in self._copies.values())):
            slab.close()
        self.slabs.clear()
        self._copies.clear()
        if self._bounce is not None:
            self._bounce.close()
            self._bounce = None
