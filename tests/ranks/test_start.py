"""How processes find each other, where one of them, or torchrun, is gone before all have."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from torch import distributed as dist

import penstock
from penstock.errors import RankError
from penstock.ranks import start
from tests import warm
from tests.patience import PATIENCE

LEFT = """
import os, signal
from pathlib import Path
import penstock
from penstock.ranks import start
read, write = os.pipe()
if os.fork():
    os.read(read, 1)
    os.kill(os.getpid(), signal.SIGKILL)  # as torchrun
os.write(write, b"x")
try:
    penstock.torchrun_mesh("cpu")
except penstock.RankError as error:
    Path("said").write_text(str(error))
"""


@pytest.fixture
def given() -> Iterator[dict[str, str]]:
    """What the torchrun of two processes tells the second; it has no other process."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2") | dict.fromkeys(("RANK", "LOCAL_RANK"), "1")
    yield {**address, **sizes, "TORCHELASTIC_RUN_ID": "none"}
    del store


def test_who_is_left_by_a_torchrun_that_was_killed_does_not_wait_for_the_next_one(
    given: dict[str, str], tmp_path: Path
) -> None:
    """The next one is at the same address."""
    warm.start(["-c", LEFT], cwd=tmp_path, env={**os.environ, **given}).communicate(PATIENCE)
    said = "torchrun, which has started this process, was gone before all 2 ranks had joined"
    assert (tmp_path / "said").read_text() == said


@pytest.mark.parametrize("address", ["nowhere.invalid", "no..name"])
def test_a_meeting_place_that_has_no_address_is_named_while_it_is_waited_for(
    given: dict[str, str], address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (given | {"MASTER_ADDR": address}).items():
        monkeypatch.setenv(name, value)

    def refused(*_: object, **__: object) -> NoReturn:
        raise dist.DistNetworkError("timed out")

    monkeypatch.setattr(dist, "TCPStore", refused)
    with pytest.raises(RankError, match="could not join"):
        penstock.torchrun_mesh("cpu")
    assert f"MASTER_ADDR={address!r}, where all processes are to meet, is no host that this one knows" in caplog.text


@pytest.mark.parametrize("when", ["joining", "after"])
def test_what_torch_has_for_a_process_that_is_gone_is_an_error_of_ranks(
    given: dict[str, str], when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also once all have joined, as they meet again for each axis of their mesh."""

    def refused(*_: object, **__: object) -> NoReturn:
        raise dist.DistNetworkError("Connection refused")

    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "is_initialized", lambda: when == "after")
    monkeypatch.setattr(dist, "init_process_group", refused)
    monkeypatch.setattr(start, "init_device_mesh", refused)
    said = "this process could not join the other ones of 2 ranks, of which one may be gone: Connection refused"
    with pytest.raises(RankError, match=said):
        penstock.torchrun_mesh("cpu")
