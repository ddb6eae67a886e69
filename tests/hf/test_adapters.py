"""A model with adapters comes out as its adapter, as peft writes it, or merged, as peft merges it."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import KasaConfig, LoraConfig, PeftModel, PromptTuningConfig, VeraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import penstock
from penstock import ConfigError, ModelError
from penstock.compat.peft import base_name
from penstock.hf import Trainer, export
from penstock.hf.models.folder import SINGLE
from tests import folders
from tests.library_runs import arguments, examples, in_memory, llama
from tests.models import causal_lm

pytestmark = pytest.mark.usefixtures("one_thread")

TARGETS = {"llama": ["q_proj", "down_proj", "embed_tokens"], "gpt2": ["c_attn"], "mixtral": ["q_proj"]}


def with_adapters(name: str, folder: Path, **options: Any) -> Any:
    source = folder if folder.exists() else folders.write(name, folder, max_shard_size="1GB")
    base = type(folders.model(name)).from_pretrained(source, dtype=torch.float32)
    base.config.use_cache = False
    torch.manual_seed(1)
    return get_peft_model(base, LoraConfig(r=2, lora_alpha=8, target_modules=TARGETS[name], **options))


def trained(model: Any, steps: int = 2) -> penstock.Engine:
    engine = penstock.wrap(
        model,
        optimizer=penstock.AdamW(lr=1e-2),
        budget=penstock.Budget(device="32MiB", host="32MiB"),
        precision="fp32",
        device="cpu",
        plan=None,
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        engine.step([causal_lm(generator, 2, 12)])
    return engine


def _ordered(file: Path, settings: LoraConfig) -> bytes:
    """What peft has written, with settings that are sets in order: each process has another one of them."""
    if file.name != "adapter_config.json":
        return file.read_bytes()
    body = json.loads(file.read_text())
    sets = {key: sorted(value) for key, value in vars(settings).items() if isinstance(value, set)}
    assert sets
    return json.dumps(body | sets, indent=2, sort_keys=True).encode()


@pytest.mark.parametrize(
    ("name", "options"),
    [("llama", {"modules_to_save": ["lm_head"]}), ("gpt2", {"use_rslora": True}), ("mixtral", {})],
)
def test_adapter_and_merged_model_are_those_of_peft(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    with trained(with_adapters(name, tmp_path / "base", **options)) as engine:
        export(engine, tmp_path / "adapter")
        export(engine, tmp_path / "merged", merge=True)
        values = dict(engine.master_parameters())
    plain = with_adapters(name, tmp_path / "base", **options)
    with torch.no_grad():
        for key, parameter in plain.named_parameters():
            assert torch.equal(parameter, values[key]) != parameter.requires_grad, key  # only adapters have changed
            parameter.copy_(values[key])
    plain.save_pretrained(tmp_path / "plain")
    for file in (tmp_path / "plain").iterdir():
        written = (tmp_path / "adapter" / file.name).read_bytes()
        assert written == _ordered(file, plain.peft_config["default"]), file.name
    again = type(folders.model(name)).from_pretrained(tmp_path / "base", dtype=torch.float32)
    loaded = PeftModel.from_pretrained(again, tmp_path / "adapter")
    merged = loaded.merge_and_unload()
    merged.save_pretrained(tmp_path / "plain-merged")
    expected, found = load_file(tmp_path / "plain-merged" / SINGLE), load_file(tmp_path / "merged" / SINGLE)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_what_cannot_be_merged_is_said(tmp_path: Path) -> None:
    small = trained(with_adapters("llama", tmp_path / "llama"), steps=0)
    with small as engine:
        with pytest.raises(ConfigError, match="shard_size='1MB' has no effect: an adapter is one file"):
            export(engine, tmp_path / "out", shard_size="1MB")
        (tmp_path / "config.json").write_text("{}")
        for merge, place in itertools.product((False, True), (tmp_path / "llama", tmp_path)):
            with pytest.raises(ConfigError, match=f"{place} has the weights that the adapters are for, so it is not"):
                export(engine, place, merge=merge, overwrite=True)
    dora = trained(with_adapters("mixtral", tmp_path / "base", use_dora=True))
    with dora as engine, pytest.raises(ModelError, match=r"not merged here.*merge_and_unload"):
        export(engine, tmp_path / "out", merge=True)
    plain = folders.model("gpt2")
    plain.config.use_cache = False
    with trained(plain) as engine, pytest.raises(ConfigError, match="has no adapters"):
        export(engine, tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("llama-tied", {"target_modules": ["lm_head"]}, "lm_head.weight is trained"),
        ("llama-tied", {"modules_to_save": ["embed_tokens"]}, "model.embed_tokens.weight is trained"),
        ("llama-tied", {"modules_to_save": ["lm_head"]}, "lm_head.weight is trained"),
        ("llama", {"trainable_token_indices": [1, 2]}, "trainable tokens"),
    ],
)
def test_a_merged_model_never_lacks_what_was_trained(
    name: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """A value that the model has under two names would be written under one, without what was trained of the other."""
    base = folders.model(name)
    base.config.use_cache = False
    model = get_peft_model(base, LoraConfig(**{"r": 2, "target_modules": ["q_proj"]} | settings))
    with trained(model) as engine, pytest.raises(ModelError, match=rf"{message}.*export the adapter"):
        export(engine, tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()


Q = LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj"])


def activated(base: Any) -> Any:
    return get_peft_model(base, LoraConfig(**Q.to_dict() | {"alora_invocation_tokens": [3], "task_type": "CAUSAL_LM"}))


def truncated(base: Any) -> Any:
    return get_peft_model(base, LoraConfig(**Q.to_dict() | {"kasa_config": KasaConfig()}))


def with_bias(base: Any) -> Any:
    return get_peft_model(base, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, lora_bias=True))


def two_at_once(base: Any) -> Any:
    model = get_peft_model(base, Q)
    model.add_adapter("other", Q)
    model.base_model.set_adapter(["default", "other"])
    return model


def merged_in_place(base: Any) -> Any:
    model = get_peft_model(base, Q)
    model.merge_adapter()
    return model


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (activated, "llama", "another variant"),
        (truncated, "llama", "another variant"),
        (with_bias, "gpt2", "a bias"),
        (two_at_once, "llama", "default and other, of which one has to be active"),
        (merged_in_place, "llama", "merged already"),
    ],
)
def test_adapters_that_add_something_else_than_a_product_are_not_merged(
    make: Any, name: str, message: str, tmp_path: Path
) -> None:
    """peft does not merge the first at all, and the second has a matrix between its two."""
    base = folders.model(name)
    base.config.use_cache = False
    with (
        trained(make(base), steps=0) as engine,
        pytest.raises(ModelError, match=rf"{message}.* not merged here.*merge_and_unload"),
    ):
        export(engine, tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()


def test_of_several_adapters_the_active_one_is_merged_and_nothing_of_the_others(tmp_path: Path) -> None:
    """The other is in other layers, and has a head of its own."""
    model = with_adapters("llama", tmp_path / "base")
    model.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"], modules_to_save=["lm_head"]))
    model.set_adapter("default")
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["other"].weight.fill_(7.0)
    with trained(model) as engine:
        export(engine, tmp_path / "merged", merge=True)
    before, found = load_file(tmp_path / "base" / SINGLE), load_file(tmp_path / "merged" / SINGLE)
    changed = {key for key, value in found.items() if not torch.equal(value, before[key])}
    assert changed == {key for key in before if any(name in key for name in TARGETS["llama"])}


def test_an_adapter_with_a_value_that_its_dtype_cannot_hold_is_not_written(tmp_path: Path) -> None:
    model = with_adapters("llama", tmp_path / "base")
    with torch.no_grad():
        model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight[0, 0] = 1e6
    with (
        trained(model, steps=0) as engine,
        pytest.raises(ModelError, match=r"lora_B.* has 1e\+06.*too large for float16"),
    ):
        export(engine, tmp_path / "out", dtype="fp16")
    assert not (tmp_path / "out").exists()


def prompts(base: Any) -> Any:
    return get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))


def renamed(base: Any) -> Any:
    return get_peft_model(base, LoraConfig(target_modules=["q_proj"]), adapter_name="mine")


def put_into(base: Any) -> Any:
    base.add_adapter(LoraConfig(target_modules=["q_proj"]))
    return base


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (prompts, "PROMPT_TUNING: .*train low-rank adapters"),
        (renamed, "adapters are called mine, .*without adapter_name"),
        (put_into, "by add_adapter cannot be saved: call peft.get_peft_model"),
    ],
)
def test_adapters_that_could_not_be_saved_are_refused_before_they_are_trained(
    make: Any, message: str, tmp_path: Path
) -> None:
    model = make(llama())
    trainer = Trainer(model=model, args=arguments(tmp_path / "run"), train_dataset=examples(4), engine=in_memory())
    with pytest.raises(ModelError, match=message):
        trainer.train()


def in_bf16(folder: Path, resized: int = 0, **settings: Any) -> Any:
    """A base in bf16 with adapters, which peft makes in fp32."""
    if not folder.exists():
        llama(dtype=torch.bfloat16).save_pretrained(folder)
    base: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    torch.manual_seed(1)
    if resized:
        base.resize_token_embeddings(resized)
    return get_peft_model(base, LoraConfig(**{"r": 2, "target_modules": ["q_proj"]} | settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"modules_to_save": ["lm_head"]},
        {"resized": 104},
        {"target_modules": r".*\.(q_proj|embed_to.ens)"},
        {"trainable_token_indices": [1, 2]},
    ],
    ids=str,
)
def test_a_trainer_saves_of_an_adapter_what_peft_does_in_the_dtypes_that_it_has(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    in_bf16(tmp_path / "base", **settings).save_pretrained(tmp_path / "plain")
    model = in_bf16(tmp_path / "base", **settings)
    trainer = Trainer(model=model, args=arguments(tmp_path / "run"), train_dataset=examples(4), engine=in_memory())
    trainer.save_model(str(tmp_path / "out"))
    trainer.end()
    expected, found = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("plain", "out"))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key], value), key


def test_buffers_that_all_layers_share_are_saved_with_an_adapter(tmp_path: Path) -> None:
    """VeRA's two random matrices, which peft saves under a name that no layer has."""

    def shared() -> Any:
        torch.manual_seed(1)
        return get_peft_model(llama(), VeraConfig(r=2, target_modules=["q_proj"]))

    shared().save_pretrained(tmp_path / "plain")
    trainer = Trainer(model=shared(), args=arguments(tmp_path / "run"), train_dataset=examples(4), engine=in_memory())
    trainer.save_model(str(tmp_path / "out"))
    trainer.end()
    expected, found = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("plain", "out"))
    assert "base_model.vera_A" in expected
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": TARGETS["llama"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]},
    ],
    ids=str,
)
def test_names_from_before_peft(settings: dict[str, Any]) -> None:
    model = get_peft_model(folders.model("llama"), LoraConfig(r=2, **settings))
    plain = {name for name, _ in folders.model("llama").named_parameters()}
    found = {base_name(name) for name, _ in model.named_parameters()} - {None}
    assert found == plain
