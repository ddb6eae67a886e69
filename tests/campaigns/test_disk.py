"""Disks that are full, on a real small file system, and disks that are slow or stall: a run survives them all."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from bench import harness
from penstock.errors import StoreError
from penstock.store import packed
from tests.campaign import SETTINGS, digests, go_on, open_run, share, truth
from tests.conftest import Campaign
from tests.faults import Call, Go, Hook, Nth, fill, intercepted
from tests.patience import PATIENCE
from tests.training import assert_same_state, state_of

pytestmark = pytest.mark.usefixtures("one_thread")

LAST = 4


@pytest.fixture
def deadline() -> Iterator[None]:
    """A run that waits for something that never comes fails instead of hanging."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("a deadlock?")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(int(PATIENCE))
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.sampled(3, values=False)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_on_a_disk_that_others_fill_goes_on_and_only_a_snapshot_has_to_wait(
    name: str, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, campaign: Campaign
) -> None:
    """Neither a step nor a commit needs new space; a snapshot does, leaves nothing behind, and can be repeated."""
    known = truth(name)
    with open_run(SETTINGS[name], small_disk / "store") as engine:
        go_on(engine, 1)
        fill(small_disk / "hog")
        assert go_on(engine, 3) == known.after(1, 3)
        with pytest.raises(StoreError, match=r"snapshot.*No space left on device: free some space"):
            engine.save(small_disk / "snapshot")
        os.truncate(small_disk / "hog", (small_disk / "hog").stat().st_size - (64 << 10))
        with pytest.raises(StoreError, match=r"the snapshot needs .* are free: free some space, or give another path"):
            engine.save(small_disk / "snapshot")
        with monkeypatch.context() as patch:  # and where free space is there when it is looked for, and gone when used
            patch.setattr(packed, "free_bytes", lambda path: 1 << 40)
            with pytest.raises(StoreError, match=r"are needed for penstock\.snapshot|No space left on device"):
                engine.save(small_disk / "snapshot")
        assert sorted(p.name for p in small_disk.iterdir()) == ["hog", "lost+found", "store"]
        (small_disk / "hog").unlink()
        engine.save(small_disk / "snapshot")
    with open_run(SETTINGS[name], small_disk / "store") as engine:
        assert go_on(engine, LAST) == known.after(3, LAST)
        assert_same_state(state_of(engine), known.states[LAST])
        engine.load(small_disk / "snapshot")
        assert_same_state(state_of(engine), known.states[3])
    campaign.found(f"a full ext4, {name}: steps and commits go on, a snapshot is refused and works with space again")


def test_a_store_that_does_not_fit_leaves_nothing_and_fits_with_space_again(small_disk: Path, tmp_path: Path) -> None:
    setting = SETTINGS["fp32"]
    known = truth("fp32")
    fill(small_disk / "hog")
    with pytest.raises(StoreError, match=r"store cannot be created: No space left on device: free some space"):
        open_run(setting, small_disk / "store")
    os.truncate(small_disk / "hog", (small_disk / "hog").stat().st_size - (64 << 10))
    with pytest.raises(StoreError, match=r"the store needs .* on this file system, .* are free: free some space"):
        open_run(setting, small_disk / "store")
    assert sorted(p.name for p in small_disk.iterdir()) == ["hog", "lost+found"]
    (small_disk / "hog").unlink()
    with open_run(setting, small_disk / "store") as engine:
        go_on(engine, 1)
        assert_same_state(state_of(engine), known.states[1])


# ---- slow disks


class Slow:
    """Every call takes ten times as long as it did."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def __call__(self, call: Call, go: Go) -> Any:
        began = time.perf_counter()
        result = go()
        time.sleep(max(0.001, (time.perf_counter() - began) * (self._factor - 1)))
        return result


@pytest.mark.usefixtures("deadline")
@pytest.mark.parametrize("name", SETTINGS)
def test_a_disk_ten_times_slower_changes_nothing_but_the_time(name: str, tmp_path: Path, campaign: Campaign) -> None:
    known = truth(name)
    with intercepted(tmp_path / "store", Slow(10)), open_run(SETTINGS[name], tmp_path / "store") as engine:
        assert go_on(engine, LAST) == known.after(0, LAST)
        assert_same_state(state_of(engine), known.states[LAST])
    campaign.found(f"every disk call 10x slower, {name}: bit-equal")


def _train_and_close(name: str, store: Path, hook: Hook) -> None:
    """The hook acts from the second step on; the run ends, is found again, and is what it should be."""
    known = truth(name)
    with open_run(SETTINGS[name], store) as engine:
        go_on(engine, 1)
        with intercepted(store, hook):
            assert go_on(engine, LAST) == known.after(1, LAST)
            engine.close()
    with open_run(SETTINGS[name], store) as engine:
        assert_same_state(state_of(engine), known.states[LAST])


@pytest.mark.usefixtures("deadline")
@pytest.mark.parametrize("name", SETTINGS)
def test_a_disk_that_stalls_at_any_call_is_waited_for(name: str, tmp_path: Path, campaign: Campaign) -> None:
    """A call at random of a step, or of its commit, comes back only when everything else has long come to rest."""
    rng = random.Random(name)
    seconds = campaign.cases(1, 3) * 0.5
    clean = Nth(-1, lambda call, go: go())
    _train_and_close(name, tmp_path / "store", clean)
    stalled = [rng.randrange(len(clean.calls) * 3 // 4) for _ in range(campaign.cases(1, share(40)))]
    names = set()
    for case, number in enumerate(stalled):

        def stall(call: Call, go: Go) -> Any:
            time.sleep(seconds)
            return go()

        nth = Nth(number, stall)
        _train_and_close(name, tmp_path / f"store-{case}", nth)
        assert nth.struck
        names.add(nth.calls[number].name)
    campaign.found(f"a stall of {seconds} s, {name}: {len(stalled)} of calls {sorted(names)}, all bit-equal")


_THROTTLED = """
import sys, time, torch
from pathlib import Path
from tests.campaign import SETTINGS, digests, go_on, open_run
from tests.training import state_of
torch.set_num_threads(1)
with open_run(SETTINGS[sys.argv[1]], Path(sys.argv[2])) as engine:
    go_on(engine, 1)
    began = time.monotonic()
    open(sys.argv[3], "w").write("0")
    go_on(engine, int(sys.argv[4]))
    print(time.monotonic() - began)
    print(sorted(digests(state_of(engine)).items()))
"""


@pytest.mark.skipif(harness.why_no_limit() is not None, reason=str(harness.why_no_limit()))
def test_a_disk_that_the_kernel_throttles_in_mid_run(tmp_path: Path, campaign: Campaign) -> None:
    """A real slow disk: 1 MB/s from the second step on, as the block layer has it."""
    if not campaign.full:
        pytest.skip("takes 8 s: make faults runs it")
    known = truth("fp32")
    limit = harness.DiskLimit(read=1_000_000, write=1_000_000)
    with harness.disk_cgroup(limit, tmp_path) as group:
        command = [sys.executable, "-c", _THROTTLED, "fp32", str(tmp_path / "store"), f"{group}/cgroup.procs", "3"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    seconds, state = done.stdout.splitlines()
    assert state == str(sorted(digests(known.states[3]).items()))
    moved = 2 * 2 * sum(t.nbytes for n, t in known.states[3].items() if not n.startswith("buffer")) / 1e6
    assert float(seconds) > 0.5 * moved, "the disk was not slow"
    campaign.found(f"a disk held to 1 MB/s by the kernel: {float(seconds):.1f} s for two steps, bit-equal")
