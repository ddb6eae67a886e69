"""Graphs of blocks' calls that are kept in a step, as many as the device has room for: the bits of one that computes
all blocks again, and no more memory than was planned."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.compat.torch import TorchDispatchMode
from penstock.errors import BudgetError, ConfigError, ModelError
from penstock.tape.watch import Watch
from tests.models import MODELS, PLAIN
from tests.stacks import Layer, stack
from tests.training import assert_same, budget, run_steps, steps_of, train, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = PLAIN
STEPS = steps_of(CASE, 2)
CALLS = 3 * len(STEPS[0])
ON_HOST: Mapping[str, Any] = {"weights": "host", "state": "host"}


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_as_many_graphs_as_there_is_room_for_change_no_bit(schedule: str) -> None:
    wanted = train(CASE, budget(None, **ON_HOST), STEPS, schedule=schedule, recompute=True, overlap=False)
    with wrap(CASE, budget(None, **ON_HOST), schedule=schedule, recompute=False) as engine:
        assert_same(run_steps(engine, STEPS), wanted)
        most = engine.plan.device_bytes
        assert engine.plan.graphs_kept == engine.plan.calls == CALLS
    with wrap(CASE, budget(None, **ON_HOST), schedule=schedule, recompute=True) as engine:
        engine.step(STEPS[0])
        least = engine.plan.device_bytes
        assert engine.plan.graphs_kept == 0
    kept = []
    for share in (0.0, 0.5, 1.0):
        device = round(least + share * (most - least))
        with wrap(CASE, budget(None, **ON_HOST, device=f"{device}B"), schedule=schedule) as engine:
            result = run_steps(engine, STEPS)
            assert_same(result, wanted)
            assert max(stats.peak_bytes["device"] for stats in result.stats) <= engine.plan.device_bytes <= device
            kept.append(engine.plan.graphs_kept)
    assert kept == sorted(kept)
    assert kept[0] < kept[1] < CALLS == kept[2]


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    with (
        wrap(CASE, budget(None, **ON_HOST, device="300KiB"), recompute=False) as engine,
        pytest.raises(BudgetError, match="the smallest that works is"),
    ):
        engine.step(STEPS[0])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"budget": budget(None, activations="host")}, "budget.activations='host' has no effect with recompute=False"),
        ({"compile": True, "recompute": True}, "recompute=True has no effect with compile=True"),
        (
            {"schedule": "zero-bubble"},
            "recompute=False cannot be with schedule='zero-bubble', whose backwards in two parts",
        ),
        ({"compile": True}, "recompute=False cannot be with compile=True, as graphs of compiled blocks are not kept"),
    ],
)
def test_what_has_to_compute_all_again_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        wrap(CASE, settings.pop("budget", budget(None)), **({"recompute": False} | settings))


def test_a_step_that_is_repeated_keeps_its_graphs_again(tmp_path: Path) -> None:
    """Over the limit of the norm: the same schedule runs a second time."""
    common: dict[str, Any] = {"clip_grad_norm": 1e-3, "speculate": True}
    wanted = train(CASE, budget(tmp_path / "a"), STEPS, recompute=True, **common)
    found = train(CASE, budget(tmp_path / "b"), STEPS, recompute=False, **common)
    assert all(stats.repeats for stats in found.stats)
    assert_same(found, wanted)


def test_an_evaluation_between_steps_changes_nothing() -> None:
    found = []
    for recompute in (True, False):
        with wrap(CASE, budget(None, **ON_HOST), recompute=recompute) as engine:
            first = engine.step(STEPS[0]).loss
            found.append((first, engine.evaluate(STEPS[0]), engine.step(STEPS[1]).loss, engine.step(STEPS[0]).loss))
    assert found[0] == found[1]


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0]


class WithOwn(Layer):
    """A block with a backward written in Python, which may keep anything."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Own.apply(super().forward(x))
        return out


def test_where_no_graph_can_be_kept_it_is_said() -> None:
    case = stack(WithOwn)
    (step,) = steps_of(case, 1)
    with (
        wrap(case, budget(None), recompute=False) as engine,
        pytest.raises(ModelError, match="no block's graph can be"),
    ):
        engine.step(step)
    with wrap(case, budget(None)) as engine:
        engine.step(step)
        assert engine.plan.graphs_kept == 0


class Live(TorchDispatchMode):
    """Follows the bytes of all storages that ops make."""

    def __init__(self) -> None:
        super().__init__()
        self.watch = Watch({}, lambda _: None)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return self.watch.__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_what_graphs_hold_is_within_their_pool(schedule: str) -> None:
    """Live bytes when the last forward has run are at most those of all pools that torch's allocator serves, and more
    than without graphs. Nothing of the schedule's own accounts is looked at."""
    case = replace(MODELS["gpt2"], blocks=3)
    most: dict[bool, int] = {}
    for recompute in (True, False):
        with wrap(case, budget(None, **ON_HOST), schedule=schedule, recompute=recompute, overlap=False) as engine:
            engine.step(STEPS[0])
            with Live() as live:
                engine.step(STEPS[0])
            most[recompute] = live.watch.peak
            pools = [p for p in engine.plan.schedule.pools if p.tier == "device" and not p.backed]
            fixed = sum(n for tier, what, n in engine.plan.schedule.fixed if tier == "device" and what != "weights")
            assert most[recompute] <= sum(p.size * p.count for p in pools) + fixed
    assert most[False] > most[True]
