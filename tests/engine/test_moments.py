"""Moments in bf16 and in 8 bits: the schedule never changes the numbers, and a run goes on from what it has written."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.config.optimizer import Moments
from penstock.errors import ConfigError
from penstock.schedule.program import COMPACT_FROM
from tests.models import TIED
from tests.other_plans import other_plans
from tests.training import ADAMW, Result, assert_same, budget, result_of, run_steps, steps_of, train, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASE, CLIP = TIED, 0.17
STEPS = steps_of(CASE, 4)
FORMS: tuple[Moments, ...] = ("bf16", "int8")
OPTIMIZERS = {
    "adamw": ADAMW,
    "lion": penstock.Lion(lr=1e-3),
    "momentum": penstock.SGD(lr=1e-2, momentum=0.9),
}
Where = Callable[[Path], penstock.Budget]
VARIANTS: dict[str, tuple[Where, dict[str, Any]]] = {
    "on disk": (lambda p: budget(p), {}),
    "one slot": (lambda p: budget(p, slots=1), {}),
    "on the host": (lambda p: budget(None, weights="host", state="host"), {}),
    "on the device": (lambda p: budget(None, weights="device", state="device"), {}),
    "copies on the host": (lambda p: budget(p, weights="host"), {"speculate": True}),
    "state on the host": (lambda p: budget(p, weights="disk", state="host", durability="none"), {}),
    "horizontal": (lambda p: budget(p), {"schedule": "horizontal"}),
    "delayed": (lambda p: budget(p), {"delay": 0.5}),
    "striped": (lambda p: budget([p / "a", p / "b"]), {"io_threads": 1}),
    "planned": (lambda p: budget(p, weights=None, state=None, durability="none"), {}),
}


def settings_of(form: Moments, optimizer: str = "adamw", precision: str = "bf16") -> dict[str, Any]:
    made = replace(OPTIMIZERS[optimizer], moments=form)
    return {"optimizer": made, "precision": precision, "clip_grad_norm": CLIP}


@cache
def wanted(form: Moments, optimizer: str = "adamw", precision: str = "bf16") -> Result:
    """The numbers of the serial oracle."""
    with TemporaryDirectory() as folder:
        where, more = budget(Path(folder, "store")), {"overlap": False, "speculate": False, "delay": 0.0}
        return train(CASE, where, STEPS, **settings_of(form, optimizer, precision), **more)


@pytest.mark.sampled(3, values=False)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("form", "optimizer", "precision"),
    [
        ("int8", "adamw", "bf16"),
        ("int8", "adamw", "fp32"),
        ("int8", "adamw", "fp16"),
        ("int8", "lion", "bf16"),
        ("int8", "momentum", "fp32"),
        ("bf16", "adamw", "bf16"),
        ("bf16", "momentum", "fp32"),
    ],
)
def test_same_bits_as_the_oracle(form: Moments, optimizer: str, precision: str, variant: str, tmp_path: Path) -> None:
    where, more = VARIANTS[variant]
    (tmp_path / "store").mkdir()
    found = train(CASE, where(tmp_path / "store"), STEPS, **settings_of(form, optimizer, precision), **more)
    assert_same(found, wanted(form, optimizer, precision))


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("form", FORMS)
def test_plans_in_any_order_give_the_bits_of_one(form: Moments, tmp_path: Path) -> None:
    with wrap(CASE, budget(tmp_path, weights=None, state=None, durability="none"), **settings_of(form)) as engine:
        engine.prepare(STEPS[0])
        plans, stats = other_plans(engine.inside.planning.request, seed=5), []
        for micro_batches in STEPS:
            engine.inside.planning.change(next(plans))
            stats.append(engine.step(micro_batches))
        found = result_of(engine, stats)
    assert_same(found, wanted(form))


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("form", FORMS)
def test_a_run_goes_on_from_its_store_and_from_a_snapshot(form: Moments, tmp_path: Path) -> None:
    settings = settings_of(form)
    with wrap(CASE, budget(tmp_path / "store"), delay=0.0, **settings) as engine:
        run_steps(engine, STEPS[:2])
        engine.save(tmp_path / "snapshot")
    for opened in (True, False):
        where = budget(tmp_path / "store") if opened else budget(None, weights="host", state="host")
        with wrap(CASE, where, **settings) as engine:
            if not opened:
                engine.load(tmp_path / "snapshot")
            found = run_steps(engine, STEPS[2:])
        assert found.losses == wanted(form).losses[2:]
        assert all(torch.equal(found.state[name], array) for name, array in wanted(form).state.items())


def test_small_parameters_keep_fp32_and_what_is_moved_is_what_the_form_says(tmp_path: Path) -> None:
    with wrap(CASE, budget(tmp_path), **settings_of("int8")) as engine:
        run_steps(engine, STEPS[:1])
        arrays, groups = engine.inside.resources.arrays, engine.inside.resources.groups
        for group in groups:
            small = {s.name for s in group.slices if s.numel < COMPACT_FROM}
            assert not small or len(small) == len(group.slices)
            kinds = [arrays.parts[name].dtype for name in arrays.parts_of_state(group.spec.index)]
            exact = [torch.int16, torch.float32, torch.float32]
            codes = [torch.int16, torch.int8, torch.uint8, torch.int16, torch.int16]
            assert kinds == (exact if small else codes)
        written = engine.plan.schedule.bytes_per_lane()["write"]
        assert written == sum(
            2 * g.spec.trainable + engine.plan.settings.form.state_bytes(g.spec) for g in groups if g.spec.trainable
        )
        large = sum(g.spec.trainable for g in groups if g.spec.compact)
        assert engine.plan.settings.form.per_element == 2 + 2 * (1 + 1 / 16)
        assert large > 0


def test_an_optimizer_without_moments_has_no_form_of_them() -> None:
    with pytest.raises(ConfigError, match="moments has no effect without momentum"):
        penstock.SGD(lr=0.1, moments="int8")


class _WithNothing(nn.Module):
    """A parameter without elements beside a matrix of a compact moment's size."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing, self.lin = nn.Parameter(torch.empty(0, 3)), nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.lin(x) + self.nothing.sum()


@pytest.mark.parametrize(
    "optimizer",
    [penstock.AdamW(moments="bf16"), penstock.AdamW(moments="int8"), penstock.Muon()],
    ids=["bf16", "int8", "muon"],
)
def test_parameters_without_elements_may_be_all_that_is_stepped_apart(
    optimizer: penstock.AdamW | penstock.Muon, tmp_path: Path
) -> None:
    """Small parameters, and those that are no matrices, have groups of their own."""
    settings: dict[str, Any] = {"optimizer": optimizer, "precision": "fp32", "plan": None, "device": "cpu"}
    settings |= {"loss_fn": lambda model, batch: model(batch["x"]).square().mean()}
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(4, 64), nn.Sequential(_WithNothing(), _WithNothing()))
        with penstock.wrap(model, budget=budget(tmp_path / "store"), **settings) as engine:
            losses.append(engine.step([{"x": torch.arange(4)}]).loss)
            assert dict(engine.master_parameters())["1.0.nothing"].shape == (0, 3)
    assert losses[1] < losses[0]
