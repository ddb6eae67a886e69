"""Processes that train, to be killed: forked from a server that has imported torch once, so that one takes 0.1 s."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.store import Store
from tests.campaign import SETTINGS, digests, open_run, step_data
from tests.faults import Call, Go, intercepted
from tests.patience import PATIENCE
from tests.training import state_of
from tests.warm import server


@dataclass(frozen=True, kw_only=True)
class KillPoint:
    """An instant in a commit: at its system call number ``call``, before, after, or when half of it is done."""

    commit: int
    call: int
    when: str


@dataclass(frozen=True, kw_only=True)
class Diary:
    """What a process wrote down while it lived. ``state`` is what it ended with, None if it did not get there."""

    resumed: int | None
    numbers: dict[int, tuple[float, float]]
    state: dict[str, str] | None
    commits: list[int]
    """system calls of each commit"""

    @staticmethod
    def read(path: Path) -> "Diary":
        resumed, numbers, state, commits = None, {}, None, []
        for line in path.read_text().splitlines() if path.exists() else ():
            word, value = json.loads(line)
            if word == "resumed":
                resumed = value
            elif word == "step":
                numbers[value[0]] = (value[1], value[2])
            elif word == "commits":
                commits = value
            else:
                state = value
        return Diary(resumed=resumed, numbers=numbers, state=state, commits=commits)


class Victims:
    """Starts processes. ``setting`` is a name in ``SETTINGS``; each run lasts until step ``last``."""

    def __init__(self, setting: str, last: int) -> None:
        self.setting = setting
        self.last = last
        self._context = server()

    def start(self) -> None:
        """Have the server import what processes need, which takes seconds."""
        process = self._context.Process(target=_nothing)
        process.start()
        process.join(PATIENCE)

    def run(self, store: Path, diary: Path, *, after: float | None = None, at: KillPoint | None = None) -> Diary:
        """A process that trains on ``store``; killed ``after`` so many seconds, or ``at`` an instant of a commit."""
        code = self.call(train_here, self.setting, self.last, store, diary, at, after=after)
        found = Diary.read(diary)
        assert code == -signal.SIGKILL or (code == 0 and found.state is not None), code
        return found

    def call(
        self,
        target: Callable[..., None],
        *words: Any,
        after: float | None = None,
        meanwhile: Callable[[int], None] = lambda pid: None,
    ) -> int:
        """Run ``target(*words, ready)`` in a process, killed ``after`` so many seconds; its exit code.

        ``meanwhile`` is called with its process id as soon as it is ready.
        """
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(*words, theirs))
        process.start()
        theirs.close()
        try:
            assert ours.poll(PATIENCE), "the process does not start"
            ours.recv()
            assert process.pid is not None
            meanwhile(process.pid)
            if after is not None:
                time.sleep(after)
                process.kill()
            process.join(PATIENCE)
            assert process.exitcode is not None, "the process hangs"
            return process.exitcode
        finally:
            process.kill()
            process.join()


@contextmanager
def victims_of_one_thread() -> Iterator[None]:
    """The server that processes are forked from must have no other threads, which a fork would lose."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            patch.setenv(name, "1")
        yield


def _nothing() -> None:
    pass


def train_here(name: str, last: int, store: Path, diary: Path, at: KillPoint | None, ready: Connection) -> None:
    """Train up to step ``last``, in this process, and write down how it goes."""
    torch.set_num_threads(1)
    file = os.open(diary, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(word: str, value: Any) -> None:
        os.write(file, (json.dumps([word, value]) + "\n").encode())

    commits = _Commits(at)
    with ExitStack() as stack:
        stack.enter_context(intercepted(store, commits))
        stack.enter_context(commits.watched())
        ready.send(None)
        with open_run(SETTINGS[name], store) as engine:
            note("resumed", engine.step_count)
            for step in range(engine.step_count + 1, last + 1):
                stats = engine.step(step_data(step))
                note("step", (step, stats.loss, stats.grad_norm))
            state = digests(state_of(engine))
    note("commits", commits.calls)
    note("state", state)


class _Commits:
    """Counts the system calls of each commit, and kills the process at one of them."""

    def __init__(self, at: KillPoint | None) -> None:
        self._at = at
        self._inside = threading.local()
        self.calls: list[int] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        real = Store.commit

        def commit(store: Store, *rest: Any, **more: Any) -> Any:
            self.calls.append(0)
            self._inside.commit = len(self.calls) - 1
            try:
                return real(store, *rest, **more)
            finally:
                self._inside.commit = None

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Store, "commit", commit)
            yield

    def __call__(self, call: Call, go: Go) -> Any:
        number = getattr(self._inside, "commit", None)
        if number is None:
            return go()
        here = self.calls[number]
        self.calls[number] += 1
        if self._at is None or (number, here) != (self._at.commit, self._at.call):
            return go()
        if self._at.when == "half" and call.writes:
            go(call.nbytes // 2)
        elif self._at.when != "before":
            go()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")
