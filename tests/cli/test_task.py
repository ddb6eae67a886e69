"""Room on the drives for a run's stores, which is looked for before the run's data are read."""

from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main, settings, task
from penstock.cli.changed import changed
from penstock.cli.model import run_model
from penstock.cli.task import check_room, requests_of, shape_of
from penstock.errors import BudgetError, ConfigError
from penstock.store.removal import delete_store

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("flags", [(), ("--micro_batch_size", "null")], ids=["cut as asked", "cut as fits"])
def test_a_run_without_room_for_its_state_is_refused_before_its_data_are_read(
    flags: tuple[str, ...],
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(task, "free_bytes", lambda path: 100 << 10)
        assert main(["train", str(config), *flags]) == 2
    said = capsys.readouterr()
    assert "of disk are needed for weights and state, and 100 KiB are free in " in said.err
    assert "Reading the data" not in said.out
    assert not (tmp_path / "run").exists()


def test_no_rank_of_a_pipeline_is_planned_to_keep_graphs_of_compiled_blocks(config: Path) -> None:
    most = {}
    for compiled in ("true", "false"):
        found = settings.load(config, [("pipeline", "2"), ("compile", compiled)])
        most[compiled] = [r.most_graphs for r in requests_of(found, shape_of(found, "cpu"), "cpu", 2, 2, 2)]
    assert most["true"] == [0, 0]
    assert all(most["false"])


def test_what_a_run_replaces_makes_room_for_it(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it was kept in another directory."""
    disk = ("--budget.disk", str(tmp_path / "disk"))
    assert main(["train", str(config), *disk, "--steps", "1"]) == 0
    monkeypatch.setattr(task, "free_bytes", lambda path: 0)
    assert main(["train", str(config), "--steps", "1", "--overwrite"]) == 0
    delete_store([tmp_path / "run" / "store"])
    assert main(["train", str(config), "--steps", "1", "--overwrite"]) == 2


@pytest.mark.sampled(4, values=False)
@pytest.mark.parametrize(
    "flags",
    [
        {"precision": "fp32"},
        {"precision": "bf16", "budget.slots": "1", "budget.durability": "none"},
        {"precision": "fp16"},
        {"optimizer.moments": "int8"},
        {"optimizer.moments": "bf16", "precision": "bf16"},
        {"optimizer.name": "muon", "optimizer.adamw": "{lr: 1e-3}"},
        {"optimizer.name": "sgd"},
    ],
    ids=str,
)
def test_no_run_is_refused_whose_store_has_room(
    flags: dict[str, Any], config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = settings.load(config, list(flags.items()))
    model = changed(run_model(found.model, found.data).model, found)
    needed = requests_of(found, shape_of(found, "cpu"), "cpu", 2, 2, 1)[0].store_bytes
    monkeypatch.setattr(task, "free_bytes", lambda path: needed)
    check_room(found, model, "cpu", 1, 1, ())
    monkeypatch.setattr(task, "free_bytes", lambda path: needed // 2)
    with pytest.raises(BudgetError, match="are needed for weights and state"):
        check_room(found, model, "cpu", 1, 1, ())


def test_a_vocabulary_that_is_no_number_is_refused_before_there_is_a_model(config: Path) -> None:
    flags = [("model.config.vocab_size", "32k")]
    with pytest.raises(ConfigError, match=r"model\.config\.vocab_size must be a whole number, not '32k'"):
        shape_of(settings.load(config, flags), "cpu")
