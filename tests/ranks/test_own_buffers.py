"""Buffers that each rank keeps for itself: those that torch makes of its own micro-batches, in a step that is taken,
run again, skipped or broken off, and as a run goes on in every way. Who has none of his own takes the first rank's."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import penstock
from penstock.config.step import SyncBuffers
from penstock.errors import ModelError, NonFiniteError
from penstock.state.buffers import Buffers
from penstock.state.reshard import reshard
from penstock.state.slots import Slots
from penstock.state.values import Committed, committed, kept
from penstock.store.store import Store
from tests.engine.test_nonfinite import loss_of, with_fault
from tests.models import MicroBatch
from tests.ranks.test_buffers import CASE as WITHOUT_FAULTS
from tests.ranks.test_buffers import buffers_of
from tests.ranks.test_copies import copies_of
from tests.ranks.worlds import World, together
from tests.training import abandon, budget, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = replace(WITHOUT_FAULTS, loss_fn=loss_of)
Found = dict[str, torch.Tensor]


def given(rank: int, step: int, fault: int = 0) -> list[MicroBatch]:
    return with_fault(WITHOUT_FAULTS.micro_batches(2, seed=10 * step + rank), fault)


def equal(one: Found, other: Mapping[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def plain(engine: penstock.Engine) -> nn.Module:
    """The model as this rank has it."""
    model, values = CASE.model(), engine.values()
    for name, parameter in model.named_parameters():
        parameter.data = values.parameter(name)
    for name, buffer in model.named_buffers():
        buffer.copy_(values.buffers[name])
    return model


def made_of(model: nn.Module, micro_batches: list[MicroBatch]) -> Found:
    """The buffers that torch makes of a rank's micro-batches."""
    for micro_batch in micro_batches:
        loss_of(model, micro_batch)
    return {f"buffer.{name}": buffer for name, buffer in model.named_buffers()}


def stepped(mesh: DeviceMesh, disk: Path) -> Found:
    """This rank's buffers at the end. Other numbers are those of ranks that go on with the first's."""
    rank, how = mesh.get_rank(), {"mesh": mesh, "speculate": True, "clip_grad_norm": 0.01}
    with (
        wrap(CASE, budget(disk / "own"), sync_buffers="own", **how) as engine,
        wrap(CASE, budget(None), sync_buffers="first", mesh=mesh, clip_grad_norm=0.01) as other,
    ):
        for step in range(2):
            wanted = made_of(plain(engine), given(rank, step))
            found = engine.step(given(rank, step))
            assert found.repeats == 1
            assert equal(buffers_of(engine), wanted)
            assert (found.loss, found.grad_norm) == ((same := other.step(given(rank, step))).loss, same.grad_norm)
        mine = buffers_of(engine)
        values, others = engine.values(), other.values()
        assert all(torch.equal(values.parameter(name), others.parameter(name)) for name in values.parameters)
        assert engine.step(given(rank, 2, fault=2 * rank)).skipped
        assert equal(buffers_of(engine), mine)
        with pytest.raises(NonFiniteError):
            engine.step(given(rank, 2, fault=3 * rank))
        assert equal(buffers_of(engine), mine)
        model = plain(engine).eval()
        with torch.no_grad():
            losses = [float(loss_of(model, micro_batch)) for micro_batch in given(rank, 3)]
        of_all: list[Any] = [None] * mesh.size()
        torch.distributed.all_gather_object(of_all, losses)
        assert engine.evaluate(given(rank, 3), loss_weights=[0.25, 0.25]) == pytest.approx(
            sum(map(sum, of_all)) / 4, rel=1e-7
        )
        assert equal(buffers_of(engine), mine)
    with wrap(CASE, budget(disk / "own"), sync_buffers="own", **how) as engine:
        assert equal(buffers_of(engine), mine)
        wanted = made_of(plain(engine), given(rank, 3))
        engine.step(given(rank, 3))
        assert equal(buffers_of(engine), wanted)
    return wanted


def in_values(found: Committed) -> Found:
    return {f"buffer.{name}": tensor for name, tensor in found.values.buffers.items()}


def in_store(folder: Path) -> Found:
    """The buffers of a store's last commit."""
    model = CASE.model()
    buffers = Buffers(model)
    with Store.open([folder], writable=False) as store:
        buffers.read(Slots(store).read)
    return buffers.tensors()


def test_each_rank_goes_on_with_what_its_own_micro_batches_have_made(tmp_path: Path) -> None:
    """Stores that are cut anew: where there are as many ranks each has its own, else the first's."""
    mine, theirs = together(2, stepped, tmp_path)
    assert not equal(mine, theirs)
    old = [[tmp_path / "own" / f"rank-{rank}"] for rank in range(2)]
    with committed(old) as exported:
        assert equal(in_values(exported), mine)
    for size, wanted in ((1, [mine]), (2, [mine, theirs]), (4, [mine] * 4)):
        (tmp_path / str(size)).mkdir()
        new = [[tmp_path / str(size) / f"rank-{rank}"] for rank in range(size)]
        reshard(old, new, names=new, strands=4)
        assert all(equal(in_store(*paths), buffers) for paths, buffers in zip(new, wanted, strict=True))


