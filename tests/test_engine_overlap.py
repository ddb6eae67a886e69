"""Steps before the norm is known and steps in the next forward: the bits of a serial run that waits, wherever state is.

The oracle has no overlap, no speculation, no delay: everything on disk, one op at a time.
"""

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import MODELS
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

import penstock

CASE = MODELS["gpt2"]
STEPS = steps_of(CASE, 4)
PLACES: dict[str, dict[str, Any]] = {
    "disk": {},
    "weights-host": {"weights": "host"},
    "weights-device": {"weights": "device"},
    "host": {"weights": "host", "state": "host"},
    "device": {"weights": "device", "state": "device"},
    "mixed": {"weights": None, "state": None, "host": "2MiB"},
}


def places(precision: str) -> list[str]:
    """In fp32 the weights are the master copy, which cannot be on the device without the moments."""
    return [name for name in PLACES if precision != "fp32" or name != "weights-device"]


def oracle(path: Path, steps: Sequence[MicroBatches], **settings: Any) -> Result:
    return train(CASE, budget(path), steps, overlap=False, speculate=False, delay=0.0, **settings)


def limit(path: Path, precision: str) -> float:
    """A norm that about half of the steps are over."""
    norms = sorted(train(CASE, budget(path), STEPS, clip_grad_norm=1e9, precision=precision).norms)
    return (norms[1] + norms[2]) / 2


@pytest.mark.parametrize(("precision", "place"), [(p, place) for p in ("fp32", "bf16", "fp16") for place in places(p)])
def test_clipping_in_half_of_the_steps_gives_the_bits_of_a_run_that_waits(
    tmp_path: Path, precision: str, place: str
) -> None:
    clip = limit(tmp_path / "limit", precision)
    common: dict[str, Any] = {"clip_grad_norm": clip, "precision": precision}
    wanted = oracle(tmp_path / "oracle", STEPS, **common)
    assert 0 < sum(s.clipped for s in wanted.stats) < len(STEPS)
    for i, (speculate, delay) in enumerate(((True, 0.0), (True, 0.4), (False, 0.6), (True, 1.0))):
        if place in ("host", "device") and speculate:
            speculate = False
        found = train(
            CASE, budget(tmp_path / str(i), **PLACES[place]), STEPS, speculate=speculate, delay=delay, **common
        )
        assert_same(wanted, found)
        repeats = [s.repeats for s in found.stats]
        if place == "disk" and speculate and delay < 1:
            assert repeats == [int(s.clipped) for s in wanted.stats]
        if not speculate or delay == 1.0:
            assert not any(repeats)


@pytest.mark.parametrize("delay", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("place", places("bf16"))
def test_any_delay_gives_the_same_bits_without_a_norm_to_wait_for(tmp_path: Path, place: str, delay: float) -> None:
    common: dict[str, Any] = {"clip_grad_norm": None, "precision": "bf16"}
    wanted = oracle(tmp_path / "oracle", STEPS, **common)
    for checkpoints, gradients in product(("device", "host", "disk"), ("host", "disk")):
        if (checkpoints, gradients) not in (("device", "host"), ("host", "host"), ("disk", "disk")):
            continue
        where = tmp_path / f"{checkpoints}-{gradients}"
        found = train(CASE, budget(where, checkpoints=checkpoints, **PLACES[place]), STEPS, delay=delay, **common)
        assert_same(wanted, found)


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_pending_is_done_before_the_state_is_looked_at(tmp_path: Path, overlap: bool) -> None:
    """Evaluation, a snapshot, the parameters, and the end of the run."""
    wanted = oracle(tmp_path / "oracle", STEPS, clip_grad_norm=1.0)
    after: list[Any] = []
    for delay in (0.0, 0.7):
        with wrap(CASE, budget(tmp_path / f"store{delay}"), delay=delay, clip_grad_norm=1.0, overlap=overlap) as engine:
            seen: list[Any] = []
            for i, micro_batches in enumerate(STEPS):
                engine.step(micro_batches)
                if i == 0:
                    seen.append(engine.evaluate(micro_batches))
                if i == 1:
                    engine.save(tmp_path / f"snapshot{delay}")
                if i == 2:
                    seen.append({name: p.clone() for name, p in engine.master_parameters()})
            after.append(seen)
        with wrap(CASE, budget(tmp_path / f"store{delay}"), delay=delay, clip_grad_norm=1.0) as engine:
            assert engine.step_count == len(STEPS)
            found = run_steps(engine, [])
            assert_same_state(wanted.state, found.state)
        with wrap(CASE, budget(tmp_path / f"other{delay}"), delay=delay, clip_grad_norm=1.0) as engine:
            engine.load(tmp_path / f"snapshot{delay}")
            assert_same_state(wanted.state, run_steps(engine, STEPS[2:]).state)
    assert after[0][0] == after[1][0]
    assert_same_state(after[0][1], after[1][1])


def test_micro_batches_of_another_shape_find_what_was_pending_done(tmp_path: Path) -> None:
    steps = [*STEPS[:2], *steps_of(CASE, 1, first=3, lengths=(16, 16)), *steps_of(CASE, 1, first=4)]
    wanted = oracle(tmp_path / "oracle", steps, clip_grad_norm=1.0)
    found = train(CASE, budget(tmp_path / "found"), steps, delay=0.5, speculate=True, clip_grad_norm=1.0)
    assert_same(wanted, found)


def test_the_learning_rate_of_a_delayed_step_is_that_of_its_own_step(tmp_path: Path) -> None:
    def run(path: Path, **settings: Any) -> Result:
        with wrap(CASE, budget(path), clip_grad_norm=1.0, **settings) as engine:
            schedule = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 1.0 / (1 + step))
            for micro_batches in STEPS[:-1]:
                engine.step(micro_batches)
                schedule.step()
            return run_steps(engine, STEPS[-1:])

    wanted = run(tmp_path / "wanted", overlap=False, speculate=False, delay=0.0)
    assert_same(wanted, run(tmp_path / "found", speculate=True, delay=0.6))


def test_horizontal_speculates_too(tmp_path: Path) -> None:
    clip = limit(tmp_path / "limit", "bf16")
    common: dict[str, Any] = {"clip_grad_norm": clip, "precision": "bf16", "schedule": "horizontal"}
    wanted = oracle(tmp_path / "oracle", STEPS, **common)
    found = train(CASE, budget(tmp_path / "found"), STEPS, speculate=True, **common)
    assert_same(wanted, found)
    assert any(s.repeats for s in found.stats)


def test_the_norm_of_a_step_that_waits_for_nothing_is_that_of_all_its_gradients(tmp_path: Path) -> None:
    found = train(CASE, budget(tmp_path / "found"), STEPS, delay=0.5, clip_grad_norm=None)
    wanted = oracle(tmp_path / "oracle", STEPS, clip_grad_norm=None)
    assert found.norms == wanted.norms
    assert all(math.isfinite(norm) for norm in found.norms)


def test_bytes_moved_are_those_of_the_schedule_with_a_delay_and_early_steps(tmp_path: Path) -> None:
    with wrap(CASE, budget(tmp_path), delay=0.5, speculate=True, clip_grad_norm=1e9, precision="bf16") as engine:
        stats = [engine.step([STEPS[0][0]] * 2) for _ in range(3)]
        planned = engine.plan.schedule.bytes_per_lane()
        assert {lane: n for lane, n in stats[-1].bytes_moved.items() if n} == {k: v for k, v in planned.items() if v}
        assert "CM" in engine.plan.schedule.by_id
    assert isinstance(engine, penstock.Engine)
