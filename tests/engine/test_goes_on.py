"""What a model's own code keeps from one micro-batch to the next: the numbers of a plain loop, or a refusal."""

import random
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.engine.test_buffers import SGD, STEPS, assert_plain, refused
from tests.stacks import Layer, Stack, of
from tests.training import budget, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

Run = Callable[[Any, torch.Tensor], torch.Tensor]


def through(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


DRAWS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch": (lambda: torch.Generator().manual_seed(3), lambda g: torch.randn((), generator=g)),
    "numpy": (lambda: np.random.default_rng(3), lambda g: g.standard_normal()),
    "numpy, of the older kind": (lambda: np.random.RandomState(3), lambda g: g.standard_normal()),
    "Python": (lambda: random.Random(3), lambda g: g.gauss(0, 1)),
}
kept: dict[str, Any] = {}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("where", ["an attribute", "within one", "a global"])
@pytest.mark.parametrize("kind", DRAWS)
def test_generators_of_all_kinds_draw_once_for_each_micro_batch(kind: str, where: str, tmp_path: Path) -> None:
    new, draw = DRAWS[kind]

    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        found = {"an attribute": model.generator, "within one": model.found[0], "a global": kept.get("generator")}
        return through(model, x + draw(found[where]))

    def build() -> nn.Module:
        model: Any = Stack(run=run)
        model.generator, model.found, kept["generator"] = None, [None], None
        if where == "an attribute":
            model.generator = new()
        elif where == "within one":
            model.found = [new()]
        else:
            kept["generator"] = new()
        return model  # type: ignore[no-any-return]

    assert_plain(build, budget(tmp_path), clip=0.01)


