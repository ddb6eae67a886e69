"""An engine that nothing refers to any more ends by itself, as by a kill: its threads go, and its store is free."""

import gc
import os
import threading
import weakref
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import penstock
from penstock.engine.durability import Durability
from penstock.store.layout import ALIGN, Layout
from penstock.store.store import Store
from tests.engine.test_turns import in_child
from tests.models import MODELS
from tests.training import AT_ONCE, Result, assert_same_state, budget, run_steps, state_of, steps_of, train, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = MODELS["skips"]
STEPS = steps_of(CASE, 2)


def engines_threads() -> set[str]:
    """Names of lanes' and writers' threads."""
    found = {thread.name for thread in threading.enumerate() if thread.name.startswith("penstock-")}
    return found - {"penstock-dropped", "penstock-stalls"}


def stepped(where: penstock.Budget, **settings: Any) -> penstock.Engine:
    engine = wrap(CASE, where, **settings)
    engine.step(STEPS[0])
    return engine


@cache
def wanted() -> Result:
    """What a run of the steps comes to that nobody drops."""
    return train(CASE, budget(None, weights="host", state="host"), STEPS)


@pytest.mark.parametrize("way", ["alone", "in a cycle", "by an error"])
def test_the_next_engine_goes_on_from_the_last_commit_of_one_that_was_dropped(way: str, tmp_path: Path) -> None:
    engine = stepped(budget(tmp_path / "store"), **AT_ONCE)
    gone = weakref.ref(engine)
    if way == "in a cycle":
        vars(engine)["itself"] = engine
    elif way == "by an error":
        with pytest.raises(penstock.ConfigError):
            engine.step(STEPS[1], position={"at": object()})
    model = engine.model
    del engine
    with wrap(CASE, budget(tmp_path / "store"), **AT_ONCE) as after:
        assert gone() is None
        assert after.step_count == 1
        assert not engines_threads()
        result = run_steps(after, STEPS[1:])
    assert_same_state(result.state, wanted().state)
    with pytest.raises(penstock.ModelError, match="the model's weights are the engine's"):
        model.state_dict()


def test_state_in_memory_that_was_not_committed_is_said_to_be_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = stepped(budget(tmp_path / "store", weights="host", state="host", durability="interval"))
    del engine
    with wrap(CASE, budget(tmp_path / "store", weights="host", state="host", durability="interval")) as after:
        assert after.step_count == 0
    assert "dropped without close(): its store goes on from the last commit" in caplog.text


def test_an_engine_that_is_dropped_gives_its_memory_back(tmp_path: Path) -> None:
    engine = stepped(budget(None))
    arrays = weakref.ref(engine.inside.resources.arrays)
    del engine
    with wrap(CASE, budget(tmp_path / "other")):
        gc.collect()
        assert arrays() is None
        assert not engines_threads()


def test_a_model_whose_store_is_refused_is_let_go_with_the_error(tmp_path: Path) -> None:
    with Store.create([tmp_path / "rank-0"], Layout.build([("a", ALIGN, 2)]), model={}) as store:
        store.commit({"step": 3, "whole": True})
    model = CASE.model()
    gone = weakref.ref(model)
    with pytest.raises(penstock.StoreError, match="has the state of a rank of several"):
        wrap(CASE, budget(tmp_path), model=model)
    del model
    gc.collect()
    assert gone() is None


def test_an_engine_that_a_forked_child_drops_is_the_parents(tmp_path: Path) -> None:
    held = [stepped(budget(tmp_path / "store"))]

    def drop() -> int:
        held.clear()
        with wrap(CASE, budget(tmp_path / "other")) as own:
            return own.step_count

    assert in_child(drop) == "0"
    with held[0] as engine:
        assert engine.step(STEPS[1]).loss > 0
    with pytest.raises(penstock.ConfigError, match="closed"):
        engine.step(STEPS[1])


def test_an_engine_may_be_closed_while_another_one_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [wrap(CASE, budget(tmp_path / f"{number}")) for number in range(3)]

    def alive(_: Any) -> bool:
        closing = threading.Thread(target=engines.pop().close)
        closing.start()
        closing.join()
        return True

    with monkeypatch.context() as patch:
        patch.setattr(weakref.finalize, "alive", property(alive))
        wrap(CASE, budget(tmp_path / "other")).close()
    assert not engines


def test_threads_that_make_engines_at_once_all_wait_for_one_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, may_end, found = stepped(budget(tmp_path / "store"), **AT_ONCE), threading.Event(), []
    abandon = Durability.abandon

    def later(durability: Durability) -> None:
        may_end.wait()
        abandon(durability)

    def make(name: str) -> None:
        with wrap(CASE, budget(tmp_path / name), **AT_ONCE) as made:
            found.append(made.step_count)

    with monkeypatch.context() as patch:
        patch.setattr(Durability, "abandon", later)
        del engine
        makers = [threading.Thread(target=make, args=(name,)) for name in ("other", "store")]
        for maker in makers:
            maker.start()
            maker.join(0.3)
        may_end.set()
        for maker in makers:
            maker.join()
    assert sorted(found) == [0, 1]


def test_what_was_got_from_an_engine_keeps_it(tmp_path: Path) -> None:
    """Values are read from it as long as anybody has them."""
    values = stepped(budget(tmp_path / "store"), **AT_ONCE).values()
    gc.collect()
    name = next(iter(values.parameters))
    with pytest.raises(penstock.StoreError, match=f"in use by process {os.getpid()}, which is this one"):
        wrap(CASE, budget(tmp_path / "store"))
    read = values.parameter(name)
    del values
    with wrap(CASE, budget(tmp_path / "store")) as after:
        assert torch.equal(after.values().parameter(name), read)
        assert state_of(after)


@pytest.mark.parametrize("part", ["Durability", "Snapshots", "Planning", "dropped.watch"])
def test_ctrl_c_as_an_engine_is_put_together_leaves_its_store_free(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"penstock.engine.engine.{part}", interrupted)
        with pytest.raises(KeyboardInterrupt):
            wrap(CASE, budget(tmp_path / "store"))
    wrap(CASE, budget(tmp_path / "store")).close()
