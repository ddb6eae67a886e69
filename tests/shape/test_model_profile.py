"""A model's profile without the model: a dry run finds what a probe of the real model finds, and so does a formula."""

import gc
import json
import operator
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, PreTrainedConfig

import penstock
from penstock.compat.torch import TorchDispatchMode
from penstock.config.optimizer import Orthogonal
from penstock.errors import ConfigError, ModelError
from penstock.hardware.machine import DeviceKind, Machine
from penstock.schedule.place import Format
from penstock.schedule.work import BothWays, Work, model_flops
from penstock.shape import decoders, meta
from penstock.shape.huggingface import HuggingFaceModel, model_shape
from penstock.shape.model import EFFICIENCY, ModelProfile, stage_times
from penstock.shape.shipped import CONFIGS
from penstock.tape.dry import build_on_meta, dry_run, shorten
from penstock.tape.values import Values
from tests import models
from tests.machines import gpu, host
from tests.models import MODELS, Case, causal_lm
from tests.tape_reference import Bench

pytestmark = pytest.mark.usefixtures("one_thread")

FP32, BF16 = Format.of("fp32", 2), Format.of("bf16", 2)
MUON = Format.of("bf16", 2, whole=Orthogonal(steps=5))
MUON8 = replace(MUON, form="int8")


def experts(build: str, implementation: str) -> Case:
    return Case(
        build=lambda: getattr(models, build)(experts_implementation=implementation), micro_batch=causal_lm, blocks=3
    )


class Encoder(nn.Module):
    """torch's own transformer layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 32)
        layers = (nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2))
        self.layers = nn.ModuleList(layers)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


CASES: Mapping[str, Case] = {
    **{name: case for name, case in MODELS.items() if name not in ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")},
    **{f"{n} grouped": experts(n, "grouped_mm") for n in ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")},
    "torch's own": Case(
        build=Encoder,
        micro_batch=lambda g, rows, length: {"tokens": torch.randint(0, 96, (rows, length), generator=g)},
        blocks=2,
        loss_fn=lambda m, mb: m(**mb),
    ),
    "mixtral batched": experts("mixtral", "batched_mm"),
    "gpt2 dropout": Case(build=lambda: models.gpt2(attn_implementation="sdpa"), micro_batch=causal_lm, blocks=3),
    "bert sdpa": Case(
        build=lambda: models.bert(attn_implementation="sdpa"), micro_batch=MODELS["bert"].micro_batch, blocks=3
    ),
}


def dry(case: Case, *, dtype: torch.dtype = torch.float32, kind: DeviceKind = "cpu") -> Any:
    model, micro_batch = build_on_meta(case.build), case.micro_batches(1)[0]
    return dry_run(model, micro_batch, dtype=dtype, kind=kind, loss_fn=case.loss_fn, splits=True)


def but_for_ops(work: Sequence[BothWays]) -> list[tuple[Work, ...]]:
    return [tuple(replace(way, ops=0) for way in both) for both in work]


def assert_about_as_many_ops(found: Sequence[BothWays], real: Sequence[BothWays]) -> None:
    """Some ops are made of others by one device, and are one on another."""
    for mine, theirs in zip(found, real, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a.ops == pytest.approx(b.ops, abs=3, rel=0.1), (a, b)


# ---- by dry run


@pytest.mark.sampled(2, values=False)
@pytest.mark.parametrize("name", CASES)
def test_a_dry_run_finds_what_a_probe_finds(name: str) -> None:
    """All of it, to the byte and to the FLOP: groups, stages, reads, saved activations, peaks."""
    case = CASES[name]
    real = Bench(case, case.model(), moving=True, splits=True)
    real.probe(case.micro_batches(1)[0])
    found = dry(case)
    assert found.groups == tuple(g.spec for g in real.groups)
    assert found.stages == real.stages
    assert but_for_ops(found.work) == but_for_ops(real.learned.work)
    assert_about_as_many_ops(found.work, real.learned.work)


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("name", ["llama_sdpa", "gpt2", "bert sdpa", "vit", "t5", "mixtral grouped"])
def test_a_dry_run_in_16_bits_finds_what_a_probe_finds(name: str) -> None:
    case = CASES[name]
    real = Bench(case, case.model().to(torch.bfloat16), moving=True, splits=True)
    real.probe(case.micro_batches(1, dtype=torch.bfloat16)[0])
    found = dry(case, dtype=torch.bfloat16)
    # The real one's buffers are in 16 bits, too, and rotary frequencies are widened: 24 bytes.
    prologue = real.learned.work[0][0]
    fewer = tuple((replace(prologue, traffic=prologue.traffic - less), real.learned.work[0][1]) for less in (0, 24))
    assert found.stages == real.stages
    assert but_for_ops(found.work)[0] in but_for_ops(fewer)
    assert but_for_ops(found.work)[1:] == but_for_ops(real.learned.work)[1:]
    assert_about_as_many_ops(found.work, real.learned.work)


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5"])
def test_flop_are_those_that_torch_counts(name: str) -> None:
    case = CASES[name]
    counter = FlopCounterMode(display=False)
    with counter:
        case.loss_fn(case.model(), case.micro_batches(1)[0]).backward()
    found = dry(case)
    assert model_flops(found.work) == counter.get_total_flops()


def test_a_gpu_keeps_less_of_attention_and_dropout() -> None:
    """What is fused there: no scores of every query with every key, and dropout's mask in one byte an element."""
    case = Case(build=lambda: models.gpt2(attn_implementation="sdpa"), micro_batch=causal_lm, blocks=3)
    cpu, gpu = (dry(case, kind=kind).stages[1].backward_peak for kind in ("cpu", "cuda"))
    assert gpu < cpu


