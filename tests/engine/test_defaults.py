"""Settings of torch for a whole process change no number."""

from typing import Any

import pytest
import torch

import penstock
from penstock.optim import library
from tests.models import MODELS
from tests.training import budget, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = MODELS["gpt2"]
STEPS = steps_of(CASE, 1)


def trained(precision: Any, moments: Any, dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a step, and the parameters after it, with torch's default dtype set to ``dtype``."""
    model, before = CASE.model(), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        optimizer = penstock.AdamW(moments=moments)
        with wrap(CASE, budget(None), model=model, precision=precision, optimizer=optimizer, plan=None) as engine:
            return engine.step(STEPS[0]).loss, dict(engine.master_parameters())
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("precision", "moments"), [("fp32", "fp32"), ("bf16", "int8")])
def test_the_default_dtype_changes_no_number(
    precision: Any, moments: Any, dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of a step, also where its kernels are torch's own, nor of what is read."""
    if not native:
        monkeypatch.setattr(library, "native", lambda: None)
    loss, wanted = trained(precision, moments, torch.float32)
    found_loss, found = trained(precision, moments, dtype)
    assert found_loss == loss
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    assert not [name for name, tensor in wanted.items() if not torch.equal(tensor, found[name])]
