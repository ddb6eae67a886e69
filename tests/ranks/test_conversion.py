"""Moments in another form, of ranks that have the state in each way: a step then has the bits of one process that goes
on from the same state in that form. ``tests/state/test_converted_stores.py`` compares all that is kept.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

import penstock
from penstock.store.manifest import Manifest
from tests.models import PLAIN
from tests.ranks.test_beside import beside
from tests.ranks.test_bits import equal, results
from tests.ranks.test_copies import copies_of
from tests.ranks.worlds import pipeline, together
from tests.training import ADAMW, budget, run_steps, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = PLAIN
LENGTHS = (12, 8, 8, 12)
HOW: Mapping[str, Any] = {"precision": "bf16", "clip_grad_norm": 0.92, "strands": 4}
COMPACT = {"optimizer": replace(ADAMW, moments="int8")}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A way in which ranks have the state. ``begins``: what is asked for besides, where the run begins."""

    ranks: int
    axis: str = "dp_shard"
    stages: int = 1
    copies: int = 1
    hosts: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    begins: Mapping[str, Any] = field(default_factory=dict)

    def of(self, mesh: DeviceMesh) -> DeviceMesh:
        os.environ["GROUP_RANK"] = str(mesh.get_rank() * self.hosts // mesh.size())
        if self.copies > 1:
            return copies_of(mesh, self.copies)
        return mesh if self.axis == "pp" or self.stages == 1 else beside(mesh, self.stages)

    def micro_batches(self, mesh: DeviceMesh | None, count: int, first: int) -> list[Any]:
        """Those of each step that are this rank's."""
        steps = steps_of(CASE, count, first=first, lengths=LENGTHS)
        if mesh is None or self.axis == "pp":
            return steps
        number, size = (mesh.get_rank(), self.ranks) if self.stages == 1 else (mesh.get_local_rank(1), mesh.size(1))
        share = len(LENGTHS) // size
        return [step[number * share : (number + 1) * share] for step in steps]


LAYOUTS = {
    "pipeline": Layout(ranks=2, axis="pp"),
    "pipeline of two hosts, dealt unevenly": Layout(ranks=2, axis="pp", hosts=2, begins={"deal": [2, 1]}),
    "zero bubble of three": Layout(ranks=3, axis="pp", settings={"schedule": "zero-bubble"}),
    "interleaved": Layout(ranks=2, axis="pp", settings={"schedule": "interleaved-1f1b"}),
    "pipelines beside each other on two hosts": Layout(ranks=4, stages=2, hosts=2),
    "1f1b beside each other": Layout(ranks=4, stages=2, settings={"schedule": "1f1b"}),
    "copies": Layout(ranks=4, copies=2),
    "copies on two hosts": Layout(ranks=4, copies=2, hosts=2, settings={"stage": 2}),
    "stage 0 on two hosts": Layout(ranks=2, hosts=2, settings={"stage": 0}),
}


def gone_on(
    mesh: DeviceMesh | None, one: Path, where: penstock.Budget, layout: Layout, saves: Path | None, **settings: Any
) -> dict[str, Any]:
    """The third step with moments in 8 bits, of an engine on stores of two steps, or that loads these from ``one``."""
    with wrap(CASE, where, mesh=mesh, **HOW, **layout.settings, **COMPACT, **settings) as engine:
        if not engine.step_count:
            engine.load(one)
        assert engine.step_count == 2
        found = results(engine, run_steps(engine, layout.micro_batches(mesh, 1, 3)))
        if saves is not None:
            engine.save(saves)
        return found


def in_another_form(mesh: DeviceMesh, one: Path, folder: Path, layout: Layout) -> list[dict[str, Any]]:
    """From the stores of the ranks; from a snapshot of one process; and from their own."""
    own, where = layout.of(mesh), budget(folder / "store")
    with wrap(CASE, where, mesh=own, **HOW, **layout.settings, **layout.begins) as engine:
        engine.load(one)
        engine.save(folder / "several")
    return [
        gone_on(own, one, where, layout, folder / "compact"),
        gone_on(own, one, budget(None), layout, None, **layout.begins),
        gone_on(own, folder / "several", budget(None), layout, None, **layout.begins),
    ]


@pytest.fixture(scope="module")
def began(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """One process leaves a snapshot of two steps, goes on with moments in 8 bits, and leaves another one."""
    folder = tmp_path_factory.mktemp("one")
    with wrap(CASE, budget(None), **HOW) as engine:
        run_steps(engine, steps_of(CASE, 2, lengths=LENGTHS))
        engine.save(folder / "one")
    wanted = gone_on(None, folder / "one", budget(None), Layout(ranks=1), folder / "compact")
    return folder, wanted


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_go_on_with_moments_in_another_form_as_one_process_does(
    name: str, began: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """So does one process, from what they have saved, in the form that they had before."""
    layout, (alone, wanted) = LAYOUTS[name], began
    words = (layout.ranks, in_another_form, alone / "one", tmp_path, layout)
    for found in pipeline(*words) if layout.axis == "pp" else together(*words):
        for one in found:
            equal(one, wanted)
    forms = [Manifest.read(tmp_path / "store" / f"rank-{rank}").model["moments"] for rank in range(layout.ranks)]
    assert forms == ["int8"] * layout.ranks
    with wrap(CASE, budget(None), **HOW) as engine:
        back = []
        for folder in (alone, tmp_path):
            engine.load(folder / "compact")
            back.append(results(engine, run_steps(engine, [])))
    equal(*back)
