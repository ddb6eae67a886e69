"""The loss in tiles is the model's own loss: for every head, whatever models do to logits, and never with all of them.

Sums go in another order, so losses may differ by rounding and gradients by the rounding of their largest: 2^-20 of the
loss, and of each gradient's norm, in fp32; nothing that could be seen (2^-40) in fp64.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import peft
import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock
from penstock.errors import ConfigError, ModelError
from penstock.hf import tiled_loss
from penstock.loss.tiled import in_tiles
from penstock.loss.tiles import Entropy, linear_cross_entropy
from penstock.schedule.program import Program
from tests import models
from tests.engine.test_zoo import ADAMW, ZOO, Architecture, built, steps_of
from tests.training import budget, master_of, relative

pytestmark = pytest.mark.usefixtures("one_thread")

LOSS, GRADIENT = 2.0**-20, 2.0**-20


def gemma2(**changes: Any) -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    # A cap so low, and weights so large, that it bends many logits.
    settings = models.decoder(final_logit_softcapping=0.5, sliding_window=4, initializer_range=0.3)
    return Gemma2ForCausalLM(Gemma2Config(**settings | changes))


def cohere(**changes: Any) -> nn.Module:
    from transformers import CohereConfig, CohereForCausalLM

    settings = models.decoder(logit_scale=0.25)
    settings.pop("head_dim")
    return CohereForCausalLM(CohereConfig(**settings | changes))


def granite(**changes: Any) -> nn.Module:
    from transformers import GraniteConfig, GraniteForCausalLM

    settings = models.decoder(logits_scaling=8.0, embedding_multiplier=12.0, residual_multiplier=0.5)
    settings.pop("head_dim")
    return GraniteForCausalLM(GraniteConfig(**settings | changes))


HEADS = {name: a for name, a in ZOO.items() if name not in ("vit", "llama, fused attention")} | {
    "gemma2: soft cap": Architecture(build=gemma2),
    "cohere: scaled": Architecture(build=cohere),
    "granite: scaled": Architecture(build=granite),
}


def both(
    model: nn.Module, tile: int, micro_batch: dict[str, Any]
) -> tuple[list[torch.Tensor], dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """The whole loss and the tiled one; each parameter's gradients by them."""
    losses, gradients = [], []
    for loss_fn in (lambda m, mb: m(**mb).loss, tiled_loss(tile)):
        model.zero_grad()
        loss = loss_fn(model, micro_batch)
        loss.backward()
        losses.append(loss.detach())
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    return losses, {name: (g, gradients[1][name]) for name, g in gradients[0].items()}


@pytest.mark.parametrize("name", HEADS)
def test_equals_the_models_own_loss_and_gradients(name: str) -> None:
    model = built(HEADS[name])
    for tile in (5, 1000):  # many tiles, the last one short; and one
        losses, gradients = both(model, tile, steps_of(HEADS[name])[0][0])
        torch.testing.assert_close(losses[1], losses[0], rtol=LOSS, atol=0)
        largest = max(float(whole.norm()) for whole, _ in gradients.values())
        for parameter, (whole, tiled) in gradients.items():
            assert float((whole - tiled).norm()) <= GRADIENT * max(float(whole.norm()), 0.1 * largest), parameter
    assert "forward" not in vars(model.get_output_embeddings())


def test_a_cap_is_seen() -> None:
    """What the test above compares would differ without it."""
    model = built(HEADS["gemma2: soft cap"])
    micro_batch = steps_of(HEADS["llama"])[0][0]
    capped = tiled_loss(5)(model, micro_batch).item()
    model.config.final_logit_softcapping = None
    assert abs(tiled_loss(5)(model, micro_batch).item() - capped) > 1e-3 * capped


SHAPES: dict[str, tuple[int, int, int, float, str]] = {
    "tiles that do not divide": (13, 31, 4, 0.0, "mean"),
    "one token a tile": (6, 9, 1, 0.0, "sum"),
    "one tile": (8, 16, 100, 0.0, "mean"),
    "smoothing": (13, 31, 4, 0.1, "mean"),
    "more tokens than vocabulary": (40, 3, 8, 0.0, "mean"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_formula_in_fp64(name: str) -> None:
    rows, vocabulary, tile, smoothing, reduction = SHAPES[name]
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((rows, 7), (vocabulary, 7), (vocabulary,))
    )
    labels = torch.randint(0, vocabulary, (rows,), generator=generator)
    labels[1::3] = -100
    cap = (lambda z: z / 2.0, torch.tanh, lambda z: z * 2.0)
    logits = torch.tanh(functional.linear(hidden, weight, bias) / 2.0) * 2.0
    whole = functional.cross_entropy(logits, labels, reduction=reduction, label_smoothing=smoothing)
    wanted = torch.autograd.grad(whole * 3.0, (hidden, weight, bias))
    entropy = Entropy(tile=tile, after=cap, ignore_index=-100, smoothing=smoothing)
    total = linear_cross_entropy(hidden, weight, bias, labels, entropy)
    tiled = total if reduction == "sum" else total / (labels != -100).sum()
    found = torch.autograd.grad(tiled * 3.0, (hidden, weight, bias))
    torch.testing.assert_close(tiled, whole, rtol=2.0**-40, atol=0)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2.0**-40, atol=2.0**-44)