def test_decisions_by_activations_are_refused() -> None:
    with pytest.raises(ModelError, match=r"needs the values of activations .*grouped_mm.*one step is enough"):
        dry(MODELS["mixtral"])


def test_integers_keep_their_values_through_views_and_writes() -> None:
    """On the meta device, as long as what is written is known too."""
    values = Values("cpu")
    with values:
        given = values.give({"tokens": torch.tensor([[3, 1], [2, 0]])})["tokens"]
        mask = given > 0
        mask[0].logical_not_()
        positions = torch.arange(4, device="meta").cumsum(0)
        assert (mask.sum().item(), mask.all().item(), positions[-1].item()) == (1, False, 6)
        assert mask.nonzero().shape == (1, 2)
        mask[1] = torch.rand(2, device="meta") > 0.5
        with pytest.raises(ModelError, match="needs the values"):
            mask.any().item()


def config_of(name: str, layers: int, **changes: Any) -> dict[str, Any]:
    built = getattr(models, name)(num_hidden_layers=layers, **changes)
    return {k: v for k, v in built.config.to_dict().items() if v is not None} | changes


def whole(shape: meta.MetaModel, form: Format = FP32) -> ModelProfile:
    return replace(shape, repeats=False).profile(2, 12, form)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param("llama", {"attn_implementation": "sdpa"}, marks=pytest.mark.campaign),
        ("qwen3", {"vocab_size": 9000}),
        pytest.param("mixtral", {"experts_implementation": "grouped_mm"}, marks=pytest.mark.campaign),
        ("gpt_oss", {"experts_implementation": "grouped_mm"}),
    ],
)
def test_running_equal_blocks_once_is_running_them_all(name: str, changes: dict[str, Any]) -> None:
    """Or else all are run: gpt-oss alternates two kinds of attention, Mixtral's loss sees the routers of all."""
    config = config_of(name, 4, **changes)
    shape = meta.from_config(config, name=name, kind="cpu")
    assert shape.profile(2, 12, FP32) == whole(shape)
    shortened = shorten(build_on_meta(shape.build))
    assert (shortened is None) == (name == "gpt_oss")


