"""Fixtures that tests of commands share."""

from pathlib import Path

import pytest

from penstock.planner.ask import PlanReport
from tests.runs import write_run


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The settings file of a run of four steps in ``tmp_path / "run"``, whose state is on disk."""
    return write_run(tmp_path)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch, one_simulation: None) -> None:
    """Other batches are not weighed, nor what would help, which takes most of a plan's time: for tests that look at
    neither, and to which any plan will do."""
    monkeypatch.setattr(PlanReport, "curve", ())
    monkeypatch.setattr(PlanReport, "advice", ())
