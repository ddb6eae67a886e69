"""Losses and gradients that are no numbers: what is skipped, what is refused, and that nothing is lost by it."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import NonFiniteError, StoreError
from tests.models import MODELS, SURE, MicroBatch
from tests.training import Result, assert_same_state, budget, run_steps, state_of, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = SURE
STEPS = steps_of(CASE, 3)


class Spoil(torch.autograd.Function):
    """Leaves a loss as it is and makes its gradient infinite."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.inf


def loss_of(model: nn.Module, micro_batch: Mapping[str, Any]) -> torch.Tensor:
    """The model's loss, spoiled as the micro-batch's ``fault`` says."""
    out = model(**{k: v for k, v in micro_batch.items() if k != "fault"})
    loss: torch.Tensor = out if isinstance(out, torch.Tensor) else out.loss
    match int(micro_batch["fault"]):
        case 1:
            return loss.float() * 1e8  # finite; its gradient is too large for fp16
        case 2:
            return Spoil.apply(loss)
        case 3:
            return loss * torch.nan
    return loss


FAULTY = replace(CASE, loss_fn=loss_of)


def with_fault(micro_batches: list[MicroBatch], fault: int = 0, at: int = 1) -> list[MicroBatch]:
    return [mb | {"fault": torch.tensor(fault if m == at else 0)} for m, mb in enumerate(micro_batches)]


GOOD = [with_fault(step) for step in STEPS]


@cache
def undisturbed(*, after_first: int = 0, **settings: Any) -> Result:
    """The good steps alone, everything on disk; ``after_first``: how often the loss scale is halved after the first."""
    with TemporaryDirectory() as folder, wrap(FAULTY, budget(Path(folder, "store")), **settings) as engine:
        first = run_steps(engine, GOOD[:1])
        for _ in range(after_first):
            engine.inside.resources.progress.scale.update(overflow=True)
        rest = run_steps(engine, GOOD[1:])
        return replace(rest, losses=first.losses + rest.losses, norms=first.norms + rest.norms)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("places", [{}, {"activations": "disk", "gradients": "disk"}, {"memory": "device"}], ids=str)
def test_an_overflow_in_fp16_skips_the_step_and_nothing_else(
    clip: float | None, places: dict[str, str], tmp_path: Path
) -> None:
    def where(name: str) -> penstock.Budget:
        if "memory" in places:
            return budget(None, weights=places["memory"], state=places["memory"])
        return budget(tmp_path / name, **places)

    settings = {"precision": "fp16", "clip_grad_norm": clip}
    wanted = undisturbed(after_first=1, **settings)
    with wrap(FAULTY, where("found"), **settings) as engine:
        first = run_steps(engine, GOOD[:1])
        bad = run_steps(engine, [with_fault(STEPS[1], fault=1)])
        rest = run_steps(engine, GOOD[1:])
        assert engine.step_count == 4
        assert engine.inside.resources.progress.updates == 3
    assert bad.stats[0].skipped
    assert not bad.stats[0].clipped
    assert_same_state(bad.state, first.state)
    assert [s.loss_scale for s in (*first.stats, *bad.stats, *rest.stats)] == [65536, 65536, 32768, 32768]
    assert first.losses + rest.losses == wanted.losses
    assert first.norms + rest.norms == wanted.norms
    assert_same_state(rest.state, wanted.state)


def test_the_loss_scale_is_part_of_a_snapshot(tmp_path: Path) -> None:
    settings = {"precision": "fp16"}
    with wrap(FAULTY, budget(tmp_path / "one"), **settings) as engine:
        engine.step(GOOD[0])
        engine.step(with_fault(STEPS[1], fault=1))
        engine.save(tmp_path / "snapshot")
        wanted = run_steps(engine, GOOD[1:])
    with wrap(FAULTY, budget(tmp_path / "two"), **settings) as engine:
        engine.load(tmp_path / "snapshot")
        found = run_steps(engine, GOOD[1:])
    assert [s.loss_scale for s in found.stats] == [32768, 32768]
    assert_same_state(found.state, wanted.state)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_infinite_gradient_skips_the_step_when_clipping(precision: str, tmp_path: Path) -> None:
    wanted = undisturbed(precision=precision)
    with wrap(FAULTY, budget(tmp_path / "found"), precision=precision) as engine:
        engine.step(GOOD[0])
        assert engine.step(with_fault(STEPS[1], fault=2)).skipped
        found = run_steps(engine, GOOD[1:])
    assert {s.loss_scale for s in found.stats} == {1.0}
    assert found.losses == wanted.losses[1:]
    assert_same_state(found.state, wanted.state)


