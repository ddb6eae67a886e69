"""Key-value caches and configurations: switched off or left out while a model is trained, put back, never walked."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import ModelError
from penstock.hf.models.exporting import export
from tests import models
from tests.models import MODELS
from tests.stacks import Layer, Stack, refused, stack
from tests.training import assert_same, budget, run_steps, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")


def configs(model: nn.Module) -> list[Any]:
    return list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())


@pytest.mark.parametrize(
    ("name", "when"),
    [("llama", "within"), pytest.param("gpt2", "before", marks=pytest.mark.campaign), ("t5", "before")],
)
def test_a_model_with_its_cache_on_trains_as_one_without(name: str, when: str, tmp_path: Path) -> None:
    """``within``: it is switched on again while the engine has it, so that its blocks are handed caches."""
    case = MODELS[name]
    steps = steps_of(case, 1, lengths=(12, 8))
    with wrap(case, budget(tmp_path / "without")) as engine:
        wanted = run_steps(engine, steps)
    model = case.model()
    for config in configs(model):
        config.use_cache = True
    with wrap(case, budget(tmp_path / "with"), model=model) as engine:
        assert not any(config.use_cache for config in configs(model))
        if when == "within":
            for config in configs(model):
                config.use_cache = True
        assert_same(run_steps(engine, steps), wanted)
    assert all(config.use_cache for config in configs(model))


@pytest.mark.parametrize("use_cache", [True, False])
def test_an_exported_configuration_is_as_it_came(use_cache: bool, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    model = models.llama(use_cache=use_cache)
    came = model.config.to_dict()  # type: ignore[union-attr, operator]
    settings: dict[str, Any] = {"optimizer": penstock.SGD(lr=0.1), "precision": "fp32", "device": "cpu"}
    with penstock.wrap(model, budget=budget(tmp_path / "store"), **settings) as engine:
        export(engine, tmp_path / "out", dtype="fp32")
    found = LlamaForCausalLM.config_class.from_pretrained(tmp_path / "out").to_dict()
    assert found["use_cache"] is use_cache
    written = ("architectures", "dtype", "transformers_version", "_name_or_path")  # as saving does
    assert {k: v for k, v in found.items() if k not in written} == {k: v for k, v in came.items() if k not in written}


class Handed(Layer):
    """Takes a cache, which it has a way to do without."""

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        assert cache is None
        return super().forward(x)


class Needing(Layer):
    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        return super().forward(x)


def handing(cache: Callable[[], Any]) -> Callable[[Stack, torch.Tensor], torch.Tensor]:
    def run(model: Stack, x: torch.Tensor) -> torch.Tensor:
        held = cache()
        for layer in model.layers:
            x = layer(x, held)
        return x

    return run


def dynamic() -> Any:
    from transformers import DynamicCache

    return DynamicCache()


def both() -> Any:
    """A cache as XLM makes it in any case: its configuration has nothing to switch it off."""
    from transformers import DynamicCache, EncoderDecoderCache

    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def filled() -> Any:
    cache = dynamic()
    cache.update(torch.ones(2, 2, 3, 8), torch.ones(2, 2, 3, 8), 0)
    return cache


@pytest.mark.parametrize("cache", [dynamic, both])
def test_an_empty_cache_is_left_out_of_calls(cache: Callable[[], Any], tmp_path: Path) -> None:
    case, plain = stack(Handed, handing(cache)), stack(Handed)
    steps = steps_of(plain, 1)
    with wrap(plain, budget(tmp_path / "plain")) as engine:
        wanted = run_steps(engine, steps)
    with wrap(case, budget(tmp_path / "store")) as engine:
        assert_same(run_steps(engine, steps), wanted)


@pytest.mark.parametrize(
    ("layer", "cache", "says"),
    [
        (Handed, filled, "key-value cache that holds values"),
        (Handed, lambda: (dynamic(),), "key-value cache that holds values"),
        (Needing, dynamic, "by its signature it cannot do without"),
    ],
)
def test_a_cache_that_cannot_be_left_out_is_refused(
    layer: type[nn.Module], cache: Callable[[], Any], says: str
) -> None:
    assert says in refused(stack(layer, handing(cache)))


LOOKS: dict[str, Callable[[Any], Any]] = {
    "its length": lambda cache: cache.get_seq_length(),
    "its layers": lambda cache: len(cache.layers),
    "how many it has": len,
    "what it has": list,
    "the first": lambda cache: cache[0],
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_what_blocks_would_have_left_in_a_cache_is_not_taken_for_nothing(look: Callable[[Any], Any]) -> None:
    """The model's own code goes by it. It may hand the cache on, or compare it with None."""

    def run(model: Stack, x: torch.Tensor) -> torch.Tensor:
        cache = dynamic()
        assert cache.get_seq_length() == 0  # before the blocks it is what it is
        for layer in model.layers:
            x = layer(x, cache)
        assert isinstance(cache, type(dynamic()))
        look(cache)
        return x

    said = refused(stack(Handed, run))
    assert "reads a key-value cache after blocks that would write to it" in said
    assert "blocks=[" in said


def test_prefix_tuning_is_refused_for_what_it_does(tmp_path: Path) -> None:
    import peft

    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(models.llama(), config)  # type: ignore[arg-type]
    settings: dict[str, Any] = {"optimizer": penstock.SGD(lr=0.1), "precision": "fp32", "device": "cpu"}
    case = MODELS["llama"]
    says = pytest.raises(ModelError, match=r"holds values \(as peft's prefix tuning makes.*such as LoRA")
    with penstock.wrap(model, budget=budget(tmp_path / "store"), **settings) as engine, says:
        engine.step(case.micro_batches(2))


@dataclasses.dataclass
class Secretive:
    """A configuration whose attributes are code that refuses, as those of models with settings per layer are."""

    width: int = 8

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return super().__getattribute__(name)
        raise RuntimeError(f"{name} may vary across layers")


class Configured(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.config = Secretive()


def test_configurations_are_not_walked(tmp_path: Path) -> None:
    case, plain = stack(Configured), stack()
    steps = steps_of(plain, 1)
    with wrap(plain, budget(tmp_path / "plain")) as engine:
        wanted = run_steps(engine, steps)
    with wrap(case, budget(tmp_path / "store")) as engine:
        assert_same(run_steps(engine, steps), wanted)
