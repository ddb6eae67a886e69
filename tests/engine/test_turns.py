"""Calls of engines take turns, and an engine belongs to the process that made it."""

import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import ConfigError, StoreError
from tests.models import TIED
from tests.patience import PATIENCE
from tests.training import assert_same, assert_same_state, budget, run_steps, state_of, steps_of, train, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = TIED  # with dropout: its numbers depend on torch's random state
STEPS = steps_of(CASE, 3, lengths=(12, 8))


def in_child(work: Callable[[], object]) -> str:
    """Run something in a forked child; what it returns or raises, as text."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing"
        try:
            try:
                said = f"{work()}"
            except BaseException as error:  # noqa: BLE001 - all of it is told
                said = f"{type(error).__name__}: {error}"
        finally:
            os.write(write, said.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def unwound(engine: penstock.Engine) -> None:
    with engine:
        sys.exit(3)


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("places", [{}, {"weights": "host", "state": "host"}], ids=["disk", "host"])
def test_a_forked_child_that_ends_changes_nothing_of_its_parents_run(places: dict[str, Any], tmp_path: Path) -> None:
    """It closes the engine, or leaves the block that does by ``sys.exit``; the parent goes on, and its store too."""
    wanted = train(CASE, budget(tmp_path / "wanted", **places), STEPS)
    with wrap(CASE, budget(tmp_path / "store", **places)) as engine:
        first = run_steps(engine, STEPS[:1])
        before = {path: path.read_bytes() for path in (tmp_path / "store").iterdir() if path.is_file()}
        assert in_child(engine.close) == "None"
        assert in_child(lambda: unwound(engine)) == "SystemExit: 3"
        assert {path: path.read_bytes() for path in before} == before
        second = run_steps(engine, STEPS[1:2])
        assert in_child(lambda: unwound(engine)) == "SystemExit: 3"
        with pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
            wrap(CASE, budget(tmp_path / "store", **places))
    with wrap(CASE, budget(tmp_path / "store", **places)) as engine:
        assert engine.step_count == 2
        third = run_steps(engine, STEPS[2:])
    assert first.losses + second.losses + third.losses == wanted.losses
    assert_same_state(third.state, wanted.state)


def test_a_forked_child_is_told_that_the_engine_is_its_parents(tmp_path: Path) -> None:
    with wrap(CASE, budget(tmp_path / "store")) as engine:
        run_steps(engine, STEPS[:1])
        calls: list[Callable[[], object]] = [
            lambda: engine.step(STEPS[1]),
            lambda: engine.evaluate(STEPS[1]),
            lambda: engine.prepare(STEPS[1]),
            lambda: engine.save(tmp_path / "snapshot"),
            lambda: engine.load(tmp_path / "snapshot"),
            lambda: next(engine.master_parameters()),
        ]
        for call in calls:
            assert in_child(call).startswith(f"ConfigError: this engine belongs to process {os.getpid()}, and this is")
        store = engine.inside.resources.commits.store
        assert store is not None
        for use in (lambda: store.commit({}), store.flush, lambda: state_of(engine)):
            assert "belongs to process" in (said := in_child(use)) or "was opened by process" in said
        assert not (tmp_path / "snapshot").exists()


def test_engines_in_two_threads_take_turns(tmp_path: Path) -> None:
    """Whatever one does, the other's numbers are those that it has alone."""
    wanted = [train(CASE, budget(tmp_path / f"wanted{i}"), STEPS, seed=i) for i in range(2)]
    before = torch.get_rng_state()

    def run(i: int) -> Any:
        torch.set_num_threads(1)
        return train(CASE, budget(tmp_path / f"found{i}"), STEPS, seed=i, model=models[i])

    models = [CASE.model(), CASE.model()]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(run, range(2)))
    for one, other in zip(wanted, found, strict=True):
        assert_same(one, other)
    torch.set_rng_state(before)


def waiting(inside: threading.Event, leave: threading.Event) -> Callable[[nn.Module, Mapping[str, Any]], torch.Tensor]:
    """A loss that stops in the middle of a step."""

    def loss(model: nn.Module, micro_batch: Mapping[str, Any]) -> torch.Tensor:
        found = CASE.loss_fn(model, micro_batch)
        inside.set()
        assert leave.wait(PATIENCE)
        return found

    return loss


def test_two_threads_do_not_use_one_engine_at_once_and_may_one_after_the_other(tmp_path: Path) -> None:
    inside, leave = threading.Event(), threading.Event()
    case = CASE.__class__(build=CASE.build, micro_batch=CASE.micro_batch, blocks=3, loss_fn=waiting(inside, leave))
    wanted = train(CASE, budget(tmp_path / "wanted"), STEPS[:2])
    with wrap(case, budget(tmp_path / "found")) as engine, ThreadPoolExecutor(1, "the-other") as threads:
        step = threads.submit(engine.step, STEPS[0])
        assert inside.wait(PATIENCE)
        for call in (lambda: engine.step(STEPS[1]), lambda: engine.evaluate(STEPS[1]), engine.close):
            with pytest.raises(ConfigError, match="this engine is in use by thread 'the-other_0'"):
                call()
        leave.set()
        losses = [step.result().loss, engine.step(STEPS[1]).loss]
        assert losses == wanted.losses
        assert_same_state(state_of(engine), wanted.state)


def test_a_call_from_within_a_step_is_refused(tmp_path: Path) -> None:
    """Of the same engine, and of another one: neither waits for a turn that never comes."""
    with wrap(CASE, budget(tmp_path / "other")) as other:
        engines: list[penstock.Engine] = [other]

        def loss(model: nn.Module, micro_batch: Mapping[str, Any]) -> torch.Tensor:
            engines[-1].evaluate(STEPS[0])
            return CASE.loss_fn(model, micro_batch)

        case = CASE.__class__(build=CASE.build, micro_batch=CASE.micro_batch, blocks=3, loss_fn=loss)
        with wrap(case, budget(tmp_path / "store")) as engine:
            for which in (other, engine):
                engines.append(which)
                with pytest.raises(ConfigError, match="was called within a call of an engine"):
                    engine.step(STEPS[0])
