"""Pipelines beside each other, whose neighbours share what is one rank's in a pipeline: the bits of one process, stores
that go on and can be cut anew, and a rank that fails ends them all."""

import os
import signal
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.state.values import kept
from tests.conftest import Campaign
from tests.models import PLAIN, Case
from tests.ranks.test_bits import BF16, CASES, FP16, FP32, LENGTHS, STEPS, STRANDS, Numbers, Run, equal, results
from tests.ranks.test_failures import learns
from tests.ranks.test_prediction import any_plan, machine
from tests.ranks.worlds import World, together
from tests.training import AT_ONCE, budget, run_steps, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")


def beside(mesh: DeviceMesh, stages: int = 2) -> DeviceMesh:
    """The same ranks as pipelines of so many."""
    return init_device_mesh(mesh.device_type, (stages, mesh.size() // stages), mesh_dim_names=("pp", "dp_shard"))


def of_rank(
    case: Case, mesh: DeviceMesh | None, count: int, first: int = 1, lengths: Sequence[int] = LENGTHS
) -> list[Any]:
    """The micro-batches of each step that are those of a rank's pipeline."""
    steps = steps_of(case, count, first=first, lengths=lengths)
    place, pipelines = (0, 1) if mesh is None else (mesh.get_local_rank("dp_shard"), mesh.size(1))
    share = len(lengths) // pipelines
    return [micro_batches[place * share : (place + 1) * share] for micro_batches in steps]


def trained(mesh: DeviceMesh | None, numbers: Numbers, run: Run, disk: Path | None) -> dict[str, Any]:
    """What a run has found, and left."""
    where, case = budget(disk if run.disk else None, **run.budget), CASES[numbers.model]
    with wrap(case, where, mesh=mesh, strands=STRANDS, **numbers.settings(), **run.settings) as engine:
        found = results(engine, run_steps(engine, of_rank(case, mesh, STEPS)))
        found["evaluated"] = engine.evaluate(of_rank(case, mesh, 1, first=50)[0])
        return found


@cache
def alone(numbers: Numbers) -> dict[str, Any]:
    return trained(None, numbers, Run(), None)


def by_itself(mesh: DeviceMesh, numbers: Numbers) -> dict[str, Any]:
    """``alone``, of the one rank of a mesh."""
    return trained(beside(mesh, 1), numbers, Run(), None)


def in_pipelines(mesh: DeviceMesh, stages: int, numbers: Numbers, run: Run, disk: Path | None) -> dict[str, Any]:
    return trained(beside(mesh, stages), numbers, run, disk)


WAYS: dict[str, tuple[Numbers, Run]] = {
    "in memory": (FP32, Run()),
    "on disk, early, bf16": (BF16, Run(disk=True, settings={"speculate": True})),
    "all on disk": (
        FP32,
        Run(disk=True, settings={"speculate": False}, budget={"gradients": "disk", "activations": "disk"}),
    ),
    "delayed": (FP32, Run(disk=True, settings={"delay": 0.5})),
    "stage 2": (BF16, Run(settings={"stage": 2})),
    "fp16": (FP16, Run(disk=True)),
    "one op at a time": (FP32, Run(disk=True, settings={"overlap": False})),
    "1f1b": (BF16, Run(disk=True, settings={"schedule": "1f1b"})),
    "interleaved, dealt": (FP32, Run(settings={"schedule": "interleaved-1f1b", "deal": [2, 1]})),
    "zero bubble": (FP32, Run(disk=True, settings={"schedule": "zero-bubble"})),
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if way == "interleaved, dealt" else [pytest.mark.campaign]) for way in WAYS]
)
def test_two_pipelines_of_two_ranks_have_the_bits_of_one_process(way: str, tmp_path: Path) -> None:
    """Of those on disk ``test_accelerator`` runs one each time."""
    numbers, run = WAYS[way]
    for found in together(4, in_pipelines, 2, numbers, run, tmp_path / "store"):
        equal(found, alone(numbers))


# ---- what is kept


CASE = PLAIN
FEW = LENGTHS[:4]
"""Lengths of micro-batches where it is about what is kept, and not about sums."""


def steps(
    mesh: DeviceMesh | None, stages: int, disk: Path | None, count: int, **settings: Any
) -> tuple[int, list[float]]:
    """The step that a run on a store began after, and its losses."""
    found = None if mesh is None else mesh if stages == 1 else beside(mesh, stages)
    with wrap(CASE, budget(disk), mesh=found, strands=STRANDS, **AT_ONCE, **settings) as engine:
        begun = engine.step_count
        return begun, run_steps(engine, mine(found, count, begun + 1)).losses


