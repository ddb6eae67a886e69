"""A trained model comes out as ``save_pretrained`` would write it, to the byte, and computes what the engine does."""

import errno
import json
import os
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CamembertConfig, CamembertForMaskedLM, LlamaConfig, LlamaForCausalLM

import penstock
from penstock import ConfigError, ModelError, StoreError
from penstock.hf import export, load
from penstock.hf.models.exporting import Source, copy_companions, write_folder
from penstock.hf.models.folder import INDEX, SINGLE
from penstock.hf.models.kept import keep, kept_model
from penstock.hf.models.shard_files import ShardFiles
from penstock.hf.models.shards import DTYPES
from penstock.state.values import committed
from penstock.store.records import encode
from tests import folders, warm
from tests.models import causal_lm
from tests.sweep.configs import tiny_of

pytestmark = pytest.mark.usefixtures("one_thread")


def wrap(model: Any, store: Path | None, **options: Any) -> penstock.Engine:
    settings: dict[str, Any] = {
        "optimizer": penstock.AdamW(lr=1e-2),
        "budget": penstock.Budget(device="32MiB", host="32MiB", disk=store),
        "precision": "fp32",
        "device": "cpu",
        "plan": None,
    }
    return penstock.wrap(model, **settings | options)


def micro_batches(count: int = 2) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [causal_lm(generator, 2, 12) for _ in range(count)]


def trained_copy(engine: penstock.Engine, plain: Any) -> Any:
    """A plain model with the engine's values."""
    values = dict(engine.master_parameters())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(values[name])
        for name, buffer in engine.values().buffers.items():
            plain.get_buffer(name).copy_(buffer)
    return plain.eval()


def assert_same_files(found: Path, expected: Path) -> None:
    """All but the configuration, where only the version of transformers and the like may differ, byte for byte."""
    assert sorted(p.name for p in found.iterdir()) == sorted(p.name for p in expected.iterdir())
    for file in expected.iterdir():
        assert (found / file.name).read_bytes() == file.read_bytes(), file.name


TRAINED = ["llama", "llama-tied", "mixtral", "qwen3-moe", "gemma3", "gpt2", "deepseek-v3", "gpt-oss"]


@pytest.mark.sampled(2, values=False)
@pytest.mark.parametrize("name", TRAINED)
def test_what_is_exported_is_what_was_trained(name: str, tmp_path: Path) -> None:
    """Train a folder, export it; the files are those of a plain model in memory, and so are logits and loss."""
    source = folders.write(name, tmp_path / "source", max_shard_size="1GB")
    loaded = load(source)
    with wrap(loaded.model, tmp_path / "store", weights=loaded.weights) as engine:
        for _ in range(2):
            engine.step(micro_batches())
        own_loss = engine.evaluate(micro_batches(1))
        export(engine, tmp_path / "out")
        plain = trained_copy(engine, type(folders.model(name)).from_pretrained(source, dtype=torch.float32))
    plain.save_pretrained(tmp_path / "plain")
    assert_same_files(tmp_path / "out", tmp_path / "plain")
    (batch,) = micro_batches(1)
    again = type(plain).from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, plain(**batch).logits)
        assert float(again(**batch).loss) == own_loss


@pytest.mark.parametrize("name", [name for name in folders.MODELS if name not in (*TRAINED, "llama-300")])
def test_models_of_other_kinds_come_out_as_they_went_in(name: str, tmp_path: Path) -> None:
    source = folders.write(name, tmp_path / "source", max_shard_size="30KB")
    loaded = load(source)
    with wrap(loaded.model, None, weights=loaded.weights) as engine:
        export(engine, tmp_path / "out", shard_size="30KB")
    plain = type(folders.model(name)).from_pretrained(source, dtype=torch.float32)
    plain.save_pretrained(tmp_path / "plain", max_shard_size="30KB")
    assert_same_files(tmp_path / "out", tmp_path / "plain")