def test_a_callable_is_run_on_the_meta_device() -> None:
    case = MODELS["skips"]
    shape = meta.MetaModel(
        name="model",
        build=case.build,
        micro_batch=lambda rows, length: case.micro_batches(1, rows=rows, length=length)[0],
        loss_fn=case.loss_fn,
        kind="cpu",
    )
    profile = replace(shape, splits=True).profile(2, 12, FP32)
    found = dry(case)
    assert (profile.program.stages, profile.tokens) == (found.stages, 24)
    assert profile.parameters == sum(p.numel() for p in case.model().parameters())


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: torch.zeros(3), r"returned Tensor: it must build and return a torch.nn.Module"),
        (lambda: nn.Linear(2, int(torch.ones(()).item())), r"cannot be built on the meta device"),
    ],
)
def test_a_callable_that_cannot_be_built_says_so(build: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        meta.MetaModel(name="model", build=build, micro_batch=lambda rows, length: {}).profile(1, 8, FP32)


@pytest.mark.parametrize("config", [CONFIGS["llama-8b"], CONFIGS["gpt-13b"]], ids=["llama", "gpt2"])
def test_what_is_built_without_values_is_not_initialized(config: dict[str, Any]) -> None:
    """Of a deep model that takes longer than all else; nor does Python look for cycles meanwhile, and then it may."""
    ran, searched = set[str](), list[bool]()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.add(str(func.overloadpacket))
            return func(*args, **kwargs or {})

    shape = model_shape({**config, "num_hidden_layers": 2, "n_layer": 2, "tie_word_embeddings": True})
    run = meta.from_config(shape.config, name="small")

    def seen() -> nn.Module:
        searched.append(gc.isenabled())
        with Seen():
            return run.build()

    model = build_on_meta(seen)
    assert not ran & {"aten.uniform_", "aten.normal_"}
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight  # type: ignore[operator]
    replace(run, build=seen).profile(1, 8, BF16)
    assert searched == [True, False]
    assert gc.isenabled()
    norm = build_on_meta(lambda: nn.Linear(2, 2, device="cpu")).get_parameter("weight").norm()
    assert 0 < norm < 2, "what has memory has values"


# ---- by formula

LLAMA = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 3000,
    "n_positions": 512,
    "n_embd": 256,
    "n_layer": 5,
    "n_head": 4,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
FORMULAS: Mapping[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama grouped tied": LLAMA
    | {"num_key_value_heads": 2, "tie_word_embeddings": True, "head_dim": 80, "intermediate_size": 1280},
    "mistral": LLAMA | {"model_type": "mistral", "num_key_value_heads": 3},
    "qwen3": LLAMA | {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 80, "intermediate_size": 1280},
    "gpt2": GPT2,
    "gpt2 small": GPT2 | {"vocab_size": 900, "n_inner": 768},
}


def by_dry_run(shape: HuggingFaceModel, rows: int, length: int, form: Format) -> ModelProfile:
    run = meta.from_config(shape.config, name=shape.name, kind=shape.kind, loss_tile=shape.loss_tile, splits=True)
    return run.profile(rows, length, form)


def assert_equal_but_for_small_tensors(found: ModelProfile, exact: ModelProfile) -> None:
    """A formula's bytes are those of what grows with tokens times widths; a token's own few numbers, masks and tables
    of positions are left out: of a stage that computes 3%, and of the prologue a MiB, or a third. Outside of blocks it
    may count two ops more, as some are not needed for a single sequence."""
    for mine, theirs in zip(found.work, exact.work, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            rel, least = (0.03, 1 << 16) if b.flops else (0.33, 1 << 20)
            assert a.traffic == pytest.approx(b.traffic, rel=rel, abs=least), (a, b)
    assert [(f.ops, b.ops) for f, b in found.work[1:-1]] == [(f.ops, b.ops) for f, b in exact.work[1:-1]]
    for at in (0, -1):
        for a, b in zip(found.work[at], exact.work[at], strict=True):
            assert abs(a.ops - b.ops) <= 2, (a, b)
    products = [[tuple(replace(way, traffic=0, ops=0) for way in both) for both in p.work] for p in (found, exact)]
    assert products[0] == products[1]
    assert found == replace(exact, work=found.work)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("rows", "length", "form", "kind"),
    [
        (1, 64, BF16, "cuda"),
        (8, 256, BF16, "cuda"),
        (4, 128, FP32, "cpu"),
        (1, 64, MUON, "cuda"),
        (1, 64, MUON8, "cuda"),
    ],
)
@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_gives_what_a_dry_run_gives(
    name: str, rows: int, length: int, form: Format, kind: DeviceKind
) -> None:
    formula = decoders.from_config(FORMULAS[name], name=name)
    assert formula is not None
    assert formula.is_usual
    exact = meta.from_config(FORMULAS[name], name=name, kind=kind, splits=True).profile(rows, length, form)
    found = formula.profile(rows, length, form)
    assert found.program.groups == exact.program.groups
    for mine, theirs in zip(found.program.stages, exact.program.stages, strict=True):
        assert mine == theirs
    assert_equal_but_for_small_tensors(found, exact)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("rows", "length", "form", "kind"), [(1, 64, BF16, "cuda"), (4, 128, FP32, "cpu")])
