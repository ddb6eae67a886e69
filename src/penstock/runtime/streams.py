"""When an op is really done: at once on the CPU, at an event on a CUDA stream.

On CUDA the lanes ``compute``, ``h2d``, ``d2h`` and ``net`` are streams. Such an op counts as complete as soon as it is
queued; whoever depends on it, or reuses a buffer that it gave back, waits for its event: another stream by
``wait_event``, a host thread (``read``, ``write``, ``cpu``) by blocking.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from penstock.schedule.ir.lanes import Lane


@dataclass(kw_only=True, slots=True)
class Mark:
    """An op's place in time. ``start``/``end`` are perf_counter seconds on the CPU; on CUDA they come from events."""

    lane: Lane
    start: float = 0.0
    end: float = 0.0
    begun: "torch.cuda.Event | None" = None
    done: "torch.cuda.Event | None" = None
    moved: int = 0
    """bytes, as counted by whoever moved them"""


class HostStreams:
    """The CPU: an op is done when its function returns."""

    @contextmanager
    def run(self, lane: Lane, waits: Iterable[Mark]) -> Iterator[Mark]:
        mark = Mark(lane=lane, start=time.perf_counter())
        yield mark
        mark.end = time.perf_counter()

    def restart(self) -> None:
        """Nothing to do: there is one clock."""

    def used_on(self, lane: Lane, tensor: torch.Tensor) -> None:
        """Nothing to do: freed memory is free at once."""

    def resolve(self, marks: Iterable[Mark]) -> None:
        """Nothing to do: the times are known."""

    def synchronize(self) -> None:
        """Nothing is ever queued."""


class CudaStreams:
    """One stream per device lane; events order them against each other and against host threads."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # compute stays on the current stream: the model's own code and its allocations belong to it.
        self.streams: dict[Lane, torch.cuda.Stream] = {
            "compute": torch.cuda.current_stream(device),
            "h2d": torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
            "d2h": torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
            "net": torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
        }
        self.restart()

    def restart(self) -> None:
        """Start the clock anew: events tell time in fp32 milliseconds, which are exact only for a short while."""
        self._origin = _event()
        self._origin.record(self.streams["compute"])
        self._origin.synchronize()
        self._origin_time = time.perf_counter()

    @contextmanager
    def run(self, lane: Lane, waits: Iterable[Mark]) -> Iterator[Mark]:
        stream = self.streams.get(lane)
        mark = Mark(lane=lane)
        if stream is None:
            for other in waits:
                if other.done is not None:
                    other.done.synchronize()
            mark.start = time.perf_counter()
            yield mark
            mark.end = time.perf_counter()
            return
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            for other in waits:
                if other.done is not None and other.lane != lane:
                    stream.wait_event(other.done)
            mark.begun, mark.done = _event(), _event()
            mark.begun.record(stream)
            yield mark
            mark.done.record(stream)

    def used_on(self, lane: Lane, tensor: torch.Tensor) -> None:
        """Keep the tensor's memory from being reused before the lane's work that is queued now is done."""
        tensor.record_stream(self.streams[lane])

    def resolve(self, marks: Iterable[Mark]) -> None:
        """Fill in the times of queued ops; waits for all of them."""
        self.synchronize()
        for mark in marks:
            if mark.begun is not None and mark.done is not None:
                mark.start = self._origin_time + self._origin.elapsed_time(mark.begun) / 1e3
                mark.end = self._origin_time + self._origin.elapsed_time(mark.done) / 1e3

    def synchronize(self) -> None:
        for stream in self.streams.values():
            stream.synchronize()


def streams_for(device: torch.device) -> HostStreams | CudaStreams:
    return CudaStreams(device) if device.type == "cuda" else HostStreams()


def _event() -> torch.cuda.Event:
    # blocking: a host thread that waits sleeps, and leaves its core to the optimizer
    return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
