"""A fixture that most tests of commands begin with."""

from pathlib import Path

import pytest

from tests.runs import write_run


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The settings file of a run of four steps in ``tmp_path / "run"``, whose state is on disk."""
    return write_run(tmp_path)
