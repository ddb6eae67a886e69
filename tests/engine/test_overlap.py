"""Steps before the norm is known and steps in the next forward: the bits of a serial run that waits, wherever state is.

The oracle has no overlap, no speculation, no delay, no graph that is kept: everything on disk, one op at a time.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn

from penstock.engine import repeats
from tests.models import TIED, MicroBatch
from tests.training import (
    MicroBatches,
    Result,
    assert_same,
    assert_same_state,
    budget,
    run_steps,
    steps_of,
    train,
    wrap,
)

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = TIED
STEPS = steps_of(CASE, 3)
PLACES: dict[str, dict[str, Any]] = {
    "disk": {},
    "weights-host": {"weights": "host"},
    "weights-device": {"weights": "device"},
    "host": {"weights": "host", "state": "host"},
    "device": {"weights": "device", "state": "device"},
    "mixed": {"weights": None, "state": None, "durability": "none", "device": "400KiB", "host": "1000KiB"},
}


def places(precision: str) -> list[str]:
    """In fp32 the weights are the master copy, which cannot be on the device without the moments."""
    return [name for name in PLACES if precision != "fp32" or name != "weights-device"]


def oracle(path: Path, steps: Sequence[MicroBatches], **settings: Any) -> Result:
    if settings.get("clip_grad_norm", 1.0) is not None or settings.get("precision") == "fp16":
        settings["speculate"] = False
    return train(CASE, budget(path), steps, overlap=False, delay=0.0, recompute=True, **settings)


@cache
def wanted(precision: str, clip: float | None, schedule: str = "vertical") -> Result:
    with TemporaryDirectory() as folder:
        return oracle(Path(folder, "store"), STEPS, precision=precision, clip_grad_norm=clip, schedule=schedule)


@cache
def limit(precision: str) -> float:
    """A norm that some of the steps are over."""
    norms = sorted(wanted(precision, 1e9).norms)
    return (norms[0] + norms[1]) / 2


def variants(precision: str, place: str) -> list[tuple[bool, float]]:
    """(speculate, delay) that are possible, and enough of them. In fp32 weights in memory are state in memory."""
    if place in ("host", "device") or (precision, place) == ("fp32", "weights-host"):
        return [(False, 0.6)]
    return [(True, 0.0), (True, 0.4), (False, 0.6), (True, 1.0)] if place == "disk" else [(True, 0.4)]


@pytest.mark.sampled(3, values=False)
@pytest.mark.parametrize(
    ("precision", "place", "speculate", "delay"),
    [(p, place, *v) for p in ("fp32", "bf16", "fp16") for place in places(p) for v in variants(p, place)],
)
def test_clipping_in_some_of_the_steps_gives_the_bits_of_a_run_that_waits(
    tmp_path: Path, precision: str, place: str, speculate: bool, delay: float
) -> None:
    common: dict[str, Any] = {"clip_grad_norm": limit(precision), "precision": precision}
    clipped = [s.clipped for s in wanted(precision, limit(precision)).stats]
    assert 0 < sum(clipped) < len(STEPS)
    places_of = PLACES[place] | ({"host": "600KiB"} if place == "mixed" and precision != "fp32" else {})
    found = train(CASE, budget(tmp_path, **places_of), STEPS, speculate=speculate, delay=delay, **common)
    assert_same(wanted(precision, limit(precision)), found)
    assert place != "mixed" or ("disk" in found.placed and len(found.placed) > 1)
    repeats = [s.repeats for s in found.stats]
    early = speculate and delay < 1
    assert repeats == ([int(c) for c in clipped] if early else [0] * len(STEPS)) or place == "mixed"


@pytest.mark.sampled(3, values=False)
@pytest.mark.parametrize(("activations", "gradients"), [("device", "host"), ("host", "host"), ("disk", "disk")])
@pytest.mark.parametrize(("place", "delay"), list(zip(places("bf16"), (0.25, 0.5, 1.0, 0.3, 0.6, 0.8), strict=True)))
def test_any_delay_gives_the_same_bits_without_a_norm_to_wait_for(
    tmp_path: Path, place: str, delay: float, activations: str, gradients: str
) -> None:
    common: dict[str, Any] = {"clip_grad_norm": None, "precision": "bf16"}
    if gradients == "disk":
        common["clip_grad_norm"] = 1e9
        common["speculate"] = False
    where = budget(
        tmp_path, activations=activations, gradients=gradients if gradients == "disk" else None, **PLACES[place]
    )
    found = train(CASE, where, STEPS, delay=delay, **common)
    assert_same(wanted("bf16", common["clip_grad_norm"]), found)


def looked_at(folder: Path, delay: float, *, overlap: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of an evaluation after the first step, and the parameters after the last one. ``folder`` has a snapshot
    after the second step then, and the store."""
    with wrap(CASE, budget(folder / "store"), delay=delay, clip_grad_norm=0.1, overlap=overlap) as engine:
        engine.step(STEPS[0])
        evaluated = engine.evaluate(STEPS[0])
        engine.step(STEPS[1])
        engine.save(folder / "snapshot")
        engine.step(STEPS[2])
        return evaluated, {name: p.clone() for name, p in engine.master_parameters()}


