"""An engine on a GPU that is not the caller's current one, as CUDA would see it: ``torch.cuda`` is a stand-in."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from penstock.engine import resources
from penstock.runtime.actions import Actions
from penstock.runtime.streams import DeviceStreams
from penstock.schedule.ir.ops import Op
from tests.models import MODELS
from tests.training import budget, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

SECOND = torch.device("cuda", 1)


class Stream:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait_stream(self, other: "Stream") -> None: ...

    def wait_event(self, event: "Event") -> None: ...

    def synchronize(self) -> None: ...


class Event:
    """All is over as soon as it is queued."""

    waited: ClassVar[list[tuple[str, torch.device]]] = []
    """(thread, its current device) of each wait"""
    of_thread: ClassVar["Selected"]

    def __init__(self, **_: bool) -> None:
        self.at = 0.0

    def record(self, stream: Stream) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        self.waited.append((threading.current_thread().name, self.of_thread.device))

    def elapsed_time(self, other: "Event") -> float:
        return 1e3 * (other.at - self.at)


class Selected(threading.local):
    """A thread's current device, and its current stream on each device. A thread begins with the first of all."""

    def __init__(self, default: Mapping[torch.device, Stream]) -> None:
        self.device = torch.device("cuda", 0)
        self.streams = dict(default)

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        before, self.device = self.device, device
        yield
        self.device = before

    @contextmanager
    def queued(self, stream: Stream) -> Iterator[None]:
        """A stream is selected without its device, so that whoever needs both enters both."""
        before, self.streams[stream.device] = self.streams[stream.device], stream
        yield
        self.streams[stream.device] = before


@pytest.fixture
def selected(monkeypatch: pytest.MonkeyPatch) -> Selected:
    devices = [torch.device("cuda", index) for index in range(2)]
    found = Selected({device: Stream(device) for device in devices})
    monkeypatch.setattr(Event, "of_thread", found, raising=False)
    monkeypatch.setattr(Event, "waited", [])
    for name, stand_in in {
        "Stream": Stream,
        "Event": Event,
        "device": found.on,
        "stream": found.queued,
        "current_stream": lambda device: found.streams[device],
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return found


def test_an_engines_calls_and_lanes_are_on_its_device(
    selected: Selected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they launch would otherwise be the current device's: the caller's, and the first GPU's in other threads. A
    thread that waits for an event would have memory taken there."""
    monkeypatch.setattr(resources, "streams_for", lambda device: DeviceStreams(SECOND))
    case, seen, told, act = MODELS["skips"], dict[str, set[Any]](), SimpleQueue[Any](), Actions.__call__

    def here() -> tuple[torch.device, Stream]:
        return selected.device, selected.streams[SECOND]

    def watched(self: Actions, op: Op) -> int:
        seen.setdefault(op.lane, set()).add(here())
        return act(self, op)

    def loss(model: nn.Module, micro_batch: dict[str, Any]) -> torch.Tensor:
        told.put(here())
        return case.loss_fn(model, micro_batch)

    monkeypatch.setattr(Actions, "__call__", watched)
    before, steps = here(), steps_of(case, 2)
    with wrap(case, budget(tmp_path / "store"), loss_fn=loss) as engine:
        streams = engine.inside.resources.streams
        assert isinstance(streams, DeviceStreams)
        assert {stream.device for stream in streams.streams.values()} == {SECOND}
        own = Stream(SECOND)
        with selected.queued(own):
            engine.prepare(steps[0])
            assert {told.get() for _ in range(told.qsize())} == {(SECOND, streams.streams["compute"])}
            for step in steps:
                engine.step(step)
            engine.evaluate(steps[0])
            assert here() == (before[0], own)
    assert here() == before
    assert {told.get() for _ in range(told.qsize())} == {(SECOND, streams.streams["compute"])}
    for lane in ("compute", "h2d", "d2h"):
        assert seen[lane] == {(SECOND, streams.streams[lane])}, lane
    assert {"penstock-cpu", "penstock-read"} <= {thread.rpartition("-")[0] for thread, _ in Event.waited}
    assert {device for _, device in Event.waited} == {SECOND}
