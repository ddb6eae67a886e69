"""No memory in the middle of a step: an error that says so, the last commit intact, and the run goes on bit for bit."""

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

from penstock.errors import StoreError
from tests.accelerator import DEVICE, simulated
from tests.campaign import CASE, ON_ACCELERATOR, SETTINGS, Attempt, Net, digests, truth
from tests.conftest import Campaign
from tests.victims import Diary, Victims, train_here, victims_of_one_thread

pytestmark = pytest.mark.usefixtures("one_thread")

LAST = 4


def device_refuses() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def host_refuses() -> None:
    torch.empty(1 << 50)  # more than any address space: torch's own allocator says no


def python_refuses() -> None:
    bytearray(1 << 50)


REFUSALS: dict[str, tuple[Callable[[], None], type[BaseException], str]] = {
    "device": (device_refuses, torch.OutOfMemoryError, "CUDA out of memory"),
    "host": (host_refuses, RuntimeError, "can't allocate memory|not enough memory"),
    "python": (python_refuses, MemoryError, ""),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("memory", REFUSALS)
@pytest.mark.parametrize("name", SETTINGS)
def test_without_memory_a_step_fails_and_can_be_repeated(
    name: str, memory: str, tmp_path: Path, campaign: Campaign
) -> None:
    """Memory ends at each call of a layer in turn, in forwards and recomputations, of every micro-batch."""
    refuse, kind, words = REFUSALS[memory]
    calls, strike = SimpleQueue[None](), -1  # a number would be put back where a step does not count

    def before(module: torch.nn.Module, arguments: object) -> None:
        calls.put(None)
        if calls.qsize() - 1 == strike:
            refuse()

    def build() -> torch.nn.Module:
        model = CASE.model()
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(before)
        return model

    attempt = Attempt(name, tmp_path / "store", model=build, survives=(kind, StoreError))
    attempt.to(1)
    calls = SimpleQueue()
    attempt.to(2)
    numbers = range(calls.qsize()) if campaign.full else random.Random(name).sample(range(calls.qsize()), 1)
    attempt.close()
    again = 0
    for number in numbers:
        attempt = Attempt(name, tmp_path / f"store-{number}", model=build, survives=(kind, StoreError))
        attempt.to(2)
        calls, strike = SimpleQueue(), number
        attempt.to(LAST)
        strike = -1
        attempt.insist(attempt.look)
        assert isinstance(failure := attempt.errors[0], kind)
        assert re.search(words, str(failure))
        assert any("in op" in note for note in failure.__notes__)
        again += attempt.engines > 1
        attempt.close()
    campaign.found(
        f"no memory ({memory}), {name}: at {len(numbers)} calls of a step, all ended bit-equal, {again} in a new engine"
    )


@pytest.mark.accelerator
@pytest.mark.skipif(DEVICE != "sim", reason="needs a device whose memory can be made smaller")
def test_a_device_that_is_full_fails_a_step_that_can_be_repeated(tmp_path: Path) -> None:
    """Its memory ends where a layer is called, with copies under way on other streams, and is there again after it."""
    (name,), sim = ON_ACCELERATOR, simulated.start()
    calls, strike = SimpleQueue[None](), -1

    def before(module: torch.nn.Module, arguments: object) -> None:
        calls.put(None)
        if calls.qsize() == strike:
            torch.accelerator.empty_cache()
            sim.limit(torch.accelerator.memory_reserved())

    def after(module: torch.nn.Module, arguments: object, output: object) -> None:
        sim.limit(simulated.MEMORY)

    def build() -> torch.nn.Module:
        model = CASE.model()
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(before)
                module.register_forward_hook(after, always_call=True)
        return model

    kind = torch.OutOfMemoryError
    attempt = Attempt(name, tmp_path / "store", model=build, survives=(kind, StoreError))
    attempt.to(1)
    calls = SimpleQueue()
    attempt.to(2)
    of_a_step = calls.qsize()
    for done, part in enumerate((4, 2), start=2):
        calls, strike = SimpleQueue(), of_a_step // part
        attempt.to(done + 1)
        strike = -1
    attempt.insist(attempt.look)
    attempt.close()
    assert [type(error) for error in attempt.errors] == [kind] * 2
    assert all("the simulated device is out of memory" in str(error) for error in attempt.errors)
    assert attempt.engines == 2, "the first time in the same engine, as this does"


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A cgroup whose processes may take 128 MiB besides what they had: above it the kernel ends one."""
    group = Path(f"/sys/fs/cgroup/memory/penstock-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(128 << 20))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"holding a process to little memory needs root and the cgroup v1 memory controller: {error}")
    yield group
    for _ in range(50):  # the kernel may need a moment after the last process has been reaped
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.1)


def _greedy(name: str, store: Path, diary: Path, group: Path, ready: Connection) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))
    forward = Net.forward

    def hungry(self: Net, *arguments: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        if max(Diary.read(diary).numbers, default=0) == 2:
            torch.ones(1 << 28)
        return forward(self, *arguments, **named)

    Net.forward = hungry  # type: ignore[method-assign]
    train_here(name, LAST, store, diary, None, ready)


@pytest.mark.sampled(3, values=False)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_that_the_kernel_ends_for_its_memory_goes_on(
    name: str, tmp_path: Path, small_memory: Path, campaign: Campaign
) -> None:
    known = truth(name)
    with victims_of_one_thread():
        victims = Victims(name, LAST)
        code = victims.call(_greedy, name, tmp_path / "store", tmp_path / "diary", small_memory)
        assert code == -signal.SIGKILL
        assert set(Diary.read(tmp_path / "diary").numbers) == {1, 2}
        found = victims.run(tmp_path / "store", tmp_path / "second")
    assert found.resumed is not None
    assert 2 - SETTINGS[name].lag <= found.resumed <= 2
    assert found.state == digests(known.states[LAST])
    campaign.found(f"ended by the kernel's out-of-memory killer in step 3, {name}: resumed bit-equal")