def test_the_number_of_items_is_the_models_own_argument() -> None:
    model, micro_batch = built(HEADS["llama"]), steps_of(HEADS["llama"])[0][0]
    losses, _ = both(model, 5, micro_batch | {"num_items_in_batch": torch.tensor(1000)})
    torch.testing.assert_close(losses[1], losses[0], rtol=LOSS, atol=0)
    assert float(losses[0]) < 0.1


def test_sixteen_bits_are_no_further_from_fp64_than_whole_logits() -> None:
    exact = built(HEADS["llama"]).double()
    micro_batch = steps_of(HEADS["llama"])[0][0]
    wanted = {n: pair[0] for n, pair in both(exact, 5, micro_batch)[1].items()}
    _, gradients = both(copy.deepcopy(exact).bfloat16(), 5, micro_batch)
    for name in ("lm_head.weight", "model.norm.weight", "model.layers.0.mlp.up_proj.weight"):
        whole, tiled = (relative(g, wanted[name]) for g in gradients[name])
        assert tiled <= 1.25 * whole, name


def step_of(model: nn.Module, where: Path, tile: int | None, schedule: Any = "vertical") -> tuple[Any, ...]:
    settings = {} if tile is None else {"loss_fn": tiled_loss(tile)}
    with penstock.wrap(
        model,
        optimizer=penstock.AdamW(**ADAMW),
        budget=budget(where),
        precision="fp32",
        device="cpu",
        schedule=schedule,
        **settings,
    ) as engine:
        micro_batches = steps_of(HEADS["llama"])[0]
        losses = [engine.step(micro_batches).loss for _ in range(2)]
        return losses, engine.evaluate(micro_batches), master_of(engine)


def test_the_engine_trains_by_it_alike_in_any_order(tmp_path: Path) -> None:
    whole, one, other = (
        step_of(built(HEADS["llama"]), tmp_path / str(i), tile, schedule)
        for i, (tile, schedule) in enumerate([(None, "vertical"), (5, "vertical"), (5, "horizontal")])
    )
    assert one[0] == pytest.approx(whole[0], rel=LOSS)
    assert one[1] == pytest.approx(whole[1], rel=LOSS)
    assert relative(one[2], whole[2]) <= 1e-6
    assert one[:2] == other[:2]
    assert torch.equal(one[2], other[2])


def peak_of(tmp_path: Path, tile: int | None, rows: int) -> tuple[int, Program]:
    """Bytes that the last stage takes at most, as the probe has measured them."""
    torch.manual_seed(0)
    model = models.llama(vocab_size=4096)
    settings = {} if tile is None else {"loss_fn": tiled_loss(tile)}
    where = budget(tmp_path / f"{tile} {rows}")
    with penstock.wrap(
        model, optimizer=penstock.SGD(lr=0.1), budget=where, precision="fp32", device="cpu", **settings
    ) as engine:
        tokens = torch.randint(2, 4096, (rows, 64), generator=torch.Generator().manual_seed(0))
        engine.step([{"input_ids": tokens, "labels": tokens}])
        return engine.plan.program.stages[-1].forward_peak, engine.plan.program


def test_logits_are_never_whole(tmp_path: Path) -> None:
    logits = 4096 * 4  # of one token
    head = 4096 * 32 * 4  # the gradient of the head's weights, which there is in any case
    whole, _ = peak_of(tmp_path, None, 8)
    assert whole > 2 * 512 * logits
    for rows in (2, 8):  # more tokens take no more logits
        tiled, _ = peak_of(tmp_path, 16, rows)
        assert tiled <= 4 * 16 * logits + head + rows * 64 * 32 * 4 * 6


