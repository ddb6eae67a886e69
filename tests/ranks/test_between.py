"""A rank that is gone between the engine's calls ends those who wait for it in collectives of others' code: a library's
loop, or a script's own.
"""

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.ranks import watch
from tests.models import PLAIN
from tests.patience import PATIENCE
from tests.ranks.launched import Launched
from tests.ranks.worlds import World, together
from tests.training import budget, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = PLAIN
COLLECTIVES: dict[str, Callable[[], Any]] = {
    "barrier": dist.barrier,
    "sum": lambda: dist.all_reduce(torch.ones(2)),
    "objects": lambda: dist.all_gather_object([None, None], "small"),
}
GONE = {"is killed": signal.SIGKILL, "is stopped": signal.SIGSTOP}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "rank 1 has failed: OSError: no more data"),
        ("end", "rank 1 has failed: OSError: no more data"),
        ("stop", "rank 1 has not answered for 3 s"),
    ],
)
def test_a_trainer_names_the_rank_that_is_gone_between_two_steps(how: str, said: str, tmp_path: Path) -> None:
    launched = Launched(2, ["-m", "tests.ranks.stopped", tmp_path, how], tmp_path)
    first, second = launched.processes
    try:
        _, errors = first.communicate(PATIENCE)
    finally:
        second.kill()
    assert first.returncode == 1
    assert f"RankError: {said}" in errors


def alone_in(mesh: DeviceMesh, name: str, how: str) -> float:
    """The seconds that the first rank waits, the other being gone or late."""
    watch.SILENT = 2.0
    with wrap(CASE, budget(None), mesh=mesh):
        COLLECTIVES[name]()
        if mesh.get_rank() == 1:
            if how in GONE:
                os.kill(os.getpid(), GONE[how])
            time.sleep(1.5 * watch.SILENT)  # it answers meanwhile
        since = time.monotonic()
        COLLECTIVES[name]()
        return time.monotonic() - since


@pytest.mark.parametrize(
    ("name", "how", "said"),
    [
        ("barrier", "is killed", "rank 1 was killed"),
        ("sum", "is stopped", "rank 1 has not answered for 2 s"),
        ("objects", "is killed", "rank 1 was killed"),
    ],
)
def test_a_scripts_own_collective_ends_where_a_rank_is_gone(name: str, how: str, said: str) -> None:
    world = World(2, alone_in, name, how)
    world.processes[0].join(PATIENCE)
    world.processes[1].kill()
    found = world.outcomes()[0]
    assert (found.kind, found.said) == ("RankError", said)


def waited_for_a_while(mesh: DeviceMesh) -> tuple[str, float]:
    """The error of a wait for so long that the first rank makes by itself, and the seconds that it took."""
    with wrap(CASE, budget(None), mesh=mesh):
        since, said = time.monotonic(), ""
        if mesh.get_rank() == 0:
            work = dist.all_reduce(torch.ones(2), async_op=True)
            assert work is not None
            try:
                work.wait(timedelta(seconds=0.5))
            except RuntimeError as error:
                said = type(error).__name__
        return said, time.monotonic() - since


def without_engine(mesh: DeviceMesh) -> bool:
    """True if a collective has the sum of all ranks before there is an engine, and when it is closed."""
    found = []
    for _ in range(2):
        total = torch.ones(3)
        dist.all_reduce(total)
        found.append(bool((total == mesh.size()).all()))
        with wrap(CASE, budget(None), mesh=mesh):
            pass
    return all(found)


def all_that_go_on(mesh: DeviceMesh) -> tuple[bool, float, tuple[str, float]]:
    return without_engine(mesh), alone_in(mesh, "sum", "is late"), waited_for_a_while(mesh)


def test_collectives_are_torchs_own_without_an_engine_who_is_late_is_waited_for_and_a_wait_with_an_end_has_it() -> None:
    (first, waited, (said, seconds)), (second, *_) = together(2, all_that_go_on)
    assert first
    assert second
    assert waited > 2.0
    assert said == "RuntimeError"  # torch's own
    assert 0.5 <= seconds < PATIENCE
