"""A model's folder streams into a store: every value as ``from_pretrained`` has it, and what cannot be is refused."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM, LlamaModel

import penstock
from penstock import ConfigError, ModelError, StoreError
from penstock.hf import load
from penstock.hf.models.folder import INDEX, SINGLE
from penstock.hf.models.shards import read_headers
from tests import folders

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.write("llama", tmp_path_factory.mktemp("llama") / "small-llama")


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    """A folder of three shards that a test may spoil."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


def values(loaded: Any) -> dict[str, torch.Tensor]:
    """All parameters and persistent buffers, as an engine asks for them."""
    found = {}
    for name, like in loaded.model.state_dict().items():
        assert name in loaded.weights
        dtype = torch.float32 if like.is_floating_point() else like.dtype
        found[name] = torch.full(like.shape, 7, dtype=dtype)
        loaded.weights.fill(name, found[name])
    return found


def wrapped(loaded: Any, disk: Path | None = None, **more: Any) -> penstock.Engine:
    """An engine that has the values of a loaded model."""
    settings = {"optimizer": penstock.SGD(lr=0.1), "precision": "fp32", "device": "cpu", "plan": None} | more
    memory = penstock.Budget(device="16MiB", host="16MiB", disk=disk)
    return penstock.wrap(loaded.model, weights=loaded.weights, budget=memory, **settings)


