"""A conversion of moments that a failing call or a kill breaks off: the run goes on from what was there, or from what
was made of it, and nothing else is left.
"""

import errno
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from shutil import copytree

import pytest
import torch

from penstock.errors import StoreError
from tests.conftest import Campaign
from tests.engine.test_conversion import OF_A_STORE, STEPS, Seen, begun, check, opened, seen
from tests.faults import Nth, error, intercepted
from tests.training import budget, run_steps
from tests.victims import Victims, victims_of_one_thread

pytestmark = pytest.mark.usefixtures("one_thread")


def goes_on(folder: Path, before: Seen, *, back: bool) -> None:
    """The run goes on from what is there, in the form that it was to get or back in its own; nothing else is left."""
    with opened("fp32" if back else "int8", budget(folder)) as engine:
        after = seen(engine)
        run_steps(engine, STEPS[2:3])
    if not back:
        check(before, after, "int8")
    else:
        try:
            check(before, after, "fp32")
        except AssertionError:
            check(before, after, "int8")
    assert {path.name for path in folder.iterdir()} <= OF_A_STORE


def test_a_call_that_fails_leaves_what_was_there_or_what_was_made(tmp_path: Path, campaign: Campaign) -> None:
    before, counted = begun("fp32", tmp_path), Nth(-1, error(errno.EIO))
    copytree(tmp_path / "store", tmp_path / "clean")
    with intercepted(tmp_path / "clean", counted, names=True):
        opened("int8", budget(tmp_path / "clean")).close()
    rng, failures = Random(0), 0
    for case in range(campaign.cases(2, 100)):
        folder = tmp_path / str(case)
        copytree(tmp_path / "store", folder)
        hook = Nth(rng.randrange(len(counted.calls)), error(rng.choice((errno.EIO, errno.ENOSPC))))
        with intercepted(folder, hook, names=True):
            try:
                opened("int8", budget(folder)).close()
            except StoreError:
                failures += 1
        goes_on(folder, before, back=case % 2 == 0)
    campaign.found(f"{case + 1} calls of a conversion of moments failed, {failures} ended it: nothing was lost")


@pytest.fixture
def victims() -> Iterator[Victims]:
    with victims_of_one_thread():
        yield Victims("fp32", 1)


def convert_here(folder: Path, at: int, ready: Connection) -> None:
    torch.set_num_threads(1)
    with intercepted(folder, Nth(at, lambda call, go: os.kill(os.getpid(), signal.SIGKILL)), names=True):
        ready.send(None)
        opened("int8", budget(folder)).close()


def test_a_kill_leaves_what_was_there_or_what_was_made(tmp_path: Path, campaign: Campaign, victims: Victims) -> None:
    before, counted = begun("fp32", tmp_path), Nth(-1, error(errno.EIO))
    copytree(tmp_path / "store", tmp_path / "clean")
    with intercepted(tmp_path / "clean", counted, names=True):
        opened("int8", budget(tmp_path / "clean")).close()
    rng = Random(1)
    for case in range(campaign.cases(2, 100)):
        folder = tmp_path / str(case)
        copytree(tmp_path / "store", folder)
        assert victims.call(convert_here, folder, rng.randrange(len(counted.calls))) == -signal.SIGKILL
        goes_on(folder, before, back=case % 2 == 0)
    campaign.found(f"{case + 1} conversions of moments killed at one of {len(counted.calls)} calls: nothing was lost")
