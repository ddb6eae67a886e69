"""A model that was wrapped has no weights of its own: whoever uses it as if it had is told so, and what to do."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from lightning_fabric import Fabric
from torch import nn
from torch.nn.utils import clip_grad_norm_

import penstock
from penstock.config import fields_of
from penstock.engine.arguments import LoopArguments
from penstock.errors import BudgetError, ConfigError, ModelError
from penstock.fabric import PenstockStrategy
from penstock.hf import EngineArguments, load
from penstock.state.arrays import StateArrays
from tests.folders import write
from tests.models import MODELS
from tests.training import budget, relative, run_steps, state_of, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = MODELS["llama"]
STEPS = steps_of(CASE, 2)
IDS = torch.ones(1, 4, dtype=torch.long)
USES: dict[str, Callable[[Any], object]] = {
    "forward": lambda model: model(input_ids=IDS),
    "forward by its name": lambda model: model.forward(input_ids=IDS),
    "the body": lambda model: model.model(input_ids=IDS),
    "a block": lambda model: model.model.layers[0](torch.ones(1, 4, 16), position_embeddings=None),
    "a layer within a block": lambda model: model.model.layers[0].mlp.up_proj(torch.ones(1, 4, 16)),
    "a part of a block": lambda model: model.model.layers[1].mlp(torch.ones(1, 4, 16)),
    "the embedding": lambda model: model.get_input_embeddings()(IDS),
    "the head": lambda model: model.lm_head(torch.ones(1, 16)),
    "generate": lambda model: model.generate(input_ids=IDS, max_new_tokens=2),
    "state_dict": lambda model: model.state_dict(),
    "a part's state_dict": lambda model: model.model.layers[0].state_dict(),
    "load_state_dict": lambda model: model.load_state_dict({}, strict=False),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": lambda model: torch.save(model, io.BytesIO()),
}


@pytest.mark.parametrize("closed", [False, True])
def test_every_use_as_a_model_with_weights_is_refused(closed: bool, tmp_path: Path) -> None:
    """Before the first step, after it, and when the engine is closed. The engine is not disturbed by it."""
    model = CASE.model()
    with wrap(CASE, budget(tmp_path / "store"), model=model) as engine:
        for step in (0, 1):
            for use in USES.values():
                with pytest.raises(ModelError, match=r"weights are the engine's, .* engine\.evaluate.* load that"):
                    use(model)
            if not closed:
                run_steps(engine, STEPS[step : step + 1])
                engine.evaluate(STEPS[0])
    if closed:
        for name, use in USES.items():
            with pytest.raises(ModelError, match="weights are the engine's"):
                use(model)
            assert name


def test_what_has_no_weights_may_be_called_and_blocks_at_work_have_no_hooks(tmp_path: Path) -> None:
    """Compilers, and code that looks for hooks, find those that the model had."""
    model = CASE.model()
    layer, seen = model.model.layers[0], []

    def loss_fn(model: nn.Module, micro_batch: Any) -> torch.Tensor:
        for module in layer.modules():
            mine = module.register_forward_pre_hook(lambda *_: None)
            hooks = mine.hooks_dict_ref()
            mine.remove()
            assert hooks is not None
            seen.append(len(hooks) if module is not layer else 0)
        return CASE.loss_fn(model, micro_batch)

    with wrap(CASE, budget(tmp_path / "store"), model=model, loss_fn=loss_fn) as engine:
        engine.step(STEPS[0])
        engine.evaluate(STEPS[0])
        assert not any(seen)
        assert seen
        assert layer.mlp.act_fn(torch.zeros(1)).item() == 0.0


def test_wrapping_a_model_again_says_so_at_once(tmp_path: Path) -> None:
    """While its engine is open and afterwards, also as a part of another model, and nothing is made on the disk."""
    model = CASE.model()
    with (
        wrap(CASE, budget(tmp_path / "store"), model=model),
        pytest.raises(ModelError, match="this model was wrapped before"),
    ):
        wrap(CASE, budget(tmp_path / "other"), model=model)
    with pytest.raises(ModelError, match="this model was wrapped before"):
        wrap(CASE, budget(tmp_path / "other"), model=model)
    outer = nn.ModuleDict({"inner": model})
    with pytest.raises(ModelError, match="'inner', a part of this model, was wrapped before"):
        wrap(CASE, budget(tmp_path / "other"), model=outer)
    assert not (tmp_path / "other").exists()


def test_a_model_of_which_nothing_was_taken_can_be_wrapped_again_and_one_of_which_it_was_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``wrap`` fails before, or after, it has begun to take values."""
    model = CASE.model()
    with pytest.raises(BudgetError):
        wrap(CASE, penstock.Budget(device="1KiB", host="1KiB"), model=model)
    assert not model(input_ids=IDS).logits.isnan().any()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(StateArrays, "write", fail)
        with pytest.raises(OSError, match="injected"):
            wrap(CASE, budget(tmp_path / "store"), model=model)
    with pytest.raises(ModelError, match="this model was wrapped before"):
        wrap(CASE, budget(tmp_path / "other"), model=model)


