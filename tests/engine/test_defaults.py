"""Settings of torch for a whole process change no number."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.hf import load
from penstock.optim import library
from penstock.optim.precision import precision_of_weights
from tests import folders
from tests.models import MODELS
from tests.training import budget, default_dtype, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = MODELS["gpt2"]
STEPS = steps_of(CASE, 1)


def trained(precision: Any, moments: Any, dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a step, and the parameters after it, with torch's default dtype set to ``dtype``."""
    model = CASE.model()
    with default_dtype(dtype):
        optimizer = penstock.AdamW(moments=moments)
        with wrap(CASE, budget(None), model=model, precision=precision, optimizer=optimizer, plan=None) as engine:
            return engine.step(STEPS[0]).loss, dict(engine.master_parameters())


@cache
def usual(precision: Any, moments: Any, native: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """``trained`` with torch's own default dtype; ``native``: whether the kernels are, as the caller has seen to."""
    return trained(precision, moments, torch.float32)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("precision", "moments"), [("fp32", "fp32"), ("bf16", "int8")])
def test_the_default_dtype_changes_no_number(
    precision: Any, moments: Any, dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of a step, also where its kernels are torch's own, nor of what is read."""
    if not native:
        monkeypatch.setattr(library, "native", lambda: None)
    loss, wanted = usual(precision, moments, native)
    found_loss, found = trained(precision, moments, dtype)
    assert found_loss == loss
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    assert not [name for name, tensor in wanted.items() if not torch.equal(tensor, found[name])]


def first_losses(device: str | None) -> list[float]:
    """Of a model on the meta device, with torch's default device set before it is wrapped."""
    case = MODELS["qwen3"]  # it computes its rotary frequencies, which are buffers
    torch.set_default_device(device)
    try:
        with torch.device("meta"):
            model = case.build().train()
        with wrap(case, budget(None), model=model, plan=None) as engine:
            torch.set_default_device(None)
            return [engine.step(step).loss for step in steps_of(case, 2)]
    finally:
        torch.set_default_device(None)


def test_the_default_device_changes_no_initialisation() -> None:
    assert first_losses("meta") == first_losses(None)


def test_the_default_device_is_not_where_a_folders_weights_are_read_to(tmp_path: Path) -> None:
    folder = folders.write("deepseek-v3", tmp_path / "model")  # which has buffers, too
    plain, loaded = folders.model("deepseek-v3"), load(folder)
    where = {"budget": budget(None), "plan": None, "device": "cpu", "precision": "fp32"}
    torch.set_default_device("meta")
    try:
        engine = penstock.wrap(loaded.model, weights=loaded.weights, optimizer=penstock.SGD(lr=0.1), **where)
    finally:
        torch.set_default_device(None)
    with engine:
        found = dict(engine.master_parameters()) | dict(engine.model.named_buffers())
        assert all(torch.equal(found[name], value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("precision", [None, "fp32"])
def test_a_model_in_fp64_is_told_what_it_trains_in_unless_that_was_asked_for(
    precision: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with wrap(CASE, budget(None), model=CASE.model().double(), precision=precision, plan=None):
        said = [record.getMessage() for record in caplog.records if "fp64" in record.getMessage()]
    assert [line.partition(" (")[0] for line in said] == (
        ["the model is in fp64, which the engine does not compute in: it trains in fp32"] if precision is None else []
    )
    caplog.clear()
    assert precision_of_weights(CASE.model().double()) == "fp32"
    assert "it trains in fp32" in caplog.text


def test_a_model_of_two_precisions_is_told_what_it_trains_in(caplog: pytest.LogCaptureFixture) -> None:
    model = CASE.model().bfloat16()
    name, norm = list(model.named_parameters())[-1]
    assert precision_of_weights(model) == "bf16"
    assert not caplog.records
    norm.data = norm.data.float()
    assert precision_of_weights(model) == "bf16"
    (line,) = (record.getMessage() for record in caplog.records)
    assert f"1 of the model's parameters are in fp32, such as {name}, and" in line
    assert "they train in bf16" in line
