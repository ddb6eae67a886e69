"""Whose a store is, for whoever opens it from Python, and what is never taken for something passing."""

from pathlib import Path

import pytest

from penstock.cli.run_record import RunRecord
from penstock.errors import ConfigError, StoreError
from penstock.hf.checkpoint import make_room
from penstock.store.facts import store_exists
from penstock.store.layout import Layout
from penstock.store.owner import Owner
from penstock.store.store import Store
from tests.models import PLAIN
from tests.training import budget, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = PLAIN
STEP = steps_of(CASE, 1)[0]


def run_in(folder: Path) -> Path:
    folder.mkdir()
    RunRecord.of(Owner.new(folder)).write(folder)
    return folder


def test_a_store_is_opened_for_its_run_alone(tmp_path: Path) -> None:
    ours, other, store = run_in(tmp_path / "ours"), run_in(tmp_path / "other"), tmp_path / "store"
    with wrap(CASE, budget(store), run=ours) as engine:
        engine.step(STEP)
    with pytest.raises(StoreError, match=rf"the state of another run, which began in {ours}.*wrap\(run="):
        wrap(CASE, budget(store))
    with pytest.raises(StoreError, match=f"which began in {ours}, and not that of {other}"):
        wrap(CASE, budget(store), run=other)
    with pytest.raises(ConfigError, match=r"budget\.disk: .* holds the state of a run of penstock train"):
        make_room(None, budget(store), overwrite=True)
    ours.rename(tmp_path / "moved")
    with wrap(CASE, budget(store), run=tmp_path / "moved") as engine:
        assert engine.step_count == 1
    with pytest.raises(ConfigError, match=r"run="):
        wrap(CASE, budget(store), run=tmp_path)


def test_a_store_of_no_run_is_no_runs(tmp_path: Path) -> None:
    with wrap(CASE, budget(tmp_path / "store")) as engine:
        engine.step(STEP)
    with pytest.raises(StoreError, match="belongs to no run"):
        wrap(CASE, budget(tmp_path / "store"), run=run_in(tmp_path / "run"))
    with wrap(CASE, budget(tmp_path / "store")) as engine:
        assert engine.step_count == 1


def test_what_a_killed_step_has_left_goes_whatever_the_next_plan_needs(tmp_path: Path) -> None:
    scratch = tmp_path / "store" / "scratch"
    scratch.parent.mkdir()
    Store.create([scratch], Layout.build([("gradients.0", 4096, 1)]), model={}, passing=True).close()
    with wrap(CASE, budget(tmp_path / "store")) as engine:
        assert not scratch.exists()
        engine.step(STEP)
    scratch.mkdir()
    (scratch / "penstock.store.partial").write_bytes(bytes(4096))
    with wrap(CASE, budget(tmp_path / "store")):
        assert not scratch.exists()


def test_a_store_that_lies_where_passing_things_go_is_not_removed(tmp_path: Path) -> None:
    """Another run's directory may be called so."""
    scratch = tmp_path / "store" / "scratch"
    scratch.parent.mkdir()
    Store.create([scratch], Layout.build([("weights.0", 4096, 1)]), model={}).close()
    with (
        wrap(CASE, budget(tmp_path / "store", activations="disk")) as engine,
        pytest.raises(StoreError, match="holds a run's state: move it"),
    ):
        engine.step(STEP)
    assert store_exists([scratch])
