"""Turns of engines: their calls come one after another, and only in the process that made the engine.

A step uses what a process has once: torch's random state, which it sets for each stage and puts back, and the handler
of Ctrl-C. So a call of one engine waits for that of another in another thread. Two calls of one engine at once would be
in an order that nobody has asked for: the second is refused, and so is a call from within another one.

A forked child has the engine's memory, but neither its threads nor its locks, and its store is the parent's: there,
``close`` does nothing, and all else is refused.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from penstock.engine.interrupt import holding, whole_calls
from penstock.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


class Owned(Protocol):
    """An object of one process. ``_process``: the id of the one that made it. ``_around_call``: what each of its calls
    is made within."""

    _process: int

    def _around_call(self) -> AbstractContextManager[None]: ...


Self = TypeVar("Self", bound=Owned)


class _Turns:
    """The turn, and the threads of calls that have or await it, by what they are of."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.calls: dict[int, threading.Thread] = {}
        self.changing = threading.Lock()


_turns = _Turns()
_LOOK = 0.1
"""Seconds after which a call that waits for its turn looks for Ctrl-C."""


def _start_anew() -> None:
    """In a forked child, whose only thread has no call under way that could ever end."""
    global _turns
    _turns = _Turns()


os.register_at_fork(after_in_child=_start_anew)


@contextmanager
def alone(owner: object, what: str = "this engine") -> Iterator[None]:
    """Within: no other call of any engine. ``owner``: what must not be used twice at once; ``what`` names it.

    Raises:
        ConfigError: it is in use, or this thread is within a call already.
    """
    turns, me = _turns, threading.current_thread()
    with whole_calls():
        with turns.changing:
            user = turns.calls.get(id(owner))
            if user is not None and user is not me:
                raise ConfigError(f"{what} is in use by thread {user.name!r}: call it from one thread at a time")
            if me in turns.calls.values():
                raise ConfigError(f"{what} was called within a call of an engine (in its loss_fn?): call it after that")
            turns.calls[id(owner)] = me
        try:
            while not turns.turn.acquire(timeout=_LOOK):
                with holding(False):  # Ctrl-C is not kept waiting for another engine's call
                    pass
            try:
                yield
            finally:
                turns.turn.release()
        finally:
            with turns.changing:
                del turns.calls[id(owner)]


def in_turn(method: Callable[Concatenate[Self, P], R]) -> Callable[Concatenate[Self, P], R]:
    """A method of an engine that waits for its turn.

    Raises:
        ConfigError: as ``alone``; or this is a forked child of the process that made the engine.
    """

    @functools.wraps(method)
    def call(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if is_foreign(self):
            raise ConfigError(
                f"this engine belongs to process {self._process}, and this is process {os.getpid()}, forked from it: "
                "an engine's threads and its store stay with the process that made it. Make one here, with a store of "
                "its own"
            )
        with alone(self), self._around_call():
            return method(self, *args, **kwargs)

    return call


def outside_of_inference_mode() -> AbstractContextManager[None]:
    """Within, torch notes changes of tensors, also where the caller evaluates in ``torch.inference_mode()``: what an
    engine makes there may be of use later, and a model's blocks could not be run one by one."""
    return torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext()


def is_foreign(owned: Owned) -> bool:
    """True if this process is another than the one that made it: a forked child of it."""
    return owned._process != os.getpid()
