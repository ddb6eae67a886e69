"""Copies of the state (HSDP), each shared by as many ranks: the bits of one rank, the bytes of the formula, and a copy
that is lost costs nothing.
"""

import shutil
import time
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.errors import ConfigError
from penstock.ranks import process_groups
from penstock.ranks.group import Ranks
from penstock.ranks.watch import EVERY
from penstock.state.take_over import Drive, doubts, drives_of
from penstock.store.directory import mount_point
from tests.ranks.test_bits import BF16, FP32, HORIZONTAL, Numbers, Run, alone, equal, trained
from tests.ranks.test_failures import CASE, LENGTHS, micro_batches, steps
from tests.ranks.test_wire import sent
from tests.ranks.worlds import World, together
from tests.training import budget, run_steps, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")


def copies_of(mesh: DeviceMesh, copies: int = 2) -> DeviceMesh:
    """The same ranks with so many copies."""
    return init_device_mesh(
        mesh.device_type, (copies, mesh.size() // copies), mesh_dim_names=("dp_replicate", "dp_shard")
    )


def trained_in_copies(mesh: DeviceMesh, numbers: Numbers, run: Run, disk: Path | None) -> dict[str, Any]:
    return trained(copies_of(mesh), numbers, run, disk)


WAYS: dict[str, tuple[Numbers, Run]] = {
    "on disk, early, bf16": (BF16, Run(disk=True, settings={"speculate": True})),
    "in memory": (FP32, Run()),
    "delayed": (FP32, Run(disk=True, settings={"delay": 0.5})),
    "horizontal": (BF16, Run(settings=HORIZONTAL, disk=True)),
    "stage 2": (BF16, Run(settings={"stage": 2})),
    "one op at a time": (FP32, Run(settings={"overlap": False})),
    "small chunks": (BF16, Run(disk=True, chunk=4096)),
}


@pytest.mark.campaign
@pytest.mark.parametrize("way", WAYS)
def test_two_copies_of_two_ranks_each_have_the_bits_of_one_rank(way: str, tmp_path: Path) -> None:
    """Each time ``test_accelerator`` runs one on disk, with moments in 8 bits."""
    numbers, run = WAYS[way]
    for found in together(4, trained_in_copies, numbers, run, tmp_path / "store"):
        equal(found, alone(numbers))


def sent_in_copies(mesh: DeviceMesh, each: int, schedule: str) -> dict[str, Any]:
    return sent(copies_of(mesh), each, "bf16", schedule)


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_between_copies_each_gradient_crosses_twice_and_no_weights_do(schedule: str) -> None:
    """8 N / r (H - 1) / H bytes of each of r ranks, so 8 N (H - 1) / H of a host that has a copy."""
    for one in together(4, sent_in_copies, 2, schedule):
        assert one["moved"] == one["scheduled"] == one["traced"]
        assert one["copied"] == one["to_copy"]
        assert one["exchanged"] == one["made"] * 4 // 2
        assert one["between"] == one["made"] // 2 * 8 // 2


def refused(mesh: DeviceMesh, what: str) -> None:
    """The last rank comes late: it is not told that another one has failed."""

    def join(*given: Any) -> Ranks:
        ranks = process_groups.join(*given)
        time.sleep(2 * EVERY * (ranks.rank == ranks.size - 1))
        return ranks

    vars(import_module("penstock.engine.wrap"))["join"] = join
    if what == "stage":
        trained(copies_of(mesh), FP32, Run(settings={"stage": 0}), None)
    trained(copies_of(mesh, mesh.size()), FP32, Run(), None)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("stage", "stage=0 gives each rank a copy of the state"),
        ("alone", "mesh has 2 copies of the state, each on 1 rank:"),
    ],
)
def test_what_copies_do_not_go_with_is_refused(what: str, said: str) -> None:
    for found in World(4 if what == "stage" else 2, refused, what).outcomes():
        assert (found.kind, said in found.said) == (ConfigError.__name__, True), found


def steps_in_copies(mesh: DeviceMesh, disk: Path, count: int, stage: int | None) -> tuple[int, list[float]]:
    """As ``steps``, each copy with drives of its own."""
    two = copies_of(mesh) if stage is None else mesh
    return steps(two, disk, count, **({} if stage is None else {"stage": stage}))


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("stage", [None, 0])
def test_ranks_that_have_lost_their_state_take_it_over_from_another_copy(stage: int | None, tmp_path: Path) -> None:
    """A host is new: its drives have nothing. What all copies have lost is an error."""
    size = 4 if stage is None else 2
    disk = tmp_path / "store"
    together(size, steps_in_copies, disk, 1, stage)
    for rank in range(size // 2, size):
        shutil.rmtree(disk / f"rank-{rank}")
    assert together(size, steps_in_copies, disk, 2, stage) == [(1, whole(size)[1:3])] * size
    assert together(size, steps_in_copies, disk, 0, stage) == [(3, [])] * size
    if stage == 0:
        return
    for rank in (0, 2):
        shutil.rmtree(disk / f"rank-{rank}")
    lost = World(size, steps_in_copies, disk, 1, stage).outcomes()
    assert any("holds no store, and other ranks have theirs" in found.said for found in lost), lost


@pytest.mark.parametrize(
    ("made", "theirs", "sure"),
    [
        ("", "/elsewhere", False),
        ("", "/", False),
        ("disk", "/elsewhere", False),
        ("disk", "here", True),
        ("disk/rank-1", "/elsewhere", True),
    ],
)
def test_a_drive_is_new_where_a_copy_has_its_mounted_at_the_same_place_or_somebody_says_so(
    made: str, theirs: str, sure: bool, tmp_path: Path
) -> None:
    (tmp_path / made).mkdir(parents=True, exist_ok=True)
    own, disk = tmp_path / "disk" / "rank-1", tmp_path / "disk"
    mount = mount_point(tmp_path) if theirs == "here" else Path(theirs)
    of_giver = [Drive(path=disk / "rank-0", is_there=True, named=disk, named_is_there=True, mount=mount)]
    assert [drive.path for drive in doubts(drives_of([own]), of_giver)] == ([] if sure else [own])


def test_the_mount_point_of_what_is_not_there_is_that_of_what_it_would_be_in() -> None:
    assert mount_point(Path("/proc/none/such")) == Path("/proc")
    assert mount_point(Path("/none/such")) == Path("/")


def saved_and_gone_on(mesh: DeviceMesh, folder: Path) -> list[float]:
    """The losses of the steps after a snapshot, which copies have made."""
    with wrap(CASE, budget(None), mesh=copies_of(mesh)) as engine:
        run_steps(engine, micro_batches(mesh, 2))
        engine.save(folder)
    with wrap(CASE, budget(None), mesh=copies_of(mesh)) as engine:
        engine.load(folder)
        return run_steps(engine, micro_batches(mesh, 2, first=3)).losses


def test_a_snapshot_of_copies_is_gone_on_from_by_copies_and_by_one_process(tmp_path: Path) -> None:
    assert together(4, saved_and_gone_on, tmp_path / "saved") == [whole(4)[2:]] * 4
    with wrap(CASE, budget(None), strands=4) as engine:
        engine.load(tmp_path / "saved")
        assert run_steps(engine, steps_of(CASE, 2, first=3, lengths=LENGTHS)).losses == whole(4)[2:]


@cache
def whole(strands: int) -> list[float]:
    """The losses of one process that sums as so many ranks do."""
    with wrap(CASE, budget(None), strands=strands) as engine:
        return run_steps(engine, steps_of(CASE, 4, lengths=LENGTHS)).losses
