"""Models of any kind on an accelerator: the bits of one op at a time, in whatever order ops run there, and no access
that nothing orders."""

import random
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.engine import batch
from penstock.errors import ConfigError, ModelError
from tests.accelerator import DEVICE
from tests.any_model import Spec, any_spec, loss_of
from tests.conftest import Campaign
from tests.engine.test_any_model import Setting, any_setting, built, by_engine, goes_undetected, is_fair, oracle
from tests.training import assert_same_state

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("deterministic")]


NOT_SIMULATED = {"spectrum", "complex", "sparse", "lookup, sparse"}
"""Parts and calls with ops that the simulated device has not, which end there in more than an error."""


def can_be_trained(spec: Spec, setting: Setting) -> bool:
    """True if torch trains the model there: some make tensors on the processor, and some ops a device has not."""
    if DEVICE == "sim" and spec.names() & NOT_SIMULATED:
        return False
    model = built(spec, setting).to(DEVICE)
    try:
        for micro_batches in spec.data():
            for micro_batch in batch.all_to_device(micro_batches, torch.device(DEVICE), torch.float32):
                loss = loss_of(model, micro_batch)
                loss.backward()
                if not bool(loss.isfinite()):
                    return False
        torch.accelerator.synchronize()
    except Exception:  # noqa: BLE001  whatever torch has against it
        with suppress(RuntimeError):  # what is queued has ended by then, and fails no one else
            torch.accelerator.synchronize()
        return False
    return True


def on_device(setting: Setting) -> Setting:
    return replace(setting, numbers={**setting.numbers, "device": DEVICE})


def test_a_model_of_any_kind_has_the_bits_of_one_op_at_a_time(campaign: Campaign, tmp_path: Path) -> None:
    trained = 0
    for seed in range(campaign.cases(6, 1500)):
        drawn = random.Random(seed)
        spec, setting = any_spec(drawn), any_setting(drawn)
        if not can_be_trained(spec, setting):
            continue
        found, said = [], ""
        for number, each in enumerate((oracle(setting), setting)):
            shutil.rmtree(tmp_path / str(number), ignore_errors=True)
            try:
                found.append(by_engine(spec, built(spec, setting), on_device(each), tmp_path / str(number)))
            except (ModelError, ConfigError) as error:
                said = str(error)
        if said or goes_undetected(spec):
            assert not said or is_fair(said, spec), f"seed {seed}: {said}\n{spec}\n{setting}"
            continue
        trained += 1
        one, other = found
        assert (one.losses, one.norms) == (other.losses, other.norms), f"seed {seed}\n{spec}\n{setting}"
        assert_same_state(one.state, other.state)
    assert trained, "no model was trained"