def test_a_tied_weight_comes_out_under_the_name_that_transformers_saves_it_by(tmp_path: Path) -> None:
    """CamemBERT's head, whose name it has first, comes before the embedding that it is tied to."""
    plain = CamembertForMaskedLM(tiny_of(CamembertForMaskedLM, CamembertConfig))
    plain.save_pretrained(tmp_path / "plain")
    with wrap(plain, None) as engine:
        export(engine, tmp_path / "out")
    assert_same_files(tmp_path / "out", tmp_path / "plain")


class OddBuffers(LlamaForCausalLM):
    """Has buffers of all dtypes that a file can have and torch makes, and one without elements."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for name, dtype in DTYPES.items():
            if not name.startswith("F8"):
                self.register_buffer(name.lower(), torch.tensor([0, 1, 1], dtype=torch.int16).to(dtype))
        self.register_buffer("empty", torch.zeros(2, 0))


def test_buffers_of_any_dtype_and_without_elements_come_out_as_they_went_in(tmp_path: Path) -> None:
    plain = OddBuffers(folders.model("llama").config)
    plain.save_pretrained(tmp_path / "plain")
    loaded = load(tmp_path / "plain", model_class=OddBuffers)
    with wrap(loaded.model, tmp_path / "store", weights=loaded.weights) as engine:
        export(engine, tmp_path / "out")
    assert_same_files(tmp_path / "out", tmp_path / "plain")


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_in_16_bits_as_a_plain_model_of_that_dtype_is_saved(
    dtype: Any, torch_dtype: torch.dtype, tmp_path: Path
) -> None:
    """DeepSeek keeps a buffer in fp32, so that the files have both dtypes."""
    source = folders.write("deepseek-v3", tmp_path / "source", max_shard_size="1GB")
    loaded = load(source)
    with wrap(loaded.model, tmp_path / "store", weights=loaded.weights) as engine:
        export(engine, tmp_path / "out", dtype=dtype)
    plain = type(folders.model("deepseek-v3")).from_pretrained(source, dtype=torch_dtype)
    plain.save_pretrained(tmp_path / "plain")
    dtypes = {tensor.dtype for tensor in load_file(tmp_path / "out" / SINGLE).values()}
    assert dtypes == {torch_dtype, torch.float32}
    assert_same_files(tmp_path / "out", tmp_path / "plain")


def test_the_dtype_is_the_one_that_the_model_came_in(tmp_path: Path) -> None:
    source = folders.write("llama", tmp_path / "source", torch.bfloat16, max_shard_size="1GB")
    loaded = load(source)
    with wrap(loaded.model, tmp_path / "store", weights=loaded.weights) as engine:
        export(engine, tmp_path / "out")
    assert_same_files(tmp_path / "out", source)


def test_shards_and_index_are_those_of_save_pretrained(tmp_path: Path) -> None:
    plain = folders.model("llama")
    with wrap(folders.model("llama"), tmp_path / "store") as engine:
        export(engine, tmp_path / "out", shard_size="20KB")
    plain.save_pretrained(tmp_path / "plain", max_shard_size="20KB")
    assert len(json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]) == 21
    assert_same_files(tmp_path / "out", tmp_path / "plain")


def test_a_store_alone_gives_what_its_engine_gives_also_in_bf16_with_frozen_weights(tmp_path: Path) -> None:
    model = folders.model("deepseek-v3")
    model.config.use_cache = False
    model.model.layers[0].requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    with wrap(model, tmp_path / "store", precision="bf16") as engine:
        engine.step(micro_batches())
        config = engine.model.config
        export(engine, tmp_path / "live")
    with committed([[tmp_path / "store"]]) as found:
        assert (found.step, found.precision) == (1, "bf16")
        source = Source(cls=type(model), config=config, rules=None, values=found.values)
        write_folder(tmp_path / "out", source, lambda folder: None)
    live = load_file(tmp_path / "live" / SINGLE)
    alone = load_file(tmp_path / "out" / SINGLE)
    assert live.keys() == alone.keys()
    assert all(torch.equal(live[name], alone[name]) for name in live)
    fresh = folders.model("deepseek-v3").state_dict()
    name = "model.embed_tokens.weight"
    assert torch.equal(alone[name], fresh[name].bfloat16().float())  # frozen, in the dtype that computes
    assert not torch.equal(alone["lm_head.weight"], fresh["lm_head.weight"])


def test_old_names_come_out_as_they_went_in(tmp_path: Path) -> None:
    """The names are those of ``save_pretrained`` of a model from ``from_pretrained``: the rules that were used are
    turned round."""
    source = folders.write("bert", tmp_path / "source", max_shard_size="1GB")
    state = load_file(source / SINGLE)
    from safetensors.torch import save_file

    old = {k.replace("LayerNorm.weight", "LayerNorm.gamma"): v for k, v in state.items()}
    save_file(old, source / SINGLE, metadata={"format": "pt"})
    loaded = load(source)
    with wrap(loaded.model, None, weights=loaded.weights) as engine:
        export(engine, tmp_path / "out")
    type(folders.model("bert")).from_pretrained(source).save_pretrained(tmp_path / "plain")
    assert_same_files(tmp_path / "out", tmp_path / "plain")


OWN_CODE = """
from transformers import CamembertConfig, CamembertForMaskedLM, LlamaConfig, LlamaForCausalLM

