"""What a model's own code keeps from one micro-batch to the next: the numbers of a plain loop, or a refusal."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.engine.test_buffers import SGD, STEPS, assert_plain, refused
from tests.stacks import Stack, of
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


def taken_back(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Made once for each micro-batch, of which another has not come to its end yet."""
    if model.kept is None:
        model.kept = x.detach().mean()
    x = through(model, x) + model.kept
    model.kept = None
    return x


GO_ON = ((counted, 0), (last_mean, None), (last_mean_in_a_list, []), (taken_back, None))


@pytest.mark.parametrize(("run", "kept"), GO_ON, ids=[run.__name__ for run, _ in GO_ON])
def test_an_attribute_that_one_stage_reads_and_a_later_one_sets_goes_horizontally(run: Run, kept: Any) -> None:
    build = keeping(run, kept)
    message = refused(build, budget(None))
    assert "attribute 'kept' of a Stack passes from one micro-batch to the next through several stages" in message
    assert_plain(build, budget(None), schedule="horizontal")
    with wrap(of(build), budget(None), optimizer=SGD, plan=None) as engine:
        engine.step(STEPS[0][:1])


def counted_at_once(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.kept += 1
    return through(model, x) * (1 + model.kept)


def mean_at_once(model: Any, x: torch.Tensor) -> torch.Tensor:
    kept, model.kept = model.kept, x.detach().mean()
    return through(model, x if kept is None else x + kept)


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


STAY = ((counted_at_once, 0), (mean_at_once, None), (marked, False), (table, None))


@pytest.mark.parametrize(("run", "kept"), STAY, ids=[run.__name__ for run, _ in STAY])
def test_an_attribute_that_one_stage_alone_changes_or_that_is_a_mark_may_go_on(run: Run, kept: Any) -> None:
    assert_plain(keeping(run, kept), budget(None))