def test_an_infinite_gradient_without_clipping_is_an_error_that_a_snapshot_mends(tmp_path: Path) -> None:
    """The optimizer does not wait for the norm then, so with one slot it is too late to skip."""
    wanted = undisturbed(clip_grad_norm=None)
    with wrap(FAULTY, budget(tmp_path / "found", slots=1), clip_grad_norm=None) as engine:
        engine.step(GOOD[0])
        engine.save(tmp_path / "snapshot")
        with pytest.raises(NonFiniteError, match=r"step 2: the gradient of layers.* was infinite.*[Ll]oad a snapshot"):
            engine.step(with_fault(STEPS[1], fault=2))
        for unusable in (lambda: engine.step(GOOD[1]), lambda: engine.evaluate(GOOD[1])):
            with pytest.raises(StoreError, match=r"step 2: the gradient of.*load a snapshot"):
                unusable()
        engine.load(tmp_path / "snapshot")
        assert engine.step_count == 1
        assert_same_state(run_steps(engine, GOOD[1:]).state, wanted.state)


def test_an_infinite_gradient_without_clipping_updates_nothing_where_there_are_two_slots(tmp_path: Path) -> None:
    wanted = undisturbed(clip_grad_norm=None)
    with wrap(FAULTY, budget(tmp_path / "found"), clip_grad_norm=None) as engine:
        engine.step(GOOD[0])
        before = state_of(engine)
        with pytest.raises(
            NonFiniteError,
            match=r"step 2: the gradient of layers.2.*\(layers.2\) was infinite.* Nothing was updated",
        ):
            engine.step(with_fault(STEPS[1], fault=2))
        assert engine.step_count == 1
        assert_same_state(state_of(engine), before)
        assert_same_state(run_steps(engine, GOOD[1:]).state, wanted.state)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("memory", ["disk", "device"])
def test_a_loss_that_is_no_number_is_refused_and_changes_nothing(
    schedule: str, clip: float | None, memory: str, tmp_path: Path
) -> None:
    def where(name: str) -> penstock.Budget:
        return budget(tmp_path / name) if memory == "disk" else budget(None, weights=memory, state=memory)

    settings = {"schedule": schedule, "clip_grad_norm": clip}
    wanted = undisturbed(clip_grad_norm=clip)  # the schedule changes no bit
    with wrap(FAULTY, where("found"), **settings) as engine:
        engine.step(GOOD[0])
        before = state_of(engine)
        for micro_batch in (0, 2):
            with pytest.raises(NonFiniteError, match=rf"step 2, micro-batch {micro_batch}: the loss is nan"):
                engine.step(with_fault(STEPS[1], fault=3, at=micro_batch))
        assert_same_state(state_of(engine), before)
        assert engine.step_count == 1
        found = run_steps(engine, GOOD[1:])
    assert found.losses == wanted.losses[1:]
    assert_same_state(found.state, wanted.state)


@pytest.mark.parametrize("fault", [2, 3])
def test_running_statistics_do_not_see_what_was_skipped_or_refused(fault: int, tmp_path: Path) -> None:
    case = replace(MODELS["skips"], loss_fn=loss_of)
    steps = steps_of(case, 2)
    with wrap(case, budget(tmp_path / "store")) as engine:
        before = run_steps(engine, [with_fault(steps[0])]).state
        assert any(tensor.any() for name, tensor in before.items() if name.endswith("running_mean"))
        if fault == 2:
            assert engine.step(with_fault(steps[1], fault=2)).skipped
        else:
            with pytest.raises(NonFiniteError):
                engine.step(with_fault(steps[1], fault=3))
        assert_same_state(state_of(engine), before)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("delay", [0.5, 1.0])
@pytest.mark.parametrize("places", [{"slots": 1}, {"durability": "interval", "interval": 50}], ids=str)
def test_what_the_step_before_had_left_does_not_count_against_a_step_that_is_skipped(
    places: dict[str, Any], delay: float, tmp_path: Path
) -> None:
    """Late chunks are written in place there, and are part of the state before the step is found to be not finite."""
    with wrap(FAULTY, budget(tmp_path, **places), delay=delay, clip_grad_norm=1.0) as engine:
        for step in GOOD[:2]:
            engine.step(step)
        with pytest.raises(NonFiniteError, match="Nothing was updated"):
            engine.step(with_fault(STEPS[1], fault=3))
        assert engine.step(with_fault(STEPS[1], fault=2)).skipped
        assert not engine.step(GOOD[1]).skipped


@pytest.mark.parametrize("slots", [1, 2])
def test_a_commit_that_fails_after_what_was_left_is_done_is_the_drives_error(slots: int, tmp_path: Path) -> None:
    with wrap(FAULTY, budget(tmp_path / "run", slots=slots), delay=0.5, clip_grad_norm=1.0) as engine:
        engine.step(GOOD[0])
        store = engine.inside.resources.commits.store
        assert store is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "commit", _fails)
            with pytest.raises(StoreError, match="the drive"):
                engine.save(tmp_path / "snapshot")
        engine.save(tmp_path / "snapshot")


def _fails(record: Mapping[str, Any]) -> None:
    raise StoreError("the drive failed")
