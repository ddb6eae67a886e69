"""Host memory beside a GPU, as CUDA is asked for it."""

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock import accelerator
from penstock.errors import BudgetError
from penstock.state import memory
from penstock.state.memory import HostSlab
from tests.patience import PATIENCE


def test_pages_are_locked_and_unlocked_on_the_device_that_they_lie_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else CUDA would begin to use the first GPU, whatever is computed on."""
    current: list[torch.device] = []
    calls: list[tuple[str, int, list[torch.device]]] = []

    @contextmanager
    def within(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def lock(address: int, nbytes: int, flags: int) -> int:
        calls.append(("lock", address, [*current]))
        return 0

    def unlock(address: int) -> int:
        calls.append(("unlock", address, [*current]))
        return 0

    runtime = SimpleNamespace(cudaHostRegister=lock, cudaHostUnregister=unlock)
    monkeypatch.setattr(torch.cuda, "device", within)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    second = torch.device("cuda", 1)
    slab = HostSlab(4096, beside=second)
    address = slab.bytes.data_ptr()
    slab.close()
    assert calls == [("lock", address, [second]), ("unlock", address, [second])]


@pytest.mark.parametrize(("code", "given_back"), [(0, 0), (2, 0), (0, 2)])
def test_an_error_of_a_page_lock_is_not_the_next_kernels(
    code: int, given_back: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA keeps a call's error for whoever asks next, and only that clears it; where there is none nothing is
    launched."""
    second, last, launched = torch.device("cuda", 1), list[int](), list[int]()
    empty = torch.empty

    def noted(code: int) -> int:
        last.extend([code] if code else [])
        return code

    def launch(value: int) -> None:
        launched.append(value)
        if last:
            raise RuntimeError(f"CUDA error: {last.pop()}")

    def made(*size: int, **given: object) -> object:
        return SimpleNamespace(fill_=launch) if given.get("device") == second else empty(*size, **given)

    runtime = SimpleNamespace(cudaHostRegister=lambda *_: noted(code), cudaHostUnregister=lambda _: noted(given_back))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "empty", made)
    with pytest.raises(BudgetError, match=r"could not be page-locked \(cuda error 2\)") if code else nullcontext():
        HostSlab(4096, beside=second).close()
    assert len(launched) == bool(code or given_back)
    assert not last


SIZE = 1 << 20


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pages that are there of each memory when it is page-locked; pieces are small, and there are two cores."""
    found: list[int] = []

    def lock(device: torch.device, address: int, nbytes: int) -> int:
        residency = (ctypes.c_ubyte * (nbytes // mmap.PAGESIZE))()
        assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), residency)
        found.append(sum(page & 1 for page in residency))
        return 0

    its = SimpleNamespace(lock_pages=lock, unlock_pages=lambda device, address: None)
    monkeypatch.setattr(accelerator, "of", lambda device: its)
    monkeypatch.setattr(memory, "PIECE", SIZE // 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    return found


@pytest.mark.parametrize("advice", [memory.POPULATE_WRITE, 1 << 20], ids=["this kernel", "an older kernel"])
def test_memory_is_there_before_it_is_locked(advice: int, locked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver would fault it in by itself, in one thread."""
    monkeypatch.setattr(memory, "POPULATE_WRITE", advice)
    told: list[int] = []
    with memory.watching(told.append):
        HostSlab(SIZE, beside=torch.device("cuda", 0)).close()
    HostSlab(SIZE, beside=torch.device("cuda", 0)).close()
    assert locked == [SIZE // mmap.PAGESIZE] * 2
    assert told == [SIZE // 8] * 8


def test_several_threads_fault_memory_in(locked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    both, fault = threading.Barrier(2), memory.fault

    def meet(piece: NDArray[np.uint8]) -> None:
        both.wait(PATIENCE)
        fault(piece)

    monkeypatch.setattr(memory, "fault", meet)
    HostSlab(SIZE, beside=torch.device("cuda", 0)).close()
    assert locked == [SIZE // mmap.PAGESIZE]


def test_memory_that_is_not_there_is_a_budget_error(locked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        ctypes.set_errno(errno.ENOMEM)
        return -1

    monkeypatch.setattr(memory, "madvise", refuse)
    with pytest.raises(BudgetError, match=r"1048576 bytes of host memory are not to be had \(Cannot allocate memory\)"):
        HostSlab(SIZE, beside=torch.device("cuda", 0))
    assert not locked
