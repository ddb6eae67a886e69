"""Tells the simulated device's clocks what they cannot see: what host threads touch, and what orders them.

| who | is ordered behind |
|---|---|
| an op of a lane | the ops that it waits for, and those whose buffers it takes; not what was before it by chance |
| the first ops of a step | what the caller has done by then |
| the caller, after a step | all ops of the step |
| a thread that begins, that is waited for | who began it, what it did |
| a task of a thread pool | who gave it; who asks for its result is behind it |
| who has received the gradient of an output | the copy of that output which was sent: without it there is none |
| autograd's threads, and who called backward | each other, where a backward begins and ends |
| who holds a lock of a background write | whoever held it before |
| who may change an array | whoever has made its pieces safe from a background write |

What waits for the device tells the clocks by itself. Host memory is looked at where the engine touches it: in the
store's reads and writes, copies by numpy, and the optimizer's kernels. Only what is page-locked counts, because a
device reads and writes no other host memory after a call has returned. What ranks send each other is host memory, too.
"""

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from penstock.optim import kernels
from penstock.optim.codes import Codes
from penstock.ranks.process_groups import Together
from penstock.runtime.actions import Actions
from penstock.runtime.executor import Executor
from penstock.runtime.streams import DeviceStreams, Mark
from penstock.schedule.ir.ops import Op
from penstock.state import background
from penstock.store.store import Store
from tests.accelerator.simulated import Simulated

_keys = itertools.count(1)

PLAIN = SimpleNamespace(begin=DeviceStreams.begin, end=DeviceStreams.end, restart=DeviceStreams.restart)
"""What is watched, as it stands in the engine, for tests that change it."""


def install(sim: Simulated) -> None:
    """Watching begins for good: a process that has the device tells its clocks."""
    _watch_ops(sim)
    _watch_threads(sim)
    _watch_locks(sim)
    _watch_memory(sim)


def _watch_ops(sim: Simulated) -> None:
    run_step, act, send = Executor.run, Actions.__call__, Together.send
    under_way = threading.local()
    of_output: dict[tuple[int, int], int] = defaultdict(_keys.__next__)
    of_step: dict[int, int] = {}
    of_mark: dict[int, tuple[Mark, int]] = {}
    of_failed = list[int]()
    """what failed in a step: who runs it goes on when nothing runs any more"""

    def begin(self: DeviceStreams, mark: Mark, waits: Iterable[Mark]) -> None:
        behind = list(waits)
        if id(self) in of_step:
            sim.hear(of_step[id(self)])
        for other in behind:
            sim.hear(of_mark[id(other)][1])
        PLAIN.begin(self, mark, behind)

    def end(self: DeviceStreams, mark: Mark) -> None:
        PLAIN.end(self, mark)
        key = next(_keys)
        of_mark[id(mark)] = (mark, key)
        sim.tell(key)

    def restart(self: DeviceStreams) -> None:  # the lanes start right after it
        PLAIN.restart(self)
        of_step[id(self)] = key = next(_keys)
        sim.tell(key)

    def step(self: Executor) -> None:
        of_mark.clear()
        of_failed.clear()
        try:
            run_step(self)
        finally:
            of_step.pop(id(self.streams), None)
            for key in (*(key for _, key in of_mark.values()), *of_failed):
                sim.hear(key)

    def labelled(self: Actions, op: Op) -> int:
        sim.label(str(op.id))
        under_way.op = op
        try:
            return act(self, op)
        except BaseException:
            key = next(_keys)
            of_failed.append(key)
            sim.tell(key)
            raise
        finally:
            sim.label("")
            if op.id.kind == "RD":
                sim.hear(of_output[op.id.stage, op.id.micro_batch])

    def watched_send(self: Together, tensor: torch.Tensor, peer: int) -> None:
        op = under_way.op
        if op.id.kind == "SA":
            sim.tell(of_output[op.id.stage, op.id.micro_batch])
        send(self, tensor, peer)

    DeviceStreams.begin = begin  # type: ignore[method-assign]
    DeviceStreams.end = end  # type: ignore[method-assign]
    DeviceStreams.restart = restart  # type: ignore[method-assign]
    Executor.run = step  # type: ignore[method-assign]
    Actions.__call__ = labelled  # type: ignore[method-assign]
    Together.send = watched_send  # type: ignore[method-assign]