def mine(mesh: DeviceMesh | None, count: int, first: int) -> list[Any]:
    return of_rank(CASE, mesh, count, first, FEW) if mesh is None or mesh.ndim == 2 else of_flat(mesh, count, first)


def of_flat(mesh: DeviceMesh, count: int, first: int) -> list[Any]:
    share = len(FEW) // mesh.size()
    begin = mesh.get_rank() * share
    return [step[begin : begin + share] for step in steps_of(CASE, count, first=first, lengths=FEW)]


@cache
def whole_of(count: int) -> list[float]:
    return steps(None, 1, None, count)[1]


def killed(mesh: DeviceMesh, disk: Path) -> None:
    """The third rank in its third step, in the forward of its block."""
    both = beside(mesh)
    with wrap(CASE, budget(disk), mesh=both, strands=STRANDS, **AT_ONCE) as engine:
        *before, last = of_rank(CASE, both, 3, lengths=FEW)
        run_steps(engine, before)
        if mesh.get_rank() == 2:
            block = engine.model.layers[engine.inside.resources.dealt.index(1)]
            block.down.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        engine.step(last)


def test_a_rank_that_is_killed_ends_all_and_they_go_on_from_their_last_commit(tmp_path: Path) -> None:
    found = World(4, killed, tmp_path / "store").outcomes()
    for rank in (0, 1, 3):
        assert (found[rank].kind, found[rank].said) == ("RankError", "rank 2 was killed")
    assert together(4, steps, 2, tmp_path / "store", 2) == [(2, whole_of(4)[2:])] * 4
    for one in World(4, steps, 1, tmp_path / "store", 1).outcomes():
        assert "which are 2 pipelines of 2, and what is asked for is the part of rank" in one.said, one


def saves(mesh: DeviceMesh | None, stages: int, path: Path, load: Path | None) -> list[float]:
    """The losses of two steps that follow on a snapshot, of which another one is saved."""
    found = None if mesh is None else mesh if stages == 1 else beside(mesh, stages)
    with wrap(CASE, budget(None), mesh=found, strands=STRANDS) as engine:
        if load is not None:
            engine.load(load)
        losses = run_steps(engine, mine(found, 1, engine.step_count + 1)).losses
        engine.save(path)
        return losses


def test_a_snapshot_goes_from_any_layout_to_any_other(campaign: Campaign, tmp_path: Path) -> None:
    layouts = ((4, 2), (2, 1), (4, 2), (4, 4), (4, 2), (2, 2))
    layouts = layouts if campaign.full else layouts[:3]
    before: Path | None = None
    for number, (size, stages) in enumerate(layouts):
        path = tmp_path / str(number)
        assert together(size, saves, stages, path, before) == [whole_of(6)[number : number + 1]] * size, (size, stages)
        with kept(path) as committed:
            assert committed.step == number + 1
        before = path


# ---- pipelines whose micro-batches are others


def of_other_shapes(mesh: DeviceMesh, folder: Path) -> tuple[list[float], bool]:
    """Steps in which one pipeline meets new shapes, the other or none; and whether they are predicted."""
    both = beside(mesh)
    lengths = [[(12, 8), (12, 8)], [(9, 7), (12, 8)], [(12, 8), (6, 12)]]
    with any_plan, wrap(CASE, budget(folder), mesh=both, plan=machine(folder), **AT_ONCE) as engine:
        steps = [[CASE.micro_batches(1, seed=n, length=n)[0] for n in of[both.get_local_rank(1)]] for of in lengths]
        losses = [engine.step(micro_batches).loss for micro_batches in steps]
        return losses, engine.prediction is not None


def test_pipelines_that_meet_new_shapes_in_other_steps_wait_for_nobody(tmp_path: Path) -> None:
    found = together(4, of_other_shapes, tmp_path)
    assert found == [found[0]] * 4
    assert found[0][1]


def not_a_number(mesh: DeviceMesh, disk: Path, what: str) -> tuple[str, float]:
    """A loss of one pipeline is none, where the ranks of the first place have nothing that trains."""
    both, model = beside(mesh), CASE.model()
    for module in (model.embed, model.head):
        module.requires_grad_(False)
    mine, batches = mesh.get_rank() == 0, of_rank(CASE, both, 2, lengths=FEW)
    return learns(what, batches, budget(disk), mine=mine, mesh=both, model=model, deal=[0, 3])


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("what", ["evaluate", "step"])
def test_a_loss_that_is_no_number_in_one_pipeline_is_known_to_all(what: str, tmp_path: Path) -> None:
    (mine, loss), *others = together(4, not_a_number, tmp_path / "store", what)
    assert "the loss is nan" in mine
    assert all(("rank 0" in said, other) == (True, loss) for said, other in others), others
