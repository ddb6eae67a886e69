"""Fixtures that tests of commands share."""

from pathlib import Path

import pytest

from tests.runs import write_run


@pytest.fixture(scope="module", autouse=True)
def _looked_at(each_model_is_looked_at_once: None) -> None:
    """All of these tests start runs."""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The settings file of a run of four steps in ``tmp_path / "run"``, whose state is on disk."""
    return write_run(tmp_path)
