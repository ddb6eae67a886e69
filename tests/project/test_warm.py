"""Processes of the tests' server are those of the test that starts them."""

import os
from multiprocessing.connection import Connection

import pytest

from tests.patience import PATIENCE
from tests.warm import server


def say(name: str, end: Connection) -> None:
    end.send(os.environ.get(name))


def said(name: str) -> str | None:
    """What a variable of the environment is in a process of the server's."""
    ours, theirs = server().Pipe(duplex=False)
    process = server().Process(target=say, args=(name, theirs))
    process.start()
    theirs.close()
    assert ours.poll(PATIENCE), "the process does not start"
    found: str | None = ours.recv()
    process.join(PATIENCE)
    return found


def test_they_have_its_environment_whenever_the_server_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins with the first that is started: before the fixtures of all tests, where that is one of a test which
    another process runs. A rank then measured this machine, and left its profile with the user's own."""
    name = "PENSTOCK_OF_ONE_TEST"
    assert said(name) is None
    monkeypatch.setenv(name, "here")
    assert said(name) == "here"
    monkeypatch.delenv(name)
    assert said(name) is None
