"""An engine that starts from a model on the meta device: nobody ever holds the whole model, and it trains."""

from pathlib import Path

import pytest
import torch
from torch import nn

import penstock
from penstock.engine import start
from tests.models import MODELS
from tests.training import assert_same, assert_same_state, budget, run_steps, state_of, steps_of, train, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = MODELS["qwen3"]  # tied embeddings, rotary buffers
STEPS = steps_of(CASE, 3)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return CASE.build().train()


def test_it_starts_with_the_models_own_initialisation(tmp_path: Path) -> None:
    on_cpu = CASE.model()
    with wrap(CASE, budget(tmp_path / "store"), model=on_meta()) as engine:
        found = dict(engine.master_parameters())
        wanted = dict(on_cpu.named_parameters())
        assert found.keys() == wanted.keys()
        for name, parameter in wanted.items():
            if "norm" in name:
                assert torch.equal(found[name], parameter.detach())
            else:
                assert float(found[name].std()) == pytest.approx(float(parameter.detach().std()), rel=0.15)
                assert not torch.equal(found[name], parameter.detach())
        layers = [tensor for name, tensor in found.items() if "q_proj" in name]
        assert not torch.equal(layers[0], layers[1])
        for name, buffer in on_cpu.named_buffers():  # rotary frequencies are computed, not drawn
            assert torch.equal(engine.model.get_buffer(name), buffer)


def test_it_trains_the_same_wherever_it_lives(tmp_path: Path) -> None:
    wanted = train(CASE, budget(tmp_path / "store"), STEPS, model=on_meta(), overlap=False)
    for where in (budget(None, weights="host", state="host"), budget(None, weights="device", state="device")):
        assert_same(train(CASE, where, STEPS, model=on_meta()), wanted)
    assert all(torch.tensor(wanted.losses).isfinite())


def test_it_continues_a_store_without_drawing_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = budget(tmp_path / "store")
    first = train(CASE, where, STEPS[:2], model=on_meta())

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a store has all parameters")

    monkeypatch.setattr(start, "initialise", refuse)
    with wrap(CASE, where, model=on_meta()) as engine:
        assert_same_state(state_of(engine), first.state)
        assert run_steps(engine, STEPS[2:]).stats[0].step == 3


def test_it_depends_on_the_seed_alone(tmp_path: Path) -> None:
    states = []
    for number, (seed, noise) in enumerate([(1, 0), (1, 5), (2, 0)]):
        torch.manual_seed(noise)
        with wrap(CASE, budget(tmp_path / str(number)), model=on_meta(), seed=seed) as engine:
            states.append(state_of(engine))
    assert_same_state(states[0], states[1])
    assert any(not torch.equal(states[0][name], states[2][name]) for name in states[0])


def test_a_parameter_that_nothing_fills_is_an_error(tmp_path: Path) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(8, 8, device="meta"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Bare() for _ in range(2))

    with pytest.raises(penstock.ModelError, match=r"nothing initialises parameter 'blocks\.0\.weight'"):
        wrap(CASE, budget(tmp_path / "store"), model=Model())
