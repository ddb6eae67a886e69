"""The engine trains as plain PyTorch does: the same losses, gradient norms and parameters."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    MiniMaxConfig,
    MiniMaxForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    XGLMConfig,
    XGLMForCausalLM,
)

import penstock
from penstock.config.optimizer import OptimizerSpec
from penstock.tape.dry import build_on_meta, dry_run
from tests.engine.test_prediction import machine
from tests.models import MODELS, PLAIN, Case, MicroBatch, causal_lm, qwen3
from tests.sweep.configs import tiny
from tests.training import budget, items, master_of, plain_loop, relative, run_steps, steps_of, torch_adamw, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CLIP = {"gpt2": 1.7, "mixtral": 1.27, "bert": 1.9, "t5": 2.9, "skips": 1.0}
"""A limit that lies between the gradient norms of the first three steps, so that some are clipped and some are not.
Of llama and qwen3 other tests here say the same."""

TorchOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@pytest.mark.parametrize("name", CLIP)
def test_training_equals_plain_torch(name: str, tmp_path: Path) -> None:
    case, steps = MODELS[name], steps_of(MODELS[name], 3)
    model = case.model()
    plain_model = copy.deepcopy(model)
    with wrap(case, budget(tmp_path / "store"), model=model, clip_grad_norm=CLIP[name]) as engine:
        found = run_steps(engine, steps)
        plain = plain_loop(case, plain_model, engine, steps, torch_adamw, CLIP[name])
        assert found.losses == pytest.approx(plain.losses, rel=1e-6)
        assert found.norms == pytest.approx(plain.norms, rel=1e-5)
        assert relative(master_of(engine), plain.parameters) <= 1e-6
        assert [s.clipped for s in found.stats] == [norm > CLIP[name] for norm in plain.norms]
        assert {s.clipped for s in found.stats} == {True, False}
        for key, buffer in plain_model.named_buffers():  # the running statistics of batch norm
            torch.testing.assert_close(found.state[f"buffer {key}"], buffer)


OPTIMIZERS: dict[str, tuple[OptimizerSpec, TorchOptimizer]] = {
    "adam": (
        penstock.Adam(lr=1e-3, weight_decay=0.01),
        lambda m: torch.optim.Adam(m.parameters(), lr=1e-3, weight_decay=0.01),
    ),
    "sgd": (penstock.SGD(lr=0.1), lambda m: torch.optim.SGD(m.parameters(), lr=0.1)),
    "nesterov": (
        penstock.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    "norms and biases spared": (
        penstock.AdamW(
            lr=1e-3,
            weight_decay=0.5,
            decay_norms_and_biases=False,
            overrides=(penstock.Override(match="embed", lr=1e-2),),
        ),
        lambda m: torch.optim.AdamW(
            [
                {"params": [p for n, p in m.named_parameters() if p.ndim > 1 and "embed" not in n]},
                {"params": [p for n, p in m.named_parameters() if p.ndim == 1], "weight_decay": 0.0},
                {"params": [p for n, p in m.named_parameters() if "embed" in n], "lr": 1e-2},
            ],
            lr=1e-3,
            weight_decay=0.5,
        ),
    ),
    "overrides": (
        penstock.AdamW(
            lr=1e-3,
            weight_decay=0.5,
            overrides=(penstock.Override(match="norm", weight_decay=0.0), penstock.Override(match="embed", lr=1e-2)),
        ),
        lambda m: torch.optim.AdamW(
            [
                {"params": [p for n, p in m.named_parameters() if "norm" not in n and "embed" not in n]},
                {"params": [p for n, p in m.named_parameters() if "norm" in n], "weight_decay": 0.0},
                {"params": [p for n, p in m.named_parameters() if "embed" in n], "lr": 1e-2},
            ],
            lr=1e-3,
            weight_decay=0.5,
        ),
    ),
}


TWO_BLOCKS = replace(MODELS["qwen3"], build=partial(qwen3, num_hidden_layers=2), blocks=2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_equals_torchs(name: str, tmp_path: Path) -> None:
    case, steps = TWO_BLOCKS, steps_of(TWO_BLOCKS, 3)
    ours, torchs = OPTIMIZERS[name]
    plain_model = case.model()
    with wrap(case, budget(tmp_path / "store"), optimizer=ours, clip_grad_norm=None) as engine:
        found = run_steps(engine, steps)
        plain = plain_loop(case, plain_model, engine, steps, torchs, None)
        assert found.losses == pytest.approx(plain.losses, rel=1e-6)
        assert relative(master_of(engine), plain.parameters) <= 1e-6
        assert not any(s.clipped for s in found.stats)


@pytest.mark.filterwarnings("error")
def test_learning_rate_schedulers_of_torch_work(tmp_path: Path) -> None:
    case, steps = PLAIN, steps_of(PLAIN, 4)

    def factor(step: int) -> float:
        return (1.0, 0.5, 3.0, 0.1)[step]

    plain_model = case.model()
    with wrap(case, budget(tmp_path / "store"), clip_grad_norm=1.0) as engine:
        scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, factor)
        rates = []
        for micro_batches in steps:
            rates.append(engine.step(micro_batches).lr)
            if len(rates) < len(steps):
                scheduler.step()
        assert rates == pytest.approx([1e-3, 0.5e-3, 3e-3, 0.1e-3])

        def scheduled(model: nn.Module) -> torch.optim.Optimizer:
            optimizer = torch_adamw(model)
            plain_schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
            optimizer.register_step_post_hook(
                lambda *_: plain_schedule.step() if plain_schedule.last_epoch < len(steps) - 1 else None
            )
            return optimizer

        plain = plain_loop(case, plain_model, engine, steps, scheduled, 1.0)
        assert relative(master_of(engine), plain.parameters) <= 1e-6


def freeze(model: nn.Module) -> nn.Module:
    """What a low-rank adapter does to a model: little in each block is trained, and nothing outside."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name or "input_layernorm" in name)
    return model