class MineConfig(LlamaConfig):
    model_type = "mine"

class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
"""


def test_a_model_with_code_of_its_own_takes_it_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In and out, and into what a run keeps and out of that: the folder loads and runs its own class."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    source = folders.write("llama", tmp_path / "source", max_shard_size="1GB")
    (source / "modeling_mine.py").write_text(OWN_CODE)
    classes = {"AutoConfig": "modeling_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    changes = {"model_type": "mine", "architectures": ["MineForCausalLM"], "auto_map": classes}
    file = source / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    loaded = load(source, trust_remote_code=True)
    keep(
        tmp_path / "kept",
        loaded.model,
        config=loaded.config,
        dtype=loaded.dtype,
        rules=loaded.rules,
        source=loaded.folder,
    )
    with wrap(loaded.model, tmp_path / "store", weights=loaded.weights) as engine:
        export(engine, tmp_path / "live")
    kept = kept_model(tmp_path / "kept", trust_remote_code=True)
    with committed([[tmp_path / "store"]]) as found:
        write_folder(tmp_path / "out", Source.of(kept, found.values), partial(copy_companions, kept.folder))
    for folder in (tmp_path / "live", tmp_path / "out"):
        with pytest.raises(ConfigError, match="trust_remote_code: true"):
            load(folder)
        again = load(folder, trust_remote_code=True)
        assert type(again.model).__name__ == "MineForCausalLM"
        assert (folder / SINGLE).read_bytes() == (source / SINGLE).read_bytes()


def test_all_that_prepares_a_models_inputs_is_kept_and_comes_out_with_it(tmp_path: Path) -> None:
    """Chat templates, of which some are in a folder of their own, and Mistral's own tokenizer."""
    source = folders.write("llama", tmp_path / "source")
    inputs = ["additional_chat_templates/tools.jinja", "chat_template.jinja", "tekken.json", "tokenizer.json"]
    (source / "additional_chat_templates").mkdir()
    for name in inputs:
        (source / name).write_text(name)
    model = folders.model("llama")
    keep(tmp_path / "kept", model, config=model.config, dtype=torch.float32, rules=None, source=source)
    for adapter in (False, True):
        out = tmp_path / f"out-{adapter}"
        out.mkdir()
        copy_companions(tmp_path / "kept", out, adapter=adapter)
        found = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
        assert found == sorted(inputs if adapter else [*inputs, "generation_config.json"])


# ---- what goes wrong


@pytest.fixture
def engine() -> Iterator[penstock.Engine]:
    with wrap(folders.model("llama"), None) as made:
        yield made


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir())


