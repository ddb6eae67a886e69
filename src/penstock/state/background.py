"""Writes the state that lives in memory to its extents while training goes on, as the state of one step.

    begin          the arrays in memory are cut into pieces (``StateArrays.pieces``), first those that will change first
    a thread       copies piece after piece into a bounce buffer, and writes that to the slot that is not durable
    before_change  whoever is about to change a range writes its pieces that are still waiting, itself, before it does
    done           when every piece is written: the caller's function, which commits

So what reaches the disk is the state at ``begin``, bit for bit, and memory for one piece is all that it takes. A piece
goes from ``waiting`` over ``taken`` to ``safe``: safe, and free to be changed, is what is on the disk or in a bounce
buffer. The thread has a piece taken only while it copies it, so a change never waits for a write that the thread has
under way; nobody waits for a piece while another is taken by him, so no order of changes can deadlock.

What is on disk at home is not written here: ``flip_step`` and the next step's writes would mix another step into the
commit. Where trained state is both in memory and on disk, ``wait`` before the next step's first write to disk.
"""

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from penstock import accelerator
from penstock.state.arrays import StateArrays
from penstock.state.memory import BOUNCE, HostSlab, numpy_bytes
from penstock.state.numa import near


class Background:
    """Writes a run's arrays in memory, one step's state at a time. Takes 8 MiB of host memory, beside a GPU 16 MiB.

    One thread calls ``begin``, ``wait``, ``check`` and ``close``; any threads call ``before_change``, at once. From
    ``begin`` until ``wait`` has returned, arrays stay where they are (no ``StateArrays.settle``), and whoever changes
    one says so before.
    """

    def __init__(self, arrays: StateArrays) -> None:
        """``arrays``: with a store whose extents have two slots, so that the last commit stands meanwhile.

        Raises:
            BudgetError: the memory could not be page-locked.
        """
        assert arrays.store is not None
        assert arrays.slots.two
        self._arrays = arrays
        with near(arrays.device), ExitStack() as undo:
            self._bounce = HostSlab(BOUNCE, beside=arrays.device)
            undo.callback(self._bounce.close)
            self._device = DeviceCopies(arrays.device) if arrays.device.type != "cpu" else None
            undo.pop_all()
        self.guarded: Pieces | None = None
        """the pieces that a change must look at; None when nothing is pending"""
        self._last: Pieces | None = None
        self.thread: threading.Thread | None = None
        """the thread that writes, or has written, the newest snapshot; until it is waited for"""
        self._running = threading.Lock()
        """held by the thread that writes"""
        self._closed = False

    def begin(self, order: Sequence[int], done: Callable[[], None]) -> None:
        """Start to write what is in memory as it is now (of frozen groups what is not on disk yet); waits for the write
        before, if it is still under way.

        On a GPU, all that has changed an array so far is complete or queued on the current stream.

        Args:
            order: groups in the order in which the next step changes them. Groups that are left out come last.
            done: called by the writing thread when all arrays are written and flipped. It commits, with what was the
                step's progress at ``begin``.

        Raises:
            BaseException: what the write before has failed with; nothing is begun.
        """
        self.wait()
        if self._device is not None:
            self._device.mark()
        pieces = Pieces(self._cut(order))
        for name in pieces.names:
            self._arrays.begin(name)
        thread = threading.Thread(target=self._run, args=(pieces, done), name="penstock-background", daemon=True)
        self.guarded = self._last = pieces
        try:
            thread.start()
        except BaseException:  # an interrupt may have left a thread: it has ended from here on, or will find it stopped
            pieces.stop()
            with self._running:
                self.guarded = None
            raise
        self.thread = thread

    def before_change(self, name: str, start: int, numel: int) -> None:
        """Elements ``[start, start + numel)`` of an array are about to be changed: returns when they may be.

        On a GPU the change is queued after this returns, on any stream. A drive that fails is no error here: the write
        is given up, and ``wait`` says so.
        """
        pieces = self.guarded
        if pieces is None:
            return
        for piece in pieces.overlapping(name, start, numel):
            if piece.state != "safe":
                self._write_now(pieces, piece)

    def wait(self) -> None:
        """Return when nothing is under way any more.

        Raises:
            BaseException: what the write has failed with, once. The commit before it stands, and the arrays in memory
                are what they are without it: training can go on, and another write can be begun.
        """
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        self.check()

    def check(self) -> None:
        """Raise what a write has failed with, as ``wait`` does, without waiting."""
        error = self._last.collect_error() if self._last is not None else None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback would hold this frame, which holds it

    def close(self) -> None:
        """Give up what is not yet written (``wait`` first to have it), and give the memory back."""
        if self._closed:
            return
        self._closed = True
        if self._last is not None:
            self._last.stop()
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        self._bounce.close()
        if self._device is not None:
            self._device.close()

    def _cut(self, order: Sequence[int]) -> "list[_Piece]":
        """All pieces in memory that are not on disk as they are: group by group in their order, and in a group as
        chunks change, range by range."""
        arrays, cut = self._arrays, []
        for g in dict.fromkeys((*order, *arrays.of_group)):
            mine = [
                _Piece(name=part.name, start=start, numel=view.numel())
                for part in arrays.of_group[g]
                if arrays.tier_of(part.name) != "disk" and not arrays.is_kept(part)
                for start, view in arrays.pieces(part.name, self._bounce.bytes)
            ]
            cut += sorted(mine, key=lambda piece: piece.start)
        return cut

    def _run(self, pieces: "Pieces", done: Callable[[], None]) -> None:
        with self._running:
            self._write_all(pieces, done)

    def _write_all(self, pieces: "Pieces", done: Callable[[], None]) -> None:
        try:
            for piece in pieces.all:
                if pieces.take(piece, wait=False):
                    copied = piece.view_of(self._bounce, self._arrays)
                    self._copy(piece, copied)
                    pieces.make_safe(piece)
                    self._write(piece, copied)
                    pieces.count_written()
            if pieces.wait_written():
                for name in pieces.names:
                    self._arrays.flip(name)
                done()
                self._arrays.keep(pieces.names)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised where the write is waited for
            pieces.fail(error)
        finally:
            if self.guarded is pieces:  # not if it was given up, and another was begun since
                self.guarded = None

    def _copy(self, piece: "_Piece", target: torch.Tensor) -> None:
        source = piece.of(self._arrays)
        if source.device.type == "cpu":
            np.copyto(numpy_bytes(target), numpy_bytes(source))  # not by torch, whose threads the step needs
        else:
            assert self._device is not None
            self._device.copy_beside(target, source)

    def _write_now(self, pieces: "Pieces", piece: "_Piece") -> None:
        """Write a piece in the thread that is about to change it, or wait until another has made it safe."""
        try:
            if not pieces.take(piece, wait=True):
                return
            source = piece.of(self._arrays)
            if source.device.type == "cpu":
                self._write(piece, source)
                pieces.make_safe(piece)
            else:
                assert self._device is not None
                with self._device.lock:
                    copied = piece.view_of(self._device.bounce, self._arrays)
                    self._device.copy_here(copied, source)
                    pieces.make_safe(piece)
                    self._write(piece, copied)
            pieces.count_written()
        except BaseException as error:
            pieces.fail(error)
            if not isinstance(error, Exception):
                raise  # an interrupt is the step's business as well

    def _write(self, piece: "_Piece", data: torch.Tensor) -> None:
        self._arrays.slots.write(piece.name, piece.start * data.itemsize, numpy_bytes(data))


