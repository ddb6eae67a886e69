"""Fixtures that tests of commands share."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.planner.ask import PlanReport
from tests.runs import write_run


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The settings file of a run of four steps in ``tmp_path / "run"``, whose state is on disk."""
    return write_run(tmp_path)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other batches are not weighed, nor what would help, which takes most of a plan's time: for tests that look at
    neither."""
    monkeypatch.setattr(PlanReport, "curve", ())
    monkeypatch.setattr(PlanReport, "advice", ())


@pytest.fixture
def for_all(tmp_path: Path) -> Iterator[Path]:
    """A folder that another user may look into. Pytest's own are their owner's alone, are shared by tests that run at
    the same time, and are closed again by each run of pytest that begins."""
    if os.geteuid():  # who is not root tests as the user that he is
        yield tmp_path
        return
    closed = next((path for path in reversed(tmp_path.parents) if not path.stat().st_mode & 0o001), tmp_path)
    with tempfile.TemporaryDirectory(dir=closed.parent) as made:
        os.chmod(made, 0o755)
        yield Path(made)