def test_a_folder_that_is_there_is_replaced_only_when_asked_and_only_if_it_is_a_models(
    engine: penstock.Engine, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="exists"):
        export(engine, out)
    with pytest.raises(ConfigError, match="no model's folder"):
        export(engine, out, overwrite=True)
    assert left(out) == ["thesis.txt"]
    (out / "config.json").write_text("{}")
    export(engine, out, overwrite=True)
    assert left(out) == ["config.json", "generation_config.json", SINGLE]
    assert left(tmp_path) == ["out"]


@pytest.mark.parametrize("text", [encode("any", {}).decode(), encode("any", {}).decode()[:-9], ""])
@pytest.mark.parametrize("name", ["run.json", "penstock.store", "penstock.store.next", "snapshot.json", "ranks.json"])
def test_a_folder_with_the_state_of_a_run_in_it_is_not_replaced(
    engine: penstock.Engine, name: str, text: str, tmp_path: Path
) -> None:
    """As a model's folder, in which runs of it are; or a Trainer's, in which its checkpoints are. Be they damaged."""
    kept = tmp_path / "out" / "runs" / "mine" / name
    kept.parent.mkdir(parents=True)
    (tmp_path / "out" / "config.json").write_text("{}")
    kept.write_text(text)
    with pytest.raises(ConfigError, match=f"not replaced, as {kept} would go with it"):
        export(engine, tmp_path / "out", overwrite=True)
    assert kept.exists()


@pytest.mark.parametrize("name", ["run.json", "snapshot.json", "ranks.json"])
def test_a_folder_with_files_of_others_of_such_names_is_replaced(
    engine: penstock.Engine, name: str, tmp_path: Path
) -> None:
    for folder, text in (("out", '{"id": 7}'), ("out/more", "[1]")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text)
    (tmp_path / "out" / "below" / name).mkdir(parents=True)
    (tmp_path / "out" / "config.json").write_text("{}")
    export(engine, tmp_path / "out", overwrite=True)
    assert left(tmp_path / "out") == ["config.json", "generation_config.json", SINGLE]