@pytest.mark.parametrize("name", ["llama grouped tied", "gpt2"])
@pytest.mark.parametrize("tile", [250, 1024])
def test_a_formula_knows_the_loss_in_tiles(
    name: str, rows: int, length: int, form: Format, kind: DeviceKind, tile: int
) -> None:
    shape = HuggingFaceModel(name=name, config=FORMULAS[name], kind=kind, loss_tile=tile)
    exact = by_dry_run(shape, rows, length, form)
    formula = decoders.from_config(FORMULAS[name], name=name)
    assert formula is not None
    assert_equal_but_for_small_tensors(formula.profile(rows, length, form, loss_tile=tile), exact)
    assert_equal_but_for_small_tensors(shape.profile(rows, length, form), exact)
    if rows * length > tile:
        whole = replace(shape, loss_tile=None).profile(rows, length, form)
        assert exact.program.stages[-1].forward_peak < 0.75 * whole.program.stages[-1].forward_peak


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize(("tile", "form"), [(16, BF16), (64, BF16), (16, FP32), (64, FP32)])
@pytest.mark.parametrize("name", ["llama grouped tied", "gpt2"])
def test_where_hidden_states_take_more_than_a_tile_what_is_planned_is_what_a_dry_run_gives(
    name: str, tile: int, form: Format
) -> None:
    shape = HuggingFaceModel(name=name, config=FORMULAS[name], kind="cuda" if form is BF16 else "cpu", loss_tile=tile)
    for rows in (1, tile // 2):
        found = replace(shape, splits=True).profile(rows, 128, form)
        assert_equal_but_for_small_tensors(found, by_dry_run(shape, rows, 128, form))


@pytest.mark.sampled(2, values=False)
@pytest.mark.parametrize("name", ["gpt-175b", "llama-70b", "qwen3-8b"])
def test_a_large_model_by_formula_is_the_real_one(name: str) -> None:
    exact = meta.from_config(CONFIGS[name], name=name, splits=True).profile(2, 2048, BF16)
    assert_equal_but_for_small_tensors(model_shape(name).profile(2, 2048, BF16), exact)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"model_type": "qwen3", "attention_bias": True, "num_key_value_heads": 2},
    ],
)
def test_parameters_are_counted_with_biases(changes: dict[str, Any]) -> None:
    formula = decoders.from_config(LLAMA | changes, name="biased")
    assert formula is not None
    exact = meta.from_config(LLAMA | changes, name="biased", splits=True).profile(1, 16, BF16)
    found = formula.profile(1, 16, BF16)
    assert (found.parameters, found.program.groups) == (exact.parameters, exact.program.groups)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral", "qwen3"])
def test_a_setting_that_is_left_out_is_what_the_installed_class_takes_for_it(kind: str) -> None:
    of_all = PreTrainedConfig().to_dict().keys()
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if kind == "gpt2" else {}
    given = {"model_type": kind, **off}
    whole = {k: v for k, v in AutoConfig.for_model(**given).to_dict().items() if k not in of_all or k in given}
    formula = decoders.from_config(given, name=kind)
    assert formula is not None
    assert formula == decoders.from_config(whole, name=kind)


def test_names_have_the_parameters_that_they_are_called_after() -> None:
    sizes = {
        name: round(model_shape(name).profile(1, 128, BF16).parameters / 1e9, 1)
        for name in CONFIGS
        if "oss" not in name
    }
    assert sizes == {
        "gpt-13b": 12.9,
        "gpt-30b": 30.0,
        "gpt-65b": 64.9,
        "gpt-175b": 174.6,
        "llama-8b": 8.0,
        "llama-70b": 70.6,
        "qwen3-8b": 8.2,
        "qwen3-14b": 14.8,
    }


