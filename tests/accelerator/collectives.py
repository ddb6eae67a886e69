"""What NCCL is to GPUs, for the simulated accelerator: process groups whose collectives are queued.

    all_gather_into_tensor(out, part)    queued on a stream of the group, behind what the caller's stream has by then
    work.wait()                          the caller's stream goes on behind it; the host does not wait

Only tensors of the device are taken. Bytes go by gloo, in a thread of each group, once its stream has come to them,
which stands at a gate meanwhile. So a rank that does not come leaves the others' streams standing, and their hosts
notice it only if they look; ``abort`` opens the gates.
"""

import os
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from penstock import accelerator
from tests.accelerator.simulated import NAME, start

BACKEND = "simccl"

Exchange = Callable[[list[torch.Tensor], list[torch.Tensor]], Any]
"""A call of gloo, which fills tensors of the host with what others send of theirs."""


def register() -> None:
    """Make it the backend of the simulated device, once in a process."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, Collectives, devices=[NAME])
    # torch's recorder, from 2.15 on, takes a group that says its devices for one with a backend for each
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"


def _device() -> torch.device:
    return torch.device(NAME, 0)


class Queued(dist.Work):
    """A collective that is queued, up to ``done``. ``kept``: tensors that it reads and writes."""

    def __init__(self, done: torch.Event, kept: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._done, self._kept = done, kept

    def wait(self, timeout: timedelta | None = None) -> bool:
        accelerator.of(_device()).current_stream(_device()).wait_event(self._done)
        return True

    def get_future(self) -> "torch.futures.Future[None]":
        """It is complete as soon as all is queued, as NCCL's is."""
        found: torch.futures.Future[None] = torch.futures.Future()
        found.set_result(None)
        return found


class Collectives(dist.ProcessGroup):
    """One process group."""

    _device_types = property(lambda self: [_device()])

    def __init__(self, store: "dist.Store", rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._sim = start()
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._stream = torch.Stream(_device())
        self._calls = queue.SimpleQueue[Callable[[], None]]()
        self._lock = threading.Lock()
        self._staging: list[torch.Tensor] = []
        self._gates: set[int] = set()
        threading.Thread(target=self._work, name="simccl", daemon=True).start()

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getBackendName(self) -> str:  # noqa: N802 - torch's own
        return BACKEND

    def _work(self) -> None:
        while True:
            self._calls.get()()

    def _queue(self, sent: Sequence[torch.Tensor], got: Sequence[torch.Tensor], exchange: Exchange) -> Queued:
        for tensor in (*sent, *got):
            if tensor.device.type != NAME:
                raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
            if not tensor.is_contiguous():
                raise ValueError("Tensors must be contiguous")
        its = accelerator.of(_device())
        here, there = ([self._host(tensor) for tensor in tensors] for tensors in (sent, got))
        self._stream.wait_stream(its.current_stream(_device()))
        come, done = torch.Event(NAME), torch.Event(NAME)
        with its.queued_on(self._stream):
            for tensor, host in zip(sent, here, strict=True):
                host.copy_(tensor, non_blocking=True)
            come.record()
            gate = self._sim.close_gate()
            self._gates.add(gate)
            for tensor, host in zip(got, there, strict=True):
                tensor.copy_(host, non_blocking=True)
            done.record()

        def make() -> None:
            come.synchronize()
            try:
                exchange(here, there).wait()
            except RuntimeError:  # another rank is gone: on a GPU its kernel goes on waiting
                return
            self._open(gate)
            done.synchronize()
            with self._lock:
                self._staging += here + there

        self._calls.put(make)
        return Queued(done, (*sent, *got))

    def _host(self, like: torch.Tensor) -> torch.Tensor:
        """Page-locked memory for a tensor, which is not given back: that would wait for the device."""
        with self._lock:
            for i, kept in enumerate(self._staging):
                if kept.shape == like.shape and kept.dtype == like.dtype:
                    return self._staging.pop(i)
        return torch.empty(like.shape, dtype=like.dtype).pin_memory()

    def _open(self, gate: int) -> None:
        self._gates.discard(gate)
        self._sim.open_gate(gate)

    def abort(self) -> None:
        """Let the streams go on."""
        for gate in list(self._gates):
            self._open(gate)

    # ---- torch's own names

    def _allgather_base(self, out: torch.Tensor, part: torch.Tensor, options: Any = None) -> Queued:
        rows = self.size()
        return self._queue(
            [part], [out], lambda sent, got: self._gloo.allgather([[*got[0].view(rows, -1)]], [sent[0].view(-1)])
        )

    all_gather_single = _allgather_base

    def allgather(
        self, out: Sequence[Sequence[torch.Tensor]], part: Sequence[torch.Tensor], options: Any = None
    ) -> Queued:
        return self._queue(part, out[0], lambda sent, got: self._gloo.allgather([got], sent))

    def alltoall_base(
        self, out: torch.Tensor, into: torch.Tensor, outs: Sequence[int], ins: Sequence[int], options: Any = None
    ) -> Queued:
        assert not outs
        assert not ins
        return self._queue([into], [out], lambda sent, got: self._gloo.alltoall_base(got[0], sent[0], [], []))

    all_to_all_single = alltoall_base

    def barrier(self, options: Any = None) -> Queued:
        word = torch.zeros(1, device=_device())
        return self._allgather_base(torch.zeros(self.size(), device=_device()), word)
