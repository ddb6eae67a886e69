"""Feed-forward parts in tiles are the model's own, but for rounding, with the memory of a tile; and nothing else is."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.cli.changed import changed, left_whole, without_effect
from penstock.errors import ConfigError, ModelError
from penstock.hf import tiled_mlps
from penstock.schedule.place import Format
from penstock.shape.meta import from_config
from tests import models
from tests.engine.test_zoo import ADAMW, ZOO, built, steps_of
from tests.models import MODELS
from tests.runs import settings_for
from tests.training import assert_same, budget, relative, train
from tests.training import steps_of as case_steps

pytestmark = pytest.mark.usefixtures("one_thread")

TILED = ("llama", "gpt2", "t5", "gemma3", "qwen3")
"""Models whose blocks have a feed-forward part of their own; GPT-2's and T5's with dropout."""
CLOSE = 2.0**-18
"""The share of a gradient's norm by which it may differ, in fp32: sums go in another order."""


def tiles_of(model: nn.Module) -> int:
    return sum("forward" in vars(module) for module in model.modules())


def check_same_gradients(name: str, whole: nn.Module, in_pieces: nn.Module) -> None:
    """Loss and gradients of a model are its own, but for rounding."""
    micro_batch = steps_of(ZOO[name])[0][0]
    losses = []
    for model in (whole, in_pieces):
        loss = model(**micro_batch).loss
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[1], losses[0], rtol=CLOSE, atol=0)
    wanted = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    found = {n: p.grad for n, p in in_pieces.named_parameters() if p.grad is not None}
    assert wanted.keys() == found.keys()
    largest = max(float(g.norm()) for g in wanted.values())
    for parameter, gradient in wanted.items():
        assert float((found[parameter] - gradient).norm()) <= CLOSE * max(float(gradient.norm()), 0.1 * largest)


@pytest.mark.parametrize("name", TILED)
def test_loss_and_gradients_equal_the_models_own(name: str) -> None:
    whole = built(ZOO[name]).eval()
    tiled = tiled_mlps(copy.deepcopy(whole), 5)
    assert tiles_of(tiled) >= 2
    check_same_gradients(name, whole, tiled)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_engine_trains_alike_in_any_order(name: str, tmp_path: Path) -> None:
    """A model with GPT-2's dropout, whose masks the recomputation draws again; beside whole parts without it."""
    case, steps = MODELS[name], case_steps(MODELS[name], 2, lengths=(12, 12))
    first, *rest = (
        train(case, budget(tmp_path / str(i)), steps, model=tiled_mlps(case.model(), 5), schedule=schedule)
        for i, schedule in enumerate(("vertical", "horizontal"))
    )
    for other in rest:
        assert_same(first, other)
    if name == "llama":
        whole = train(case, budget(tmp_path / "whole"), steps)
        assert first.losses == pytest.approx(whole.losses, rel=1e-6)
        assert first.norms == pytest.approx(whole.norms, rel=1e-5)


def peak_of(model: nn.Module, length: int) -> int:
    """Bytes that a block's backward takes at most, as the probe has measured them."""
    memory = penstock.Budget(device="256MiB", host="256MiB")
    with penstock.wrap(model, optimizer=penstock.SGD(lr=0.1), budget=memory, precision="fp32", device="cpu") as engine:
        tokens = torch.randint(2, 50, (1, length), generator=torch.Generator().manual_seed(0))
        engine.step([{"input_ids": tokens, "labels": tokens}])
        return max(stage.backward_peak for stage in engine.plan.program.stages if stage.kind == "call")


def test_a_blocks_backward_takes_the_memory_of_a_tile() -> None:
    def peak(tile: int | None) -> int:
        model = models.llama(intermediate_size=1024, num_hidden_layers=2)
        return peak_of(model if tile is None else tiled_mlps(model, tile), length)

    wide, length = 1024 * 4, 60
    whole, tiled = peak(None), peak(6)
    gradients = 3 * 32 * wide  # of a tile's weights, beside their sum
    assert whole >= 4 * length * wide, "all that a gated part keeps"
    assert whole - tiled >= 4 * (length - 2 * 6) * wide - gradients
    assert peak(length) == whole, "as long as the micro-batch: the whole part"