def test_what_is_there_by_the_end_of_an_export_stays(
    engine: penstock.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(shards: ShardFiles) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.txt").write_text("years of work")

    monkeypatch.setattr(ShardFiles, "finish", finish)
    with pytest.raises(ConfigError, match="exists"):
        export(engine, tmp_path / "out")
    assert left(tmp_path / "out") == ["thesis.txt"]
    assert left(tmp_path) == ["out"]


def test_an_error_of_who_shows_progress_is_none_of_the_folder(tmp_path: Path) -> None:
    """Such as that of a pipe that nobody reads any more."""
    model = folders.model("llama")

    def show(done: int, total: int) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with wrap(model, None) as engine:
        values = engine.inside.resources.values()
        source = Source(cls=type(model), config=model.config, rules=None, values=values)
        with pytest.raises(BrokenPipeError):
            write_folder(tmp_path / "out", source, lambda folder: None, progress=show)
    assert left(tmp_path) == []


def test_what_a_library_could_not_write_is_told_in_its_words(tmp_path: Path) -> None:
    """Libraries raise OSErrors that have no number and no words of the system."""
    model = folders.model("llama")

    def fails(folder: Path) -> None:
        raise shutil.Error([("a.json", "b.json", "no such thing")])

    with wrap(model, None) as engine:
        values = engine.inside.resources.values()
        source = Source(cls=type(model), config=model.config, rules=None, values=values)
        with pytest.raises(StoreError, match=r"out: cannot be written: .*no such thing.*: check the drive"):
            write_folder(tmp_path / "out", source, fails)
    assert left(tmp_path) == []


def test_a_value_that_is_too_large_for_the_dtype_leaves_nothing(tmp_path: Path) -> None:
    model = folders.model("llama")
    with torch.no_grad():
        model.lm_head.weight[1, 2] = 1e6
    with wrap(model, None) as engine, pytest.raises(ModelError, match=r"lm_head.weight has 1e\+06.*float16"):
        export(engine, tmp_path / "out", dtype="fp16")
    assert left(tmp_path) == []


def test_a_disk_without_room_is_said_before_anything_is_written(
    engine: penstock.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.store.packed.free_bytes", lambda path: 50_000)
    with pytest.raises(StoreError, match=r"needs 98.7 KiB, and 48.8 KiB are free"):
        export(engine, tmp_path / "out")
    assert left(tmp_path) == []


def test_a_disk_that_fills_up_in_the_middle_leaves_what_was_there(
    engine: penstock.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(engine, tmp_path / "out")
    before = (tmp_path / "out" / SINGLE).read_bytes()
    calls, write = 0, os.pwrite

    def full(fd: int, data: Any, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls > 9:
            raise OSError(28, "No space left on device")
        return write(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreError, match="No space left on device: free some space"):
        export(engine, tmp_path / "out", overwrite=True)
    assert calls == 10
    assert left(tmp_path) == ["out"]
    assert (tmp_path / "out" / SINGLE).read_bytes() == before


def test_what_a_killed_export_left_is_removed_by_the_next(engine: penstock.Engine, tmp_path: Path) -> None:
    code = (
        "import sys, os; from pathlib import Path; from penstock.store.whole import WholeFolder; "
        "WholeFolder(Path(sys.argv[1])); os._exit(9)"
    )
    assert warm.run(["-c", code, tmp_path / "out"]).returncode == 9
    (abandoned,) = left(tmp_path)
    assert abandoned.startswith("out.partial-")
    export(engine, tmp_path / "out")
    assert left(tmp_path) == ["out"]


def test_only_what_exports_leave_behind_is_removed(engine: penstock.Engine, tmp_path: Path) -> None:
    (tmp_path / "out.partial-mine").mkdir()
    (tmp_path / "out.partial-mine" / "thesis.txt").write_text("years of work")
    (tmp_path / "out.partial-0123456789ab").write_text("a file")
    export(engine, tmp_path / "out")
    assert left(tmp_path) == ["out", "out.partial-0123456789ab", "out.partial-mine"]
    assert left(tmp_path / "out.partial-mine") == ["thesis.txt"]


def test_the_folder_that_a_link_leads_to_is_replaced_and_the_link_stays(
    engine: penstock.Engine, tmp_path: Path
) -> None:
    export(engine, tmp_path / "first", dtype="bf16")
    before = (tmp_path / "first" / SINGLE).stat().st_size
    (tmp_path / "latest").symlink_to("first")
    export(engine, tmp_path / "latest", overwrite=True)
    assert left(tmp_path) == ["first", "latest"]
    assert (tmp_path / "latest").is_symlink()
    assert (tmp_path / "first" / SINGLE).stat().st_size > before


def test_a_model_of_no_library_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    with (
        wrap(model, None, blocks=list(model)) as engine,
        pytest.raises(ConfigError, match="Sequential is no model of transformers"),
    ):
        export(engine, tmp_path / "out")


def test_a_store_that_is_in_use_or_empty(tmp_path: Path) -> None:
    with (
        wrap(folders.model("llama"), tmp_path / "store"),
        pytest.raises(StoreError, match="in use"),
        committed([[tmp_path / "store"]]),
    ):
        pass
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(StoreError, match="does not exist"), committed([[tmp_path / "store"]]):
        pass


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype='bfloat16': must be one of fp32, bf16, fp16, or None"),
        ({"shard_size": 0}, "shard_size=0: must be more than 0"),
        ({"tokenizer": "gpt2"}, "tokenizer='gpt2': must be a tokenizer of transformers, or None"),
    ],
)
def test_an_export_that_cannot_be_made_as_it_was_asked_for_is_refused(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with wrap(folders.model("llama"), None) as engine, pytest.raises(ConfigError, match=message):
        export(engine, tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()