def test_a_folders_weights_that_wait_are_not_forgotten(tmp_path: Path) -> None:
    """Without them the model is refused, unless it is to begin with random values; also with adapters around it."""
    folder = write("llama", tmp_path / "model")
    common: dict[str, Any] = {"optimizer": penstock.AdamW(lr=1e-3), "budget": budget(None), "device": "cpu"}
    loaded = load(folder)
    outer = nn.ModuleDict({"inner": loaded.model})
    for model in (loaded.model, outer):
        with pytest.raises(
            ConfigError, match=rf"weights in {folder} .*waiting.* weights=loaded\.weights, or init=True"
        ):
            penstock.wrap(model, **common)
    with penstock.wrap(loaded.model, weights=loaded.weights, **common) as engine:
        values = {name: value.clone() for name, value in engine.master_parameters()}
    with penstock.wrap(load(folder).model, init=True, **common) as engine:
        assert relative(dict(engine.master_parameters())["lm_head.weight"], values["lm_head.weight"]) > 0.5
    again = load(folder)
    for model, given, why in (
        (again.model, {"weights": again.weights}, "weights are given"),
        (CASE.model(), {}, "no folder's weights are waiting"),
        (_on_meta(), {}, "no folder's weights are waiting"),
    ):
        with pytest.raises(ConfigError, match=f"init has no effect: {why}"):
            penstock.wrap(model, init=True, **given, **common)


@pytest.mark.parametrize("init", [False, True])
def test_the_loops_of_libraries_do_not_forget_them_either(init: bool, tmp_path: Path) -> None:
    """What ``hf.Trainer`` and ``SFTTrainer`` are told of the engine, and Fabric's strategy."""
    folder = write("llama", tmp_path / "model")
    given = fields_of(EngineArguments(budget=budget(None), init=init), LoopArguments)

    def by_trainer() -> None:
        penstock.wrap(load(folder).model, optimizer=penstock.AdamW(lr=1e-3), device="cpu", **given).close()

    def by_fabric() -> None:
        strategy, model = PenstockStrategy(budget=budget(None), init=init), load(folder).model
        Fabric(devices=1, accelerator="cpu", strategy=strategy).setup(model, torch.optim.AdamW(model.parameters()))
        strategy.engine.close()

    for begin in (by_trainer, by_fabric):
        if init:
            begin()
        else:
            with pytest.raises(ConfigError, match=r"waiting.* weights=loaded\.weights, or init=True"):
                begin()


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return CASE.build()


def test_a_model_that_initialises_itself_needs_no_leave(tmp_path: Path) -> None:
    with wrap(CASE, budget(tmp_path / "store"), model=_on_meta()) as engine:
        assert not any(value.isnan().any() for value in state_of(engine).values())


def _clips() -> dict[str, Callable[[Any], object]]:
    accelerator = Accelerator(cpu=True)
    return {
        "norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "norm of one": lambda model: nn.utils.clip_grad_norm_(next(model.parameters()), 1.0),
        "a norm that is known": lambda model: nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, torch.ones(())),
        "norm, imported": lambda model: clip_grad_norm_(model.parameters(), 1.0),
        "value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        "accelerate's norm": lambda model: accelerator.clip_grad_norm_(model.parameters(), 1.0),
        "accelerate's value": lambda model: accelerator.clip_grad_value_(model.parameters(), 1.0),
    }


def test_gradients_that_there_are_none_of_cannot_be_clipped_nor_stepped_by(tmp_path: Path) -> None:
    """While the engine is open and afterwards: all of that would do nothing, in silence."""
    model = CASE.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    prepared = Accelerator(cpu=True).prepare_optimizer(optimizer)

    def check() -> None:
        for name, clip in _clips().items():
            with pytest.raises(ConfigError, match=r"clips by their norm itself where clip_grad_norm says so"):
                clip(model)
            assert name
        for one in (optimizer, prepared):
            one.zero_grad()
            with pytest.raises(ConfigError, match=r"step\(\) of this SGD would change nothing.*engine\.step"):
                one.step()

    with wrap(CASE, budget(tmp_path / "store"), model=model) as engine:
        check()
        run_steps(engine, STEPS[:1])
        check()
    check()


def test_clipping_and_steps_of_others_are_torchs_own(tmp_path: Path) -> None:
    """Of a model that no engine has, also where there is one that has another."""
    with wrap(CASE, budget(tmp_path / "store")):
        for name, clip in _clips().items():
            weight = nn.Parameter(torch.zeros(2))
            weight.grad = torch.tensor([3.0, 4.0])
            clip(nn.ParameterList([weight]))
            assert weight.grad.tolist() != [3.0, 4.0], name
            torch.optim.SGD([weight], lr=1.0).step()
            assert weight.detach().tolist() == [-value for value in weight.grad.tolist()]