def test_flop_of_large_models_are_six_per_parameter_and_token() -> None:
    """Plus attention: 4 T s h forward a layer, 2.5 times that backward. Without the embedding, which is looked up."""
    for name, length in (("gpt-175b", 2048), ("llama-70b", 4096)):
        config, profile = CONFIGS[name], model_shape(name).profile(2, length if name != "gpt-175b" else 2048, BF16)
        layers = config.get("n_layer") or config["num_hidden_layers"]
        width = config.get("n_embd") or config["hidden_size"]
        looked_up = 2048 * width if name.startswith("gpt") else config["vocab_size"] * width
        expected = 6 * (profile.parameters - looked_up) * profile.tokens + 14 * layers * profile.tokens * length * width
        assert profile.model_flops == pytest.approx(expected, rel=0.001)
        left_out = 2 * layers * profile.tokens * width * (config.get("intermediate_size") or 4 * width)
        assert profile.flops == pytest.approx(4 / 3 * profile.model_flops - left_out, rel=0.03)


def test_a_size_by_which_hugging_face_divides_is_refused_with_its_type() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    for config in ({"model_type": "gemma", "num_attention_heads": 0}, {"model_type": "phi", "hidden_size": 0}):
        with pytest.raises(ConfigError, match=f"Hugging Face cannot build this {config['model_type']} model"):
            model_shape(sizes | config, kind="cpu").profile(1, 32, BF16)


def test_planning_a_shipped_model_imports_no_torch_and_takes_no_time() -> None:
    script = (
        "import sys, time; from penstock.shape.huggingface import model_shape\n"
        "from penstock.schedule.place import Format\n"
        "started = time.process_time()\n"
        "model_shape('gpt-175b').profile(8, 2048, Format.of('bf16', 2))\n"
        "assert time.process_time() - started < 0.1\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mixtral"},
        {"hidden_act": "gelu"},
        {"attention_dropout": 0.1},
        {"attn_implementation": "eager"},
        {"a_setting_of_tomorrow": 1},
    ],
)
def test_what_no_formula_is_for_has_none(changes: dict[str, Any]) -> None:
    assert decoders.from_config(LLAMA | changes, name="other") is None
    assert decoders.from_config({**GPT2, "attn_pdrop": 0.1}, name="dropout") is None
    assert decoders.from_config({k: v for k, v in GPT2.items() if k != "attn_pdrop"}, name="dropout") is None