def _watch_threads(sim: Simulated) -> None:
    start, join = threading.Thread.start, threading.Thread.join
    submit, result = ThreadPoolExecutor.submit, Future.result

    def watched_start(self: threading.Thread) -> None:
        begun, ended = next(_keys), next(_keys)
        run = self.run

        def watched_run() -> None:
            sim.hear(begun)
            if self.name == "penstock-background":  # which runs no ops, of which each has a label of its own
                sim.label("a background write")
            try:
                run()
            finally:
                sim.tell(ended)

        self.run = watched_run  # type: ignore[method-assign]
        self.sim_ended = ended  # type: ignore[attr-defined]
        sim.tell(begun)
        start(self)

    def watched_join(self: threading.Thread, timeout: float | None = None) -> None:
        join(self, timeout)
        if hasattr(self, "sim_ended") and not self.is_alive():
            sim.hear(self.sim_ended)

    def watched_submit(self: ThreadPoolExecutor, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        given, done = next(_keys), next(_keys)

        def watched(*args: Any, **kwargs: Any) -> Any:
            sim.hear(given)
            try:
                return work(*args, **kwargs)
            finally:
                sim.tell(done)

        sim.tell(given)
        future = submit(self, watched, *args, **kwargs)
        future.sim_done = done  # type: ignore[attr-defined]
        return future

    def watched_result(self: Future[Any], timeout: float | None = None) -> Any:
        try:
            return result(self, timeout)
        finally:
            if hasattr(self, "sim_done"):
                sim.hear(self.sim_done)

    run_backward = torch.autograd._engine_run_backward

    def watched_backward(*args: Any, **kwargs: Any) -> Any:
        sim.meet_autograd()
        try:
            return run_backward(*args, **kwargs)
        finally:
            sim.meet_autograd()

    torch.autograd._engine_run_backward = watched_backward
    threading.Thread.start = watched_start  # type: ignore[method-assign]
    threading.Thread.join = watched_join  # type: ignore[method-assign]
    ThreadPoolExecutor.submit = watched_submit  # type: ignore[method-assign, assignment]
    Future.result = watched_result  # type: ignore[method-assign]


def _watch_locks(sim: Simulated) -> None:
    class Lock:
        """A stand-in for ``threading.Lock``."""

        def __init__(self) -> None:
            self._plain, self._key = threading.Lock(), next(_keys)

        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            taken = self._plain.acquire(blocking, timeout)
            if taken:
                sim.hear(self._key)
            return taken

        def release(self) -> None:
            sim.tell(self._key)
            self._plain.release()

        def locked(self) -> bool:
            return self._plain.locked()

        def __enter__(self) -> bool:
            return self.acquire()

        def __exit__(self, *_: object) -> None:
            self.release()

    def condition(lock: Any = None) -> threading.Condition:
        return threading.Condition(Lock() if lock is None else lock)

    make_safe, before_change, safe = background.Pieces.make_safe, background.Background.before_change, next(_keys)

    def watched_make_safe(self: Any, piece: Any) -> None:
        sim.tell(safe)
        make_safe(self, piece)

    def watched_before_change(self: Any, name: str, start: int, numel: int) -> None:
        before_change(self, name, start, numel)
        sim.hear(safe)

    background.Pieces.make_safe = watched_make_safe  # type: ignore[method-assign]
    background.Background.before_change = watched_before_change  # type: ignore[method-assign]
    names = {name: getattr(threading, name) for name in threading.__all__}
    background.threading = SimpleNamespace(**names | {"Lock": Lock, "Condition": condition})  # type: ignore[attr-defined]


def _arrays(given: Any) -> Iterator[Any]:
    """The arrays in an argument: one, or moments, which may have codes and scales."""
    for one in given if isinstance(given, tuple) else (given,):
        yield from (one.codes, one.scales) if isinstance(one, Codes) else (one,)


def _watch_memory(sim: Simulated) -> None:
    def touched(array: Any, what: str, *, writes: bool) -> None:
        if isinstance(array, torch.Tensor) and array.device.type == "cpu":
            sim.host_access(array.data_ptr(), array.numel() * array.itemsize, what, writes=writes)
        elif isinstance(array, np.ndarray):
            sim.host_access(array.__array_interface__["data"][0], array.nbytes, what, writes=writes)

    def watched(
        owner: Any, name: str, what: str, reads: tuple[int | str, ...] = (), writes: tuple[int | str, ...] = ()
    ) -> None:
        """Arguments that are read, and those that are written (both, if they are in both), by place or name."""
        plain = getattr(owner, name)

        @wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = {**dict(enumerate(args)), **kwargs}
            for names, written in ((reads, False), (writes, True)):
                for key in names:
                    for array in _arrays(given.get(key)):
                        touched(array, what, writes=written)
            return plain(*args, **kwargs)

        setattr(owner, name, call)

    watched(Together, "send", "a message that is sent", reads=(1,))
    watched(Together, "receive", "a message that has come", writes=(1,))
    watched(Store, "read", "a read from disk", writes=(3,))
    watched(Store, "write", "a write to disk", reads=(3,))
    watched(np, "copyto", "a copy on the host", reads=(1,), writes=(0,))
    watched(kernels, "step", "an optimizer step", reads=("grad",), writes=("weights", "rest", "moments"))
    watched(kernels, "partial_norms", "a norm", reads=(0,))
    watched(kernels, "add", "an addition", reads=(1,), writes=(0,))
    watched(kernels, "cast", "a cast", reads=(1,), writes=(0,))