def backward_of(norms: bool) -> float:
    """What a block's backward in bf16 takes on 256 tokens, in hidden states, run without weights."""

    def change(model: nn.Module) -> nn.Module:
        tiled_mlps(model, 64)
        for module in model.modules() if not norms else ():
            if "RMSNorm" in type(module).__name__:
                del vars(module)["forward"]
        return model

    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "vocab_size": 256}
    program = from_config(config, name="a", change=change).profile(1, 256, Format.of("bf16", 2, "fp32", None)).program
    return max(stage.backward_peak for stage in program.stages if stage.kind == "call") / (256 * 64 * 2)


def test_norms_in_fp32_go_in_tiles_too_but_for_those_of_queries_and_keys() -> None:
    assert backward_of(norms=False) - backward_of(norms=True) >= 6
    model = tiled_mlps(built(ZOO["qwen3"]), 5)
    tiled = [name for name, module in model.named_modules() if "forward" in vars(module)]
    layers = [
        f"model.layers.{i}.{part}" for i in range(3) for part in ("mlp", "input_layernorm", "post_attention_layernorm")
    ]
    assert sorted(tiled) == sorted([*layers, "model.norm"])


class Mixing(nn.Module):
    """A language model whose ``mlp`` is ``part``."""

    def __init__(self, part: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(_Block(part()) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states = self.embed(tokens)
        for layer in self.layers:
            states = layer(states)
        return states


class _Block(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.mlp = part

    def forward(self, states: torch.Tensor) -> Any:
        found = self.mlp(self.before(states))
        return found[0] if isinstance(found, tuple) else found


class Summing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, states: torch.Tensor) -> Any:
        return self.linear(states).cumsum(-2)


class Noting(Summing):
    def forward(self, states: torch.Tensor) -> Any:
        return self.linear(states), states.sum()


class Scaled(Summing):
    def forward(self, scale: float, states: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        found = self.linear(states) * scale
        return found if bias is None else found + bias


@pytest.mark.parametrize(
    ("part", "message"),
    [(Summing, r"'layers\.0\.mlp' does not treat each token alone"), (Noting, "does not give back one tensor")],
)
def test_a_part_that_tiles_would_change_is_refused_when_it_first_runs(part: type[nn.Module], message: str) -> None:
    model = tiled_mlps(Mixing(part), 4)
    model(torch.zeros(1, 4, dtype=torch.int64))  # one tile is the whole part
    with pytest.raises(ModelError, match=message) as caught:
        model(torch.arange(12)[None])
    assert "mlp_tile=4" in str(caught.value)
    assert "set mlp_tile to null" in str(caught.value)


@pytest.mark.parametrize(("tile", "rows"), [(1, 1), (4, 6)])
def test_a_tile_of_one_token_is_no_way_past_that_however_often_it_runs(tile: int, rows: int) -> None:
    part = tiled_mlps(Mixing(Summing), tile).get_submodule("layers.0.mlp")
    states = torch.randn(rows, 12, 8, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        with pytest.raises(ModelError, match="does not treat each token alone"):
            part(states)


def test_the_hidden_states_may_stand_anywhere_and_no_other_tensor() -> None:
    part: Any = tiled_mlps(Mixing(Scaled), 4).get_submodule("layers.0.mlp")
    states = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(0))
    wanted = 3.0 * part.linear(states)
    for found in (part(3.0, states), part(3.0, states=states, bias=None), part(scale=3.0, states=states)):
        torch.testing.assert_close(found, wanted)
    for bias in (torch.ones(8), [torch.ones(8)]):
        with pytest.raises(ModelError, match="takes more tensors than the hidden states"):
            part(3.0, states, bias=bias)


def test_gradients_are_those_of_the_masks_that_the_forward_drew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recomputation of a tile draws its dropout again: so does a run that keeps all, and recomputes nothing."""
    found = []
    for whole in (False, True):
        if whole:
            monkeypatch.setattr("penstock.hf.tiles.checkpoint", lambda run, states, use_reentrant: run(states))
        model = tiled_mlps(MODELS["gpt2"].model(), 5)
        assert any(isinstance(part, nn.Dropout) and part.p > 0 for part in model.modules())
        (micro_batch,) = MODELS["gpt2"].micro_batches(1)
        torch.manual_seed(3)
        model(**micro_batch).loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert relative(found[0], found[1]) <= CLOSE


def test_what_has_no_part_to_tile_is_refused() -> None:
    bare = Mixing(Summing)
    for layer in bare.layers:
        layer.mlp = nn.Linear(8, 8)
    refused = (("MixtralForCausalLM", built(ZOO["mixtral"])), ("BertForMaskedLM", built(ZOO["bert"])), ("Mixing", bare))
    for name, model in refused:
        with pytest.raises(ModelError, match=f"no block of {name} has a feed-forward part of its own"):
            tiled_mlps(model, 4)
    with pytest.raises(ConfigError, match="mlp_tile=0: must be at least 1 token"):
        tiled_mlps(built(ZOO["llama"]), 0)


def test_the_blocks_that_stay_whole_are_said(tmp_path: Path) -> None:
    config = settings_for(tmp_path, mlp_tile=4)
    mixed = tiled_mlps(models.qwen3_moe(num_hidden_layers=3, mlp_only_layers=[0]), 4)
    said = left_whole(mixed, config)
    assert said is not None
    assert said.startswith("mlp_tile=4: blocks without a feed-forward part that can be tiled, as those with experts")
    assert "layers.0" not in said
    assert all(f"model.layers.{i}" in said for i in (1, 2))
    assert left_whole(tiled_mlps(built(ZOO["llama"]), 4), config) is None


def test_settings_that_leave_a_model_as_it_is_are_said(tmp_path: Path) -> None:
    """A micro-batch of two sequences of 64 tokens, and a model of 4 heads."""
    for tile, heads, said in ((127, 2, []), (128, 4, ["128 tokens", "4 query heads"]), (1000, 9, ["128", "4 query"])):
        config = settings_for(tmp_path, mlp_tile=tile, attention_heads=heads)
        model = changed(models.llama(num_attention_heads=4, num_key_value_heads=2), config)
        found = without_effect(model, config, 2)
        assert len(found) == len(said)
        assert all(f"has no effect: {'a micro-batch' * (i == 0)}" in words for i, words in enumerate(found))
        assert all(part in words for part, words in zip(said, found, strict=True))


def test_hooks_and_other_forwards_are_refused_and_nothing_is_changed() -> None:
    hooked, within, replaced = Mixing(Summing), Mixing(Summing), Mixing(Summing)
    for model, name in ((hooked, "layers.1.mlp"), (within, "layers.1.mlp.linear")):
        model.get_submodule(name).register_full_backward_hook(lambda module, inputs, outputs: None)
    vars(replaced.get_submodule("layers.1.mlp"))["forward"] = lambda states: states
    for model, left in ((hooked, 0), (within, 0), (replaced, 1)):
        with pytest.raises(ModelError, match=r"'layers\.1\.mlp' has hooks on gradients, or a forward that is not its"):
            tiled_mlps(model, 4)
        assert tiles_of(model) == left


def test_another_tile_takes_the_place_of_the_one_before() -> None:
    model = tiled_mlps(tiled_mlps(built(ZOO["llama"]).eval(), 3), 1000)
    plain, micro_batch = built(ZOO["llama"]).eval(), steps_of(ZOO["llama"])[0][0]
    assert torch.equal(model(**micro_batch).loss, plain(**micro_batch).loss)


def test_compiled_blocks_are_refused(tmp_path: Path) -> None:
    case = MODELS["llama"]
    with pytest.raises(ModelError, match=r"the forward of 'model\.layers\.0\.mlp' has been replaced"):
        train(case, budget(None), case_steps(case, 1), model=tiled_mlps(case.model(), 5), compile="aot_eager")


def test_adapters_train_in_tiles() -> None:
    from penstock.config import LoraConfig
    from penstock.hf.lora import with_adapters

    found = []
    for tile in (None, 5):
        torch.manual_seed(0)
        model = with_adapters(built(ZOO["llama"]), LoraConfig(rank=2, target_modules="all-linear"))
        if tile is not None:
            tiled_mlps(model, tile)
        with penstock.wrap(
            model,
            optimizer=penstock.AdamW(**ADAMW),
            budget=budget(None),
            precision="fp32",
            device="cpu",
        ) as engine:
            stats = [engine.step(step[:1]) for step in steps_of(ZOO["llama"])[:2]]
            found.append(torch.tensor([[s.loss, s.grad_norm] for s in stats]))
    assert relative(found[1], found[0]) <= 1e-5