def test_where_a_formula_does_not_hold_the_model_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped queries in fp32 on a GPU; a small vocabulary; a narrow MLP; a window no longer than the sequence."""
    plain = HuggingFaceModel(name="plain", config=LLAMA)
    by_formula = plain.profile(2, 64, BF16)
    monkeypatch.setattr(meta.MetaModel, "profile", lambda run, *sizes: (run.name, *sizes))
    assert plain.profile(2, 64, BF16) == by_formula
    window = {"model_type": "mistral", "sliding_window": 16, "num_key_value_heads": 2}
    for changes, form in (
        ({"num_key_value_heads": 2}, FP32),
        ({"vocab_size": 300}, BF16),
        ({"intermediate_size": 512}, BF16),
        (window, BF16),
        (window | {"sliding_window": 64}, BF16),
    ):
        shape = HuggingFaceModel(name="odd", config=LLAMA | changes)
        assert shape.profile(2, 64, form) == ("odd", 2, 64, form)


def test_what_is_planned_is_what_the_engine_runs() -> None:
    """The program of a step, from a configuration alone, by formula and by a dry run."""
    shape = model_shape(LLAMA | {"num_hidden_layers": 2, "use_cache": False}, kind="cpu")
    model = build_on_meta(meta.from_config(shape.config, name="same").build)
    tokens = torch.randint(0, 4096, (2, 64))
    where = penstock.Budget(device="512MiB", host="256MiB", disk=None)
    with penstock.wrap(model, optimizer=penstock.AdamW(), budget=where, precision="fp32", device="cpu") as engine:
        engine.step([{"input_ids": tokens, "labels": tokens}])
        for profile in (shape.profile(2, 64, FP32), by_dry_run(shape, 2, 64, FP32)):
            planned = profile.program
            stages = tuple(replace(stage, split=None, split_peak=0) for stage in planned.stages)  # none is asked for
            assert replace(planned, stages=stages) == engine.plan.program


# ---- where a model comes from


def test_a_folder_a_file_a_mapping_and_a_name_give_a_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for source in (tmp_path, str(tmp_path / "config.json"), LLAMA):
        assert model_shape(source).config == LLAMA
    assert model_shape("gpt-65b").config == CONFIGS["gpt-65b"]
    assert model_shape("gpt-13b").with_layers(3).profile(1, 64, BF16).program.stages[-2].name == "transformer.h.2"


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model 'gpt-66b' ships.*did you mean gpt-\d+b\?"):
        model_shape("gpt-66b")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="it has no model_type"):
        model_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        model_shape(tmp_path)
    with pytest.raises(ConfigError, match=r"model_type='ilama' is not a type"):
        model_shape({"model_type": "ilama"}).profile(1, 8, BF16)
    with pytest.raises(ConfigError, match=r"hidden_size=-1 must be a positive whole number"):
        model_shape(LLAMA | {"hidden_size": -1}).profile(1, 8, BF16)
    mixtral = {**LLAMA, "model_type": "mixtral", "max_position_embeddings": 2048}  # which has no formula
    for shape in (model_shape("gpt-13b"), model_shape(LLAMA), model_shape(mixtral)):
        with pytest.raises(ConfigError, match=r"sequence_length=4096: .* takes at most 2048"):
            shape.profile(1, 4096, BF16)


# ---- seconds


def test_seconds_are_flop_over_rate_and_bytes_over_a_copys() -> None:
    profile = model_shape("gpt-13b").profile(4, 1024, BF16)
    machine = Machine(name="test", host=host(), device=gpu())
    times = stage_times(profile, machine, "bf16")
    reached, moved = EFFICIENCY["cuda"], sum(forward.traffic + backward.traffic for forward, backward in profile.work)
    assert sum(times.forward) + sum(times.backward) == pytest.approx((profile.flops / 1e14 + moved / 2e12) / reached)
    assert times.backward[-1] == 0.0
    block = profile.work[1][0]
    assert times.forward[1] == pytest.approx((block.flops / 1e14 + block.traffic / 2e12) / reached)
    with pytest.raises(ConfigError, match=r"the profile of test does not tell how fast a copy .* penstock doctor"):
        stage_times(profile, replace(machine, device=gpu(copy=None)), "bf16")
    with pytest.raises(ConfigError, match=r"precision='fp32': the profile of test has no rate for it, only for bf16"):
        stage_times(profile, machine, "fp32")


def test_the_backward_of_a_graph_that_is_kept_takes_less_by_what_is_computed_again_alone() -> None:
    profile = model_shape(LLAMA).profile(4, 1024, BF16)
    whole = tuple((forward, replace(backward, traffic=0)) for forward, backward in profile.work)
    profile = replace(profile, work=tuple((replace(forward, traffic=0), backward) for forward, backward in whole))
    machine = Machine(name="test", host=host(), device=gpu())
    times = stage_times(profile, machine, "bf16")
    forward, backward = profile.work[1]
    assert 0 < backward.again < forward.flops
    assert times.kept(1) == pytest.approx(times.backward[1] * (1 - backward.again / backward.flops))
    first, second = times.in_two(1)
    assert first + second == times.backward[1]
    assert second == pytest.approx(times.kept(1) / 2, rel=0.05)


def test_the_host_takes_its_time_for_each_op_beside_a_gpu_and_before_a_processor() -> None:
    profile = model_shape(LLAMA).profile(1, 64, FP32)
    block = profile.work[1][1]
    for kind, add in (("cuda", max), ("cpu", operator.add)):
        machine = Machine(name="test", host=host(), device=gpu(kind=kind, flops={"fp32": 1e14}))
        computed = stage_times(profile, machine, "fp32").backward[1]
        for share in (0.5, 2):
            dispatch = share * computed / block.ops
            times = stage_times(profile, replace(machine, dispatch=dispatch), "fp32")
            assert times.backward[1] == pytest.approx(add(computed, share * computed))
