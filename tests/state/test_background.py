"""What is written in the background is the state of one step, whatever changes meanwhile, in whichever order."""

import errno
import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import accelerator
from penstock.config import Tier
from penstock.errors import StoreError
from penstock.schedule.place import Format, Placement
from penstock.schedule.program import ALIGN, GroupSpec
from penstock.state import background as module
from penstock.state.arrays import StateArrays
from penstock.state.background import Background
from penstock.state.layout import parts_of
from penstock.state.memory import HostSlab
from penstock.state.slots import Slots
from penstock.store import Layout, Store
from tests.accelerator import DEVICE
from tests.faults import failing
from tests.patience import PATIENCE, until

GROUPS = (
    GroupSpec(index=0, name="ends", trainable=3 * ALIGN, frozen=0),
    GroupSpec(index=1, name="block", trainable=5 * ALIGN, frozen=3 * ALIGN),
    GroupSpec(index=2, name="frozen", trainable=0, frozen=ALIGN),
    GroupSpec(index=3, name="block", trainable=8 * ALIGN, frozen=0),
)
FORM, DTYPE = Format.of("bf16", 2), torch.bfloat16
ORDER = (3, 1, 0)
PLACES: dict[str, tuple[tuple[Tier, Tier], ...]] = {  # (weights, state) of each group
    "host": (("host", "host"),) * 4,
    "device": (("device", "device"),) * 4,
    "both": (("device", "device"), ("device", "host"), ("host", "host"), ("host", "host")),
    "frozen on disk": (("host", "host"), ("device", "device"), ("disk", "disk"), ("host", "host")),
}
State = dict[str, torch.Tensor]


class Run:
    """A arrays in memory above a store, and what an engine would do with them."""

    def __init__(self, path: Path, place: str, device: str = "cpu") -> None:
        parts = [part for group in GROUPS for part in parts_of(group, FORM, DTYPE)]
        layout = Layout.build([(part.name, part.nbytes, 2) for part in parts], {part.name: part.grid for part in parts})
        self.store = Store.create([path], layout, model={})
        self.slots = Slots(self.store)
        self.arrays = StateArrays(GROUPS, FORM, DTYPE, torch.device(device), self.store, self.slots, host_bytes=0)
        self.commits = -1  # the first is of what the run begins with
        for name in self.arrays.parts:
            self.arrays.zero(name)
        self.commit()
        weights, state = zip(*PLACES[place], strict=True)
        self.arrays.settle(Placement(weights=weights, state=state, gradients="host", activations="device"))
        generator = torch.Generator().manual_seed(0)
        for name in self.names:
            part = self.arrays.parts[name]
            self.arrays.write(name, 0, torch.randn(part.numel, generator=generator).to(part.dtype))
        self.background = Background(self.arrays)

    @property
    def names(self) -> list[str]:
        return [name for name in self.arrays.parts if self.arrays.tier_of(name) != "disk"]

    @property
    def trained(self) -> list[str]:
        return [name for name in self.names if self.arrays.parts[name].trainable]

    def state(self) -> State:
        return {name: self.arrays.array(name).to("cpu", copy=True) for name in self.names}

    def commit(self) -> None:
        self.store.commit({"slots": self.slots.record(), "number": self.commits + 1})
        self.slots.committed()
        self.commits += 1

    def committed(self) -> State:
        """What a run that opens the store would find."""
        slots, found = Slots(self.store), {}
        for name in self.names:
            part = self.arrays.parts[name]
            slab = HostSlab(part.nbytes)
            self.store.read(name, 0, slab.bytes.numpy()[: part.nbytes], slots.current(name))
            found[name] = slab.bytes[: part.nbytes].view(part.dtype)
        return found

    def save(self) -> State:
        """Commit the state as it is; what that was."""
        self.background.begin(ORDER, self.commit)
        self.background.wait()
        return self.state()

    def change(self, name: str, start: int, numel: int) -> None:
        self.background.before_change(name, start, numel)
        self.arrays.array(name)[start : start + numel].neg_()

    def change_all(self) -> None:
        for name in self.trained:
            self.change(name, 0, self.arrays.parts[name].numel)

    def change_at_random(self, seed: int, pause: float) -> None:
        """Ranges of any length, anywhere; as several threads do it, some of them the same."""
        rng = random.Random(seed)
        for _ in range(30):
            name = rng.choice(self.trained)
            blocks = self.arrays.parts[name].numel // ALIGN
            first = rng.randrange(blocks)
            self.change(name, first * ALIGN, rng.randint(1, blocks - first) * ALIGN)
            time.sleep(rng.random() * pause)

    def close(self) -> None:
        self.background.close()
        self.arrays.close()
        self.store.close()


