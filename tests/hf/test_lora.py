"""Low-rank adapters: peft's model unmodified, its base only read; and the ``lora`` section of settings."""

import copy
import json
import math
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

import penstock
import penstock.hf
from penstock.cli.task import shape_of
from penstock.compat.peft import base_name
from penstock.config import DataConfig, LoraConfig, ModelConfig, TrainConfig
from penstock.config.batch import BatchConfig
from penstock.config.optimizer import OptimizerConfig
from penstock.errors import ConfigError, ModelError
from penstock.hf import tiled_loss
from penstock.hf.lora import BaseWeights, with_adapters
from penstock.schedule.place import Format
from penstock.shape.huggingface import model_shape
from penstock.tape.dry import build_on_meta, dry_run
from tests import models
from tests.engine.test_zoo import ADAMW, CLIP, ROUNDING, ZOO, built, plain_step, steps_of
from tests.training import abandon, budget, relative

pytestmark = pytest.mark.usefixtures("one_thread")

LORA = LoraConfig(rank=2, alpha=4)


def adapted(model: nn.Module, **changes: Any) -> nn.Module:
    """An adapter that peft alone makes. B is not zero, so that A has a gradient in the first step, too."""
    settings: dict[str, Any] = {"r": 2, "lora_alpha": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    torch.manual_seed(1)
    with_lora = peft.get_peft_model(model, peft.LoraConfig(**settings | changes))
    for name, parameter in with_lora.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return with_lora.train()


def wrapped(model: nn.Module, where: Path | None = None, **settings: Any) -> penstock.Engine:
    common = {"optimizer": penstock.AdamW(**ADAMW), "precision": "fp32", "device": "cpu", "clip_grad_norm": CLIP}
    return penstock.wrap(model, budget=budget(where), **common | settings)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_training_equals_plain_peft(name: str, tmp_path: Path) -> None:
    """Losses, norms and adapters; and the base is written once, when the store is made, and then read alone."""
    model = adapted(built(ZOO[name]))
    plain = copy.deepcopy(model)
    trained = {n for n, p in plain.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], **ADAMW)
    base = {n: p.detach().clone() for n, p in plain.named_parameters() if n not in trained}
    assert trained
    assert all("lora_" in n for n in trained)
    steps = steps_of(ZOO[name])[:2]
    with wrapped(model, tmp_path) as engine:
        for micro_batches in steps:
            stats = engine.step(micro_batches)
            loss, norm = plain_step(ZOO[name], plain, optimizer, micro_batches)
            assert stats.loss == pytest.approx(loss, rel=4 * ROUNDING)
            assert stats.grad_norm == pytest.approx(norm, rel=8 * ROUNDING)
        found = dict(engine.master_parameters())
        wanted = dict(plain.named_parameters())
        mine, theirs = (torch.cat([p[n].detach().flatten() for n in sorted(trained)]) for p in (found, wanted))
        assert relative(mine, theirs) <= len(steps) * ROUNDING
        assert all(torch.equal(found[n], value) for n, value in base.items())
        blocks = [g.spec for g in engine.inside.resources.groups if g.spec.name.startswith("blocks")]
        assert all(0 < g.trainable < g.frozen for g in blocks)
        moved = sum(g.spec.trainable for g in engine.inside.resources.groups)
        assert stats.bytes_moved["write"] == 12 * moved
        assert stats.bytes_moved["d2h"] == 4 * moved
        kinds = {n.split(".")[0]: 0 for n in engine.inside.resources.arrays.parts}
        for n, part in engine.inside.resources.arrays.parts.items():
            kinds[n.split(".")[0]] += part.numel
        assert kinds["moment0"] == kinds["moment1"] == moved
        assert not {"master", "low"}.intersection(kinds)


def test_sixteen_bits_keep_half_a_master_copy_of_what_is_trained_alone(tmp_path: Path) -> None:
    with wrapped(adapted(models.llama()), tmp_path, precision="bf16") as engine:
        engine.step(steps_of(ZOO["llama"])[0][:1])
        moved = sum(g.spec.trainable for g in engine.inside.resources.groups)
        assert sum(p.numel for n, p in engine.inside.resources.arrays.parts.items() if n.startswith("low")) == moved
        assert sum(
            p.nbytes for n, p in engine.inside.resources.arrays.parts.items() if n.startswith("weights")
        ) == 2 * sum(g.spec.numel for g in engine.inside.resources.groups)


COMPACT = {
    "int8": penstock.AdamW(**ADAMW, moments="int8"),
    "bf16": penstock.AdamW(**ADAMW, moments="bf16"),
    "muon": penstock.Muon(lr=0.02, moments="int8", adamw=penstock.AdamW(**ADAMW)),
}


