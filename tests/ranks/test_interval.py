"""State of several ranks in memory, committed every few steps while they go on: by all of them, or by none."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

import penstock
from penstock.engine.due import Due
from penstock.errors import RankError, StoreError
from penstock.store.store import Store
from tests.models import PLAIN
from tests.ranks.worlds import RankFailedError, World, pipeline, together
from tests.training import budget, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = PLAIN
STEPS = 7
LOSSES = list[float]


def opened(mesh: DeviceMesh | None, disk: Path) -> penstock.Engine:
    where = budget(disk, weights="host", state="host", durability="interval", interval=2)
    return wrap(CASE, where, mesh=mesh, strands=2)


def trained(engine: penstock.Engine, mesh: DeviceMesh | None, last: int) -> LOSSES:
    alone = mesh is None or mesh.mesh_dim_names == ("pp",)  # ranks of a pipeline have all micro-batches
    rank, share = (0, 4) if alone else (mesh.get_rank(), 2)
    steps = steps_of(CASE, last, lengths=(12, 8, 10, 12))[engine.step_count :]
    return [engine.step(micro_batches[rank * share : (rank + 1) * share]).loss for micro_batches in steps]


def killed(mesh: DeviceMesh, disk: Path) -> None:
    """One rank, in the step after the one after the second commit; the first rank alone knows when commits are due."""
    with pytest.MonkeyPatch.context() as patch, opened(mesh, disk) as engine:
        if mesh.get_rank():
            patch.setattr(Due, "after", lambda *_: False)
        trained(engine, mesh, 4)
        engine.inside.rest()
        trained(engine, mesh, 5)
        if mesh.get_rank():
            os.kill(os.getpid(), signal.SIGKILL)
        trained(engine, mesh, 6)


def failed_and_gone_on(mesh: DeviceMesh, disk: Path) -> tuple[str, tuple[int, LOSSES], tuple[int, LOSSES]]:
    """What is said where one rank cannot write the third commit; where it and the next run began, and their losses."""

    def fails(*_: Any) -> None:
        raise StoreError("the drive is gone")

    losses: LOSSES = []
    with pytest.MonkeyPatch.context() as patch, opened(mesh, disk) as engine:
        begun = engine.step_count
        if mesh.get_rank():
            patch.setattr(Store, "write", fails)
        losses += trained(engine, mesh, 6)
        with pytest.raises((StoreError, RankError)) as caught:
            engine.close()
    with opened(mesh, disk) as engine:
        again = engine.step_count
        return f"{caught.type.__name__}: {caught.value}", (begun, losses), (again, trained(engine, mesh, STEPS))


@pytest.mark.parametrize("axis", ["dp_shard", pytest.param("pp", marks=pytest.mark.campaign)])
def test_all_ranks_commit_what_is_in_memory_or_none_does(axis: str, tmp_path: Path) -> None:
    with opened(None, tmp_path / "alone") as engine:
        wanted = trained(engine, None, STEPS)
    first, second = World(2, killed, tmp_path / "store", axis=axis).outcomes()
    assert isinstance(first, RankFailedError)
    assert (first.said, second) == ("rank 1 was killed", None)
    among = pipeline if axis == "pp" else together
    (theirs, *found), (mine, *other) = among(2, failed_and_gone_on, tmp_path / "store")
    assert mine == "StoreError: the drive is gone"
    assert theirs == "RankError: rank 1 has failed: StoreError: the drive is gone"
    assert found == other == [(4, wanted[4:6]), (4, wanted[4:])]
