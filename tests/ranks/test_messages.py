"""A message that can never come ends the wait for it by an error that says why, and leaves nothing waiting."""

import _thread
import os
import select
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import RankError
from penstock.ranks import watch
from penstock.ranks.process_groups import join
from tests.patience import until
from tests.ranks.worlds import World, pipeline

CPU = torch.device("cpu")


def to_who_is_gone(mesh: DeviceMesh, in_lane: bool) -> str:
    """The error of a message to a rank that was killed: its connection is known to be lost, and not yet why."""
    watch.EVERY = 1.0
    ranks, process, said = join(mesh, CPU), torch.tensor([os.getpid()]), list[str]()

    def lane() -> None:
        if mesh.get_rank() == 1:
            ranks.send(process, 0)
            ranks.receive(process, 0)
            os.kill(os.getpid(), signal.SIGKILL)
        ranks.receive(process, 1)
        other = os.pidfd_open(int(process))
        ranks.send(process, 1)
        select.select([other], [], [])
        os.close(other)
        time.sleep(0.1)
        with pytest.raises(RankError) as failure:
            ranks.send(process, 1)
        said.append(str(failure.value))

    if in_lane:
        thread = threading.Thread(target=lane)
        thread.start()
        thread.join()
    else:
        lane()
    assert ranks.broken_off  # what is being sent stays where it is
    ranks.close()
    return said[0]


@pytest.mark.parametrize("in_lane", [True, False])
def test_a_message_that_begins_when_its_rank_is_gone_already_says_which(in_lane: bool) -> None:
    assert World(2, to_who_is_gone, in_lane, axis="pp").outcomes() == ["rank 1 was killed", None]


def interrupted(mesh: DeviceMesh, closed: Path) -> tuple[bool, list[str]]:
    """Whether something may still be written to, and the threads that are left."""
    ranks, found = join(mesh, CPU), False
    if mesh.get_rank() == 0:
        threading.Timer(0.3, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt), ranks.together("receive"):
            ranks.receive(torch.zeros(8), 1)
        found = ranks.broken_off
    else:
        until(closed.exists)  # its connections are there
    ranks.close()
    closed.touch()
    return found, [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock")]


def test_an_interrupt_of_a_wait_for_a_message_leaves_no_thread_that_waits(tmp_path: Path) -> None:
    assert pipeline(2, interrupted, tmp_path / "closed") == [(True, []), (False, [])]