@cache
def looked_at_with_nothing_pending() -> tuple[float, dict[str, torch.Tensor]]:
    with TemporaryDirectory() as folder:
        return looked_at(Path(folder), 0.0, overlap=True)


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_pending_is_done_before_the_state_is_looked_at(tmp_path: Path, overlap: bool) -> None:
    """Evaluation, a snapshot, the parameters, and the end of the run."""
    serial, (loss, parameters) = wanted("fp32", 0.1), looked_at_with_nothing_pending()
    found_loss, found = looked_at(tmp_path, 0.7, overlap=overlap)
    assert found_loss == loss
    assert_same_state(found, parameters)
    with wrap(CASE, budget(tmp_path / "store"), delay=0.7, clip_grad_norm=0.1) as engine:
        assert engine.step_count == len(STEPS)
        assert_same_state(serial.state, run_steps(engine, []).state)
        engine.load(tmp_path / "snapshot")
        assert_same_state(serial.state, run_steps(engine, STEPS[2:]).state)


def test_micro_batches_of_another_shape_find_what_was_pending_done(tmp_path: Path) -> None:
    steps = [*STEPS[:2], *steps_of(CASE, 1, first=3, lengths=(16, 16)), *steps_of(CASE, 1, first=4)]
    serial = oracle(tmp_path / "oracle", steps, clip_grad_norm=0.1)
    found = train(CASE, budget(tmp_path / "found"), steps, delay=0.5, speculate=True, clip_grad_norm=0.1)
    assert_same(serial, found)


def test_the_learning_rate_of_a_delayed_step_is_that_of_its_own_step(tmp_path: Path) -> None:
    def run(path: Path, **settings: Any) -> Result:
        with wrap(CASE, budget(path), clip_grad_norm=0.1, **settings) as engine:
            schedule = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 1.0 / (1 + step))
            for micro_batches in STEPS[:-1]:
                engine.step(micro_batches)
                schedule.step()
            return run_steps(engine, STEPS[-1:])

    serial = run(tmp_path / "serial", overlap=False, speculate=False, delay=0.0)
    assert_same(serial, run(tmp_path / "found", speculate=True, delay=0.6))


def test_horizontal_speculates_too(tmp_path: Path) -> None:
    clip = limit("bf16")
    found = train(
        CASE, budget(tmp_path), STEPS, speculate=True, clip_grad_norm=clip, precision="bf16", schedule="horizontal"
    )
    assert_same(wanted("bf16", clip, "horizontal"), found)
    assert any(s.repeats for s in found.stats)


def test_bytes_moved_are_those_of_the_schedule_with_a_delay_and_early_steps(tmp_path: Path) -> None:
    with wrap(CASE, budget(tmp_path), delay=0.5, speculate=True, clip_grad_norm=1e9, precision="bf16") as engine:
        stats = [engine.step([STEPS[0][0]] * 2) for _ in range(3)]
        planned = engine.plan.schedule.bytes_per_lane()
        assert {lane: n for lane, n in stats[-1].bytes_moved.items() if n} == {k: v for k, v in planned.items() if v}
        assert "CM" in engine.plan.schedule.by_id


def test_a_run_that_is_clipped_all_the_time_stops_speculating_and_takes_it_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeats, "WINDOW", 2)
    clip = sorted(wanted("bf16", 1e9).norms)[0] * 0.9
    scale = 1.0

    def scaled(model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
        return CASE.loss_fn(model, micro_batch) * scale

    settings: dict[str, Any] = {"clip_grad_norm": clip, "precision": "bf16", "plan": None}
    with wrap(replace(CASE, loss_fn=scaled), budget(tmp_path), **settings) as engine:
        first = run_steps(engine, STEPS)
        assert [s.repeats for s in first.stats] == [1, 1, 0]
        assert not engine.plan.settings.speculate
        assert_same(wanted("bf16", clip), first)
        scale = 1e-3  # gradients are within the limit from now on
        for _ in range(2):
            engine.step(STEPS[0])
        assert engine.plan.settings.speculate