def keeping(run: Run, kept: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model: Any = Stack(run=run)
        model.kept = kept
        return model  # type: ignore[no-any-return]

    return build


def counted(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = through(model, x * (1 + model.kept))
    model.kept += 1
    return x


def last_mean(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = through(model, x if model.kept is None else x + model.kept)
    model.kept = x.detach().mean()
    return x


def last_mean_in_a_list(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = through(model, x + sum(model.kept))
    model.kept = [x.detach().mean()]
    return x


def counted_before_and_behind(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.kept += 1
    x = through(model, x * (1 + 0.1 * model.kept))
    model.kept += 1
    return x


def mean_before_and_behind(model: Any, x: torch.Tensor) -> torch.Tensor:
    for part in (lambda x: through(model, x), lambda x: x):
        x, model.kept = part(x * (1 + model.kept)), 0.1 * float(x.detach().mean())
    return x


GO_ON = (
    *((counted, 0), (last_mean, None), (last_mean_in_a_list, [])),
    *((counted_before_and_behind, 0), (mean_before_and_behind, 0.0)),
)


@pytest.mark.parametrize(("run", "kept"), GO_ON, ids=[run.__name__ for run, _ in GO_ON])
def test_an_attribute_that_one_stage_reads_and_a_later_one_sets_goes_horizontally(run: Run, kept: Any) -> None:
    build = keeping(run, kept)
    message = refused(build, budget(None))
    assert "attribute 'kept' of a Stack passes from one micro-batch to the next through several stages" in message
    assert_plain(build, budget(None), schedule="horizontal")
    with wrap(of(build), budget(None), optimizer=SGD, plan=None) as engine:
        engine.step(STEPS[0][:1])


class Told(Layer):
    """A layer whose numbers follow from a number that is an attribute of itself, and from one of its model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = [model]
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.model[0].kept
        x = super().forward(self.scale * x)
        return x + torch.tanh(x * kept) if isinstance(kept, int | float) else x


def scale(model: Any, by: float) -> None:
    for layer in model.layers:
        layer.scale = by


def made_once(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Once for each micro-batch, of which another has not come to its end yet."""
    if model.kept is None:
        model.kept = x.detach().mean()
    x = through(model, x) + model.kept
    model.kept = None
    return x


def made_between(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = through(model, x)
    if model.kept is None:
        model.kept = x.detach().mean()
    x = through(model, x)
    model.kept = None
    return x


def without_and_with(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Twice through the layers, of which the second time is told otherwise, and more than once."""
    first = through(model, x)
    scale(model, 0.25)
    second = through(model, x)
    scale(model, 1.0)
    third = through(model, first)
    scale(model, 0.125 * 4)
    scale(model, 0.5)
    fourth = through(model, third)
    scale(model, 0.5 + 0.5)
    return first - second + fourth


def numbered(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.kept = model.kept + 0
    for layer in model.layers:
        x = layer(x)
        model.kept += 1
    model.kept = 0
    return x


def numbered_floats(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.kept *= 2
    for layer in model.layers:
        x = layer(x)
        model.kept += 0.5
    model.kept = 2.5 * 0.1
    return x


ENDS_AS_BEGUN = (
    (made_once, None),
    (made_between, None),
    (without_and_with, None),
    (numbered, 0),
    (numbered_floats, 0.25),
)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
@pytest.mark.parametrize(("run", "kept"), ENDS_AS_BEGUN, ids=[run.__name__ for run, _ in ENDS_AS_BEGUN])
def test_an_attribute_that_ends_as_it_began_is_each_micro_batch_s_own(run: Run, kept: Any, schedule: Any) -> None:
    def build() -> nn.Module:
        model: Any = Stack(run=run)
        model.layers = nn.ModuleList(Told(model) for _ in range(3))
        model.kept = kept
        return model  # type: ignore[no-any-return]

    assert_plain(build, budget(None), clip=0.01, schedule=schedule)


def counted_at_once(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.kept += 1
    return through(model, x) * (1 + model.kept)


def mean_at_once(model: Any, x: torch.Tensor) -> torch.Tensor:
    kept, model.kept = model.kept, x.detach().mean()
    return through(model, x if kept is None else x + kept)


def counted_in_all_stages(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        model.kept += 1
        x = layer(x)
    model.kept += 1
    return x


def marked(model: Any, x: torch.Tensor) -> torch.Tensor:
    if not model.kept:
        x = x + 0
    x = through(model, x)
    model.kept = True
    return x


def table(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Made behind the blocks, and not of what is trained."""
    if model.kept is not None:
        x = x + 0 * model.kept
    x = through(model, x)
    model.kept = torch.ones(())
    return x


STAY = ((counted_at_once, 0), (counted_in_all_stages, 0), (mean_at_once, None), (marked, False), (table, None))


@pytest.mark.parametrize(("run", "kept"), STAY, ids=[run.__name__ for run, _ in STAY])
def test_an_attribute_that_one_stage_alone_changes_or_that_nothing_depends_on_may_go_on(run: Run, kept: Any) -> None:
    assert_plain(keeping(run, kept), budget(None))


class Counting(Layer):
    """Keeps a number from call to call on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.01 * self.calls)


class Centred(Layer):
    """A model that normalises by a running mean that is no buffer, and begins at the first one: from the same inputs
    again it is the same."""

    mean: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().mean((0, 1))
        self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
        return super().forward(x - self.mean)


class CentredByNumber(Layer):
    """The same with a number in the place of a tensor."""

    mean: float | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = float(x.detach().mean())
        self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
        return super().forward(x - self.mean)


class EverySecond(Layer):
    """Does something else after each two calls: a forward and its recomputation alone would not show it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (1 + (self.calls - 1) // 2 % 2)


class Remembering(Layer):
    """Mixes in what it has returned before."""

    def __init__(self) -> None:
        super().__init__()
        self.returned: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.returned.append(y.detach().mean((0, 1)))
        return y + torch.stack(self.returned).mean(0)


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
@pytest.mark.parametrize("layer", [Counting, Centred, CentredByNumber, EverySecond, Remembering])
def test_what_a_block_alone_goes_on_with_is_in_its_recomputation_as_in_its_call(
    layer: type[nn.Module], schedule: Any
) -> None:
    assert_plain(lambda: Stack(layer), budget(None), clip=0.01, schedule=schedule, recompute=True)


def counted_by_a_block(model: Any, x: torch.Tensor) -> torch.Tensor:
    return through(model, x) * (1 + 0.1 * model.kept)


class CountsElsewhere(Told):
    """A layer that counts on its model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.model[0].kept += 1
        return super().forward(x)


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_a_recomputation_changes_no_attribute(schedule: Any) -> None:
    def build() -> nn.Module:
        model: Any = Stack(run=counted_by_a_block)
        model.layers = nn.ModuleList([Layer(), CountsElsewhere(model)])
        model.kept = 0
        return model  # type: ignore[no-any-return]

    assert_plain(build, budget(None), clip=0.01, schedule=schedule, recompute=True)


class Hooked(Layer):
    """Its backward reads what its forward has kept."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = float(x.detach().mean())
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * (1 + self.mean))
        return y


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_a_backward_reads_what_the_recomputation_has_left_on_its_block(schedule: Any) -> None:
    assert_plain(lambda: Stack(Hooked), budget(None), clip=0.01, schedule=schedule, recompute=True)


class CountsFromItsClass(Layer):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


def test_numbers_that_a_probe_has_put_on_modules_are_gone_behind_it() -> None:
    assert_plain(lambda: Stack(CountsFromItsClass), budget(None), recompute=True)


def built_by_the_first_call(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        model.kept += 1
        if model.kept == 1:
            model.table = torch.linspace(0, 1, x.shape[-1])
        x = layer(x + model.table)
    return x


def filled_where_a_mask_was_asked(model: Any, x: torch.Tensor) -> torch.Tensor:
    if (x.abs() < 1e9).all():
        model.table.copy_(torch.linspace(0, 1, x.shape[-1]))
    return through(model, x + model.table) + model.table


def steps_are_told(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.steps += 1
    x = through(model, x)
    if model.steps.item() % 10 == 0:
        model.kept = "a tenth step"
    return x


@pytest.mark.parametrize("run", [built_by_the_first_call, filled_where_a_mask_was_asked, steps_are_told])
def test_tables_and_counts_of_the_steps_are_no_memory(run: Run) -> None:
    def build() -> nn.Module:
        model: Any = Stack(run=run)
        model.kept, model.table = 0, None
        if run is filled_where_a_mask_was_asked:
            model.table = torch.zeros(next(model.layers.parameters()).shape[-1])
        model.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        return model  # type: ignore[no-any-return]

    assert_plain(build, budget(None))


def another_function(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = through(model, model.kept.apply(x))
    mean = x.detach().mean()
    model.kept.apply = lambda y: y + mean
    return x


def test_functions_are_not_the_same_for_having_no_attributes() -> None:
    message = refused(keeping(another_function, types.SimpleNamespace(apply=lambda x: x)), budget(None))
    assert "passes from one micro-batch to the next" in message
