"""Host memory beside a GPU, as CUDA is asked for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from penstock.state.memory import HostSlab


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