class Strange(nn.Module):
    """A language model that does ``change`` with its logits before the loss."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16)
        self.change = change

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: torch.Tensor) -> Any:
        logits = self.change(self.head(input=self.embed(input_ids)))
        loss = functional.cross_entropy(logits.view(-1, logits.size(-1)), input_ids.view(-1))
        return SimpleNamespace(loss=loss)


def banned(logits: torch.Tensor) -> torch.Tensor:
    logits[..., 3] = -torch.inf
    return logits


STRANGE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "a bias by tensor": (lambda z: z + torch.ones(16), "calls add on its logits"),
    "a softmax": (lambda z: z.softmax(-1), "calls softmax"),
    "banned words": (banned, "calls __setitem__"),
    "in place": (lambda z: z.mul_(2.0), "calls mul_"),
    "a part of the vocabulary": (lambda z: z[..., :8], "takes a part of its vocabulary"),
    "other shapes": (lambda z: z.view(-1, 4), "the shape"),
    "their mean": (lambda z: z - z.mean(), "calls mean"),
    "in a list": (lambda z: torch.cat([z, z]), "calls cat"),
    "by name": (lambda z: torch.softmax(input=z, dim=-1), "calls softmax"),
    "other numbers": (lambda z: z.view(torch.int32), "the shape .* of torch.int32"),
    "one label too many": (lambda z: z[:, 1:], r"a cross-entropy of \[3, 16\] with labels of shape \[4\]"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_what_cannot_be_done_in_tiles_is_refused_by_its_name(name: str) -> None:
    change, message = STRANGE[name]
    with pytest.raises(ModelError, match=message) as caught:
        tiled_loss(2)(Strange(change), {"input_ids": torch.tensor([[1, 2, 3, 4]])})
    assert "loss_tile=2" in str(caught.value)
    assert "set loss_tile to null" in str(caught.value)


def test_rows_may_be_chosen_and_logits_scaled_by_numbers() -> None:
    tokens = {"input_ids": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])}
    for change in (
        lambda z: (2.0 * z / 3 - 1).contiguous().to(torch.float64).to("cpu"),
        lambda z: z.reshape(8, 16)[torch.arange(8)].unsqueeze(0),
        lambda z: z[:, :, :],
    ):
        model = Strange(change)
        torch.testing.assert_close(tiled_loss(3)(model, tokens), model(**tokens).loss)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_rows_at_all_have_the_loss_that_torch_gives(reduction: str) -> None:
    head = nn.Linear(8, 16)
    hidden, labels = torch.zeros(0, 8, requires_grad=True), torch.zeros(0, dtype=torch.uint8)
    model = SimpleNamespace(get_output_embeddings=lambda: head)
    with in_tiles(cast(nn.Module, model), 2):
        tiled = functional.cross_entropy(head(hidden), labels, reduction=reduction)
    torch.testing.assert_close(
        tiled, functional.cross_entropy(head(hidden), labels, reduction=reduction), equal_nan=True
    )
    tiled.backward()
    assert head.weight.grad is not None


def test_a_label_of_uint8_that_minus_a_hundred_would_be_counts() -> None:
    head, hidden, labels = nn.Linear(8, 256), torch.randn(4, 8), torch.tensor([155, 156, 157, 156], dtype=torch.uint8)
    model = SimpleNamespace(get_output_embeddings=lambda: head)
    with in_tiles(cast(nn.Module, model), 2):
        tiled = functional.cross_entropy(head(hidden), labels)
    torch.testing.assert_close(tiled, functional.cross_entropy(head(hidden), labels))


def test_models_without_a_plain_head_are_refused() -> None:
    vit = built(ZOO["vit"])
    with pytest.raises(ModelError, match="ViTForImageClassification has no head over a vocabulary"):
        tiled_loss(4)(vit, steps_of(ZOO["vit"])[0][0])
    model = Strange(lambda z: z)
    model.head = nn.utils.parametrizations.weight_norm(model.head)
    with pytest.raises(ModelError, match=r"has a .*ParametrizedLinear as its head, not a plain torch\.nn\.Linear"):
        tiled_loss(4)(model, {"input_ids": torch.tensor([[1, 2]])})
    hooked = Strange(lambda z: z)
    hooked.head.register_full_backward_hook(lambda module, inputs, outputs: None)
    with pytest.raises(ModelError, match="hooks on the gradient of its head's logits"):
        tiled_loss(4)(hooked, {"input_ids": torch.tensor([[1, 2]])})
    adapted = peft.get_peft_model(built(ZOO["llama"]), peft.LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(ModelError, match=r"has a peft\.tuners\.lora\.layer\.Linear as its head"):
        tiled_loss(4)(adapted, steps_of(ZOO["llama"])[0][0])
    with pytest.raises(ConfigError, match="loss_tile=0: must be at least 1 token"):
        tiled_loss(0)


def test_autocast_reaches_the_head() -> None:
    model, micro_batch = built(HEADS["llama"]), steps_of(HEADS["llama"])[0][0]
    with torch.autocast("cpu", torch.bfloat16):
        whole = model(**micro_batch).loss
        tiled = tiled_loss(5)(model, micro_batch)
    torch.testing.assert_close(tiled, whole, rtol=LOSS, atol=0)


def test_under_autocast_the_loss_is_in_fp32() -> None:
    """As torch's own is, also where a model leaves its logits in bf16."""
    model, tokens = Strange(lambda z: z), {"input_ids": torch.tensor([[1, 2, 3, 4]])}
    with torch.autocast("cpu", torch.bfloat16):
        whole, tiled = model(**tokens).loss, tiled_loss(3)(model, tokens)
    torch.testing.assert_close(tiled, whole)
