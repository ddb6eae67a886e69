"""A Trainer's steps with moments in another form, and with an optimizer of the engine's own, are those of ``wrap``."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.hf import Trainer
from tests import models
from tests.library_runs import CLOSE, arguments, examples, in_memory

pytestmark = pytest.mark.usefixtures("one_thread")

DATA = examples(16)
OVERRIDES = (penstock.Override(match=r"norm", weight_decay=0.0),)
ADAMW = penstock.AdamW(lr=1e-2, weight_decay=0.1, overrides=OVERRIDES)
MUON: dict[str, Any] = {"lr": 2e-2, "momentum": 0.9, "weight_decay": 0.1}


def llama() -> nn.Module:
    """Matrices of 8,192 elements, which are not too small for compact moments."""
    torch.manual_seed(0)
    return models.llama(hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1)


def trained(folder: Path, monkeypatch: pytest.MonkeyPatch, **given: Any) -> tuple[list[Any], list[float]]:
    """(micro-batches, learning rates of the param groups) of each step that a Trainer has the engine do; its losses."""
    steps, losses, real = list[Any](), list[float](), penstock.Engine.step

    def step(engine: penstock.Engine, micro_batches: Any, **more: Any) -> Any:
        steps.append((micro_batches, [group["lr"] for group in engine.optimizer.param_groups]))
        stats = real(engine, micro_batches, **more)
        losses.append(stats.loss)
        return stats

    settings = arguments(folder / "run", max_steps=4, weight_decay=0.1, learning_rate=1e-2, max_grad_norm=0)
    with monkeypatch.context() as patch:
        patch.setattr(penstock.Engine, "step", step)
        trainer = Trainer(model=llama(), args=settings, train_dataset=DATA, **given)  # type: ignore[arg-type]
        trainer.train()
        trainer.end()
    return steps, losses


def replayed(steps: list[Any], optimizer: Any) -> list[float]:
    """The losses of the same steps, taken by an engine of ``wrap``."""
    budget = penstock.Budget(device="64MiB", host="64MiB")
    with penstock.wrap(llama(), optimizer=optimizer, budget=budget, plan=None, clip_grad_norm=None) as engine:
        losses = []
        for pieces, rates in steps:
            # Without what a Trainer adds for its own loss: that leads to the Trainer, which is searched for tensors.
            micro_batches = [{n: v for n, v in piece.items() if isinstance(v, torch.Tensor)} for piece in pieces]
            for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            losses.append(engine.step(micro_batches).loss)
    return losses


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_moments_are_kept_as_the_arguments_of_the_engine_say(
    moments: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, losses = trained(tmp_path, monkeypatch, engine=in_memory(moments=moments))
    expected = replayed(steps, penstock.AdamW(lr=1e-2, weight_decay=0.1, overrides=OVERRIDES, moments=moments))
    torch.testing.assert_close(losses, expected, **CLOSE)
    assert expected != replayed(steps, ADAMW)


def test_muon_has_adamw_of_the_arguments_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = {"optimizer_cls_and_kwargs": (penstock.Muon, {"lr": MUON["lr"], "momentum": MUON["momentum"]})}
    steps, losses = trained(tmp_path, monkeypatch, engine=in_memory(moments="int8"), **kind)
    assert {tuple(sorted(set(rates))) for _, rates in steps} > {(0.0,)}  # two rates, but for the first of the warm-up
    adamw = penstock.AdamW(lr=1e-2, weight_decay=0.1)
    expected = replayed(steps, penstock.Muon(**MUON, adamw=adamw, overrides=OVERRIDES, moments="int8"))
    torch.testing.assert_close(losses, expected, rtol=5e-4, atol=0.0)  # updates are rounded to bf16
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"moments": "int8"}, r"moments cannot be honoured there: give EngineArguments\(moments=...\)"),
        ({"overrides": OVERRIDES}, "overrides cannot be honoured there: the Trainer says"),
        ({"rank": 8}, "Muon does not take this: .*'rank'"),
        ({"weight_decay": 0.3}, "weight_decay=0.3 would have no effect"),
        ({"ns_steps": 0}, "ns_steps=0"),
    ],
)
def test_settings_of_muon_that_cannot_be_honoured_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(penstock.ConfigError, match=message):
        trained(tmp_path, monkeypatch, engine=in_memory(), optimizer_cls_and_kwargs=(penstock.Muon, settings))
