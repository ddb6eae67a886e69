"""An engine says where its model waits for the device: once, however many programs are made of it."""

import logging
from pathlib import Path

import pytest

from tests.accelerator import DEVICE
from tests.models import MODELS
from tests.training import budget, run_steps, steps_of, wrap


@pytest.mark.accelerator
def test_an_engine_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = MODELS["llama"]
    steps = steps_of(case, 2)
    with caplog.at_level(logging.INFO, "penstock"), wrap(case, budget(tmp_path / "store"), device=DEVICE) as engine:
        run_steps(engine, steps)
        engine.evaluate(steps[0])
    said = [record.message for record in caplog.records if "waits for the device" in record.message]
    assert len(said) == 1
    assert "transformers.masking_utils:" in said[0]
