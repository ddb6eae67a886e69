"""What a step counts: the FLOP of its model, and the bytes that it puts on disk. And plans that are made before it."""

import copy
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import penstock
from tests.models import MODELS, PLAIN, MicroBatch
from tests.training import assert_same, budget, run_steps, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_steps_flop_are_those_of_a_plain_forward_and_backward(name: str, tmp_path: Path) -> None:
    """The FLOP of micro-batches that are shorter than what was probed are in proportion to their tokens."""
    case = MODELS[name]
    model = case.model()
    plain = copy.deepcopy(model)

    def counted(micro_batch: MicroBatch) -> int:
        with FlopCounterMode(display=False) as counter:
            loss = plain(**micro_batch).loss if case.loss_fn is None else case.loss_fn(plain, micro_batch)
            loss.backward()
        return counter.get_total_flops()

    (long,), (short,) = (case.micro_batches(1, seed=1, length=length) for length in (12, 8))
    with wrap(case, budget(tmp_path / "store"), model=model) as engine:
        assert engine.step([long, long]).flops == 2 * counted(long)
        if name == "llama":
            assert engine.step([long, short]).flops == pytest.approx(counted(long) * (1 + 8 / 12))


@pytest.mark.parametrize("activations", ["host", "disk"])
def test_the_bytes_written_are_all_that_reach_the_disk(
    activations: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are those of the write lane, and the checksums of the commit besides."""
    case = PLAIN
    where = budget(tmp_path / "store", activations=activations)
    with wrap(case, where) as engine:
        for micro_batches in steps_of(case, 3):
            stats = engine.step(micro_batches)
            lane = stats.bytes_moved["write"]
            assert lane > 0
            assert lane <= stats.bytes_written <= 1.05 * lane + 64 * 1024
    with wrap(case, budget(None)) as engine:
        assert engine.step(steps_of(case, 1)[0]).bytes_written == 0


def test_a_commit_in_the_background_counts_as_written(tmp_path: Path) -> None:
    case = PLAIN
    where = budget(tmp_path / "store", state="host", weights="host", durability="interval", interval=2)
    with wrap(case, where) as engine:
        written = [engine.step(micro_batches).bytes_written for micro_batches in steps_of(case, 5)]
        state = engine.plan.state_bytes
    assert sum(written) > state / 2, "the state was committed at least once"
    assert min(written) < state / 10, "and not in every step"


def test_a_plan_made_before_the_first_step_changes_nothing_but_when(tmp_path: Path) -> None:
    case, steps = PLAIN, steps_of(PLAIN, 2)
    with wrap(case, budget(tmp_path / "a")) as engine:
        plain = run_steps(engine, steps)
    with wrap(case, budget(tmp_path / "b")) as engine:
        plan = engine.prepare(steps[0])
        assert engine.step_count == 0
        assert engine.plan is plan
        prepared = run_steps(engine, steps)
        assert engine.plan is plan
    assert_same(plain, prepared)


def test_what_does_not_fit_is_refused_before_the_first_step_and_less_may_be_tried(tmp_path: Path) -> None:
    case = MODELS["llama"]
    (large,), (small,) = (case.micro_batches(1, seed=1, length=length) for length in (64, 4))
    with wrap(case, budget(tmp_path / "store")) as engine:
        needs = engine.prepare([small]).device_bytes
        assert engine.prepare([large]).device_bytes > needs
    with wrap(case, budget(tmp_path / "tight", device=f"{needs}B")) as engine:
        with pytest.raises(penstock.BudgetError, match="too small"):
            engine.prepare([large])
        engine.prepare([small])
        assert torch.isfinite(torch.tensor(engine.step([small]).loss))
