"""Between steps a model's parameters are placeholders, wherever their weights are, and what is put there is refused; so
is a model that is another one then."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import penstock
from penstock.engine.following import Following
from penstock.errors import ConfigError, ModelError
from penstock.hardware.machine import Machine
from tests.questions import DRIVE, MACHINE
from tests.training import budget

WIDTH = 8
KEPT: dict[str, torch.Tensor] = {}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x * self.scale).square().mean()


def give_data(model: Any) -> None:
    model.head.weight.data = torch.zeros(WIDTH, WIDTH)


def write_to_data(model: Any) -> None:
    model.layers[0].linear.weight.data.zero_()


def clamp_one_number(model: Any) -> None:
    model.scale.data.fill_(0.5)


def give_gradient(model: Any) -> None:
    model.head.weight.grad = torch.ones(WIDTH, WIDTH)


def move_modules(model: Any) -> None:
    model.layers[0].linear, model.layers[1].linear = model.layers[1].linear, model.layers[0].linear


def replace_forward_of_class(model: Any) -> None:
    for layer in model.layers:
        layer.__class__ = type("Other", (Block,), {"forward": lambda self, x: 2 * Block.forward(self, x)})


OTHER = "was given other data between steps"
WRITTEN = "was written to in place between steps"

CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "data": (give_data, f"'head.weight' {OTHER}"),
    "within data": (write_to_data, f"'layers.0.linear.weight', or another that moves with it, {WRITTEN}"),
    "one number": (clamp_one_number, f"'scale', or another that moves with it, {WRITTEN}"),
    "double": (lambda model: model.double(), f"'scale' {OTHER}"),
    "half a block": (lambda model: model.layers[1].half(), f"'layers.1.linear.weight' {OTHER}"),
    "gradient": (give_gradient, "'head.weight' was given a gradient between steps"),
    "gradient of a sum": (
        lambda model: torch.stack([p.sum() for p in model.parameters()]).sum().backward(),
        "'scale' was given a gradient between steps",
    ),
    "empty": (lambda model: model.to_empty(device="cpu"), f"'head.weight' {OTHER}"),
}
OF_MODULES: dict[str, tuple[Callable[[Any], object], str]] = {
    "moved": (move_modules, "parameter 'layers.1.linear.weight' is called 'layers.0.linear.weight' since wrap"),
    "put into another": (
        lambda model: setattr(model, "head", nn.Sequential(model.head)),
        "parameter 'head.weight' is called 'head.0.weight' since wrap",
    ),
    "forward of a class": (replace_forward_of_class, "the forward of block 'layers.0' was replaced after wrap"),
    "compiled": (lambda model: model.compile(backend="eager"), "the model has been compiled by its compile"),
}


def wrapped(places: dict[str, Any], tmp_path: Path, **settings: Any) -> penstock.Engine:
    torch.manual_seed(0)
    return wrapped_model(Model(), budget(tmp_path / "store") if places else budget(None), **settings)


def wrapped_model(model: nn.Module, where: penstock.Budget, **settings: Any) -> penstock.Engine:
    common = {"loss_fn": lambda model, mb: model(**mb), "optimizer": penstock.AdamW(lr=1e-2), "plan": None}
    return penstock.wrap(model, budget=where, precision="fp32", device="cpu", **common | settings)


MICRO_BATCHES = [{"x": torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)}]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("name", "places"),
    [(name, {"disk": True}) for name in CHANGES | OF_MODULES] + [(name, {}) for name in CHANGES],
    ids=lambda value: value if isinstance(value, str) else "on disk" if value else "in memory",
)
def test_what_is_given_to_a_model_is_refused(name: str, places: dict[str, Any], tmp_path: Path) -> None:
    change, message = (CHANGES | OF_MODULES)[name]
    with wrapped(places, tmp_path) as engine:
        engine.step(MICRO_BATCHES)
        before = {name: value.clone() for name, value in engine.master_parameters()}
        change(engine.model)
        for call in (engine.step, engine.evaluate, *((engine.prepare,) if name in CHANGES else ())):
            with pytest.raises(ModelError, match=message):
                call(MICRO_BATCHES)
        assert engine.step_count == 1
        assert all(torch.equal(before[name], value) for name, value in engine.master_parameters())
        engine.save(tmp_path / "snapshot")


def test_a_gradient_from_before_wrap_is_refused_and_the_model_left_as_it_is() -> None:
    model, where = Model(), budget(None)
    give_gradient(model)
    settings = {
        "optimizer": penstock.AdamW(),
        "device": "cpu",
        "loss_fn": lambda model, micro_batch: model(**micro_batch),
    }
    with pytest.raises(penstock.ModelError, match=r"'head.weight' has a gradient already.*call model.zero_grad\(\)"):
        penstock.wrap(model, budget=where, **settings)
    model.zero_grad()
    penstock.wrap(model, budget=where, **settings).close()


def test_what_is_read_between_steps_is_a_placeholder_wherever_weights_are(tmp_path: Path) -> None:
    with wrapped({}, tmp_path) as engine:
        engine.step(MICRO_BATCHES)
        engine.evaluate(MICRO_BATCHES)
        assert all(bool(parameter.isnan().all()) for parameter in engine.model.parameters())


@pytest.mark.parametrize("places", [{}, {"disk": True}], ids=["in memory", "on disk"])
def test_values_are_those_of_the_last_step_whenever_they_are_read(places: dict[str, Any], tmp_path: Path) -> None:
    """A step that leaves chunks to the next one included."""
    within: list[Any] = []

    def loss_fn(model: Any, micro_batch: Any) -> torch.Tensor:
        if within:
            with pytest.raises(ConfigError, match="within a call"):
                within.pop().parameter("scale")
        return model(**micro_batch)

    with wrapped({}, tmp_path) as plain, wrapped(places, tmp_path, delay=0.5, loss_fn=loss_fn) as engine:
        engine.step(MICRO_BATCHES)
        values, reading = engine.values(), engine.master_parameters()
        next(reading)
        within.append(values)
        for _ in range(2):
            plain.step(MICRO_BATCHES)
        engine.step(MICRO_BATCHES)
        assert not within
        wanted = dict(plain.master_parameters())
        assert all(torch.equal(values.parameter(name), wanted[name]) for name in values.parameters)
        assert all(torch.equal(value, wanted[name]) for name, value in reading)
    with pytest.raises(ConfigError, match="this engine is closed"):
        values.parameter("scale")


@pytest.mark.parametrize("name", ["model", "budget", "device", "optimizer"])
def test_what_an_engine_was_made_with_cannot_be_another(name: str, tmp_path: Path) -> None:
    """It would be read there, and nothing would follow it."""
    with wrapped({}, tmp_path) as engine:
        before = getattr(engine, name)
        with pytest.raises(ConfigError, match=rf"engine\.{name} is what the engine was made with"):
            setattr(engine, name, before)
        assert getattr(engine, name) is before


def test_flop_are_counted_by_torch_from_the_second_step_and_a_first_one_says_so(tmp_path: Path) -> None:
    """Its counter hangs hooks on what every module is handed; the probe would take them for a block's own."""
    said = r"a hook on all modules \(as of torch's FlopCounterMode\).*after the first step"
    with wrapped({}, tmp_path) as engine, FlopCounterMode(display=False), pytest.raises(ModelError, match=said):
        engine.step(MICRO_BATCHES)
    with wrapped({}, tmp_path) as engine:
        loss = engine.step(MICRO_BATCHES).loss
        with FlopCounterMode(display=False) as counted:
            again = engine.step(MICRO_BATCHES)
    assert counted.get_total_flops() > 0
    assert again.loss != loss


