"""Attention some heads at a time is the model's own, but for rounding, with the memory of a piece."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

from penstock.errors import ConfigError, ModelError
from penstock.hf import split_attention, tiled_mlps
from tests import models
from tests.engine.test_zoo import ZOO, built, steps_of
from tests.hf.test_tiles import CLOSE, check_same_gradients, peak_of
from tests.models import MODELS
from tests.sweep.configs import tiny
from tests.training import assert_same, budget, relative, train
from tests.training import steps_of as case_steps

pytestmark = pytest.mark.usefixtures("one_thread")

SPLIT = ("llama", "llama, fused attention", "qwen3", "mistral", "gemma3", "phi", "mixtral")
"""Models of 4 query heads; two share a key/value head of all but Phi, whose projections have biases."""


def pieces_of(model: nn.Module) -> int:
    return sum("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("heads", [1, 2])
def test_loss_and_gradients_equal_the_models_own(name: str, heads: int) -> None:
    """With 1 head the two that share keys and values are in two pieces; rows are padded."""
    whole = built(ZOO[name]).eval()
    split = split_attention(copy.deepcopy(whole), heads)
    assert pieces_of(split) == 3
    check_same_gradients(name, whole, split)


def test_pieces_that_are_no_whole_number_and_all_heads_at_once() -> None:
    """Of 6 heads, 4 and then 2; and what has as many heads as are asked for is the model's own to the bit."""
    changes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    torch.manual_seed(0)
    whole = models.llama(**changes).eval()
    micro_batch = steps_of(ZOO["llama"])[0][0]
    loss = whole(**micro_batch).loss
    torch.testing.assert_close(split_attention(copy.deepcopy(whole), 4)(**micro_batch).loss, loss, rtol=CLOSE, atol=0)
    assert torch.equal(split_attention(split_attention(whole, 4), 6)(**micro_batch).loss, loss)


def test_the_engine_trains_alike_in_any_order(tmp_path: Path) -> None:
    """With attention's dropout, which the recomputation of a piece within that of a block draws again."""
    case, steps = MODELS["llama"], case_steps(MODELS["llama"], 2, lengths=(12, 12))
    changes: dict[str, Any] = {"attention_dropout": 0.2, "num_hidden_layers": 2}
    runs = []
    for schedule in ("vertical", "horizontal"):
        torch.manual_seed(0)
        model = split_attention(tiled_mlps(models.llama(**changes), 5), 2)
        runs.append(train(case, budget(tmp_path / schedule), steps, model=model, schedule=schedule))
    assert_same(runs[0], runs[1])


def gradients_of(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(3)
    model(**steps_of(ZOO["llama"])[0][0]).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_gradients_are_those_of_the_masks_that_the_forward_drew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recomputation of a piece draws its dropout again: so does a run that keeps all, and recomputes nothing."""
    torch.manual_seed(0)
    model = split_attention(models.llama(attention_dropout=0.3).train(), 2)
    kept = copy.deepcopy(model)
    again = gradients_of(model)
    monkeypatch.setattr("penstock.hf.heads.checkpoint", lambda run, *given, use_reentrant: run(*given))
    assert relative(again, gradients_of(split_attention(kept, 2))) <= CLOSE


def peak(heads: int | None, length: int) -> int:
    """``peak_of`` a model of eight heads, beside tiles."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 2}
    model = models.llama(intermediate_size=32, max_position_embeddings=256, **sizes)
    model.set_attn_implementation("sdpa")
    tiled_mlps(model, 24)
    return peak_of(model if heads is None else split_attention(model, heads), length)


def test_a_blocks_backward_takes_the_memory_of_a_piece() -> None:
    """Eight heads of 8 are twice as wide as the hidden states: of whole attention five such tensors live at once."""
    length, wide = 120, 8 * 8 * 4
    whole, split = peak(None, length), peak(1, length)
    assert whole - split >= 4.5 * length * wide
    assert split <= whole / 2
    assert peak(8, length) == whole, "all heads: the whole part"


def test_adapters_train_in_pieces() -> None:
    from penstock.config import LoraConfig
    from penstock.hf.lora import with_adapters

    found = []
    for heads in (None, 1, 2):
        torch.manual_seed(0)
        model = with_adapters(built(ZOO["llama"]), LoraConfig(rank=2, target_modules="all-linear"))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.05)
        if heads is not None:
            split_attention(model, heads)
        found.append(gradients_of(model))
    for other in found[1:]:
        assert relative(other, found[0]) <= CLOSE


def test_what_has_no_attention_to_split_is_refused_by_name() -> None:
    for name in ("gpt2", "phi3", "deepseek v3", "bert", "t5"):
        model = built(ZOO[name])
        with pytest.raises(ModelError, match=f"no block of {type(model).__name__} has attention with projections"):
            split_attention(model, 2)
        assert not pieces_of(model)
    for name, why in (
        ("whisper", "does not say how large its heads are"),
        ("gpt-oss", "has sinks, which is of several"),
    ):
        model = built(ZOO[name])
        with pytest.raises(ModelError, match=why) as caught:
            split_attention(model, 2)
        assert "set attention_heads to null" in str(caught.value)
        assert not pieces_of(model)


