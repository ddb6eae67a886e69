"""Architectures trained by the engine, unmodified, against a plain transformers loop that knows nothing of it.

State on disk, three steps of three micro-batches of unequal rows and lengths, padded where the model knows padding,
AdamW, clipping. The two runs do the same operations but for a few: the norm of the gradients is summed in another
order, and AdamW's formula is grouped otherwise. So they may differ by rounding, once for each step:

    losses, norms    relative 2^-22 and 2^-21: torch sums squares in fp32
    parameters       relative 2^-24 per step, in the L2 norm over all of them

Dropout is off here, as both runs draw their own random numbers; ``test_tape`` compares with it.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from tests import models
from tests.accelerator import DEVICE
from tests.models import VOCABULARY, MicroBatch
from tests.training import budget, master_of, relative

pytestmark = pytest.mark.usefixtures("one_thread")

ROUNDING = 2.0**-24
CLIP = 0.5
STEPS = 3
SHAPES = ((2, 12), (3, 8), (1, 10))
"""rows and tokens of a step's micro-batches"""
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-5}
"""``eps`` is above the rounding error of a gradient: with less, AdamW would make a full step of what is rounding alone,
such as the gradient of the bias of attention's keys."""


def _lengths(rows: int, length: int) -> torch.Tensor:
    """Every row but the first is shorter than the one before."""
    return length - 2 * torch.arange(rows).unsqueeze(1)


def decoder_only(generator: torch.Generator, rows: int, length: int) -> MicroBatch:
    """Padded on the right, as chat data is."""
    tokens = torch.randint(2, VOCABULARY, (rows, length), generator=generator)
    real = torch.arange(length) < _lengths(rows, length)
    return {
        "input_ids": tokens.masked_fill(~real, 0),
        "attention_mask": real.long(),
        "labels": tokens.masked_fill(~real, -100),
    }