@pytest.mark.parametrize("name", ["int8", pytest.param("bf16", marks=pytest.mark.campaign), "muon"])
def test_adapters_whose_moments_take_less_have_the_bits_of_the_oracle_and_go_on_after_a_kill(
    name: str, tmp_path: Path
) -> None:
    """Matrices of 128 x 32, which are large enough to be kept in less than fp32."""
    of_one_shape = [micro_batches[0] for micro_batches in steps_of(ZOO["llama"])]
    steps = [of_one_shape[:2], of_one_shape[1:], of_one_shape[:2]]
    settings = {"optimizer": COMPACT[name], "precision": "bf16"}

    def engine(folder: str, **more: Any) -> penstock.Engine:
        torch.manual_seed(0)
        model = models.llama(num_hidden_layers=2)
        return wrapped(adapted(model, r=128), tmp_path / folder, **settings, **more)

    with engine("oracle", overlap=False, delay=0.0, speculate=False) as oracle:
        losses = [oracle.step(micro_batches).loss for micro_batches in steps]
        wanted = dict(oracle.master_parameters())
        groups = [g.spec for g in oracle.inside.resources.groups if g.spec.trainable]
        assert any(spec.compact and spec.frozen for spec in groups)
        assert any(spec.whole is not None for spec in groups) == (name == "muon")
    with engine("store", delay=0.5) as first:
        found = [first.step(micro_batches).loss for micro_batches in steps[:2]]
        abandon(first)
    with engine("store", delay=0.5) as second:
        done = second.step_count
        assert 0 < done <= 2
        found[done:] = [second.step(micro_batches).loss for micro_batches in steps[done:]]
        assert found == losses
        assert all(torch.equal(value, wanted[n]) for n, value in second.master_parameters())


def test_the_loss_in_tiles_is_the_same() -> None:
    micro_batches = steps_of(ZOO["llama"])[0][:1]
    losses = []
    for tile in (None, 5):
        settings = {} if tile is None else {"loss_fn": tiled_loss(tile)}
        with wrapped(adapted(built(ZOO["llama"])), **settings) as engine:
            losses.append([engine.step(micro_batches).loss for _ in range(2)])
    assert losses[1] == pytest.approx(losses[0], rel=2.0**-20)


def test_micro_batches_of_any_peft_model_count_as_those_of_its_base() -> None:
    """Without a task type, peft's class has no name that says what the model does."""
    micro_batches = steps_of(ZOO["llama"])[0][:1]
    losses = []
    for model in (models.llama(), adapted(models.llama(), task_type=None)):
        with wrapped(model) as engine:
            stats = engine.step(micro_batches)
        assert stats.labels == "but the first"
        losses.append(stats.loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)  # of other random weights


class Given:
    """A source that has a model's own values."""

    def __init__(self, model: nn.Module) -> None:
        self._values = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def fill(self, name: str, out: torch.Tensor) -> None:
        out.copy_(self._values[name].detach())


def on_meta(name: str = "llama") -> nn.Module:
    with torch.device("meta"):
        return ZOO[name].build()


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.campaign), "mixtral"])
def test_adapters_on_a_model_without_memory_begin_as_pefts_do(kind: str) -> None:
    """Those of experts, too, which are one within the other, and set a parameter in each forward."""
    source = built(ZOO[kind])
    model = with_adapters(on_meta(kind), LORA)
    assert all(p.is_meta for p in model.parameters())
    wanted = {n for n, _ in adapted(ZOO[kind].build()).named_parameters()}
    assert {n for n, _ in model.named_parameters()} == wanted
    plain = dict(source.named_parameters())
    micro_batches = steps_of(ZOO[kind])[0][:1]
    with wrapped(model, weights=BaseWeights(Given(source))) as engine:
        for name, value in engine.master_parameters():
            base = base_name(name)
            if base is not None:
                assert torch.equal(value, plain[base]), name
            elif "lora_A" in name:  # uniform to 1 / sqrt(inputs), as peft draws it
                bound = 1 / math.sqrt(value.shape[1])
                assert 0.8 * bound < float(value.abs().max()) <= bound, name
            else:
                assert "lora_B" in name
                assert not value.any(), name
        # B is zero, so that the model begins as its base.
        assert engine.evaluate(micro_batches) == pytest.approx(
            sum(ZOO[kind].items(mb) * source.eval()(**mb).loss.item() for mb in micro_batches)
            / sum(ZOO[kind].items(mb) for mb in micro_batches),
            rel=8 * ROUNDING,
        )
        engine.step(micro_batches)
        assert all(value.any() for name, value in engine.master_parameters() if "lora_B" in name)