def same(one: State, other: State) -> bool:
    """Bit for bit: -0.0 is not 0.0."""
    assert one.keys() == other.keys()
    return all(torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)) for name in one)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks each: every array is several."""
    monkeypatch.setattr(module, "BOUNCE", 2 * ALIGN * 4)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def new(place: str = "host", device: str = "cpu") -> Run:
        made.append(Run(tmp_path / f"store{len(made)}", place, device))
        return made[-1]

    yield new
    for run in made:
        run.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """Threads that take turns a hundred times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    with ThreadPoolExecutor(8) as pool:
        yield pool
    sys.setswitchinterval(before)


def slow(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """A drive that takes up to so long for each write."""
    real, rng = os.pwritev, random.Random(0)

    def pwritev(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        time.sleep(rng.random() * seconds)
        return real(fd, buffers, offset)

    patch.setattr(os, "pwritev", pwritev)


class Gate:
    """A drive that holds every write until it is opened, and tells how many have come; ``but``: not this thread's."""

    def __init__(self, patch: pytest.MonkeyPatch, *, but: str = "") -> None:
        self._real = os.pwritev
        self._but = but
        self._arrived = threading.Semaphore(0)
        self._opened = threading.Event()
        self.error: OSError | None = None
        self.offsets: list[int] = []
        patch.setattr(os, "pwritev", self._pwritev)

    def _pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if threading.current_thread().name == self._but:
            return self._real(fd, buffers, offset)
        self.offsets.append(offset)
        self._arrived.release()
        assert self._opened.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        return self._real(fd, buffers, offset)

    def wait_for(self, writes: int) -> None:
        for _ in range(writes):
            assert self._arrived.acquire(timeout=PATIENCE)

    def open(self) -> None:
        self._opened.set()


# ---- what is committed


@pytest.mark.sampled(4)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("drive", "pause"), [(3e-3, 0.0), (0.0, 3e-3), (5e-4, 5e-4)], ids=["slow-drive", "slow-changes", "even"]
)
def test_what_is_committed_is_the_state_at_begin(
    place: str,
    drive: float,
    pause: float,
    make: Callable[..., Run],
    threads: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever changes what while it is written, and in both slots."""
    run = make(place)
    slow(monkeypatch, drive)
    for turn in range(2):
        wanted = run.state()
        run.background.begin(ORDER, run.commit)
        changes = [threads.submit(run.change_at_random, 10 * turn + i, pause) for i in range(3)]
        for change in changes:
            change.result(timeout=PATIENCE)
        threads.submit(run.background.wait).result(timeout=PATIENCE)
        assert run.commits == turn + 1
        assert not same(run.state(), wanted)
        assert same(run.committed(), wanted)


def test_the_same_range_changed_by_many_threads_is_written_once(
    make: Callable[..., Run], threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make()
    slow(monkeypatch, 1e-3)
    before, wanted = run.store.stats.bytes_written, run.state()
    run.background.begin(ORDER, run.commit)
    for future in [threads.submit(run.change_all) for _ in range(6)]:
        future.result(timeout=PATIENCE)
    run.background.wait()
    assert run.store.stats.bytes_written - before == sum(run.arrays.parts[name].nbytes for name in run.names)
    assert same(run.committed(), wanted)


def test_arrays_on_disk_are_left_alone(make: Callable[..., Run]) -> None:
    run = make("frozen on disk")
    before = run.slots.current("weights.2"), run.store.stats.bytes_written
    run.save()
    written = run.store.stats.bytes_written - before[1]
    assert written == sum(run.arrays.parts[name].nbytes for name in run.names)
    assert run.slots.current("weights.2") == before[0]


@pytest.mark.parametrize("place", ["host", "device"])
def test_a_frozen_array_is_written_again_only_when_something_else_was_put_there(
    place: str, make: Callable[..., Run]
) -> None:
    run = make(place)
    size = {name: run.arrays.parts[name].nbytes for name in run.names}
    trained = sum(size[name] for name in run.trained)

    def written() -> int:
        before = run.store.stats.bytes_written
        run.change_all()
        wanted = run.save()
        assert same(run.committed(), wanted)
        return run.store.stats.bytes_written - before

    assert [written() for _ in range(3)] == [trained + size["weights.2"], trained, trained]
    run.arrays.write("weights.2", 0, torch.ones(ALIGN, dtype=DTYPE))
    with pytest.MonkeyPatch.context() as patch, failing("pwritev", errno.EIO, patch), pytest.raises(StoreError):
        run.save()
    assert [written() for _ in range(2)] == [trained + size["weights.2"], trained]


def test_slots_flip_when_all_is_written_and_not_before(
    make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make()
    before = run.slots.record()
    flipped: list[str] = []
    with monkeypatch.context() as patch:
        gate = Gate(patch)
        run.background.begin(ORDER, lambda: flipped.append(run.slots.record()))
        gate.wait_for(1)
        assert run.slots.record() == before
        gate.open()
        run.background.wait()
    assert flipped == ["".join("10"[int(slot)] for slot in before)]


# ---- who waits for what


def test_pieces_are_written_in_the_order_of_the_changes(
    make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Group by group as told, the others last; in a group range by range, weights and state together."""
    run = make("both")
    gate = Gate(monkeypatch)
    gate.open()
    run.background.begin((1, 3), lambda: None)
    run.background.wait()

    def extent(offset: int) -> tuple[int, str, int]:
        for e in run.store.layout.extents:
            if e.offset <= offset < e.end:
                part = run.arrays.parts[e.name]
                return part.group, e.name, (offset - e.offset) % e.stride // part.dtype.itemsize
        raise AssertionError(offset)

    pieces = [extent(offset) for offset in gate.offsets]
    assert [g for g, _ in itertools.groupby(pieces, lambda piece: piece[0])] == [1, 3, 0, 2]
    for _, mine in itertools.groupby(pieces, lambda piece: piece[0]):
        starts = [start for _, _, start in mine]
        assert starts == sorted(starts)
    assert [name for _, name, start in pieces[:4] if start == 0] == ["weights.1", "low.1", "moment0.1", "moment1.1"]


def test_a_change_waits_for_the_copy_and_not_for_the_drive(
    make: Callable[..., Run], threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the thread is writing is in its bounce buffer."""
    run = make()
    wanted = run.state()
    with monkeypatch.context() as patch:
        gate = Gate(patch)
        run.background.begin(ORDER, run.commit)
        gate.wait_for(1)
        threads.submit(run.change, "weights.3", 0, ALIGN).result(timeout=PATIENCE)
        gate.open()
        run.background.wait()
    assert same(run.committed(), wanted)


def test_a_change_writes_what_has_not_been_written_and_others_wait_for_it(
    make: Callable[..., Run], threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make()
    wanted = run.state()
    with monkeypatch.context() as patch:
        gate = Gate(patch)
        run.background.begin(ORDER, run.commit)
        gate.wait_for(1)
        one = threads.submit(run.change, "moment0.0", 0, ALIGN)
        gate.wait_for(1)
        other = threads.submit(run.change, "moment0.0", ALIGN, ALIGN)  # of the same piece
        time.sleep(0.05)
        assert not one.done()
        assert not other.done()
        assert len(gate.offsets) == 2
        gate.open()
        one.result(timeout=PATIENCE)
        other.result(timeout=PATIENCE)
        run.background.wait()
    assert same(run.committed(), wanted)


def test_the_commit_waits_for_what_a_change_still_writes(
    make: Callable[..., Run], threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make()
    wanted = run.state()
    with monkeypatch.context() as patch:
        slow(patch, 2e-3)
        gate = Gate(patch, but="penstock-background")
        run.background.begin(ORDER, run.commit)
        change = threads.submit(run.change, "moment1.0", 2 * ALIGN, ALIGN)
        gate.wait_for(1)
        rest = sum(run.arrays.parts[name].nbytes for name in run.names) - ALIGN * 4
        until(lambda: run.store.stats.bytes_written >= rest)
        time.sleep(0.05)
        assert run.commits == 0
        gate.open()
        change.result(timeout=PATIENCE)
        run.background.wait()
    assert same(run.committed(), wanted)


def test_begin_waits_for_the_write_before(make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run = make()
    slow(monkeypatch, 1e-3)
    seen: list[State] = []

    def done() -> None:
        run.commit()
        seen.append(run.committed())

    wanted = []
    for _ in range(3):
        wanted.append(run.state())
        run.background.begin(ORDER, done)
        run.change_all()
    run.background.wait()
    assert len(seen) == 3
    assert all(map(same, seen, wanted))


def test_without_a_write_under_way_nothing_waits_and_nothing_is_written(make: Callable[..., Run]) -> None:
    run = make()
    run.background.wait()
    run.background.check()
    run.change_all()
    assert run.store.stats.bytes_written == 0
    run.save()
    before = run.store.stats.bytes_written
    assert run.background.guarded is None, "a change then costs the test of this attribute"
    run.change_all()
    assert run.store.stats.bytes_written == before


def test_close_gives_up_what_is_not_written(
    make: Callable[..., Run], threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make()
    wanted = run.save()
    run.change_all()
    gate = Gate(monkeypatch)
    run.background.begin(ORDER, run.commit)
    gate.wait_for(1)
    closing = threads.submit(run.background.close)
    change = threads.submit(run.change, "moment0.0", 0, ALIGN)
    time.sleep(0.05)
    gate.open()
    closing.result(timeout=PATIENCE)
    change.result(timeout=PATIENCE)
    assert len(gate.offsets) <= 2, "one of the thread, and perhaps one of the change"
    assert run.commits == 1
    assert same(run.committed(), wanted)
    run.background.close()  # once more does nothing


# ---- drives that fail


def test_an_error_at_every_third_write_leaves_the_commit_before_and_the_arrays(
    make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread comes upon it, or a change does, and the next write does without it."""
    run = make("both")
    run.save()  # what is frozen is written once
    gate = Gate(monkeypatch)
    gate.open()
    wanted, commits = run.save(), 2
    for after in range(0, len(gate.offsets), 3):
        run.change_all()
        with failing("pwritev", errno.EIO, monkeypatch, after=after):
            run.background.begin(ORDER, run.commit)
            before = run.state()
            run.change_all()
            with pytest.raises(StoreError, match="stopped after 0 bytes"):
                run.background.wait()
        assert run.commits == commits
        assert same(run.committed(), wanted)
        assert same(run.state(), before | {name: -before[name] for name in run.trained})
        run.background.wait()  # it was said once
        if after % 4 == 0:
            wanted, commits = run.save(), commits + 1
            assert same(run.committed(), wanted)


@pytest.mark.parametrize("told", ["begin", "wait", "check"])
def test_an_error_is_told_at_the_next_call_and_only_once(
    told: str, make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make()
    with failing("pwritev", errno.EIO, monkeypatch):
        run.background.begin(ORDER, run.commit)
        assert run.background.thread is not None
        run.background.thread.join(timeout=PATIENCE)
    calls: dict[str, Callable[[], None]] = {
        "begin": lambda: run.background.begin(ORDER, run.commit),
        "wait": run.background.wait,
        "check": run.background.check,
    }
    with pytest.raises(StoreError, match="Input/output error"):
        calls[told]()
    assert run.commits == 0
    run.save()
    assert run.commits == 1


def test_who_waits_for_a_piece_goes_on_when_its_write_fails(
    make: Callable[..., Run], threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make()
    with monkeypatch.context() as patch:
        gate = Gate(patch)
        run.background.begin(ORDER, run.commit)
        gate.wait_for(1)
        changes = [threads.submit(run.change, "moment0.0", 0, 2 * ALIGN) for _ in range(4)]
        gate.wait_for(1)
        gate.error = OSError(errno.EIO, "Input/output error")
        gate.open()
        for change in changes:
            change.result(timeout=PATIENCE)
        with pytest.raises(StoreError, match="Input/output error"):
            run.background.wait()


def test_an_error_of_the_commit_is_kept_too(make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run = make()
    wanted = run.save()
    run.change_all()

    with failing("fdatasync", errno.EIO, monkeypatch):
        run.background.begin(ORDER, run.commit)
        with pytest.raises(StoreError, match="flush failed"):
            run.background.wait()
    assert same(run.committed(), wanted)


def test_an_interrupt_in_a_change_is_raised_there_and_fails_the_write(
    make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make()
    wanted = run.save()
    main, real = threading.main_thread(), os.pwritev
    with monkeypatch.context() as patch:

        def pwritev(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if threading.current_thread() is main:
                raise KeyboardInterrupt
            time.sleep(0.02)
            return real(fd, buffers, offset)

        patch.setattr(os, "pwritev", pwritev)
        run.background.begin(ORDER, run.commit)
        with pytest.raises(KeyboardInterrupt):
            run.change_all()
        with pytest.raises(KeyboardInterrupt):
            run.background.wait()
    assert run.commits == 1
    assert same(run.committed(), wanted)


# ---- an accelerator


@pytest.mark.accelerator
@pytest.mark.parametrize("place", PLACES)
def test_kernels_that_are_queued_change_nothing_that_is_written(
    place: str, make: Callable[..., Run], threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those queued before ``begin``, which are part of the state, nor those after it; on two streams."""
    run = make(place, DEVICE)
    slow(monkeypatch, 1e-3)
    its, device = accelerator.of(torch.device(DEVICE)), torch.device(DEVICE, 0)
    width = 2048 if DEVICE == "cuda" else 32  # the simulated one is late by itself
    busy = torch.ones(width, width, device=DEVICE)
    main, side = its.current_stream(device), its.stream(device)

    def change(stream: torch.Stream, names: Sequence[str]) -> None:
        with its.queued_on(stream):
            for name in names:
                numel = run.arrays.parts[name].numel
                for start in range(0, numel, ALIGN):
                    run.change(name, start, ALIGN)

    for turn in range(3):
        expected = {name: -array for name, array in run.state().items()}
        for _ in range(20):
            busy = busy @ busy / width
        for name in run.names:
            run.arrays.array(name).neg_()  # on the device: queued behind the products
        run.background.begin(ORDER, run.commit)
        half = len(run.names) // 2
        changes = [
            threads.submit(change, side, run.names[half:]),
            threads.submit(change, main, run.names[:half]),
        ]
        for future in changes:
            future.result(timeout=PATIENCE)
        run.background.wait()
        torch.accelerator.synchronize()
        assert run.commits == turn + 1
        assert same(run.committed(), expected)


@pytest.mark.parametrize("thread", ["is still to run", "runs"])
def test_a_write_that_is_interrupted_as_it_begins_is_given_up(
    thread: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would guard its pieces: from then on it neither writes nor commits, and the next one is whole."""
    run, begun, writing, written = Run(tmp_path / "store", "host"), [], threading.Event(), []
    start, write = threading.Thread.start, run.slots.write

    def interrupted(self: threading.Thread) -> None:
        begun.append(self)
        if thread == "runs":
            start(self)
            writing.wait()
        raise KeyboardInterrupt

    def counted(*words: Any) -> None:
        writing.set()
        written.append(words[0])
        write(*words)

    monkeypatch.setattr(run.slots, "write", counted)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.background.begin(ORDER, run.commit)
    by_then, commits = len(written), run.commits
    if thread == "is still to run":
        start(begun[0])
    begun[0].join()
    assert (len(written), run.commits) == (by_then, commits)
    run.change_all()
    assert same(run.save(), run.committed())
    run.close()
