"""Any calls of an engine in any order, by somebody who also does what one does around calls: each step has the loss,
each look the values, of an engine in memory that runs one op at a time and is called where it matters alone.

``CALLS`` has what may happen. A case prints as the list of their names; ``--campaign`` plays many.
"""

import copy
import gc
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.engine.fate import State
from penstock.errors import ConfigError, ModelError, NonFiniteError, StoreError
from penstock.state.values import Values
from penstock.tape.rng import RandomState
from tests.conftest import Campaign
from tests.models import VOCABULARY
from tests.training import abandon, assert_same_state, budget, default_dtype, state_of

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, MOST = 16, 16
CPU = torch.device("cpu")


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.down(torch.tanh(self.up(x))))
        return x + self.norm(y.flatten(0, 1)).view_as(x)


class Net(nn.Module):
    """A head tied to the embedding, running statistics, dropout, and a tower that only a step with images reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.tower = nn.ModuleList(_Block() for _ in range(2))
        self.scale = 1.0

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        if image is not None:
            for block in self.tower:
                image = block(image)
            x = x + image.mean(1, keepdim=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class BrokenOffError(Exception):
    """What the loss function raises."""


class Loss:
    """The loss function of an engine. ``fails``: calls until it raises, by whether the model has run; None: never."""

    def __init__(self) -> None:
        self.fails: tuple[int, bool] | None = None
        self.factor = 1.0
        self.does: Callable[[], object] | None = None

    def __call__(self, model: nn.Module, micro_batch: Mapping[str, Any]) -> torch.Tensor:
        self._maybe(False)
        loss: torch.Tensor = model(**micro_batch)
        self._maybe(True)
        if (does := self.does) is not None:
            self.does = None
            does()
        return loss * self.factor

    def _maybe(self, ran: bool) -> None:
        if self.fails is not None and self.fails[1] is ran:
            self.fails = None if self.fails[0] == 0 else (self.fails[0] - 1, ran)
            if self.fails is None:
                raise BrokenOffError


def micro_batches(rng: Random) -> list[dict[str, torch.Tensor]]:
    generator, image = torch.Generator().manual_seed(rng.randrange(10**6)), rng.random() < 0.5
    found = []
    for length in rng.sample((3, 5, 8), rng.randint(1, 3)):
        ids = torch.randint(0, VOCABULARY, (2, length), generator=generator)
        found.append({"ids": ids, "labels": ids.roll(1, 1)})
        if image:
            found[-1]["image"] = torch.randn(2, 3, WIDTH, generator=generator)
    return found


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


AROUND: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
    nullcontext,
    torch.no_grad,
    torch.inference_mode,
    lambda: default_dtype(torch.float64),
    lambda: default_dtype(torch.bfloat16),
    lambda: torch.device("cpu"),
    deterministic,
    torch.autograd.graph.save_on_cpu,
    lambda: torch.autograd.set_multithreading_enabled(False),
)
PLACES: tuple[dict[str, Any], ...] = (
    {},
    {"slots": 1},
    {"weights": "host"},
    {"weights": None, "state": None},
    {"disk": None},
    {"weights": "host", "state": "host", "durability": "interval", "interval": 2},
)
NUMBERS: tuple[dict[str, Any], ...] = (
    {"optimizer": penstock.AdamW(lr=1e-2, weight_decay=0.1)},
    {"optimizer": penstock.SGD(lr=0.1, momentum=0.9), "clip_grad_norm": None},
)


class Life:
    """An engine and the one that says what must be, with what somebody does to both."""

    def __init__(self, rng: Random, folder: Path) -> None:
        self.rng, self.folder = rng, folder
        self.places = rng.choice(PLACES)
        self.numbers = {"clip_grad_norm": 2.0} | rng.choice(NUMBERS)
        self.how: dict[str, Any] = {"overlap": rng.random() < 0.7}
        if self.numbers["clip_grad_norm"] is not None:
            self.how["delay"] = rng.choice((0, 0.5, 1.0))
            self.how["speculate"] = None if "slots" in self.places else rng.choice((None, False))
        self.log: list[str] = [f"{self.places} {self.numbers} {self.how}"]
        self.losses = Loss(), Loss()
        self.plain = self._wrapped(budget(None), self.losses[1], overlap=False, delay=0)
        self.open()
        self.held: Values | None = None
        self.position: dict[str, int] | None = None
        self.saved = False
        self._keep()

    def _wrapped(self, where: penstock.Budget, loss: Loss, **how: Any) -> penstock.Engine:
        torch.manual_seed(0)
        settings = {"loss_fn": loss, "precision": "fp32", "device": "cpu", "plan": None, "seed": 3}
        return penstock.wrap(Net().train(), budget=where, **settings, **self.numbers, **how)

    def open(self) -> None:
        disk = None if "disk" in self.places else self.folder / "store"
        places = {key: value for key, value in self.places.items() if key != "disk"}
        self.engine = self._wrapped(budget(disk, **places), self.losses[0], **self.how)

    @property
    def both(self) -> tuple[penstock.Engine, penstock.Engine]:
        return self.engine, self.plain

    def _keep(self) -> None:
        """Note what a commit of this step would have."""
        self.plain.position = self.position
        self.plain.save(self.folder / f"at {self.plain.step_count}", overwrite=True)

    def go_on_from(self, name: str) -> None:
        """The engine has gone back to what was noted."""
        self.plain.load(self.folder / name)
        self.position = self.plain.position
        for mine, its in zip(self.engine.optimizer.param_groups, self.plain.optimizer.param_groups, strict=True):
            its.update({key: value for key, value in mine.items() if key != "params"})
        for module, its_own in zip(self.engine.model.modules(), self.plain.model.modules(), strict=True):
            module.train(its_own.training)
        self.engine.model.scale = self.plain.model.scale

    def check(self) -> None:
        assert self.engine.step_count == self.plain.step_count
        assert self.engine.position == self.position

    # -- calls

    def step(self, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        given, weights = micro_batches(self.rng), None
        if self.rng.random() < 0.3:
            weights = [self.rng.random() for _ in given]
        position = {"at": self.rng.randrange(9)} if self.rng.random() < 0.5 else None
        found = []
        for engine, about in zip(self.both, (around, nullcontext), strict=True):
            try:
                with about():
                    stats = engine.step(given, loss_weights=weights, position=position)
                found.append((stats.loss, stats.grad_norm, stats.skipped))
            except NonFiniteError as error:
                found.append(("", str(error), True))
        assert repr(found[0]) == repr(found[1])  # a norm may be NaN
        if found[0][0] != "":
            self.position = position
            self._keep()

    def step_within(self) -> None:
        self.step(self.rng.choice(AROUND))

    def step_that_is_not_finite(self) -> None:
        for loss in self.losses:
            loss.factor = math.inf
        try:
            self.step()
        finally:
            for loss in self.losses:
                loss.factor = 1.0

    def broken_off(self) -> None:
        """By an error in the loss function, of a step or an evaluation."""
        loss, given = self.losses[0], micro_batches(self.rng)
        loss.fails = self.rng.randrange(len(given)), self.rng.random() < 0.5
        call = self.rng.choice((self.engine.step, self.engine.evaluate))
        with pytest.raises(BrokenOffError):
            call(given)
        loss.fails = None  # as what the loss function keeps is put back with a step that does not count
        if self.engine.inside.durability.state is State.BROKEN:
            assert self.places or self.how.get("delay"), "all state is on disk, in two slots, and nothing was left"
            with pytest.raises((StoreError, ConfigError)):
                self.engine.evaluate(given)
            self.killed()

    def evaluate(self) -> None:
        given, around = micro_batches(self.rng), self.rng.choice(AROUND)
        modes = [module.training for module in self.engine.model.modules()]
        with around():
            found = self.engine.evaluate(given)
        assert found == self.plain.evaluate(given)
        assert modes == [module.training for module in self.engine.model.modules()]

    def look(self) -> None:
        wanted = dict(self.plain.master_parameters())
        assert all(torch.equal(value, wanted[name]) for name, value in self.engine.master_parameters())
        buffers = dict(self.plain.model.named_buffers())
        assert all(torch.equal(value, buffers[name]) for name, value in self.engine.model.named_buffers())

    def look_at_what_is_held(self) -> None:
        """Values that were got some calls ago."""
        if self.held is not None:
            wanted = dict(self.plain.master_parameters())
            assert all(torch.equal(self.held.parameter(name), wanted[name]) for name in self.held.parameters)
        self.held = self.engine.values()

    def look_at_all(self) -> None:
        assert_same_state(state_of(self.engine), state_of(self.plain))

    def settings(self) -> None:
        key, value = self.rng.choice((("lr", 1e-3), ("lr", 0.02), ("weight_decay", 0.0), ("lr", 0.0)))
        for engine in self.both:
            for group in engine.optimizer.param_groups:
                group[key] = value
        self._keep()

    def modes(self) -> None:
        part, mode = self.rng.choice(("", "blocks.0.drop", "tower")), self.rng.random() < 0.7
        for engine in self.both:
            engine.model.get_submodule(part).train(mode)

    def changed(self) -> None:
        """What a model reads between steps, and a buffer."""
        scale, buffer = self.rng.choice((0.5, 1.0, 2.0)), self.rng.random() < 0.3
        for engine in self.both:
            engine.model.scale = scale
            if buffer:
                engine.model.blocks[0].norm.running_mean.add_(0.5)

    def place(self) -> None:
        self.engine.position = self.position = {"set": self.rng.randrange(9)}
        written = self.engine.position
        assert written is not None
        written["set"] = "the caller's"  # type: ignore[index]
        self._keep()

    def save(self) -> None:
        self.engine.save(self.folder / "snapshot", overwrite=True)
        self.plain.position = self.position
        self.plain.save(self.folder / "as saved", overwrite=True)
        self.saved = True

    def load(self) -> None:
        if self.saved:
            self.engine.load(self.folder / "snapshot")
            self.go_on_from("as saved")
            self._keep()

    def reopened(self) -> None:
        self._leave(self.engine.close, lost=0)

    def killed(self) -> None:
        def kill() -> None:
            abandon(self.engine)
            self.engine.close()

        self._leave(kill, lost=3 if "interval" in self.places else 1 if self.how.get("delay") else 0)

    def _leave(self, leave: Callable[[], None], *, lost: int) -> None:
        """``lost``: steps that may be, where there is a disk."""
        self.held = None
        leave()
        with pytest.raises(ConfigError, match="closed"):
            self.engine.evaluate([])
        self.open()
        self.engine.model.scale = self.plain.model.scale
        back = self.plain.step_count - self.engine.step_count
        assert back <= lost if "disk" not in self.places else self.engine.step_count == 0
        at = self.engine.position
        self.go_on_from(f"at {self.engine.step_count}")
        self.position = at
        self._keep()

    def prepare(self) -> None:
        self.engine.prepare(micro_batches(self.rng))

    def misused(self) -> None:
        """What is refused, and put right; nothing has changed."""
        engine, given = self.engine, micro_batches(self.rng)
        weight: nn.Parameter = engine.model.blocks[0].up.weight
        group = engine.optimizer.param_groups[0]
        name = self.rng.choice(sorted(MISUSES))
        self.log[-1] += f": {name}"
        lr = group["lr"]
        with pytest.raises((ConfigError, ModelError, StoreError)):
            MISUSES[name](engine, given, weight, group, self)
        weight.requires_grad_(True)
        weight.grad, group["lr"], self.losses[0].does = None, lr, None

    def elsewhere(self) -> None:
        """An evaluation in another thread, and a forked child that may not call, and ends without a trace."""
        given, found = micro_batches(self.rng), list[float]()
        thread = threading.Thread(target=lambda: found.append(self.engine.evaluate(given)))
        thread.start()
        thread.join()
        assert found == [self.plain.evaluate(given)]
        if (child := os.fork()) == 0:
            try:
                self.engine.step(given)
            except ConfigError:
                self.engine.close()
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0

    def collected(self) -> None:
        gc.collect()

    def drawn(self) -> None:
        torch.rand(3)


def in_a_step(call: Callable[[penstock.Engine, Any], object]) -> Callable[..., object]:
    def misuse(engine: penstock.Engine, given: Any, weight: Any, group: Any, life: Life) -> None:
        refused: list[Exception] = []

        def does() -> None:
            try:
                call(engine, given)
            except ConfigError as error:
                refused.append(error)

        life.losses[0].does = does
        engine.evaluate(given)
        raise refused[0]

    return misuse


MISUSES: dict[str, Callable[..., object]] = {
    "no micro-batches": lambda e, g, w, o, t: e.step([]),
    "one mapping": lambda e, g, w, o, t: e.step(g[0]),
    "an iterator": lambda e, g, w, o, t: e.step(iter(g)),
    "an empty micro-batch": lambda e, g, w, o, t: e.step([{k: v[:0] for k, v in g[0].items()}]),
    "on the meta device": lambda e, g, w, o, t: e.step([{k: v.to("meta") for k, v in g[0].items()}]),
    "weights for fewer": lambda e, g, w, o, t: e.step(g, loss_weights=[]),
    "a weight that is NaN": lambda e, g, w, o, t: e.evaluate(g, loss_weights=[math.nan] * len(g)),
    "a position that is none": lambda e, g, w, o, t: e.step(g, position={1: object()}),
    "a frozen weight": lambda e, g, w, o, t: (w.requires_grad_(False), e.step(g)),
    "a gradient": lambda e, g, w, o, t: (setattr(w, "grad", torch.ones_like(w)), e.step(g)),
    "a rate below zero": lambda e, g, w, o, t: (o.update(lr=-1.0), e.step(g)),
    "a rate that is none": lambda e, g, w, o, t: (o.update(lr="fast"), e.step(g)),
    "the model called": lambda e, g, w, o, t: e.model(**g[0]),
    "the model's state": lambda e, g, w, o, t: e.model.state_dict(),
    "the model copied": lambda e, g, w, o, t: copy.deepcopy(e.model),
    "the engine copied": lambda e, g, w, o, t: copy.deepcopy(e),
    "the model wrapped": lambda e, g, w, o, t: penstock.wrap(e.model, optimizer=e.optimizer.spec, budget=e.budget),
    "no snapshot": lambda e, g, w, o, t: e.load(t.folder / "none"),
    "a snapshot that is there": lambda e, g, w, o, t: e.save(t.folder),
    "a group more": lambda e, g, w, o, t: e.optimizer.add_param_group({"params": []}),
    "a step in a step": in_a_step(lambda e, g: e.step(g)),
    "a look in a step": in_a_step(lambda e, g: next(e.master_parameters())),
    "the end in a step": in_a_step(lambda e, g: e.close()),
}
OFTEN = {Life.step: 6, Life.step_within: 3, Life.misused: 2, Life.broken_off: 2, Life.look: 2}
CALLS = [
    *(call for call, times in OFTEN.items() for _ in range(times)),
    *(Life.step_that_is_not_finite, Life.evaluate, Life.look_at_what_is_held, Life.look_at_all, Life.settings),
    *(Life.modes, Life.changed, Life.place, Life.save, Life.load, Life.reopened, Life.killed, Life.prepare),
    *(Life.elsewhere, Life.collected, Life.drawn),
]


def test_whatever_is_called_an_engine_does_what_it_would_alone(campaign: Campaign, tmp_path: Path) -> None:
    for seed in range(campaign.cases(2, 400)):
        rng, folder = Random(seed), tmp_path / str(seed)
        folder.mkdir()
        life = Life(rng, folder)
        try:
            for _ in range(MOST):
                call = rng.choice(CALLS)
                life.log.append(call.__name__)
                state = RandomState.capture(CPU)
                call(life)
                assert call is Life.drawn or state.is_now() or call in (Life.reopened, Life.killed, Life.broken_off)
                life.check()
            life.look()
            life.look_at_all()
        except BaseException as error:
            error.add_note(f"seed {seed}: {', '.join(life.log)}")
            raise
        finally:
            for engine in life.both:
                engine.close()