@dataclass(kw_only=True, slots=True)
class _Piece:
    """A range of an array, ``numel`` elements from ``start``. Its state is changed by ``Pieces`` only."""

    name: str
    start: int
    numel: int
    state: Literal["waiting", "taken", "safe"] = "waiting"

    def of(self, arrays: StateArrays) -> torch.Tensor:
        return arrays.array(self.name)[self.start : self.start + self.numel]

    def view_of(self, slab: HostSlab, arrays: StateArrays) -> torch.Tensor:
        """Room for the piece at the start of a slab."""
        dtype = arrays.parts[self.name].dtype
        return slab.bytes[: self.numel * dtype.itemsize].view(dtype)


class Pieces:
    """The pieces of one write, and how far it has got. Thread-safe.

    Every piece is taken once, by whoever writes it. After ``fail`` or ``stop`` none is taken any more, and nobody
    waits: what is on the disk of this write counts for nothing then.
    """

    def __init__(self, cut: Sequence[_Piece]) -> None:
        self.all = tuple(cut)
        by_name: dict[str, list[_Piece]] = {}
        for piece in cut:
            by_name.setdefault(piece.name, []).append(piece)
        self._by_name = by_name
        self._starts = {name: [piece.start for piece in mine] for name, mine in by_name.items()}
        self._unwritten = len(self.all)
        self._stopped = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    @property
    def names(self) -> tuple[str, ...]:
        """The arrays that are written."""
        return tuple(self._by_name)

    def overlapping(self, name: str, start: int, numel: int) -> Iterator[_Piece]:
        """The pieces of an array that have elements of a range, in order."""
        mine = self._by_name.get(name, [])
        first = bisect_right(self._starts[name], start) - 1 if mine else 0
        for piece in mine[max(first, 0) :]:
            if piece.start >= start + numel:
                return
            yield piece

    def take(self, piece: _Piece, *, wait: bool) -> bool:
        """True if the caller has to write the piece. If another has taken it, ``wait`` until it is safe."""
        with self._changed:
            while wait and piece.state == "taken" and not self._stopped:
                self._changed.wait()
            if self._stopped or piece.state != "waiting":
                return False
            piece.state = "taken"
            return True

    def make_safe(self, piece: _Piece) -> None:
        """The array may be changed there: the piece's bits are elsewhere."""
        with self._changed:
            piece.state = "safe"
            self._changed.notify_all()

    def count_written(self) -> None:
        """A piece that was taken is on the disk."""
        with self._changed:
            self._unwritten -= 1
            self._changed.notify_all()

    def wait_written(self) -> bool:
        """Return when all pieces are on the disk; False if they will never be."""
        with self._changed:
            while self._unwritten and not self._stopped:
                self._changed.wait()
            return not self._stopped

    def stop(self) -> None:
        """Give the write up."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Give the write up, for a reason that somebody will be told: the first one."""
        with self._changed:
            if self._error is None:
                self._error = error
        self.stop()

    def collect_error(self) -> BaseException | None:
        """The error that the write has failed with; None when it is asked for again."""
        with self._changed:
            error, self._error = self._error, None
            return error


class DeviceCopies:
    """Copies out of a GPU's memory, each complete when the call returns.

    The writing thread copies on a stream of its own, so that it neither waits for the step's kernels nor holds them up;
    it starts after those that were queued when the write began. Who is about to change an array copies on the
    current stream of the calling thread.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.Lock()
        self._its = accelerator.of(device)
        self._stream = self._its.stream(device)
        self._begun = self._its.event()
        self._copied = self._its.event()
        self.bounce = HostSlab(BOUNCE, beside=device)  # last: nothing after it can fail and leave it
        """the slab of whoever is about to change an array; guarded by ``lock``"""

    def mark(self) -> None:
        """Let what is queued on the current stream now come before every copy from here on."""
        self._begun.record(self._its.current_stream(self._stream.device))

    def copy_beside(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with self._its.queued_on(self._stream):
            self._stream.wait_event(self._begun)
            target.copy_(source, non_blocking=True)
            self._copied.record(self._stream)
            self._copied.synchronize()

    def copy_here(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._its.current_stream(source.device).wait_event(self._begun)
        target.copy_(source)

    def close(self) -> None:
        self.bounce.close()