@pytest.mark.parametrize("name", [name for name in folders.MODELS if name != "llama-300"])
def test_every_value_is_the_one_that_from_pretrained_loads(name: str, tmp_path: Path) -> None:
    folder = folders.write(name, tmp_path / "model")
    assert (folder / INDEX).exists()
    loaded = load(folder)
    assert all(p.is_meta for p in loaded.model.parameters())
    plain = type(folders.model(name)).from_pretrained(folder, dtype=torch.float32)
    assert type(loaded.model) is type(plain)
    expected = plain.state_dict()
    found = values(loaded)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_every_dtype_becomes_fp32(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = folders.write("llama", tmp_path / "model", dtype, max_shard_size="1GB")
    assert (folder / SINGLE).exists()
    loaded = load(folder)
    assert loaded.dtype == loaded.model.config.dtype == dtype
    for name, value in folders.model("llama", dtype).state_dict().items():
        out = torch.empty(value.shape)
        loaded.weights.fill(name, out)
        assert torch.equal(out, value.float()), name


def test_an_engine_holds_what_the_folder_has_and_a_store_goes_on_without_the_folder(tmp_path: Path) -> None:
    folder = folders.write("deepseek-v3", tmp_path / "model")
    plain = folders.model("deepseek-v3")

    def wrap() -> penstock.Engine:
        loaded = load(folder)
        if (tmp_path / "store").exists():
            shutil.rmtree(folder)  # its values must not be read again
        return wrapped(loaded, tmp_path / "store")

    expected = dict(plain.named_parameters())
    buffers = {k: v for k, v in plain.state_dict().items() if k not in expected}
    assert buffers
    for _ in range(2):
        with wrap() as engine:
            for name, value in engine.master_parameters():
                assert torch.equal(value, expected[name]), name
            for name, value in buffers.items():
                assert torch.equal(engine.model.get_buffer(name), value), name


class MadeElsewhere(LlamaForCausalLM):
    """Makes tensors where the meta device is not asked, from numbers that it would not have, or from its own."""

    _tied_weights_keys: ClassVar = {"again": "scale"}

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.Tensor(4).fill_(1.0))
        self.again = self.scale
        self.register_buffer("window", torch.from_numpy(np.ones(4, np.float32)))
        self.padding = torch.tensor(torch.tensor(7) // 2)
        self.sizes = [tuple(torch.tensor(of).shape) for of in (torch.arange(3), [torch.arange(3)[-1]])]


def test_what_a_constructor_makes_elsewhere_than_it_is_built_is_loaded_too(tmp_path: Path) -> None:
    plain = MadeElsewhere(folders.model("llama").config)
    with torch.no_grad():
        plain.scale.copy_(torch.arange(4))
        plain.get_buffer("window").mul_(3)
    plain.save_pretrained(tmp_path / "model")
    loaded = load(tmp_path / "model", model_class=MadeElsewhere)
    assert all(p.is_meta for p in loaded.model.parameters())
    assert loaded.model.again is loaded.model.scale
    assert loaded.model.padding == 3
    assert loaded.model.sizes == [(3,), (1,)]
    with wrapped(loaded) as engine:
        assert torch.equal(engine.model.get_buffer("window"), torch.full((4,), 3.0))
        assert torch.equal(dict(engine.master_parameters())["scale"], torch.arange(4.0))


def test_a_new_head_is_initialised_and_what_the_old_one_had_is_left(llama: Path, tmp_path: Path) -> None:
    """Its base has the folder's values, and is exported with the head."""
    with pytest.raises(ModelError, match=r"score\.weight\..* or new_head=True, and the model initialises these"):
        load(llama, model_class=AutoModelForSequenceClassification)
    with pytest.raises(ConfigError, match="no_labels=3: the configuration of a llama has no such field"):
        load(llama, no_labels=3)
    with pytest.raises(ConfigError, match="dtype='bf16': torch has none of that name"):
        load(llama, dtype="bf16")
    assert load(llama, dtype="auto").dtype == load(llama).dtype
    with pytest.raises(ConfigError, match="new_head=True would have no effect, as it has all of a LlamaForCausalLM"):
        load(llama, new_head=True)
    loaded = load(llama, model_class=AutoModelForSequenceClassification, new_head=True, num_labels=3, pad_token_id=0)
    before = LlamaForCausalLM.from_pretrained(llama).state_dict()
    with wrapped(loaded) as engine:
        own = {name: value.clone() for name, value in engine.master_parameters()}
        penstock.hf.export(engine, tmp_path / "out")
    assert before.keys() - own.keys() == {"lm_head.weight"}
    assert all(torch.equal(value, before[name]) for name, value in own.items() if name != "score.weight")
    assert own["score.weight"].shape == (3, loaded.config.hidden_size)
    assert own["score.weight"].std() > 0.01
    after = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert all(torch.equal(value, own[name]) for name, value in after.named_parameters())


@pytest.mark.parametrize("change", [{"num_labels": "three"}, {"num_hidden_layers": "2"}, {"use_cache": 1}])
def test_a_change_that_transformers_does_not_take_is_refused_by_its_name(change: dict[str, Any], llama: Path) -> None:
    ((key, value),) = change.items()
    with pytest.raises(ConfigError, match=f"^{key}={value!r}: transformers does not take that: "):
        load(llama, **change)


def test_tensors_without_elements_may_stand_anywhere_in_a_header(tmp_path: Path) -> None:
    """As the package safetensors has it."""
    places = {"b": [0, 8], "a": [0, 0], "c": [8, 8]}
    header = {
        name: {"dtype": "F32", "shape": [(end - start) // 4], "data_offsets": [start, end]}
        for name, (start, end) in places.items()
    }
    text = json.dumps(header).encode()
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    assert {tensor.name for tensor in read_headers([tmp_path / SINGLE]).values()} == places.keys()
    assert load_file(tmp_path / SINGLE).keys() == places.keys()


def test_a_base_that_lacks_something_is_refused_with_a_new_head_too(tmp_path: Path) -> None:
    copy = folders.write("llama", tmp_path / "model", max_shard_size="1GB")
    rewrite(copy / SINGLE, {k: v for k, v in load_file(copy / SINGLE).items() if k != "model.norm.weight"})
    with pytest.raises(ModelError, match=r"1 of the model's \d+ tensors are not in its files: model\.norm\.weight"):
        load(copy, model_class=AutoModelForSequenceClassification, new_head=True)


def test_a_class_without_a_base_has_no_new_head(llama: Path) -> None:
    """Nothing would tell its body from its head."""
    with pytest.raises(ConfigError, match="new_head=True: a LlamaModel has no base model"):
        load(llama, model_class=LlamaModel, new_head=True)


def test_weights_for_a_model_that_has_values_are_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match="weights has no effect"):
        wrapped(SimpleNamespace(model=folders.model("llama"), weights=load(llama).weights))


def test_tied_weights_under_either_name_or_both(tmp_path: Path) -> None:
    folder = folders.write("llama-tied", tmp_path / "model", max_shard_size="1GB")
    plain = folders.model("llama-tied").state_dict()
    both = {**load_file(folder / SINGLE), "lm_head.weight": plain["lm_head.weight"]}
    other = {k: v for k, v in both.items() if k != "model.embed_tokens.weight"}
    for state in (both, other):
        rewrite(folder / SINGLE, state)
        found = values(load(folder))
        assert all(torch.equal(found[name], plain[name]) for name in plain)
    rewrite(folder / SINGLE, both | {"lm_head.weight": plain["lm_head.weight"] + 1})
    with pytest.raises(ModelError, match=r"different values.*tie_word_embeddings"):
        load(folder)


def test_tied_weights_that_are_stored_twice_are_compared_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders.write("llama-tied", tmp_path / "model", max_shard_size="1GB")
    state = load_file(folder / SINGLE)
    twice = state["model.embed_tokens.weight"].clone()
    monkeypatch.setattr("penstock.hf.models.shards.PIECE", 1000)  # the embedding has 12 KB
    monkeypatch.setattr("penstock.hf.models.loading.read_whole", None)
    rewrite(folder / SINGLE, state | {"lm_head.weight": twice.double()})
    load(folder)
    twice[-1, -1] += 1
    rewrite(folder / SINGLE, state | {"lm_head.weight": twice})
    with pytest.raises(ModelError, match="with different values"):
        load(folder)


def test_old_names_and_missing_prefixes_are_understood(tmp_path: Path) -> None:
    folder = folders.write("bert", tmp_path / "model", max_shard_size="1GB")
    state = load_file(folder / SINGLE)
    old = {k.replace("LayerNorm.weight", "LayerNorm.gamma"): v for k, v in state.items()}
    assert old.keys() != state.keys()
    old["bert.embeddings.position_ids"] = torch.arange(64)[None]  # was once a persistent buffer
    rewrite(folder / SINGLE, old)
    plain = folders.model("bert").state_dict()
    found = values(load(folder))
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_the_bytes_of_a_large_tensor_are_read_in_pieces(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.hf.models.shards.PIECE", 1024)
    plain = folders.model("llama").state_dict()
    found = values(load(llama))
    assert all(torch.equal(found[name], plain[name]) for name in plain)


# ---- what is refused


def rewrite(file: Path, state: dict[str, torch.Tensor]) -> None:
    save_file({k: v.clone() for k, v in state.items()}, file, metadata={"format": "pt"})


def shard(folder: Path, number: int = 2) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[number - 1]


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    state = load_file(shard(folder))
    change(state)
    rewrite(shard(folder), state)


def header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = shard(folder).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    content = json.loads(data[8 : 8 + length])
    change(content)
    text = json.dumps(content).encode()
    shard(folder).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def pickled(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"not read")


def gone(folder: Path, name: str) -> None:
    """A tensor is neither in the files nor in the index."""
    changed(folder, lambda s: s.pop(name))
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][name]
    (folder / INDEX).write_text(json.dumps(index))


def first(state: dict[str, Any]) -> str:
    return next(name for name in sorted(state) if name != "__metadata__")


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a shard is gone": (lambda f: shard(f).unlink(), r"1 of the 3 shards .* missing: model-00002-of-00003"),
    "a shard is cut off": (lambda f: os.truncate(shard(f), 9000), r"00002-of-00003.*cut off: it has 9000"),
    "a shard is empty": (lambda f: os.truncate(shard(f), 0), r"00002-of-00003.*only 0 bytes"),
    "a shard is too long": (lambda f: shard(f).open("ab").write(b"1234"), "00002.*longer than that"),
    "a shard is noise": (lambda f: shard(f).write_bytes(b"\xff" * 5000), "00002.*its header would have"),
    "a header is noise": (lambda f: shard(f).write_bytes(struct.pack("<Q", 9) + b"\0" * 50), "00002.*not JSON"),
    "a header is no object": (lambda f: shard(f).write_bytes(struct.pack("<Q", 2) + b"[]"), "no JSON object"),
    "a pointer of LFS": (
        lambda f: shard(f).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        "git lfs pull",
    ),
    "a tensor that overlaps": (
        lambda f: header(f, lambda h: h[first(h)].update(data_offsets=[4, 4 + h[first(h)]["data_offsets"][1]])),
        "does not begin where|does not fit its place",
    ),
    "a tensor of another size": (lambda f: header(f, lambda h: h[first(h)].update(shape=[3, 3])), "not fit its place"),
    "a tensor without a place": (lambda f: header(f, lambda h: h[first(h)].pop("dtype")), "does not describe tensor"),
    "a negative shape": (lambda f: header(f, lambda h: h[first(h)].update(shape=[-1, -8])), "does not describe tensor"),
    **{
        f"a header with {entry}": (
            lambda f, entry=entry: header(f, lambda h: h[first(h)].update(entry)),
            "00002.*does not describe tensor",
        )
        for entry in (
            {"data_offsets": ["a", "b"]},
            {"data_offsets": [-4, 0]},
            {"dtype": ["F32"]},
            {"shape": "ab"},
            {"shape": [2**70, 0], "data_offsets": [0, 0]},
        )
    },
    "a header without end": (
        lambda f: shard(f).write_bytes(struct.pack("<Q", 10**5) + b"[" * 10**5),
        "00002.*header is not JSON",
    ),
    "a configuration without end": (lambda f: (f / "config.json").write_text('{"a":' * 10**5), "is not JSON"),
    "a size below zero": (lambda f: config(f, hidden_size=-4, head_dim=4), "Hugging Face cannot build this llama"),
    "a dtype that weights do not have": (lambda f: config(f, dtype="int8"), r"config.json: dtype is int8"),
    "shards that have changed places": (
        lambda f: (
            shard(f, 1).rename(f / "x"),
            shard(f, 1).rename(f / "model-00001-of-00003.safetensors"),
            (f / "x").rename(f / "model-00002-of-00003.safetensors"),
        ),
        r"it has .* and the index says that this is in model-0000[12]",
    ),
    "a single tensor is gone": (
        lambda f: gone(f, "model.layers.0.mlp.up_proj.weight"),
        r"1 of the model's 21 tensors are not in its files: model.layers.0.mlp.up_proj.weight\.",
    ),
    "a dtype of four bits": (lambda f: header(f, lambda h: h[first(h)].update(dtype="F4")), "F4, which cannot be"),
    "a tensor twice": (lambda f: shutil.copy(shard(f, 1), shard(f, 2)), r"is in model-00001-of-00003.* too"),
    "the index is another folder's": (
        lambda f: changed(f, lambda s: s.update({"x": s.pop(first(s))})),
        "00002.*the index says that .* are there",
    ),
    "the index is noise": (lambda f: (f / INDEX).write_text("{"), "is not JSON"),
    "the index has no map": (lambda f: (f / INDEX).write_text("{}"), "no weight_map"),
    "the index leads away": (
        lambda f: (f / INDEX).write_text(json.dumps({"weight_map": {"a": "../../etc/a.safetensors"}})),
        "not the name of a safetensors file",
    ),
    "no weights": (lambda f: [file.unlink() for file in f.glob("model*")], f"neither {SINGLE} nor {INDEX}"),
    "no index": (lambda f: (f / INDEX).unlink(), "but neither"),
    "pickles": (pickled, r"pickles \(pytorch_model.bin\).*save_pretrained\('OUT'\)"),
    "a model for another program": (
        lambda f: ([file.unlink() for file in f.glob("model*")], (f / "a.gguf").touch()),
        "for GGUF",
    ),
    "no configuration": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "a configuration that is noise": (lambda f: (f / "config.json").write_text("{]"), "is not JSON"),
    "an unknown type": (lambda f: config(f, model_type="lama"), "transformers cannot read it"),
    "code of its own": (
        lambda f: config(f, model_type="mine", auto_map={"AutoConfig": "mine.Config"}),
        "trust_remote_code: true",
    ),
    "quantised weights": (
        lambda f: config(f, quantization_config={"quant_method": "fp8"}),
        r"quantised \(.*fp8.*dequantise",
    ),
    "fp8 without a word": (
        lambda f: changed(f, lambda s: s.update({first(s): s[first(s)].to(torch.float8_e4m3fn)})),
        "is float8_e4m3fn.*dequantise",
    ),
    "whole numbers": (
        lambda f: changed(f, lambda s: s.update({first(s): s[first(s)].to(torch.int8)})),
        "is int8.*dequantise",
    ),
    "another shape": (lambda f: config(f, intermediate_size=48), r"shape \[.*64.*the model has \[.*48"),
    "more layers than files": (
        lambda f: config(f, num_hidden_layers=3),
        r"9 of the model's 30 tensors are not in its files: model.layers.\*.input_layernorm.weight",
    ),
    "more files than layers": (
        lambda f: config(f, num_hidden_layers=1),
        "have 9 tensors that LlamaForCausalLM has no place for",
    ),
    "a model without a head": (lambda f: config(f, architectures=["LlamaModel"]), "LlamaModel has no head"),
}


@pytest.mark.parametrize("what", SPOILED)
def test_what_cannot_be_loaded_is_refused_with_the_reason(what: str, copy: Path) -> None:
    spoil, says = SPOILED[what]
    spoil(copy)
    with pytest.raises((ConfigError, ModelError), match=says):
        load(copy)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_names_tensor_and_place(bad: float, copy: Path, tmp_path: Path) -> None:
    changed(copy, lambda s: s["model.layers.0.mlp.up_proj.weight"].__setitem__((3, 5), bad))
    loaded = load(copy)
    with pytest.raises(ModelError, match=rf"00002.*up_proj.weight has {bad} at \[3, 5\]"):
        wrapped(loaded, tmp_path / "store")


def test_a_value_that_fp32_cannot_hold_is_refused(tmp_path: Path) -> None:
    folder = folders.write("llama", tmp_path / "model", torch.float64)
    changed(folder, lambda s: s[first(s)].fill_(1e300))
    with pytest.raises(ModelError, match=r"1e\+300 at .*too large for fp32"):
        values(load(folder))


def test_a_file_that_changes_while_it_is_read_is_noticed(copy: Path) -> None:
    loaded = load(copy)
    changed(copy, lambda s: s[first(s)].add_(1))
    with pytest.raises(StoreError, match="changed while it was being read"):
        values(loaded)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("/no/such/folder", "no such folder"),
        ("../no/such/folder", "no such folder"),
        ("./folder", "no such folder"),
        ("org/model", "not in the hub's cache, and the hub cannot be reached"),
        ("long" * 100, "cannot be looked at: File name too long"),
    ],
)
def test_a_name_that_leads_nowhere(name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=says):
        load(name)


def test_a_name_on_the_hub_is_found_in_its_cache(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--org--small"
    shutil.copytree(llama, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for revision in (None, "main", commit):
        assert load("org/small", revision=revision).folder.name == commit
    with pytest.raises(ConfigError, match="not in the hub's cache"):
        load("org/small", revision="other")


def test_a_revision_of_a_folder_is_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match="revision='main' has no effect"):
        load(llama, revision="main")
