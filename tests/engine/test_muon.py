"""Muon: the numbers of torch's own beside AdamW, and no schedule changes them."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

import penstock
from penstock.config.optimizer import Moments, Orthogonal
from penstock.engine import start
from penstock.engine.start import describe_model
from penstock.errors import ConfigError, StoreError
from penstock.schedule.matrices import is_matrix
from penstock.schedule.program import COMPACT_FROM
from penstock.state.splits import SPLITS
from tests.accelerator import DEVICE
from tests.engine.test_moments import VARIANTS
from tests.models import MODELS, VOCABULARY, Case, causal_lm
from tests.other_plans import other_plans
from tests.training import (
    Result,
    abandon,
    assert_same,
    assert_same_state,
    budget,
    master_of,
    plain_loop,
    result_of,
    run_steps,
    steps_of,
    train,
    wrap,
)

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, CLIP = 32, 1.75
ADAMW = penstock.AdamW(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
FUSED = penstock.Split(match=r"attn\.c_attn\.weight", parts=3, dim=1)
MUON = penstock.Muon(lr=0.02, adamw=ADAMW, splits=(FUSED,))
RULE = Orthogonal(steps=5)
Cut = tuple[Any, Literal[0, 1]]
"""Number of parts, or their sizes, and the dimension that is cut."""
Numbers = tuple[str, Moments, str]
"""model, moments, precision"""
NUMBERS: tuple[Numbers, ...] = (
    ("fused", "fp32", "bf16"),
    ("fused", "int8", "bf16"),
    ("fused", "int8", "fp32"),
    ("fused", "bf16", "fp16"),
    ("fused", "fp32", "fp32"),
    ("mixtral", "fp32", "bf16"),
    ("mixtral", "int8", "fp16"),
)


class FusedProduct(nn.Module):
    """Queries, keys and values by one matrix, which has them beside each other, as GPT-2's has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.2 * torch.randn(WIDTH, 3 * WIDTH))
        self.bias = nn.Parameter(torch.zeros(3 * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = FusedProduct(), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.c_attn(x).chunk(3, -1)
        scores = (query @ key.transpose(-1, -2)).softmax(-1)
        found: torch.Tensor = self.c_proj(self.drop(scores) @ value)
        return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.up = nn.LayerNorm(WIDTH), Attention(), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm(x))
        found: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return found


class Fused(nn.Module):
    """Blocks with a matrix that is three, between an embedding and a head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.head.weight = self.embed.weight
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


CASES = {
    "fused": Case(build=Fused, micro_batch=causal_lm, blocks=3, loss_fn=lambda m, mb: m(**mb)),
    "mixtral": MODELS["mixtral"],
    "llama": MODELS["llama"],
}
"""A model that costs little, and of transformers one with stacks of matrices and one that torch's Muon takes whole."""


def settings_of(numbers: Numbers) -> dict[str, Any]:
    model, moments, precision = numbers
    made = replace(MUON, moments=moments, splits=MUON.splits if model == "fused" else ())
    return {"optimizer": made, "precision": precision, "clip_grad_norm": CLIP}


def steps(model: str, count: int = 4) -> Any:
    return steps_of(CASES[model], count)


@cache
def wanted(numbers: Numbers, device: str = "cpu") -> Result:
    """The numbers of the serial oracle."""
    with TemporaryDirectory() as folder:
        where, more = budget(Path(folder, "store")), {"overlap": False, "speculate": False, "delay": 0.0}
        settings = settings_of(numbers) | more | {"device": device}
        return train(CASES[numbers[0]], where, steps(numbers[0]), **settings)


MORE: dict[str, Any] = VARIANTS | {
    "all delayed": (lambda p: budget(p), {"delay": 1.0}),
    "delayed, gradients on disk": (lambda p: budget(p, gradients="disk"), {"delay": 1.0, "speculate": False}),
    "waiting": (lambda p: budget(p), {"speculate": False}),
}


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("variant", MORE)
@pytest.mark.parametrize("numbers", NUMBERS)
def test_same_bits_as_the_oracle(numbers: Numbers, variant: str, tmp_path: Path) -> None:
    where, more = MORE[variant]
    (tmp_path / "store").mkdir()
    found = train(CASES[numbers[0]], where(tmp_path / "store"), steps(numbers[0]), **settings_of(numbers), **more)
    assert_same(found, wanted(numbers))


@pytest.mark.accelerator
@pytest.mark.sampled(2, values=False)
@pytest.mark.parametrize("variant", ["on disk", "on the host", "on the device", "delayed", "horizontal", "planned"])
def test_an_accelerator_gives_the_bits_of_the_oracle_on_it(variant: str, tmp_path: Path) -> None:
    (where, more), numbers = MORE[variant], NUMBERS[1]
    found = train(CASES["fused"], where(tmp_path), steps("fused"), **settings_of(numbers), **more, device=DEVICE)
    assert_same(found, wanted(numbers, DEVICE))


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("numbers", [NUMBERS[0], NUMBERS[1]])
def test_plans_in_any_order_give_the_bits_of_one(numbers: Numbers, tmp_path: Path) -> None:
    where = budget(tmp_path, weights=None, state=None, durability="none")
    with wrap(CASES["fused"], where, **settings_of(numbers)) as engine:
        engine.prepare(steps("fused")[0])
        plans, stats = other_plans(engine.inside.planning.request, seed=5), []
        for micro_batches in steps("fused"):
            engine.inside.planning.change(next(plans))
            stats.append(engine.step(micro_batches))
        found = result_of(engine, stats)
    assert_same(found, wanted(numbers))


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("delay", [0.0, 1.0])
def test_a_run_goes_on_after_a_kill_and_from_a_snapshot(delay: float, tmp_path: Path) -> None:
    numbers = NUMBERS[1]
    case, settings, all_steps = CASES["fused"], settings_of(numbers), steps("fused")
    with wrap(case, budget(tmp_path / "store"), delay=delay, **settings) as engine:
        run_steps(engine, all_steps[:1])
        engine.save(tmp_path / "snapshot")
        engine.step(all_steps[1])
        engine.step(all_steps[2])
        abandon(engine)
    with wrap(case, budget(tmp_path / "store"), **settings) as engine:
        done = engine.step_count
        assert done == (2 if delay else 3)
        found = run_steps(engine, all_steps[done:])
    assert found.losses == wanted(numbers).losses[done:]
    assert_same_state(found.state, wanted(numbers).state)
    with wrap(case, budget(None, weights="host", state="host"), **settings) as engine:
        engine.load(tmp_path / "snapshot")
        assert_same_state(run_steps(engine, all_steps[1:]).state, wanted(numbers).state)


def test_matrices_stay_cut_as_they_were(tmp_path: Path) -> None:
    case, settings = CASES["fused"], settings_of(NUMBERS[0])
    with wrap(case, budget(tmp_path / "store"), **settings) as engine:
        engine.step(steps("fused")[0])
        engine.save(tmp_path / "snapshot")
    said = r"store: Muon's splits were .*c_attn.* now.*give those that the run began"
    cuts: tuple[tuple[penstock.Split, ...], ...] = ((), (penstock.Split(match="c_attn", parts=6, dim=1),))
    for splits in cuts:
        others = settings | {"optimizer": replace(MUON, splits=splits)}
        with pytest.raises(StoreError, match=said):
            wrap(case, budget(tmp_path / "store"), **others)
        with wrap(case, budget(None, weights="host", state="host"), **others) as engine:
            with pytest.raises(StoreError, match=r"snapshot: Muon's splits were .*c_attn.*, and are "):
                engine.load(tmp_path / "snapshot")
            assert engine.step_count == 0


def test_a_store_and_a_snapshot_that_do_not_say_how_matrices_are_cut_are_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 0.1.0 has not said it. By what pattern they are found makes no difference."""
    case, settings = CASES["fused"], settings_of(NUMBERS[0])
    with monkeypatch.context() as patch:
        patch.setattr(start, "describe_model", _without_splits)
        with wrap(case, budget(tmp_path / "store"), **settings) as engine:
            engine.step(steps("fused")[0])
            engine.save(tmp_path / "snapshot")
    other_words = settings | {"optimizer": replace(MUON, splits=(replace(FUSED, match="c_attn"),))}
    for said in (settings, other_words):
        with wrap(case, budget(tmp_path / "store"), **said) as engine:
            assert engine.step_count == 1
            engine.load(tmp_path / "snapshot")
            engine.save(tmp_path / "snapshot", overwrite=True)


def _without_splits(*given: Any) -> dict[str, Any]:
    return {key: value for key, value in describe_model(*given).items() if key != SPLITS}


class TorchMuon(torch.optim.Muon):
    """torch's, with torch's AdamW for what it does not take."""

    def __init__(self, model: nn.Module, adamw: penstock.AdamW, **settings: Any) -> None:
        named = dict(model.named_parameters())
        matrices = {name for name, p in named.items() if ".layers." in name and is_matrix(name, p.shape, RULE)}
        super().__init__([named[name] for name in sorted(matrices)], **settings)
        others = [p for name, p in named.items() if name not in matrices]
        self.others = torch.optim.AdamW(others, lr=adamw.lr, betas=adamw.betas, weight_decay=adamw.weight_decay)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        super().step()
        self.others.step()


class Documented(TorchMuon):
    """The formulas of docs/numerics.md, Muon's around torch's own iteration, and AdamW's: each operation is rounded by
    itself, where torch may contract two. ``splits``: what a matrix is cut into, by the end of its name."""

    def __init__(self, model: nn.Module, adamw: penstock.AdamW, splits: dict[str, Cut], **settings: Any) -> None:
        super().__init__(model, adamw, **settings)
        self.names = {p: name for name, p in model.named_parameters()}
        self.adamw, self.splits = adamw, splits

    def matrices(self, p: torch.Tensor, update: torch.Tensor) -> Sequence[torch.Tensor]:
        for end, (parts, dim) in self.splits.items():
            if self.names[p].endswith(end):
                return update.chunk(parts, dim) if isinstance(parts, int) else update.split(parts, dim)
        return (update,)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        momentum, lr = group["momentum"], group["lr"]
        for p in group["params"]:
            m = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            m.add_((p.grad - m) * (1 - momentum))
            update = m + (p.grad - m) * (1 - momentum) if group["nesterov"] else m
            whole = (group["ns_coefficients"], group["ns_steps"], group["eps"])
            for part, into in zip(self.matrices(p, update.bfloat16()), self.matrices(p, p), strict=True):
                rate = _adjust_lr(lr, group["adjust_lr_fn"], part.shape)
                step = _zeropower_via_newtonschulz(part, *whole).float() * rate
                into.copy_(into * (1 - lr * group["weight_decay"]) - step)
        (others,) = self.others.param_groups
        for p in others["params"]:
            self.element_by_element(p)

    def element_by_element(self, p: torch.Tensor) -> None:
        state, (b1, b2) = self.state[p], self.adamw.betas
        state["t"] = t = state.get("t", 0) + 1
        m, v = (state.setdefault(name, torch.zeros_like(p)) for name in "mv")
        rate, root = self.adamw.lr / (1 - b1**t), 1 / math.sqrt(1 - b2**t)
        m.add_((p.grad - m) * (1 - b1))
        v.mul_(b2).add_((p.grad * (1 - b2)) * p.grad)
        denominator = v.double().sqrt().float() * root + self.adamw.eps  # rounded once, as torch's of fp32 is not
        p.mul_(1 - self.adamw.lr * self.adamw.weight_decay).sub_((m * rate) / denominator)


CUTS: dict[str, Cut] = {"gate_proj.weight": (2, 0), "down_proj.weight": (4, 1), "q_proj.weight": ((8, 24), 0)}


@pytest.mark.parametrize(
    ("settings", "cuts"),
    [
        ({}, {}),
        ({"nesterov": False, "momentum": 0.5, "adjust_lr_fn": "match_rms_adamw"}, {}),
        ({"adjust_lr_fn": "match_rms_adamw"}, CUTS),
    ],
)
def test_parameters_have_the_bits_of_a_plain_loop(
    settings: dict[str, Any], cuts: dict[str, Cut], tmp_path: Path
) -> None:
    """Steps of one micro-batch, whose gradients are autograd's own."""
    case, all_steps = MODELS["llama"], steps_of(MODELS["llama"], 3, lengths=(12,))
    model = case.model()
    plain_model = copy.deepcopy(model)
    splits = tuple(penstock.Split(match=f"{end}$", parts=parts, dim=dim) for end, (parts, dim) in cuts.items())
    made = penstock.Muon(lr=0.02, weight_decay=0.1, adamw=ADAMW, splits=splits, **settings)
    with wrap(case, budget(tmp_path / "store"), model=model, optimizer=made, clip_grad_norm=None) as engine:
        found = run_steps(engine, all_steps)
        optimizer = lambda m: Documented(m, ADAMW, cuts, lr=0.02, weight_decay=0.1, **settings)  # noqa: E731
        plain = plain_loop(case, plain_model, engine, all_steps, optimizer, None)
        assert found.losses == plain.losses
        assert torch.equal(master_of(engine), plain.parameters)


def test_training_is_as_close_to_torch_as_bf16_allows(tmp_path: Path) -> None:
    """Both make updates orthogonal in it: where a momentum differs in its last fp32 bit, its update may in its last of
    eight, and the iteration blows up what is small in a matrix."""
    case, all_steps = MODELS["llama"], steps("llama", 3)
    model = case.model()
    plain_model, start = copy.deepcopy(model), copy.deepcopy(model)
    made = penstock.Muon(lr=0.02, weight_decay=0.1, adamw=ADAMW)
    with wrap(case, budget(tmp_path / "store"), model=model, optimizer=made, clip_grad_norm=CLIP) as engine:
        found = run_steps(engine, all_steps)
        plain = plain_loop(
            case, plain_model, engine, all_steps, lambda m: TorchMuon(m, ADAMW, lr=0.02, weight_decay=0.1), CLIP
        )
        assert found.losses == pytest.approx(plain.losses, rel=1e-4)
        before = torch.cat([p.detach().flatten() for _, p in sorted(start.named_parameters())])
        moved, off = (plain.parameters - before).norm(), (master_of(engine) - plain.parameters).norm()
        assert off / moved < 0.03


def test_matrices_have_groups_and_a_moment_of_their_own(tmp_path: Path) -> None:
    with wrap(MODELS["mixtral"], budget(tmp_path), **settings_of(("mixtral", "int8", "bf16"))) as engine:
        engine.step(steps("mixtral")[0])
        arrays = engine.inside.resources.arrays
        for group in engine.inside.resources.groups:
            for s in group.slices:
                in_block = group.spec.name.startswith("blocks.")
                assert (group.spec.whole is not None) == (in_block and is_matrix(s.name, s.shape, RULE)), s.name
                assert group.spec.compact == (s.numel >= COMPACT_FROM)
            moments = [name for name in arrays.parts_of_state(group.spec.index) if name.startswith("moment")]
            assert len(moments) == (1 if group.spec.whole else 2)
        stacks = [s for g in engine.inside.resources.groups if g.spec.whole for s in g.slices if len(s.shape) == 3]
        assert stacks
        groups = engine.optimizer.param_groups
        assert [("ns_steps" in g, g["lr"]) for g in groups] == [(True, 0.02), (False, 1e-3)]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: penstock.Muon(momentum=1.0), "momentum=1.0"),
        (lambda: penstock.Muon(ns_steps=0), "ns_steps=0"),
        (lambda: penstock.Muon(adamw=penstock.AdamW(moments="int8")), "adamw.moments.*give moments"),
        (lambda: penstock.Muon(decay_norms_and_biases=False), "give adamw.decay_norms_and_biases"),
        (lambda: penstock.Muon(adamw=penstock.Adam()), "must be an AdamW"),
        (lambda: penstock.Split(match="(", parts=2), "not a regular expression"),
        (lambda: penstock.Split(match="q", parts=1), "parts=1"),
        (lambda: penstock.Split(match="q", parts=(2, 2), dim=1), "equal parts"),
        (lambda: penstock.Split(match="q", parts=2, dim=-1), "split.dim"),  # type: ignore[arg-type]
        (lambda: penstock.Split(match="q", parts=2.0), "split.parts"),  # type: ignore[arg-type]
        (lambda: penstock.Muon(elementwise="("), "elementwise=.* not a regular expression"),
    ],
)
def test_impossible_settings_are_refused(wrong: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        wrong()


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (
            {"splits": (penstock.Split(match="no_such", parts=2),)},
            "no matrix that Muon steps; names are like model.lay",
        ),
        ({"splits": (penstock.Split(match="embed", parts=2),)}, "no matrix that Muon steps"),
        ({"splits": [penstock.Split(match="q_", parts=2), penstock.Split(match="q_proj", parts=[8, 24])]}, "q_proj"),
        ({"elementwise": "no_such"}, "elementwise='no_such' finds no parameter"),
    ],
)
def test_a_rule_that_finds_nothing_is_refused(rules: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        wrap(MODELS["llama"], budget(tmp_path), optimizer=penstock.Muon(**rules))


@pytest.mark.parametrize(
    ("name", "shape", "whole"),
    [
        ("layers.0.q_norm.weight", (32, 128), False),
        ("layers.0.experts.gate_up_proj_bias", (4, 8), False),
        ("layers.0.mixer.A_log", (64, 16), False),
        ("layers.0.q_proj.weight", (1, 8), False),
        ("layers.0.conv.weight", (4, 4, 3, 3), False),
        ("layers.0.experts.down_proj", (4, 8, 16), True),
        ("layers.0.normal_proj.weight", (8, 8), True),
        ("layers.0.norm_q.weight", (8, 8), False),
    ],
)
def test_what_is_a_matrix(name: str, shape: tuple[int, ...], whole: bool) -> None:
    assert is_matrix(name, shape, Orthogonal(steps=5, elementwise=r"A_log$")) == whole


def test_settings_written_into_param_groups_are_checked(tmp_path: Path) -> None:
    with wrap(MODELS["llama"], budget(tmp_path), optimizer=penstock.Muon(adjust_lr_fn=None)) as engine:
        (group,) = (g for g in engine.optimizer.param_groups if "ns_steps" in g)
        for key, value in (("adjust_lr_fn", "match_rms_adamW"), ("ns_steps", 0), ("ns_steps", 3.7), ("momentum", 1.5)):
            before = group[key]
            group[key] = value
            with pytest.raises(ConfigError, match=key):
                engine.step(steps("llama")[0])
            group[key] = before
        engine.step(steps("llama")[0])


@pytest.mark.parametrize(("parts", "dim"), [(5, 0), ((1, 2), 0)])
def test_a_split_that_does_not_fit_names_the_parameter(parts: Any, dim: Any, tmp_path: Path) -> None:
    made = penstock.Muon(splits=(penstock.Split(match="q_proj", parts=parts, dim=dim),))
    with pytest.raises(ConfigError, match=r"q_proj\.weight has \d+ rows"):
        wrap(MODELS["llama"], budget(tmp_path), optimizer=made)
