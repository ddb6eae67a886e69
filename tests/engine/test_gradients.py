"""``grad_dtype``: gradients rounded once, where it does not matter, and half the bytes where they are rounded early.

The oracle has no overlap, no speculation, no delay, and rounds as the optimizer reads: everything on disk, one op at a
time. The head of the model is its embedding: that gradient comes in two parts, is summed on the host, and rounded
there.
"""

import copy
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.errors import ConfigError, ScheduleError
from penstock.planner.plan import Plan
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.ir.text import parse_schedule
from penstock.schedule.lower.visits import lower_step
from tests.engine.test_traffic import CASE as LARGE_ENDS
from tests.models import TIED
from tests.stacks import Layer, Stack, stack, unequal
from tests.training import (
    Result,
    assert_same,
    budget,
    master_of,
    plain_loop,
    relative,
    run_steps,
    steps_of,
    torch_adamw,
    train,
    wrap,
)

CASE = TIED
STEPS = steps_of(CASE, 2)
BF16: dict[str, Any] = {"precision": "bf16", "grad_dtype": "bf16"}
SERIAL: dict[str, Any] = {"overlap": False, "speculate": False, "delay": 0.0}
PLACES: dict[str, dict[str, Any]] = {
    "disk": {},
    "gradients-disk": {"gradients": "disk"},
    "weights-device": {"weights": "device"},
    "host": {"weights": "host", "state": "host"},
    "device": {"weights": "device", "state": "device"},
}


@cache
def planned(precision: str) -> Plan:
    """The plan of a serial run with the cast on the device, which is where it is without a profile."""
    settings = BF16 | {"precision": precision}
    with TemporaryDirectory() as folder, wrap(CASE, budget(Path(folder)), **SERIAL, **settings) as engine:
        engine.step(STEPS[0])
        return engine.plan


def cast_on_host(plan: Plan, *, wait: bool = True) -> Schedule:
    """The schedule of the plan with the cast on the other side."""
    return lower_step("vertical", plan.program, replace(plan.settings, cast="host", wait=wait), plan.schedule.fixed)


@cache
def wanted(precision: str = "bf16", clip: float | None = 1e9) -> Result:
    settings = BF16 | {"precision": precision, "clip_grad_norm": clip, "overlap": False}
    own = cast_on_host(planned(precision), wait=clip is not None)
    with TemporaryDirectory() as folder:
        return train(CASE, budget(Path(folder)), STEPS, schedule=own, **settings)


def limit(precision: str = "bf16") -> float:
    """A norm that some of the steps are over."""
    norms = sorted(wanted(precision).norms)
    return (norms[0] + norms[1]) / 2


def crossing(plan: Plan) -> Counter[float]:
    """Number of copies from the device by bytes of an element."""
    cuts = {g.index: g.trainable for g in plan.program.groups}
    assert all(numel <= plan.settings.chunk for numel in cuts.values())
    return Counter(op.nbytes / cuts[op.id.group] for op in plan.schedule.lanes["d2h"] if op.id.kind == "DG")


@pytest.mark.sampled(2, values=False)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_side_that_casts_changes_no_bit(precision: str, tmp_path: Path) -> None:
    plan, clip = planned(precision), limit(precision)
    assert set(crossing(plan)) == {2.0, 4.0}
    assert set(crossing(replace(plan, schedule=cast_on_host(plan)))) == {4.0}
    found = train(CASE, budget(tmp_path), STEPS, clip_grad_norm=clip, **BF16 | {"precision": precision})
    assert_same(wanted(precision, clip), found)
    assert {s.clipped for s in found.stats} == {True, False}


@pytest.mark.parametrize(
    ("place", "speculate", "delay"),
    [
        ("disk", True, 0.4),
        ("gradients-disk", False, 0.6),
        ("weights-device", None, 0.0),
        ("host", None, 0.5),
        ("device", None, 0.0),
    ],
)
def test_no_place_and_no_means_change_a_bit(place: str, speculate: bool | None, delay: float, tmp_path: Path) -> None:
    clip = limit()
    where = budget(tmp_path, **PLACES[place])
    found = train(CASE, where, STEPS, clip_grad_norm=clip, speculate=speculate, delay=delay, **BF16)
    assert_same(wanted(clip=clip), found)


@pytest.mark.parametrize("place", ["disk", "device"])
def test_without_a_norm_to_wait_for_the_bits_are_the_same(place: str, tmp_path: Path) -> None:
    where = budget(tmp_path, **PLACES[place])
    assert_same(wanted(clip=None), train(CASE, where, STEPS, clip_grad_norm=None, **BF16))


def test_horizontal_sums_on_the_host_and_rounds_there(tmp_path: Path) -> None:
    """The sum over micro-batches is rounded, not what is added up."""
    clip = limit("fp32")
    settings = BF16 | {"precision": "fp32", "schedule": "horizontal", "clip_grad_norm": clip}
    with wrap(CASE, budget(tmp_path), **settings) as engine:
        assert_same(wanted("fp32", clip), run_steps(engine, STEPS))
        assert set(crossing(engine.plan)) == {4.0}
        assert engine.plan.settings.cast == "host"