def committed_in_memory(mesh: DeviceMesh, disk: Path) -> None:
    """A run ends as by a kill, behind a commit that is written while it goes on; and one with a delay."""
    rank, where = mesh.get_rank(), budget(disk / "memory", weights="host", state="host", durability="interval")
    where = replace(where, interval=2)
    for places, delay in ((where, 0), (budget(disk / "late"), 0.5)):
        how = {"mesh": mesh, "sync_buffers": "own", "delay": delay}
        with wrap(CASE, places, **how) as engine:
            after = []
            for step in range(3):
                engine.step(given(rank, step))
                after.append(buffers_of(engine))
            if not delay:  # what is being written is to be there, and what is delayed is not
                engine.inside.rest()
            abandon(engine)
        with wrap(CASE, places, **how) as engine:
            assert engine.step_count == 2
            assert equal(buffers_of(engine), after[1])


def test_a_commit_has_each_ranks_own_of_its_step(tmp_path: Path) -> None:
    together(2, committed_in_memory, tmp_path)


LAYOUTS: dict[str, tuple[int, Mapping[str, Any]]] = {
    "parts": (2, {}),
    "stage 0": (2, {"stage": 0}),
    "copies": (4, {}),
}
OTHERS: Mapping[str, Mapping[str, Any]] = {"parts": {"stage": 0}, "stage 0": {}, "copies": {}}
"""Another layout of as many ranks."""


def opened(mesh: DeviceMesh, layout: str, where: penstock.Budget, how: SyncBuffers | None) -> penstock.Engine:
    own = copies_of(mesh) if layout == "copies" else mesh
    return wrap(CASE, where, mesh=own, sync_buffers=how, **LAYOUTS[layout][1])


def saved(mesh: DeviceMesh, folder: Path, layout: str) -> Found:
    """This rank's buffers, and a snapshot and a store that have them."""
    with opened(mesh, layout, budget(folder / "store"), "own") as engine:
        engine.step(given(mesh.get_rank(), 0))
        mine = buffers_of(engine)
        engine.save(folder / "snapshot")
        engine.step(given(mesh.get_rank(), 1))
        assert not equal(buffers_of(engine), mine)
        engine.load(folder / "snapshot")
        assert equal(buffers_of(engine), mine)
    return mine


def gone_on(mesh: DeviceMesh, folder: Path, layout: str) -> list[Found]:
    """This rank's buffers in whichever way it goes on: from the store; with the snapshot, as ranks that share the state
    otherwise; with it, and the same ones as the others; from the store with these."""
    found = []
    with opened(mesh, layout, budget(folder / "store"), "own") as engine:
        found.append(buffers_of(engine))
    with wrap(CASE, budget(None), mesh=mesh, sync_buffers="own", **OTHERS[layout]) as engine:
        engine.load(folder / "snapshot")
        found.append(buffers_of(engine))
    with opened(mesh, layout, budget(None), "mean") as engine:
        engine.load(folder / "snapshot")
        found.append(buffers_of(engine))
    with opened(mesh, layout, budget(folder / "store"), None) as engine:
        found.append(buffers_of(engine))
    return found


@pytest.mark.parametrize("layout", ["parts", "stage 0", pytest.param("copies", marks=pytest.mark.campaign)])
def test_ranks_go_on_with_their_own_and_who_has_none_with_anothers(
    layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that takes its state over has the buffers of whom it has it from."""
    size, _ = LAYOUTS[layout]
    mine = together(size, saved, tmp_path, layout)
    assert not any(equal(one, other) for one, other in combinations(mine, 2))
    givers = list(range(size))
    if layout != "parts":
        givers[-1] = size // 2 - 1
        shutil.rmtree(tmp_path / "store" / f"rank-{size - 1}")
    for rank, found in enumerate(together(size, gone_on, tmp_path, layout)):
        wanted = [mine[givers[rank]], mine[rank], mine[0], mine[0]]
        assert [equal(*pair) for pair in zip(found, wanted, strict=True)] == [True] * 4
    with kept(tmp_path / "snapshot") as exported:
        assert equal(in_values(exported), mine[0])
    with wrap(CASE, budget(None), sync_buffers="own", strands=size) as engine:
        engine.load(tmp_path / "snapshot")
        assert equal(buffers_of(engine), mine[0])
    assert "each rank had buffers of its own" in caplog.text


def synchronised(mesh: DeviceMesh) -> None:
    wrap(CASE, budget(None), mesh=mesh, model=nn.SyncBatchNorm.convert_sync_batchnorm(CASE.model()))


def test_a_batch_norm_that_waits_for_other_ranks_is_refused() -> None:
    for found in World(2, synchronised).outcomes():
        assert (found.kind, "norm is a SyncBatchNorm" in found.said) == (ModelError.__name__, True), found
