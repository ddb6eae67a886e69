"""Packed documents are to a model what they are alone: logits, losses and gradients; other models are refused."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from penstock.data.apart import check_keeps_apart
from penstock.data.batches import HeldOut
from penstock.data.mixture import Mixture
from penstock.data.pieces import pieces_of
from penstock.data.stream import Prepared
from penstock.data.token_files import TokenFile
from penstock.errors import ConfigError
from tests.data_documents import batches_of

pytestmark = pytest.mark.usefixtures("one_thread")

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": TINY,
    "qwen3": TINY,
    "mistral": {**TINY, "sliding_window": 6},
    "phi3": {**TINY, "pad_token_id": 0, "eos_token_id": 1},
    "phi": {key: value for key, value in TINY.items() if key not in ("num_key_value_heads", "head_dim")},
    "gemma3_text": {**TINY, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": {**TINY, **EXPERTS},
    "qwen3_moe": {**TINY, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "deepseek_v3": {
        **{key: value for key, value in TINY.items() if key not in ("head_dim", "num_key_value_heads")},
        "num_key_value_heads": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
    },
}


def build(kind: str, settings: dict[str, Any], attention: str = "sdpa") -> Any:
    from transformers import AutoConfig

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **settings, use_cache=False)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def packed(sizes: list[int], length: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Documents of these sizes, and the one micro-batch that they are packed into."""
    ids = np.random.default_rng(7).integers(2, 64, sum(sizes)).astype(np.uint32)
    corpus = TokenFile(ids=ids, ends=np.cumsum(sizes, dtype=np.int64), answers=None)
    mixture = Mixture(sources=[pieces_of(corpus, length, None)], weights=None, seed=None)
    stream = Prepared(mixture=mixture, packing=True, length=length)
    sizes = dict.fromkeys(("sequences_per_step", "micro_batch_size"), len(stream.epoch(0)))
    (step,) = batches_of(stream, True, length, kind=HeldOut, **sizes).once()
    documents = [torch.from_numpy(part.astype(np.int64)) for part in np.split(ids, corpus.ends[:-1])]
    return documents, dict(step.micro_batches[0])


def places(mb: dict[str, torch.Tensor], document: torch.Tensor) -> tuple[int, slice]:
    """Where a document stands in a micro-batch."""
    size = len(document)
    for row, ids in enumerate(mb["input_ids"]):
        for first in range(len(ids) - size + 1):
            if torch.equal(ids[first : first + size], document):
                return row, slice(first, first + size)
    raise AssertionError("it is nowhere")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_packed_document_has_the_logits_that_it_has_alone(kind: str, attention: str) -> None:
    """Equality is to rounding: sums over masked places have other orders. Rows: three documents and padding; one that
    is full."""
    model = build(kind, MODELS[kind], attention)
    check_keeps_apart(model)
    documents, mb = packed([9, 12, 7, 32], 32)
    with torch.no_grad():
        together = model(**mb).logits
        for document in documents:
            row, stretch = places(mb, document)
            alone = model(input_ids=document[None]).logits[0]
            counts = slice(0, len(document) - 1)  # the last predicts nothing, and a full row's stands alone
            torch.testing.assert_close(together[row, stretch][counts], alone[counts], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text"])
def test_loss_and_gradients_are_those_of_the_documents_alone(kind: str) -> None:
    """Nothing crosses from one document to another: the mean over all labels is that of single documents."""
    model = build(kind, MODELS[kind])
    documents, mb = packed([9, 12, 7, 32], 32)
    together = model(**mb).loss
    gradients = torch.autograd.grad(together, list(model.parameters()))
    losses = [model(input_ids=d[None], labels=d[None]).loss * (len(d) - 1) for d in documents]
    alone = sum(losses) / sum(len(d) - 1 for d in documents)
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-6)
    for a, b in zip(gradients, torch.autograd.grad(alone, list(model.parameters())), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_the_gradient_of_one_document_does_not_reach_another() -> None:
    model = build("llama", TINY)
    documents, mb = packed([9, 12, 7], 32)
    embeddings = model.get_input_embeddings()(mb["input_ids"]).detach().requires_grad_()
    row, stretch = places(mb, documents[0])
    logits = model(inputs_embeds=embeddings, position_ids=mb["position_ids"]).logits
    (gradient,) = torch.autograd.grad(logits[row, stretch].sum(), embeddings)
    inside = gradient[row, stretch].abs().sum()
    assert inside > 0
    assert gradient.abs().sum() == inside


def test_what_builds_no_mask_from_positions_is_refused() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            return input_ids

    class Fails(Plain):
        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no such thing")

    with torch.device("meta"):
        bloom = build("bloom", {"vocab_size": 64, "hidden_size": 32, "n_layer": 1, "n_head": 2}, "eager")
        mamba = build("mamba", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}, "eager")
        gpt_oss = build("gpt_oss", {**TINY, **EXPERTS}, "eager")
        qwen3_next = build("qwen3_next", {**TINY, "num_experts": 4}, "eager")
        lfm2 = build("lfm2", {**TINY, "layer_types": ["conv", "full_attention"]}, "eager")
    for model, says in (
        (gpt_oss, "GptOssForCausalLM does not look at position_ids"),  # transformers hands its masks no positions
        (qwen3_next, "Qwen3NextForCausalLM carries a state from each token to the next"),
        (lfm2, "Lfm2ForCausalLM carries a state from each token to the next"),
        (bloom, "BloomForCausalLM takes no position_ids"),
        (mamba, "MambaForCausalLM takes no position_ids"),
        (Plain(), "Plain does not look at position_ids for where documents begin.*data.packing to false"),
        (Fails(), r"as far as can be seen \(RuntimeError: no such thing\)"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_keeps_apart(model)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_without_values_is_asked_too(kind: str) -> None:
    """Also one with a token for padding, for which GPT-2 and its like look among the ids first."""
    with torch.device("meta"):
        model = build(kind, {**MODELS[kind], "pad_token_id": 1}).train()
    check_keeps_apart(model)
    assert model.training