def test_numbers_of_heads_that_cut_unevenly_are_refused() -> None:
    with pytest.raises(ConfigError, match="attention_heads=0: must be at least 1 head"):
        split_attention(built(ZOO["llama"]), 0)
    with pytest.raises(ConfigError, match=r"in 'model\.layers\.0\.self_attn' 2 query heads share a key/value head"):
        split_attention(built(ZOO["llama"]), 3)


def attention_of(model: nn.Module) -> Any:
    return model.get_submodule("model.layers.1.self_attn")


def test_heads_that_depend_on_each_other_are_refused_when_they_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    own = modeling_llama.eager_attention_forward

    def mixed(module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(module, query - query.mean(1, keepdim=True), *args, **kwargs)

    def counted(module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(module, query * torch.arange(1, query.shape[1] + 1).view(1, -1, 1, 1), *args, **kwargs)

    for other in (mixed, counted):
        monkeypatch.setattr(modeling_llama, "eager_attention_forward", other)
        model = split_attention(built(ZOO["llama"]), 2)
        for _ in range(2):
            with pytest.raises(ModelError, match=r"'model\.layers\.0\.self_attn' has heads that depend on each other"):
                model(**steps_of(ZOO["llama"])[0][0])


def test_keys_that_other_layers_read_are_refused() -> None:
    """Of Gemma 3n's last layers: with as many heads of keys as of queries a piece's would have been taken for all."""
    sizes = {"num_key_value_heads": 4, "num_kv_shared_layers": 1, "intermediate_size": [64] * 3, "pad_token_id": 7}
    model = split_attention(Gemma3nForCausalLM(tiny(Gemma3nTextConfig, sizes)), 1)
    with pytest.raises(ModelError, match=r"'model\.layers\.\d\.self_attn' leaves tensors for other layers"):
        model(input_ids=torch.arange(8, 16).view(1, 8), use_cache=False)


def test_scores_that_are_large_are_not_taken_for_heads_that_depend_on_each_other() -> None:
    """Scores have a standard deviation of 100, and a softmax is as sensitive to their rounding."""
    torch.manual_seed(0)
    model = models.llama(
        hidden_size=1024, num_attention_heads=16, num_key_value_heads=16, num_hidden_layers=2, intermediate_size=32
    )
    with torch.no_grad():
        for name in ("q_proj", "k_proj"):
            model.get_submodule(f"model.layers.0.self_attn.{name}").weight.normal_(std=10 / 32)
    tokens = torch.randint(2, 50, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        split_attention(model, 1)(input_ids=tokens)


def test_parts_that_would_be_cut_wrongly_are_refused() -> None:
    hooked, within, replaced = (built(ZOO["llama"]) for _ in range(3))
    attention_of(hooked).register_full_backward_hook(lambda module, inputs, outputs: None)
    attention_of(within).q_proj.register_full_backward_hook(lambda module, inputs, outputs: None)
    vars(attention_of(replaced))["forward"] = lambda states: states
    for model, left in ((hooked, 0), (within, 0), (replaced, 1)):
        with pytest.raises(ModelError, match=r"'model\.layers\.1\.self_attn' has hooks on gradients, or a forward"):
            split_attention(model, 2)
        assert pieces_of(model) == left
    normed = built(ZOO["llama"])
    attention_of(normed).q_norm = nn.LayerNorm(32)
    with pytest.raises(ModelError, match=r"has q_norm\.weight, which is of several heads"):
        split_attention(normed, 2)


class Adding(nn.Linear):
    """A linear layer that may do anything."""


def test_a_projection_of_another_class_and_work_behind_the_last_are_refused() -> None:
    other, after = built(ZOO["llama"]), split_attention(built(ZOO["llama"]), 2)
    attention_of(other).k_proj = Adding(32, 16, bias=False)
    with pytest.raises(ModelError, match="has no linear q_proj with as many outputs for each head"):
        split_attention(other, 2)
    split = vars(attention_of(after))["forward"]
    own = split.whole
    split.whole = lambda *args, **kwargs: (own(*args, **kwargs)[0].relu(), None)
    with pytest.raises(ModelError, match="does more than to give back first what o_proj makes"):
        after(**steps_of(ZOO["llama"])[0][0])


def test_a_cache_is_refused_in_training_and_filled_by_the_whole_otherwise() -> None:
    whole = built(ZOO["llama"]).eval()
    split = split_attention(copy.deepcopy(whole), 2)
    tokens = steps_of(ZOO["llama"])[0][0]["input_ids"]
    with torch.no_grad():
        assert torch.equal(split(tokens, use_cache=True).logits, whole(tokens, use_cache=True).logits)
    with pytest.raises(ModelError, match="is given a cache of keys and values"):
        split(tokens, use_cache=True)


def test_pieces_are_counted_where_a_model_is_run_without_weights() -> None:
    from penstock.schedule.place import Format
    from penstock.shape.meta import from_config

    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256}
    form = Format.of("fp32", 2, "fp32", None)
    peaks = []
    for heads in (4, 1):
        shape = from_config(
            config, name="a", kind="cpu", change=lambda m, h=heads: split_attention(tiled_mlps(m, 128), h)
        )
        program = shape.profile(1, 256, form).program
        peaks.append(max(stage.backward_peak for stage in program.stages if stage.kind == "call"))
    assert peaks[0] - peaks[1] >= 3 * 256 * 64 * 4