def encoder_decoder(generator: torch.Generator, rows: int, length: int) -> MicroBatch:
    source = decoder_only(generator, rows, length)
    return source | {"labels": decoder_only(generator, rows, length // 2 + 2)["labels"]}


def speech(generator: torch.Generator, rows: int, length: int) -> MicroBatch:
    sound = torch.randn(rows, 8, 24, generator=generator)
    return {"input_features": sound, "labels": decoder_only(generator, rows, length)["labels"]}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """``shifted``: each position is compared with the next label, so that the first one does not count."""

    build: Callable[..., nn.Module]
    micro_batch: Callable[[torch.Generator, int, int], MicroBatch] = decoder_only
    settings: Mapping[str, Any] = field(default_factory=dict)
    shifted: bool = True

    def items(self, micro_batch: MicroBatch) -> int:
        """What the mean loss of a micro-batch is the mean over."""
        labels = micro_batch["labels"]
        return int((labels[:, 1:] if self.shifted else labels).ne(-100).sum())


NO_DROPOUT = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "t5": {"dropout_rate": 0.0},
}
sdpa = {"attn_implementation": "sdpa"}
grouped = {"experts_implementation": "grouped_mm"}

ZOO = {
    "llama": Architecture(build=models.llama),
    "llama, fused attention": Architecture(build=models.llama, settings=sdpa),
    "qwen3": Architecture(build=models.qwen3),
    "qwen3 moe": Architecture(build=models.qwen3_moe),
    "mistral": Architecture(build=models.mistral),
    "gemma3": Architecture(build=models.gemma3),
    "gpt2": Architecture(build=models.gpt2, settings=NO_DROPOUT["gpt2"]),
    "gpt-oss": Architecture(build=models.gpt_oss),
    "mixtral": Architecture(build=models.mixtral),
    "mixtral, grouped product": Architecture(build=models.mixtral, settings=grouped),
    "deepseek v3": Architecture(build=models.deepseek_v3),
    "phi": Architecture(build=models.phi),
    "phi3": Architecture(build=models.phi3),
    "bert": Architecture(build=models.bert, micro_batch=models.masked_lm, settings=NO_DROPOUT["bert"], shifted=False),
    "t5": Architecture(build=models.t5, micro_batch=encoder_decoder, settings=NO_DROPOUT["t5"], shifted=False),
    "whisper": Architecture(build=models.whisper, micro_batch=speech, shifted=False),
    "vit": Architecture(build=models.vit, micro_batch=models.images, shifted=False),
}
ROUTED = ("qwen3 moe", "gpt-oss", "mixtral", "mixtral, grouped product")
"""with an auxiliary loss for the balance of the experts, which counts with the micro-batch that it is of"""


def steps_of(architecture: Architecture) -> list[list[MicroBatch]]:
    generator = torch.Generator().manual_seed(0)
    return [[architecture.micro_batch(generator, *shape) for shape in SHAPES] for _ in range(STEPS)]


def built(architecture: Architecture) -> nn.Module:
    torch.manual_seed(0)
    return architecture.build(**architecture.settings).train()


def plain_step(
    architecture: Architecture, model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: list[MicroBatch]
) -> tuple[float, float]:
    """Gradient accumulation over a step's micro-batches, exact in tokens. Loss and norm."""
    counts = [architecture.items(mb) for mb in micro_batches]
    total = 0.0
    for count, micro_batch in zip(counts, micro_batches, strict=True):
        loss = model(**micro_batch).loss
        (loss * (count / sum(counts))).backward()
        total += loss.item() * count / sum(counts)
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return total, float(norm)


def equals_plain(name: str, device: str, folder: Path, *, speculate: bool) -> None:
    """Every step is over the limit: it is run twice where it has not waited for its norm."""
    architecture = ZOO[name]
    model = built(architecture)
    plain = copy.deepcopy(model).to(device)
    optimizer = torch.optim.AdamW(plain.parameters(), foreach=False, **ADAMW)
    engine = penstock.wrap(
        model,
        optimizer=penstock.AdamW(**ADAMW),
        budget=budget(folder),
        precision="fp32",
        device=device,
        clip_grad_norm=CLIP,
        speculate=speculate,
    )
    with engine:
        for micro_batches in steps_of(architecture):
            stats = engine.step(micro_batches)
            there = [{key: value.to(device) for key, value in mb.items()} for mb in micro_batches]
            loss, norm = plain_step(architecture, plain, optimizer, there)
            assert stats.loss == pytest.approx(loss, rel=4 * ROUNDING)
            assert stats.grad_norm == pytest.approx(norm, rel=8 * ROUNDING)
            assert stats.clipped
            assert stats.repeats == speculate
        wanted = torch.cat([p.detach().flatten().cpu() for _, p in sorted(plain.named_parameters())])
        assert relative(master_of(engine), wanted) <= STEPS * ROUNDING
        assert stats.bytes_moved["read"] > 12 * wanted.numel()  # the state comes from disk


@pytest.mark.sampled(2, values=False)
@pytest.mark.parametrize(
    ("name", "speculate"), [*((name, False) for name in ZOO), *((name, True) for name in ("gpt2", "mixtral", "t5"))]
)
def test_training_equals_plain_transformers(name: str, speculate: bool, tmp_path: Path) -> None:
    equals_plain(name, "cpu", tmp_path, speculate=speculate)


@pytest.mark.accelerator
@pytest.mark.skipif(DEVICE != "sim", reason="sums in the order of the CPU's kernels")
@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("name", ["qwen3 moe", "t5"])
def test_training_on_an_accelerator_equals_plain_transformers_there(name: str, tmp_path: Path) -> None:
    equals_plain(name, DEVICE, tmp_path, speculate=True)


@pytest.mark.parametrize("name", ROUTED)
def test_the_balance_of_experts_is_part_of_the_loss(name: str) -> None:
    model = built(ZOO[name])
    micro_batch = steps_of(ZOO[name])[0][0]
    output = model(**micro_batch)
    assert output.aux_loss.item() > 0
    without = model(**micro_batch, output_router_logits=False).loss
    torch.testing.assert_close(output.loss, without + 0.1 * output.aux_loss)


class Plain(nn.Module):
    """No Hugging Face model: its own loss, summed over a mapping, and a buffer that the forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(6, 16)
        # No bias in front of batch norm, which takes it out again: its gradient would be what rounding leaves.
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16), nn.GELU()) for _ in range(3)
        )
        self.outside = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inside(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.outside(x).squeeze(-1)


def squares(model: nn.Module, micro_batch: Mapping[str, Any]) -> torch.Tensor:
    return (model(micro_batch["x"]) - micro_batch["labels"]).square().mean()


def test_a_mask_that_begins_to_hide_is_planned_for(tmp_path: Path) -> None:
    """Without padding T5 makes no mask at all, and with padding one for all heads and positions."""
    padded = steps_of(ZOO["t5"])[0][0]
    whole = padded | {"attention_mask": torch.ones_like(padded["attention_mask"])}
    settings = {"optimizer": penstock.AdamW(**ADAMW), "budget": budget(tmp_path), "precision": "fp32"}
    with penstock.wrap(built(ZOO["t5"]), device="cpu", **settings) as engine:
        engine.step([whole])
        without = engine.plan
        engine.step([padded])
        assert sum(s.kept for s in engine.plan.program.stages) > sum(s.kept for s in without.program.stages)
        planned = engine.plan
        engine.step([whole])
        assert engine.plan is planned


@pytest.mark.parametrize("warm", [False, True])
def test_a_plain_module_equals_a_plain_loop(tmp_path: Path, *, warm: bool) -> None:
    """``warm``: of the first step the statistics stay as they are."""
    torch.manual_seed(0)
    model = Plain()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    engine = penstock.wrap(
        model,
        optimizer=penstock.AdamW(**ADAMW),
        budget=budget(tmp_path),
        precision="fp32",
        device="cpu",
        loss_fn=squares,
        clip_grad_norm=0.1,
    )
    with engine:
        for step in range(STEPS):
            for one in (model, plain):
                one.train(step > 0 or not warm)
            rows = (5, 3, 8)
            micro_batches = [{"x": torch.randn(n, 6), "labels": torch.randn(n)} for n in rows]
            stats = engine.step(micro_batches)
            losses = [squares(plain, mb) * (n / sum(rows)) for n, mb in zip(rows, micro_batches, strict=True)]
            sum(losses).backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            assert stats.loss == pytest.approx(float(sum(losses).detach()), rel=4 * ROUNDING)
            assert stats.grad_norm == pytest.approx(float(norm), rel=8 * ROUNDING)
        wanted = torch.cat([p.detach().flatten() for _, p in sorted(plain.named_parameters())])
        assert relative(master_of(engine), wanted) <= 4 * STEPS * ROUNDING
        for key, buffer in plain.named_buffers():
            torch.testing.assert_close(dict(model.named_buffers())[key], buffer, rtol=4 * ROUNDING, atol=4 * ROUNDING)


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_a_recomputed_block_repeats_its_dropout(name: str, tmp_path: Path) -> None:
    """What each dropout gives, in the forward and again in the recomputation."""
    architecture = ZOO[name]
    torch.manual_seed(0)
    model = architecture.build().train()
    noted = SimpleQueue[tuple[str, torch.Tensor]]()  # what is put into a list or dict is taken back from there

    def note(layer: str, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if module.p > 0:
            noted.put((layer, output.detach().clone()))

    def of_step() -> dict[str, list[torch.Tensor]]:
        seen: dict[str, list[torch.Tensor]] = {}
        engine.step(micro_batches)
        while not noted.empty():
            layer, output = noted.get()
            seen.setdefault(layer, []).append(output)
        return seen

    with penstock.wrap(
        model,
        optimizer=penstock.AdamW(**ADAMW),
        budget=budget(tmp_path),
        precision="fp32",
        device="cpu",
        clip_grad_norm=None,
        recompute=True,
    ) as engine:
        micro_batches = steps_of(architecture)[0][:1]
        engine.step(micro_batches)
        blocks = [site.name for site in engine.inside.resources.tape.sites]
        for layer, module in model.named_modules():
            if isinstance(module, nn.Dropout) and any(layer.startswith(f"{block}.") for block in blocks):
                module.register_forward_hook(partial(note, layer))
        engine.prepare(micro_batches)  # a model with other hooks is probed again, which runs them
        while not noted.empty():
            noted.get()
        first, second = of_step(), of_step()
    assert len(first) >= 6
    for layer, (a, again) in first.items():
        assert torch.equal(a, again), layer
        assert not torch.equal(a == 0, second[layer][0] == 0), layer  # another step draws others