class Keep(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        KEPT["x"] = x
        return x


class Recall(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + KEPT["x"]


class Recalling(Model):
    """Keeps what one micro-batch has before the blocks for what is behind them, once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind, self.keeps = nn.Identity(), nn.Identity(), False
        self.config = SimpleNamespace(keeps=False)

    def forward(self, x: torch.Tensor, keeps: bool | None = None) -> torch.Tensor:
        keeps = self.keeps or self.config.keeps or keeps
        x = self.before(x) * self.scale
        if keeps:
            KEPT["x"] = x
        for layer in self.layers:
            x = layer(x)
        x = self.behind(x)
        return self.head(x + KEPT["x"] if keeps else x).square().mean()


def tell_by_hooks(model: Any) -> None:
    model.before.register_forward_hook(lambda module, args, output: KEPT.update(x=output))
    model.head.register_forward_pre_hook(lambda module, args: args[0] + KEPT["x"])


def tell_by_modules(model: Any) -> None:
    model.before, model.behind = Keep(), Recall()


TELL: dict[str, Callable[[Any], object]] = {
    "hooks": tell_by_hooks,
    "modules": tell_by_modules,
    "a switch": lambda model: setattr(model, "keeps", True),
    "its configuration": lambda model: setattr(model.config, "keeps", True),
    "the micro-batch": lambda model: None,
}


@pytest.mark.parametrize("name", TELL)
def test_a_model_that_keeps_more_from_some_step_on_keeps_it_of_each_micro_batch(name: str) -> None:
    """With micro-batches of the same shapes as those that were probed before."""
    generator = torch.Generator().manual_seed(1)
    steps = [[{"x": torch.randn(3, WIDTH, generator=generator)} for _ in range(2)] for _ in range(3)]
    if name == "the micro-batch":
        steps = [[{**mb, "keeps": i > 0 or None} for mb in step] for i, step in enumerate(steps)]
    torch.manual_seed(0)
    plain = Recalling()
    sgd, wanted = torch.optim.SGD(plain.parameters(), lr=0.1), []
    for i, step in enumerate(steps):
        if i == 1:
            TELL[name](plain)
        sgd.zero_grad()
        loss = torch.stack([plain(**mb) for mb in step]).mean()
        loss.backward()
        sgd.step()
        wanted.append(loss.item())
    settings = {"optimizer": penstock.SGD(lr=0.1), "clip_grad_norm": None}
    torch.manual_seed(0)
    with wrapped_model(Recalling(), budget(None), **settings) as engine:
        found = []
        for i, step in enumerate(steps):
            if i == 1:
                TELL[name](engine.model)
            found.append(engine.step(step).loss)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
        for key, value in engine.master_parameters():
            torch.testing.assert_close(value, plain.get_parameter(key).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("plan", [None, replace(MACHINE, host=replace(MACHINE.host, optimizer={"sgd.fp32": 1e8}))])
def test_a_model_that_alternates_between_two_states_is_probed_twice(
    plan: Machine | None, caplog: pytest.LogCaptureFixture
) -> None:
    """And does in each what a plain loop does, in evaluations, too, and with micro-batches that need another plan."""
    generator = torch.Generator().manual_seed(1)
    sizes = (3, 3, 3, 3, 5, 3, 2)
    steps = [[{"x": torch.randn(size, WIDTH, generator=generator)} for _ in range(2)] for size in sizes]
    torch.manual_seed(0)
    plain = Recalling()
    sgd, wanted = torch.optim.SGD(plain.parameters(), lr=0.1), []
    for i, step in enumerate(steps):
        plain.keeps = i % 2 == 1
        with torch.no_grad():
            wanted.append(torch.stack([plain(**mb) for mb in step]).mean().item())
        sgd.zero_grad()
        loss = torch.stack([plain(**mb) for mb in step]).mean()
        loss.backward()
        sgd.step()
        wanted.append(loss.item())
    settings = {"optimizer": penstock.SGD(lr=0.1), "clip_grad_norm": None, "plan": plan}
    torch.manual_seed(0)
    with wrapped_model(Recalling(), budget(None), **settings) as engine:
        probing, found, plans, losses = engine.inside.planning.probing, [], [], []
        for i, step in enumerate(steps):
            engine.model.keeps = i % 2 == 1
            losses += [engine.evaluate(step), engine.step(step).loss]
            found += [probed for train in (True, False) for probed in probing.found[train].values()]
            plans.append(engine.plan)
        torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=0)
        for key, value in engine.master_parameters():
            torch.testing.assert_close(value, plain.get_parameter(key).detach(), rtol=1e-5, atol=1e-6)
    assert len({id(probed) for probed in found}) == 2 * 3, "with one for the larger micro-batches"
    assert plans[0] is plans[2]
    assert plans[1] is plans[3] is plans[5]
    assert plans[2] is not plans[4] is plans[6]
    assert "changed between two steps" not in caplog.text


@pytest.mark.parametrize("shown", ["machine", "norms"])
def test_a_plan_from_before_is_not_taken_for_what_steps_have_shown_since(
    shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That lanes take longer than it was predicted with, and that norms are over the limit more often."""
    known = replace(MACHINE, drives=(replace(DRIVE, path=str(tmp_path)),))
    with wrapped_model(Recalling(), budget(tmp_path), plan=known, clip_grad_norm=1.0) as engine:
        planning, plans, found = engine.inside.planning, [], []
        for i in range(5):
            engine.model.keeps = i % 2 == 1
            with monkeypatch.context() as patch:
                if i == 3 and shown == "machine":
                    patch.setattr(Following, "learn", lambda *_: ({"write": 3.0}, {"write": 3.0}))
                    engine.step(MICRO_BATCHES)
                elif i == 3:
                    patch.setattr(planning.repeats, "add", lambda over: True)
                engine.step(MICRO_BATCHES)
            plans.append(engine.plan)
            found += planning.probing.found[True].values()
    assert plans[0] is plans[2] is not plans[4]
    assert len({id(probed) for probed in found}) == 2


def test_an_engine_that_is_called_in_inference_mode_leaves_it_for_as_long(tmp_path: Path) -> None:
    """As loops are in where they evaluate."""
    with wrapped({}, tmp_path) as plain, wrapped({}, tmp_path) as engine:
        with torch.inference_mode():
            evaluated = engine.evaluate(MICRO_BATCHES)
            stepped = engine.step(MICRO_BATCHES).loss
            assert torch.is_inference_mode_enabled()
            values = dict(engine.master_parameters())
        assert (evaluated, stepped) == (plain.evaluate(MICRO_BATCHES), plain.step(MICRO_BATCHES).loss)
        assert all(torch.equal(value, values[name]) for name, value in plain.master_parameters())
        assert engine.step(MICRO_BATCHES).loss == plain.step(MICRO_BATCHES).loss


class Changing(Model):
    """Its forward changes what it consists of, in this way, and goes the same way nevertheless."""

    def __init__(self, change: Callable[[Any], object]) -> None:
        super().__init__()
        self.change, self.act, self.odd = change, nn.Identity(), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self)
        return super().forward(self.act(x))


BY_ITSELF: dict[str, Callable[[Any], object]] = {
    "a switch": lambda model: setattr(model, "odd", not model.odd),
    "a module": lambda model: setattr(model, "act", nn.Identity()),
    "a hook": lambda model: model.act.register_forward_hook(lambda module, args, output: None),
}


def probed_in_steps(engine: penstock.Engine, count: int, before: Callable[[Any], Any] = lambda model: None) -> int:
    """How many probes these steps have come by. ``before``: each; the hook that it hangs up is there for the step."""
    found: list[Any] = []
    for _ in range(count):
        handle = before(engine.model)
        engine.step([{"x": torch.ones(3, WIDTH)}] * 3)
        now = engine.inside.planning.probing.found[True].values()
        found += [probed for probed in now if all(probed is not other for other in found)]
        if handle is not None:
            handle.remove()
    return len(found)


@pytest.mark.parametrize("name", BY_ITSELF)
def test_a_model_that_changes_itself_in_its_forward_is_probed_once(name: str) -> None:
    with wrapped_model(Changing(BY_ITSELF[name]), budget(None)) as engine:
        assert probed_in_steps(engine, 4) == 1
        (before,) = engine.inside.planning.probing.found[True].values()
        engine.model.head.register_forward_hook(lambda module, args, output: None)
        assert probed_in_steps(engine, 2) == 1
        (now,) = engine.inside.planning.probing.found[True].values()
        assert now is not before


class Watcher:
    def look(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        pass


def test_a_hook_that_is_there_for_as_long_as_a_step_is_the_same_one_each_time(caplog: pytest.LogCaptureFixture) -> None:
    watcher = Watcher()
    with wrapped_model(Model(), budget(None)) as engine:
        assert probed_in_steps(engine, 3, lambda model: model.head.register_forward_hook(watcher.look)) == 1
        assert "changed between two steps" not in caplog.text
        assert probed_in_steps(engine, 4, lambda model: model.head.register_forward_hook(lambda *_: None)) == 4
    assert "changed between two steps for the 4th time" in caplog.text
