"""A program that changes a Trainer once there is an engine is refused where the library would heed what it changed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.hf import Trainer
from tests.hf.test_trainer import on_engine
from tests.library_runs import in_memory, llama

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    trainer = on_engine(tmp_path_factory.mktemp("trained"), given={"engine": in_memory()}, max_steps=1)
    trainer.train()
    yield trainer
    trainer.end()


USES: dict[str, Callable[[Any], object]] = {
    "train": lambda trainer: trainer.train(),
    "evaluate": lambda trainer: trainer.evaluate(),
    "predict": lambda trainer: trainer.predict(trainer.eval_dataset),
    "save_model": lambda trainer: trainer.save_model(),
    "engine": lambda trainer: trainer.engine,
    "training_step": lambda trainer: trainer.training_step(trainer.model, {}),
    "prediction_step": lambda trainer: trainer.prediction_step(trainer.model, {}, prediction_loss_only=True),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_another_model_than_the_engines_is_refused_wherever_it_would_be_used(
    use: Callable[[Any], object], trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = trained.engine.step_count
    with monkeypatch.context() as replaced:
        replaced.setattr(trained, "model", llama(seed=3))
        with pytest.raises(
            penstock.ConfigError, match=r"trainer.model: the engine was made for another LlamaForCausal"
        ):
            use(trained)
    assert trained.engine.step_count == steps


def test_a_model_that_is_handed_to_a_step_and_is_not_the_engines_is_refused(
    trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library trains what ``model_wrapped`` is, and subclasses hand on what they like."""
    other = llama(seed=3)
    with pytest.raises(penstock.ConfigError, match=r"trainer.model: .* set trainer.model, or trainer.model_wrapped"):
        trained.prediction_step(other, {}, prediction_loss_only=True)
    monkeypatch.setattr(trained, "model_wrapped", other)
    with pytest.raises(penstock.ConfigError, match=r"trainer.model: .* set trainer.model, or trainer.model_wrapped"):
        trained.train()


def test_a_new_optimizer_between_two_runs_is_refused_and_not_passed_over(
    trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trained, "optimizer", None)
    with pytest.raises(penstock.ConfigError, match=r"trainer.optimizer was set to None"):
        trained.train()
    monkeypatch.setattr(trained, "optimizer", torch.optim.SGD([torch.zeros(1)], lr=1.0))
    with pytest.raises(penstock.ConfigError, match=r"trainer.optimizer is SGD, because it was set"):
        trained.train()


def test_an_argument_that_cannot_be_honoured_is_refused_after_the_constructor_too(
    trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library would put other kernels into the engine's model, or cast it for an evaluation."""
    for name, use in (("use_liger_kernel", "train"), ("bf16_full_eval", "evaluate")):
        with monkeypatch.context() as changed:
            changed.setattr(trained.args, name, True)
            with pytest.raises(penstock.ConfigError, match=f"{name}=True cannot be"):
                USES[use](trained)


def test_an_optimizer_that_is_set_before_training_is_refused_by_its_name(tmp_path: Path) -> None:
    trainer = on_engine(tmp_path, given={"engine": in_memory()})
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
    with pytest.raises(penstock.ConfigError, match=r"trainer.optimizer is SGD, .* Leave it None, and ask .* by optim="):
        trainer.train()
    trainer.optimizer = None
    trainer.args.optim = "sgd"  # as the library takes it: a word, too
    trainer.train()
    assert "momentum" in trainer.optimizer.param_groups[0]
    trainer.end()


@pytest.mark.parametrize(("name", "value"), [("learning_rate", 0.5), ("weight_decay", 0.9), ("optim", "sgd")])
def test_settings_of_the_optimizer_that_are_changed_after_an_evaluation_are_refused_by_name(
    name: str, value: Any, tmp_path: Path
) -> None:
    """The library makes its optimizer when training begins, and heeds them; the engine has its own by then."""
    trainer: Trainer = on_engine(tmp_path, given={"engine": in_memory()}, max_steps=1)
    trainer.evaluate()
    before = getattr(trainer.args, name)
    setattr(trainer.args, name, value)
    for _ in range(2):
        with pytest.raises(penstock.ConfigError, match=f"{name}={value!r} was set after the engine was made"):
            trainer.train()
    setattr(trainer.args, name, before)
    trainer.train()
    trainer.end()
