"""A loop on Fabric whose processes are pipelines, or have copies of the state: the loop of one process, to the bit."""

import json
from pathlib import Path

import pytest
from lightning_fabric import Fabric

import penstock
from penstock.errors import ConfigError
from penstock.fabric import PenstockStrategy
from tests.ranks.launched import Launched
from tests.ranks.looped_together import of_logits
from tests.ranks.trained import on_engine

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.campaign)])
def test_a_loop_of_processes_that_take_batches_together_is_that_of_one(ranks: int, tmp_path: Path) -> None:
    """What they log, too, and what goes on from their checkpoint. Of four, two pipelines are beside each other."""
    ended = Launched(ranks, ["-m", "tests.ranks.looped_together", tmp_path], tmp_path).outcomes()
    assert [code for code, _, _ in ended] == [0] * ranks, ended
    by_rank = [json.loads((tmp_path / f"figures-{rank}.json").read_text()) for rank in range(ranks)]
    for name in by_rank[0]:
        strands, groups = (4, 4) if name == "copies" else (2, ranks // 2)
        layout = {"strands": strands}
        *steps, evaluated = on_engine(tmp_path / f"{name} alone", range(4), 0, 2, layout=layout, save=tmp_path / "one")
        (*losses, logits), _ = of_logits(layout)
        each = 4 // groups
        for rank, figures in enumerate(by_rank):
            (*found, gathered), (*own, seen), dealt = figures[name]
            group = rank % groups
            assert [norm for _, norm in found] == [norm for _, norm in steps]
            assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in steps], rel=1e-6)
            assert gathered[0] == evaluated
            assert own == [of_step[group * each : (group + 1) * each] for of_step in losses]
            assert seen == logits
            assert dealt == list(range(group, 8, groups))
        resumed, wanted = (
            on_engine(tmp_path / f"{name} {of}", range(4), 2, resume=tmp_path / of, layout=layout)
            for of in (name, "one")
        )
        assert resumed == wanted


def test_layouts_that_a_loop_cannot_have_are_refused() -> None:
    budget = penstock.Budget(device="64MiB", host="64MiB")
    with pytest.raises(ConfigError, match="cp=2 is not there for loops on Fabric, whose losses are of whole sequences"):
        PenstockStrategy(budget=budget, cp=2)
    with pytest.raises(ConfigError, match="pipeline=2 with copies=2"):
        PenstockStrategy(budget=budget, pipeline=2, copies=2)
    with pytest.raises(ConfigError, match="pipeline=2 is of several processes, and this is one: start them with torch"):
        Fabric(accelerator="cpu", devices=1, strategy=PenstockStrategy(budget=budget, pipeline=2))