def test_frozen_parameters_have_no_state_and_no_gradient_traffic(tmp_path: Path) -> None:
    case, steps = MODELS["llama"], steps_of(MODELS["llama"], 3)
    plain_model = freeze(case.model())
    before = copy.deepcopy(plain_model.state_dict())
    with wrap(case, budget(tmp_path / "store"), model=freeze(case.model()), clip_grad_norm=1.0) as engine:
        found = run_steps(engine, steps)

        def trained_only(model: nn.Module) -> torch.optim.Optimizer:
            parameters = [p for p in model.parameters() if p.requires_grad]
            return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

        plain = plain_loop(case, plain_model, engine, steps, trained_only, 1.0)
        assert found.losses == pytest.approx(plain.losses, rel=1e-6)
        assert found.norms == pytest.approx(plain.norms, rel=1e-5)
        for name, tensor in engine.master_parameters():
            if "q_proj" in name or "input_layernorm" in name:
                assert not torch.equal(tensor, before[name]), name
            else:
                assert torch.equal(tensor, before[name]), name
        assert relative(master_of(engine), plain.parameters) <= 1e-6
        blocks = [g.spec for g in engine.inside.resources.groups if g.spec.name.startswith("blocks")]
        trained = sum(g.trainable for g in blocks)
        assert all(0 < g.trainable < g.numel for g in blocks)
        assert {n for n in found.state if n.startswith("moment")} == {
            f"moment{i}.{g.index}" for g in blocks for i in (0, 1)
        }
        assert found.stats[-1].bytes_moved["d2h"] == 4 * trained
        assert found.stats[-1].bytes_moved["write"] == 12 * trained


def unequal(case: Case) -> list[MicroBatch]:
    """Micro-batches of 1 x 6, 3 x 11 and 2 x 9 tokens, some of whose labels do not count."""
    generator = torch.Generator().manual_seed(0)
    made = [case.micro_batch(generator, rows, length) for rows, length in ((1, 6), (3, 11), (2, 9))]
    for micro_batch in made:
        masked = torch.rand(micro_batch["labels"].shape, generator=generator) < 0.3
        micro_batch["labels"].masked_fill_(masked, -100)
    return made


def padded(micro_batches: list[MicroBatch]) -> MicroBatch:
    """All rows as one batch. What is added on the right changes nothing in a causal model, and is not counted."""
    length = max(mb["input_ids"].shape[1] for mb in micro_batches)
    fill = {"input_ids": 0, "labels": -100}
    return {
        key: torch.cat(
            [nn.functional.pad(mb[key], (0, length - mb[key].shape[1]), value=value) for mb in micro_batches]
        )
        for key, value in fill.items()
    }


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_loss_and_gradient_are_the_mean_over_tokens(schedule: str, tmp_path: Path) -> None:
    case = MODELS["llama"]
    micro_batches, plain_model = unequal(case), case.model()
    sgd = penstock.SGD(lr=10.0)  # so large that the parameters afterwards are mostly gradient
    with wrap(case, budget(tmp_path / "store"), schedule=schedule, optimizer=sgd, clip_grad_norm=None) as engine:
        stats = engine.step(micro_batches)
        loss = case.loss_fn(plain_model, padded(micro_batches))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain_model.parameters(), torch.inf)
        torch.optim.SGD(plain_model.parameters(), lr=10.0).step()
        wanted = torch.cat([p.detach().flatten() for _, p in sorted(plain_model.named_parameters())])
        assert stats.loss == pytest.approx(loss.item(), rel=1e-6)
        assert stats.grad_norm == pytest.approx(norm.item(), rel=1e-6)
        assert relative(master_of(engine), wanted) <= 1e-6
        assert stats.tokens == 6 + 33 + 18


def test_number_and_shapes_of_micro_batches_may_change(tmp_path: Path) -> None:
    case, steps = PLAIN, list[list[MicroBatch]]()
    for number, lengths in enumerate([(8,), (8, 12), (12, 12, 5), (4, 6, 5), (20,), (8,)], start=1):
        steps += steps_of(case, 1, first=number, lengths=lengths)
    plain_model = case.model()
    with wrap(case, budget(tmp_path / "store"), clip_grad_norm=1.0) as engine:
        found = run_steps(engine, steps)
        plain = plain_loop(case, plain_model, engine, steps, torch_adamw, 1.0)
        assert found.losses == pytest.approx(plain.losses, rel=1e-6)
        assert relative(master_of(engine), plain.parameters) <= 1e-6