class Around(nn.Module):
    """A module of a user's own around a model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.pretrained, self.config = model, model.config


def put_into(model: Any) -> Any:
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    return model


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda model: with_adapters(model, LORA), "base_model.model.model.embed_tokens.weight"),
        (put_into, "model.layers.0.self_attn.q_proj.base_layer.weight"),
        (Around, "pretrained.model.embed_tokens.weight"),
    ],
    ids=["peft", "add_adapter", "own module"],
)
def test_loaded_values_that_a_model_has_under_other_names_are_not_replaced_by_random_ones(
    make: Any, name: str, tmp_path: Path
) -> None:
    models.llama().save_pretrained(tmp_path / "folder")
    loaded = penstock.hf.load(tmp_path / "folder")
    with pytest.raises(ConfigError, match=f"weights has no values for '{name}'.*penstock.hf.lora.BaseWeights"):
        wrapped(make(loaded.model), tmp_path / "store", weights=loaded.weights)


def test_an_initialisation_that_needs_weights_is_refused(tmp_path: Path) -> None:
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"])
    with torch.device("meta"):
        model = peft.get_peft_model(models.llama(), settings)
    model.peft_config["default"].init_lora_weights = "pissa"
    with pytest.raises(ModelError, match="init_lora_weights='pissa' needs the weights of the model"):
        wrapped(model, tmp_path)


def test_every_name_leads_back_to_its_base() -> None:
    names = [base_name(n) for n, _ in with_adapters(on_meta(), LORA).named_parameters()]
    assert sorted(n for n in names if n is not None) == sorted(n for n, _ in models.llama().named_parameters())


def test_making_adapters_warns_of_nothing_that_a_user_cannot_change() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with_adapters(on_meta(), LORA)


def test_targets_that_the_model_lacks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"lora.target_modules=\('query',\): .*not found"):
        with_adapters(on_meta(), LoraConfig(target_modules=("query",)))
    one = r"\('q_proj', 'value'\): no layer's name ends in 'value': .* end in down_proj, .*, q_proj, up_proj, v_proj$"
    with pytest.raises(ConfigError, match=rf"lora.target_modules={one}"):
        with_adapters(on_meta(), LoraConfig(target_modules=("q_proj", "value")))


def test_adapters_of_experts_are_planned_without_a_run() -> None:
    """peft switches autocast off where their weights are, which torch refuses on the meta device."""
    model = build_on_meta(lambda: with_adapters(models.mixtral(experts_implementation="grouped_mm"), LORA))
    found = dry_run(model, steps_of(ZOO["mixtral"])[0][0], dtype=torch.float32, kind="cpu")
    assert any("experts" in name and "lora_A" in name for name, _ in model.named_parameters())
    assert any(stage.gradients for stage in found.stages)
    with pytest.raises(RuntimeError):
        torch.autocast("meta", enabled=False)


def test_a_type_of_model_that_peft_knows_no_layers_of_is_told_to_name_them() -> None:
    with torch.device("meta"):
        model = built(ZOO["mixtral"])
    with pytest.raises(ConfigError, match=r"lora.target_modules=None: peft knows no layers .* or all-linear$"):
        with_adapters(model, LoraConfig(target_modules=None))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "lora.rank=0: must be at least 1"),
        ({"alpha": 0}, "lora.alpha=0: must be at least 1"),
        ({"dropout": 1.0}, "lora.dropout=1.0: must be at least 0 and less than 1"),
        ({"target_modules": ()}, "lora.target_modules is an empty list"),
    ],
)
def test_settings_that_make_no_adapter_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LoraConfig(**settings)
    assert message in str(caught.value)


def config_of(folder: Path, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "run": "run",
        "model": ModelConfig(path=str(folder)),
        "data": DataConfig(sources="stdlib", sequence_length=12),
        "optimizer": OptimizerConfig(lr=1e-3),
        "batch": BatchConfig(sequences=2),
        "budget": penstock.Budget(device="64MiB", host="64MiB"),
        "steps": 1,
        "precision": "fp32",
    }
    return TrainConfig(**settings | changes)


def test_a_random_base_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lora has no use with"):
        config_of(tmp_path, model=ModelConfig(config={"model_type": "llama"}, init=True), lora=LORA)


def test_a_plan_from_settings_is_what_the_engine_runs(tmp_path: Path) -> None:
    source = models.llama(attn_implementation="sdpa")
    source.config.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    config = config_of(tmp_path, lora=LORA, loss_tile=8)
    shape = shape_of(config, "cpu")
    planned = shape.profile(2, 12, Format.of("fp32", 2)).program
    tokens = torch.randint(2, 96, (2, 12))
    model = with_adapters(models.llama(attn_implementation="sdpa"), LORA)
    with wrapped(model, tmp_path / "store", loss_fn=tiled_loss(8)) as engine:
        engine.step([{"input_ids": tokens, "labels": tokens}])
        assert planned.groups == engine.plan.program.groups
        assert planned.stages == engine.plan.program.stages
    whole = model_shape(settings, kind="cpu").profile(2, 12, Format.of("fp32", 2)).program
    assert sum(g.trainable for g in planned.groups) < 0.3 * sum(g.trainable for g in whole.groups)
