"""The run that every fault of the campaign hits: small, with all state on disk, and known step by step.

A ``Setting`` is a way to train. Its ``numbers`` decide the bits; its ``how`` must not, so what a run should have done
is known from a run without it (``truth``). To put a new way through every fault, add it to ``SETTINGS``.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

import penstock
from penstock.errors import StoreError
from tests.accelerator import DEVICE
from tests.models import VOCABULARY, Case, causal_lm
from tests.training import AT_ONCE, MicroBatches, assert_same_state, budget, state_of, steps_of, wrap


class Net(nn.Module):
    """Blocks with dropout, and a running mean, so that random state and the model's buffers have to survive as well.

    Each array of a block takes several pages, so a write can be torn; running it needs no more than torch.
    """

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 24)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 96), nn.ReLU(), nn.Dropout(0.2), nn.Linear(96, 24)) for _ in range(2)
        )
        self.head = nn.Linear(24, VOCABULARY)
        self.register_buffer("mean", torch.zeros(24))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(x)
        with torch.no_grad():
            self.mean.lerp_(x.mean((0, 1)).to(self.mean.dtype), 0.1)
        x = x - self.mean.to(x.dtype)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


CASE = Case(build=Net, micro_batch=causal_lm, blocks=2, loss_fn=lambda m, mb: m(**mb))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A way to train."""

    numbers: Mapping[str, Any]
    """arguments of ``wrap`` that decide the bits"""
    how: Mapping[str, Any] = field(default_factory=dict)
    """arguments of ``wrap`` that must not"""
    budget: Mapping[str, Any] = field(default_factory=dict)
    """arguments of ``Budget``"""
    lag: int = 0
    """steps that may be lost although ``step`` had returned"""


SETTINGS = {
    "fp32": Setting(numbers={"precision": "fp32", "clip_grad_norm": None}, how=AT_ONCE),
    "bf16, clipped": Setting(numbers={"precision": "bf16", "clip_grad_norm": 1.25}, how=AT_ONCE),
    "speculating": Setting(numbers={"precision": "fp32", "clip_grad_norm": 1.25}, how={"speculate": True, **AT_ONCE}),
    "half delayed": Setting(numbers={"precision": "bf16", "clip_grad_norm": 1.25}, how={"delay": 0.5}, lag=1),
    "in memory, every 2 steps": Setting(
        numbers={"precision": "bf16", "clip_grad_norm": 1.25},
        budget={"weights": "host", "state": "host", "durability": "interval", "interval": 2},
        lag=3,
    ),
}

ON_ACCELERATOR = {
    "on an accelerator": Setting(
        numbers={"precision": "bf16", "clip_grad_norm": 1.25, "device": DEVICE},
        how={"speculate": True, **AT_ONCE},
        budget={"activations": "disk"},
    ),
}
"""Cases for tests that are marked ``accelerator``: its random numbers are its own, and so are all that follow from
them."""


def named(name: str) -> Setting:
    """One of all settings."""
    return (SETTINGS | ON_ACCELERATOR)[name]


def share(total: int) -> int:
    """How many of ``total`` cases, spread over all settings, are for one of them."""
    return -(-total // len(SETTINGS))


def open_run(setting: Setting, store: Path, model: nn.Module | None = None) -> penstock.Engine:
    """A new run, or the one that is in ``store``."""
    return wrap(CASE, budget(store, **setting.budget), model=model, **setting.numbers, **setting.how)


@cache
def step_data(step: int) -> MicroBatches:
    """The micro-batches of a step, the same ones in every run."""
    return steps_of(CASE, 1, first=step, lengths=(12, 8))[0]


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What a run that nothing happens to does: (loss, norm) of each step, and the state after each; 0 is the start."""

    numbers: dict[int, tuple[float, float]]
    states: dict[int, dict[str, torch.Tensor]]

    def after(self, step: int, last: int) -> dict[int, tuple[float, float]]:
        """The numbers of the steps after ``step``, up to ``last``."""
        return {s: self.numbers[s] for s in range(step + 1, last + 1)}


STEPS = 12
"""steps of a whole run"""


@cache
def truth(name: str) -> Truth:
    """The numbers of an undisturbed run of the setting of that name."""
    numbers, states = {}, {}
    setting = named(name)
    with TemporaryDirectory() as folder, wrap(CASE, budget(Path(folder) / "d"), **setting.numbers) as engine:
        states[0] = state_of(engine)
        for step in range(1, STEPS + 1):
            stats = engine.step(step_data(step))
            numbers[step] = (stats.loss, stats.grad_norm)
            states[step] = state_of(engine)
    return Truth(numbers=numbers, states=states)


def go_on(engine: penstock.Engine, last: int) -> dict[int, tuple[float, float]]:
    """Train up to step ``last``; (loss, norm) of each step taken."""
    found = {}
    for step in range(engine.step_count + 1, last + 1):
        stats = engine.step(step_data(step))
        found[step] = (stats.loss, stats.grad_norm)
    return found


def digests(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """What stands for a state's bits where it is too long."""
    return {n: hashlib.sha256(t.flatten().view(torch.uint8).numpy().tobytes()).hexdigest() for n, t in state.items()}


class Attempt:
    """A run that does what it is told, whatever fails on the way, and checks that it always goes on where it should.

    What fails is tried again: in the same engine, and where that refuses, in a new one on the same store.
    """

    def __init__(
        self,
        name: str,
        store: Path,
        *,
        model: Callable[[], nn.Module] = CASE.model,
        survives: tuple[type[BaseException], ...] = (StoreError,),
    ) -> None:
        """``name``: of a setting. ``survives``: the errors that are expected."""
        self._setting = named(name)
        self._store = store
        self._known = truth(name)
        self._model = model
        self._survives = survives
        self._engine: penstock.Engine | None = None
        self._done = self._target = 0
        self.errors: list[BaseException] = []
        self.engines = 0

    def to(self, last: int) -> None:
        """Train up to step ``last``."""
        for step in range(self._target + 1, last + 1):
            self.insist(partial(self._step, step=step))

    def insist(self, action: Callable[[penstock.Engine], None]) -> None:
        """Have it done, at the third try at the latest."""
        for _ in range(3):
            try:
                if self._engine is None:
                    self._engine = open_run(self._setting, self._store, self._model())
                    self.engines += 1
                    self.look(self._engine)
                    self._step(self._engine, self._target)
                action(self._engine)
                return
            except self._survives as failure:
                self.errors.append(failure)
                if len(self.errors) > 1 or self._engine is None:
                    self.close()
        raise self.errors[-1]

    def look(self, engine: penstock.Engine) -> None:
        """It has the state of the last step that had been reported, or of the one under way, bit for bit."""
        assert self._done - self._setting.lag <= engine.step_count <= self._done + 1
        assert_same_state(state_of(engine), self._known.states[engine.step_count])

    def close(self) -> None:
        """The next thing to do is done by a new engine."""
        engine, self._engine = self._engine, None
        try:
            if engine is not None:
                engine.close()
        except self._survives as failure:  # what is lost is for ``look`` to say
            self.errors.append(failure)

    def _step(self, engine: penstock.Engine, step: int) -> None:
        self._target = step
        for done in range(engine.step_count + 1, step + 1):
            assert go_on(engine, done) == self._known.after(done - 1, done)
            self._done = done
        engine.inside.durability.check_usable()  # what counts and is not committed is whole in memory
        if (last := engine.last_step) is not None:  # a step whose commit failed counts
            assert (last.loss, last.grad_norm) == self._known.numbers[engine.step_count]
