"""The moment when an op is really done: at once on the CPU, at an event on a stream of an accelerator.

There the lanes ``compute``, ``h2d``, ``d2h``, and those between ranks, are streams. Such an op counts as complete as
soon as it is queued; whoever depends on it, or reuses a buffer that it gave back, waits for its event: another stream
by ``wait_event``, a host thread (``read``, ``write``, ``cpu``) by blocking.
"""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from penstock import accelerator
from penstock.schedule.ir.lanes import Lane

_OF_DEVICE: tuple[Lane, ...] = ("h2d", "d2h", "net", "nic", "send", "recv")
"""Lanes that queue on a stream of their own."""
_ORIGINS = 3
"""Events that the device's clock is compared with the host's at, each time that it starts."""


@dataclass(kw_only=True, slots=True)
class Mark:
    """An op's place in time. ``start``/``end`` are perf_counter seconds of the host, or come from events."""

    lane: Lane
    start: float = 0.0
    end: float = 0.0
    begun: torch.Event | None = None
    done: torch.Event | None = None
    moved: int = 0
    """bytes, as counted by whoever moved them"""


class HostStreams:
    """The CPU: an op is done when its function returns."""

    def mark(self, lane: Lane) -> Mark:
        """For an op of a lane, as often as it runs: one time at a time."""
        return Mark(lane=lane)

    def on(self, lane: Lane) -> AbstractContextManager[None]:
        """Nothing to do: there are no streams."""
        return nullcontext()

    def begin(self, mark: Mark, waits: Iterable[Mark]) -> None:
        """An op begins. ``waits``: marks of those that come before it."""
        mark.start = time.perf_counter()

    def end(self, mark: Mark) -> None:
        """Mark the end of an op: its function has returned."""
        mark.end = time.perf_counter()

    def restart(self) -> None:
        """Nothing to do: there is one clock."""

    def used_on(self, lane: Lane, tensor: torch.Tensor) -> None:
        """Nothing to do: freed memory is free at once."""

    def resolve(self, marks: Iterable[Mark]) -> None:
        """Nothing to do: the times are known."""

    def synchronize(self) -> None:
        """Nothing to do: nothing is ever queued."""

    def around_caller(self) -> AbstractContextManager[None]:
        """Nothing to do: there are no streams."""
        return nullcontext()


class DeviceStreams:
    """One stream per device lane; events order them against each other and against host threads."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # compute stays on the current stream: the model's own code and its allocations belong to it.
        self._its = its = accelerator.of(device)
        self.streams: dict[Lane, torch.Stream] = {
            "compute": its.current_stream(device),
            **{lane: its.stream(device) for lane in _OF_DEVICE},
        }
        self.restart()

    def restart(self) -> None:
        """Start the clock anew: events tell time in fp32 milliseconds, which are exact only for a short while.

        By the host's clock an event was some time before this thread saw that it was. Of a few, the one counts that was
        seen soonest, and none is waited for by itself: such a wait sleeps, and to wake up takes longer.
        """
        stream, soonest = self.streams["compute"], math.inf
        stream.synchronize()
        for _ in range(_ORIGINS):
            origin, before = self._its.event(timed=True), time.perf_counter()
            origin.record(stream)
            stream.synchronize()
            seen = time.perf_counter()
            if seen - before < soonest:
                soonest, self._origin, self._origin_time = seen - before, origin, seen

    def mark(self, lane: Lane) -> Mark:
        """For an op of a lane, as often as it runs: one time at a time. Its events are made here and recorded anew."""
        if lane not in self.streams:
            return Mark(lane=lane)
        return Mark(lane=lane, begun=self._its.event(timed=True), done=self._its.event(timed=True))

    def on(self, lane: Lane) -> AbstractContextManager[None]:
        """Within, the calling thread queues on the lane's stream, if it has one. Our device is its current one."""
        stream = self.streams.get(lane)
        return self._its.selected(self.device) if stream is None else self._its.queued_on(stream)

    def begin(self, mark: Mark, waits: Iterable[Mark]) -> None:
        """An op begins, in a thread that is ``on`` its lane. ``waits``: marks of those that come before it."""
        if mark.begun is None:
            for other in waits:
                if other.done is not None:
                    other.done.synchronize()
            mark.start = time.perf_counter()
            return
        stream = self.streams[mark.lane]
        for other in waits:
            if other.done is not None and other.lane != mark.lane:
                stream.wait_event(other.done)
        mark.begun.record(stream)

    def end(self, mark: Mark) -> None:
        """All of it is queued, or done where its lane has no stream."""
        if mark.done is None:
            mark.end = time.perf_counter()
        else:
            mark.done.record(self.streams[mark.lane])

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

    @contextmanager
    def around_caller(self) -> Iterator[None]:
        """Within, the caller's stream is ``compute``, whichever it was, and its device is ours. What the caller has
        queued on its own stream comes before what is done within, and what it queues there later comes behind that."""
        compute, own = self.streams["compute"], self._its.current_stream(self.device)
        if own != compute:
            compute.wait_stream(own)
        try:
            with self._its.queued_on(compute):
                yield
        finally:
            if own != compute:
                own.wait_stream(compute)


Streams = HostStreams | DeviceStreams


def streams_for(device: torch.device) -> Streams:
    return HostStreams() if device.type == "cpu" else DeviceStreams(device)


def settle(streams: Streams, error: BaseException) -> None:
    """Wait for what is queued, when a step has failed: a device that fails then, too, hides no first error, nor does an
    interrupt, before which buffers cannot be given back."""
    while True:
        try:
            streams.synchronize()
        except KeyboardInterrupt:
            continue
        except RuntimeError as other:
            error.add_note(f"and what was queued then failed: {other}")
        return
