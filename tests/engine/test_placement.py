"""State moves between tiers only whole: plans that follow each other, and drives that fail on the way."""

import errno
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import ConfigError, ModelError, StoreError
from tests.faults import failing
from tests.models import PLAIN
from tests.training import Result, assert_same, assert_same_state, budget, run_steps, state_of, steps_of, train, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = PLAIN
STEPS = steps_of(CASE, 3, lengths=(12, 8))
ANYWHERE: Mapping[str, Any] = {"weights": None, "state": None, "durability": "none"}
"""the plan may keep state in memory"""
EVERYWHERE: Mapping[str, Any] = ANYWHERE | {"device": 1 << 20, "host": 1 << 20}


@cache
def plain() -> Result:
    """The steps with everything on disk."""
    with TemporaryDirectory() as folder:
        return train(CASE, budget(Path(folder, "store")), STEPS)


def test_a_drive_that_fails_while_arrays_are_placed_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step brings state into memory; an error there, after any number of reads, must not reach what is on
    disk: neither that engine nor the next one has another state."""
    where = budget(tmp_path / "store", **ANYWHERE)
    with wrap(CASE, where) as engine:
        before = state_of(engine)
    for after in (0, 4, 8, 12, 16):
        with wrap(CASE, where) as engine:
            assert_same_state(state_of(engine), before)
            engine.evaluate(STEPS[0])  # what the probe reads is read now
            with failing("preadv", errno.EIO, monkeypatch, after=after), pytest.raises(StoreError):
                engine.step(STEPS[0])
            assert_same_state(state_of(engine), before)
    with wrap(CASE, where) as engine:
        assert_same_state(state_of(engine), before)
        found = run_steps(engine, STEPS)
    assert_same(found, plain())


def test_evaluations_between_steps_find_the_state_where_their_plan_says(tmp_path: Path) -> None:
    with wrap(CASE, budget(tmp_path / "store", **EVERYWHERE)) as engine:
        for micro_batches in STEPS:
            engine.evaluate(STEPS[0] * 2)
            check_placed(engine)
            engine.step(micro_batches)
            check_placed(engine)
        found = state_of(engine)
    assert_same_state(found, plain().state)


def check_placed(engine: penstock.Engine) -> None:
    place, arrays = engine.plan.settings.place, engine.inside.resources.arrays
    for group in arrays.groups:
        assert arrays.found_on(group.index) == place.weights[group.index]
    fixed = engine.plan.schedule.fixed
    for tier in ("device", "host"):
        planned = sum(n for where, what, n in fixed if where == tier and what in ("weights", "state"))
        held = sum(p.nbytes for name, p in arrays.parts.items() if arrays.tier_of(name) == tier)
        held += sum(
            arrays.weights(g.index).nbytes
            for g in arrays.groups
            if arrays.found_on(g.index) == tier != arrays.tier_of(f"weights.{g.index}")
        )
        assert held == planned


def test_without_a_disk_the_host_holds_no_more_than_its_budget_at_any_time() -> None:
    where = penstock.Budget(device="64MiB", host="1MiB")
    with wrap(CASE, where) as engine:
        arrays = engine.inside.resources.arrays
        held = sum(p.nbytes for name, p in arrays.parts.items() if arrays.tier_of(name) == "host")
        assert 0 < held <= where.host_bytes


class Branches(nn.Module):
    """Blocks with a parameter that only some data reach."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Branch() for _ in range(3))

    def forward(self, x: torch.Tensor, rare: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, rare)
        return x.square().mean()


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(8, 8)
        self.rare = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, rare: torch.Tensor) -> torch.Tensor:
        y = self.common(x)
        return x + (self.rare(y) if bool(rare.any()) else y)


def branch_steps() -> list[list[dict[str, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    reached = ((True, False), (False, False), (False, True), (False, False))
    return [
        [{"x": torch.randn(4, 8, generator=generator), "rare": torch.tensor([flag])} for flag in flags]
        for flags in reached
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
@pytest.mark.parametrize("place", ["disk", "device"])
def test_a_parameter_that_no_gradient_reached_stays_as_it_is(
    precision: str, schedule: str, place: str, tmp_path: Path
) -> None:
    """What has no gradient is left alone as by torch's optimizers: no weight decay, no decay of its moments."""
    torch.manual_seed(0)
    model, plain = Branches(), Branches()
    plain.load_state_dict(model.state_dict())
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    torch_optimizer = torch.optim.AdamW(plain.parameters(), **settings)
    disk = tmp_path / "store" if place == "disk" else None
    with penstock.wrap(
        model,
        optimizer=penstock.AdamW(**settings),
        budget=penstock.Budget(device="64MiB", host="64MiB", disk=disk, weights=place, state=place),
        precision=precision,
        schedule=schedule,
        clip_grad_norm=None,
        device="cpu",
        loss_fn=lambda model, mb: model(**mb),
    ) as engine:
        for micro_batches in branch_steps():
            before = dict(engine.master_parameters())
            engine.step(micro_batches)
            for mb in micro_batches:
                (plain(**mb) / len(micro_batches)).backward()
            untouched = {name for name, p in plain.named_parameters() if p.grad is None}
            torch_optimizer.step()
            torch_optimizer.zero_grad()
            for name, after in engine.master_parameters():
                assert torch.equal(after, before[name]) == (name in untouched), name
        near = 1e-6 if precision == "fp32" else 3e-2
        found = dict(engine.master_parameters())
        for name, p in plain.named_parameters():
            torch.testing.assert_close(found[name], p.detach(), rtol=near, atol=near)


def test_a_model_that_is_half_on_the_meta_device_is_refused(tmp_path: Path) -> None:
    model = Branches()
    model.layers[1].to("meta")
    with pytest.raises(ModelError, match=r"'layers\.1\.common\.weight' is one"):
        penstock.wrap(model, optimizer=penstock.AdamW(), budget=budget(tmp_path / "store"), device="cpu")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("device", "message"),
    [("xpu", "only 'cpu' and 'cuda'"), ("cuda:99", "CUDA sees"), ("warp", "is no device")],
)
def test_a_device_that_is_not_there_is_refused(device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        penstock.wrap(Branches(), optimizer=penstock.AdamW(), budget=budget(None), device=device)


def test_micro_batches_of_incomparable_shapes_are_planned_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes = []
    with wrap(CASE, budget(tmp_path / "store")) as engine:
        probe = engine.inside.resources.tape.probe
        monkeypatch.setattr(engine.inside.resources.tape, "probe", lambda *a, **k: probes.append(1) or probe(*a, **k))
        wide = CASE.micro_batches(1, seed=1, length=12)[0]
        tall = {name: value[:, :6].repeat(3, 1) for name, value in wide.items()}
        for _ in range(3):
            engine.step([wide, tall])
    assert len(probes) == 2