def test_training_equals_plain_torch_with_gradients_rounded_once(tmp_path: Path) -> None:
    clip = limit("fp32")
    model = CASE.model()
    plain_model, unrounded_model = copy.deepcopy(model), copy.deepcopy(model)
    with wrap(CASE, budget(tmp_path), model=model, clip_grad_norm=clip, grad_dtype="bf16") as engine:
        found = run_steps(engine, STEPS)
        plain = plain_loop(CASE, plain_model, engine, STEPS, torch_adamw, clip, torch.bfloat16)
        unrounded = plain_loop(CASE, unrounded_model, engine, STEPS, torch_adamw, clip)
        assert found.norms == pytest.approx(plain.norms, rel=1e-6)
        assert found.norms != pytest.approx(unrounded.norms, rel=1e-5)
        assert relative(master_of(engine), plain.parameters) <= 1e-6
        assert relative(master_of(engine), unrounded.parameters) > 4e-6, "rounding is seen"


def test_bytes_of_gradients_are_half_of_those_in_fp32(tmp_path: Path) -> None:
    """Down, to disk and back, and as the norm and the optimizer read them; and the host buffers that they wait in."""
    case = LARGE_ENDS  # no tied head
    micro_batches = steps_of(case, 1)[0]
    moved, held = {}, {}
    for dtype in ("fp32", "bf16"):
        for gradients in ("host", "disk"):
            where = budget(tmp_path / f"{dtype}.{gradients}", gradients=gradients, activations="device")
            settings: dict[str, Any] = {"precision": "bf16", "grad_dtype": dtype, "speculate": False, "delay": 0.0}
            with wrap(case, where, clip_grad_norm=1.0, **settings) as engine:
                stats = [engine.step(micro_batches) for _ in range(2)][-1]
                planned = engine.plan.schedule.bytes_per_lane()
                assert {k: v for k, v in stats.bytes_moved.items() if v} == {k: v for k, v in planned.items() if v}
                moved[dtype, gradients] = stats.bytes_moved
                pools = {pool.name: pool.size * pool.count for pool in engine.plan.schedule.pools}
                held[dtype, gradients] = pools["gradients_held" if gradients == "host" else "gradients_in"]
                assert stats.peak_bytes["host"] <= engine.plan.host_bytes
                assert stats.peak_bytes["device"] <= engine.plan.device_bytes
                trained = sum(g.trainable for g in engine.plan.program.groups)
    for gradients in ("host", "disk"):
        spared = {lane: n - moved["bf16", gradients][lane] for lane, n in moved["fp32", gradients].items()}
        once = 2 * trained
        on_disk = once * (gradients == "disk")
        assert spared == dict.fromkeys(spared, 0) | {"d2h": once, "cpu": 2 * once, "read": on_disk, "write": on_disk}
        assert held["bf16", gradients] * 2 == held["fp32", gradients]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="grad_dtype='fp16': must be one of fp32, bf16"):
        wrap(CASE, budget(tmp_path / "a"), grad_dtype="fp16")
    with (
        wrap(CASE, budget(tmp_path / "b"), schedule=planned("bf16").schedule, precision="bf16") as engine,
        pytest.raises(ScheduleError, match=r"grad_dtype='bf16'"),
    ):
        engine.step(STEPS[0])


def test_a_schedule_that_casts_on_the_device_runs_as_it_is(tmp_path: Path) -> None:
    schedule = parse_schedule(str(planned("bf16").schedule))
    found = train(CASE, budget(tmp_path), STEPS, schedule=schedule, clip_grad_norm=1e9, overlap=False, **BF16)
    assert_same(wanted(), found)


class InParts(Layer):
    """A backward within the backward brings a weight's gradient, and what the block has returned of it another part."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y: torch.Tensor = checkpoint(super().forward, x, use_reentrant=True)
        return y, self.linear.weight.flatten()


def in_parts(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x, weight = layer(x)
        x = x + weight.sum() * 0.1
    return x


def test_gradients_that_come_in_parts_are_summed_by_their_micro_batch(tmp_path: Path) -> None:
    """A vertical step adds all micro-batches up on the device, a horizontal one each to what the host has."""
    case = stack(InParts, in_parts)
    steps = [unequal(case, seed=3 * step) for step in range(2)]
    found = []
    for schedule in ("vertical", "horizontal"):
        with wrap(case, budget(tmp_path / schedule), schedule=schedule, precision="fp32") as engine:
            found.append(run_steps(engine, steps))
    assert_same(*found)
    assert found[0].stats[0].grad_norm > 0


class _Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((4,), -0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + self.scale)


@pytest.mark.parametrize("settings", [{}, {"schedule": "horizontal"}, BF16], ids=["", "horizontal", "bf16"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_gradient_of_minus_zero_counts_as_zero(count: int, settings: dict[str, Any]) -> None:
    """A sum begins with +0, however many micro-batches there are: a weight of -0 stays one."""
    model: Any = torch.nn.Sequential(_Scaled(), _Scaled())
    with penstock.wrap(
        model,
        budget=budget(None),
        optimizer=penstock.SGD(lr=1.0),
        blocks=list(model),
        device="cpu",
        loss_fn=lambda model, micro_batch: model(micro_batch["x"]).sum(),
        **settings,
    ) as engine:
        engine.step([{"x": torch.full((4,), -0.0)}] * count)
        assert all(bool(torch.signbit(value).all()) for _, value in engine.master_parameters())
