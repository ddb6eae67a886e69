"""The device's clock beside the host's: times of events are the host's, as near as it can be told."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock import accelerator
from penstock.runtime import streams
from penstock.runtime.streams import DeviceStreams

DEVICE = torch.device("cuda", 0)


class Event:
    """One that was recorded at a moment of the device's clock, in milliseconds."""

    at = 0.0

    def record(self, stream: "Stream") -> None:
        self.at = stream.clock.device

    def elapsed_time(self, other: "Event") -> float:
        return other.at - self.at


class Clock:
    """The host's clock in seconds, and the device's, which is a day ahead. Waiting for the device takes what ``waits``
    say, one after the other; an event is recorded a millisecond after it was queued."""

    def __init__(self, *waits: float) -> None:
        self.now, self._waits = 100.0, list(waits)

    @property
    def device(self) -> float:
        return (self.now + 86_400.001) * 1e3

    def wait(self) -> None:
        self.now += self._waits.pop(0) if self._waits else 0.001


class Stream:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def synchronize(self) -> None:
        self.clock.wait()


@pytest.mark.parametrize("waits", [(0.5, 0.001, 0.3), (0.001, 0.5, 0.3), (0.3, 0.5, 0.001)])
def test_of_some_looks_at_the_clock_the_quickest_counts(
    waits: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(0.0, *waits)  # first what was queued before
    its: Any = SimpleNamespace(
        current_stream=lambda device: Stream(clock),
        stream=lambda device: Stream(clock),
        event=lambda timed=False: Event(),
    )
    monkeypatch.setitem(accelerator.KINDS, "cuda", its)
    monkeypatch.setattr(streams, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    made = DeviceStreams(DEVICE)
    mark = made.mark("h2d")
    happened = clock.now = 107.0
    for event in (mark.begun, mark.done):
        assert event is not None
        event.record(made.streams["h2d"])
    made.resolve([mark])
    assert mark.start == pytest.approx(happened, abs=0.002)
