"""A device budget that holds a sequence, and not a longer one, trains one of eight times as many tokens in pieces."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import BudgetError
from penstock.hf import split_attention, tiled_loss, tiled_mlps
from penstock.planner.longest import longest
from penstock.planner.proposals import Proposals
from penstock.planner.task import Task
from penstock.shape.huggingface import HuggingFaceModel, model_shape
from tests import models
from tests.conftest import Campaign
from tests.planner.test_search import MIB, task
from tests.training import assert_same_state, state_of

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 2048,
    "max_position_embeddings": 1 << 20,
    "tie_word_embeddings": False,
}
HOST = 1 << 30
ADAMW = penstock.AdamW(lr=1e-3)


def in_pieces(model: nn.Module, length: int) -> nn.Module:
    return split_attention(tiled_mlps(model, length // 16), 1)


def asked(device: int, length: int, tile: int | None) -> Task:
    """``tile``: tokens of the longer sequence; None: everything is whole."""
    whole = model_shape(CONFIG, kind="cpu")
    assert isinstance(whole, HuggingFaceModel)
    if tile is not None:
        whole = replace(whole, loss_tile=tile // 16, change=lambda model: in_pieces(model, tile))
    return replace(task(device=device, host=HOST), shape=whole, sequence_length=length, profiles={})


def least(length: int) -> int:
    """The least device memory that holds whole sequences of so many tokens, by the plan: to the KiB."""
    low, high = 0, 1 << 20
    whole = asked(high << 10, length, None)  # one run of the model without values will do
    while high - low > 1:
        middle = (low + high) // 2
        held = Proposals(replace(whole, budget=replace(whole.budget, device=middle << 10)).question(1, 1)).fits()
        low, high = (low, middle) if held else (middle, high)
    return high << 10


def trained(device: int, length: int, *, pieces: int | None, schedule: str = "vertical") -> dict[str, Any]:
    """A step on one sequence, as an engine takes it, and what it took of the device."""
    torch.manual_seed(0)
    settings = {key: value for key, value in CONFIG.items() if key != "model_type"}
    model = models.llama(**settings, attn_implementation="sdpa")
    loss_fn = None
    if pieces is not None:
        in_pieces(model, pieces)
        loss_fn = tiled_loss(pieces // 16)
    tokens = torch.randint(0, 2048, (1, length), generator=torch.Generator().manual_seed(0))
    with penstock.wrap(
        model,
        optimizer=ADAMW,
        budget=penstock.Budget(device=device, host=HOST),
        precision="fp32",
        device="cpu",
        schedule=schedule,
        loss_fn=loss_fn,
        clip_grad_norm=1.0,
    ) as engine:
        stats = engine.step([{"input_ids": tokens, "labels": tokens}])
        planned, state = engine.plan.device_bytes, state_of(engine)
    peak = stats.peak_bytes["device"]
    assert peak <= planned <= device
    return {"loss": stats.loss, "norm": stats.grad_norm, "state": state, "peak": peak}


def test_eight_times_the_tokens_train_in_the_memory_of_whole_ones(campaign: Campaign) -> None:
    """With `--campaign` 32,768 tokens in what holds 4,096. Beside them: whole blocks, and the other order."""
    short, long = campaign.cases(128, 4096), campaign.cases(1024, 32768)
    device = least(short)
    alone = longest(asked(device, short, None))
    assert alone is not None
    assert short <= alone.tokens < short + max(4, short // 200)  # a KiB is that of some tokens
    if campaign.full:  # a run in pieces without values takes longer than one with them
        assert Proposals(asked(device, long, long).question(1, 1)).fits()

    with pytest.raises(BudgetError):
        trained(device, long, pieces=None)
    first = trained(device, long, pieces=long)
    other = trained(device, long, pieces=long, schedule="horizontal")
    assert (first["loss"], first["norm"]) == (other["loss"], other["norm"])
    assert_same_state(first["state"], other["state"])

    whole = trained(16 * device, long, pieces=None)
    assert first["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert first["norm"] == pytest.approx(whole["norm"], rel=1e-5)
    campaign.found(
        f"{long:,} tokens in {device / MIB:.1f} MiB that hold {alone.tokens:,} whole ones: {first['peak'] / MIB:.1f} "
        f"MiB at most, whole blocks {whole['peak'] / MIB:.1f} MiB; loss {first['loss']:.7f}, whole {whole['loss']:.7f}"
    )