@pytest.mark.parametrize(
    ("config", "cls"),
    [
        (XGLMConfig, XGLMForCausalLM),
        (OpenAIGPTConfig, OpenAIGPTLMHeadModel),
        (MiniMaxConfig, MiniMaxForCausalLM),
    ],
)
def test_in_16_bits_tables_are_in_the_dtype_that_transformers_makes_them_in(config: Any, cls: Any) -> None:
    """Sinusoids, masks, and decays that are saved would meet weights in bf16 in fp32, which torch refuses. The loss is
    transformers' own."""
    case = Case(build=lambda: cls(tiny(config)), micro_batch=causal_lm, blocks=3)
    (micro_batch,) = case.micro_batches(1)
    plain = cls._from_config(tiny(config), dtype=torch.bfloat16)
    plain.load_state_dict(case.model().state_dict())
    with wrap(case, budget(None), precision="bf16", plan=None) as engine:
        assert engine.step([micro_batch]).loss == float(plain.train()(**micro_batch).loss.detach())
    dry_run(build_on_meta(case.build), micro_batch, dtype=torch.bfloat16, kind="cpu")


@pytest.mark.parametrize("name", ["gpt2", "skips"])  # dropout; and batch norm, whose statistics must stay
def test_evaluation_is_plain_evaluation_and_changes_nothing(name: str, tmp_path: Path) -> None:
    case = MODELS[name]
    steps, held_out = steps_of(case, 3), steps_of(case, 1, first=9)[0]
    with wrap(case, budget(tmp_path / "one")) as engine:
        undisturbed = run_steps(engine, steps)
    plain_model = case.model().eval()
    with wrap(case, budget(tmp_path / "two")) as engine:
        random_state = torch.get_rng_state()
        assert engine.evaluate(held_out) == pytest.approx(plain_mean(case, plain_model, held_out), rel=1e-6)
        for micro_batches in steps:
            engine.step(micro_batches)
            after = engine.evaluate(held_out)
            assert engine.evaluate(held_out) == after
        assert torch.equal(torch.get_rng_state(), random_state)
        assert engine.model.training
        disturbed = run_steps(engine, [])
        assert all(torch.equal(disturbed.state[n], t) for n, t in undisturbed.state.items())
        plain_model.load_state_dict(dict(engine.master_parameters()), strict=False)
        plain_model.load_state_dict(dict(engine.model.named_buffers()), strict=False)
        assert after == pytest.approx(plain_mean(case, plain_model, held_out), rel=1e-6)


class Counts(nn.Module):
    """Counts its forwards in what is no part of the state, and scales the loss by the counts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.forwards, self.latest = 0, torch.zeros(())
        self.register_buffer("count", torch.zeros(()), persistent=False)
        self.register_buffer("replaced", torch.zeros(()), persistent=False)
        self.register_buffer("absent", None, persistent=False)

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(**inputs)
        self.forwards += 1
        self.count += 1
        self.replaced = self.replaced + 1
        self.absent = torch.ones(()) if self.absent is None else self.absent + 1
        return loss * (4 + self.forwards + self.count + self.replaced + self.absent)

    def counts(self) -> list[float]:
        return [self.forwards, *(float(getattr(self, name) or 0) for name in ("count", "replaced", "absent"))]


COUNTS = replace(PLAIN, build=lambda: Counts(PLAIN.build()))


@pytest.mark.parametrize("speculate", [False, True])
def test_what_a_forward_counts_outside_the_state_is_that_of_the_steps_that_count(
    speculate: bool, tmp_path: Path
) -> None:
    """A plan's probe and its timing count nothing, nor do a run that is dropped and an evaluation."""
    steps, held_out = steps_of(COUNTS, 2), steps_of(COUNTS, 1, first=9)[0]
    settings: dict[str, Any] = {"speculate": speculate, "plan": machine(tmp_path), "clip_grad_norm": 1e-3}
    with wrap(COUNTS, budget(tmp_path), **settings) as engine:
        model = engine.model
        assert isinstance(model, Counts)
        for number, micro_batches in enumerate(steps, 1):
            stats = engine.step(micro_batches)
            assert model.counts() == [len(micro_batches) * number] * 4
            assert stats.repeats == int(speculate)
            assert engine.evaluate(held_out) == engine.evaluate(held_out)
            assert model.counts() == [len(micro_batches) * number] * 4


def plain_mean(case: Case, model: nn.Module, micro_batches: list[MicroBatch]) -> float:
    """The mean of a model's losses, weighted by how many items each is the mean over."""
    counts = [items(model, mb) for mb in micro_batches]
    with torch.no_grad():
        losses = [float(case.loss_fn(model, mb)) for mb in micro_batches]
    return sum(c * x for c, x in zip(counts, losses, strict=True)) / sum(counts)
