"""Models of any kind (``tests.any_model``) under any settings: each has the numbers of a plain loop, or is refused.

Two engines train a model that torch can train: one op at a time with all state on disk and every block computed again,
and one by settings that are drawn. The two have the same bits; and those of the plain loop, but for the rounding of
sums in another order. A refusal has words for one of the peculiarities that the model has.
"""

import copy
import random
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import ConfigError, ModelError
from penstock.optim.precision import DTYPES
from penstock.planner import fit
from penstock.schedule.program import Stage
from penstock.tape.blocks import Block
from tests.any_model import AnyModel, Spec, any_spec, loss_of
from tests.conftest import Campaign
from tests.models import Case
from tests.tape_reference import plain_step
from tests.training import assert_same_state, budget, state_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

# -- what may be refused ------------------------------------------------------------------------------------------

_KEEPS = {"a count", "a list", "own generator"}
"""What goes on from one forward to the next in no buffer. Where no recomputation shows it, it goes undetected."""
_DETACHED = {"detached", "detach_"}, {"reentrant checkpoint", "dropout in a reentrant checkpoint"}
"""What a block has detached looks to other code as if it had a gradient, which matters to these."""
_ASKS = {"asks for the grad mode", "asks for requires_grad", "asks for a leaf"}
_IN_PLACE = {
    *("add_", "mul_", "relu_", "masked_fill_", "index_put_", "view in place", "part in place", "detach_"),
    *(
        "turned in place",
        "data in place",
        "clamp_ without gradients",
        "in place, of the input",
        "dropout in place",
        "input written after",
    ),
}
WRITES = {
    *("buffer written", "buffer replaced", "buffer at times", "buffer of a count", "batch norm", "averages"),
    *("batch norm, cumulative", "spectral_norm", "spectral_norm of old", "averages before", "shared buffer"),
}
_BY_DATA = {"as one says", "layer drop", "by length", "experts", "sometimes reached"}

REFUSALS: tuple[tuple[str, set[str]], ...] = (
    ("changes one of its inputs in place", _IN_PLACE),
    ("was changed in place after the block", _IN_PLACE),
    ("was detached in place after", {"detach_"}),
    ("lies in the same memory", _IN_PLACE),
    ("no plain tensor of numbers", {"own class of parameter"}),
    ("returned other numbers when it was recomputed", _KEEPS | _ASKS | {"data in place"}),
    ("returns other numbers where gradients are computed", _ASKS),
    ("retain_grad was called on a tensor that is used in several", {"retain_grad"}),
    ("register_hook was called on a tensor that is used in several", {"a hook", "hook of several"}),
    ("has a hook and is used in several places", {"hooks", "hooks of parameters"}),
    ("asks for a graph in its forward", {"looks back", "a derivative of the input", "a derivative", "functional.vjp"}),
    ("changes a parameter in its forward", {"lookup, bounded", "vmap of weights"}),
    ("called inside of torch.inference_mode", {"inference_mode"}),
    ("inside of a transform of torch.func", {"vmap"}),
    ("called inside of saved_tensors_hooks", {"checkpoint", "save_on_cpu"}),
    ("is called again in the backward", {"reentrant checkpoint"}),
    ("with use_reentrant=True is called around", {"reentrant checkpoint", "dropout in a reentrant checkpoint"}),
    ("uses a transform of torch.func where", {"derivative of weights by torch.func", "func.grad", "jvp"}),
    ("for which commits and snapshots have no place", {"bf16", "double"}),
    ("and did not for the first one of its shape", {"buffer at times"}),
    ("passes from one micro-batch to the next", WRITES | _KEEPS),
    ("has written to before", WRITES | {"shared part"}),
    ("made, not returned", WRITES),
    ("that is none of its arguments", WRITES | _KEEPS | {"shared part"}),
    ("cannot look into", {"generator", "bag"}),
    ("must take the same way through the blocks", _BY_DATA),
    ("must not depend on the values of the data", _BY_DATA),
    ("take different ways through the model's blocks", _BY_DATA),
    ("which the micro-batch that the plan was made from did not do there", _BY_DATA),
    ("is a tensor that the block computes and that other code reads later", {"attribute", "shared part"}),
    ("has no parameter that is trained", {"frozen weights", "frozen ends"}),
    ("no repeated blocks were found", {"attributes", "sequential", "dict", "list", "shared part"}),
    ("is a batch norm, which torch computes on a processor", {"batch norm", "batch norm, cumulative"}),
)
"""What a refusal says, and the peculiarities that it is for: docs/architectures.md, "What is refused"."""


def is_fair(said: str, spec: Spec) -> bool:
    """True if a model has what a refusal names."""
    return any(re.search(words, said) and why & spec.names() for words, why in REFUSALS)


def goes_undetected(spec: Spec) -> bool:
    """True if a model may be trained with other numbers: "This goes undetected" there."""
    names = spec.names()
    less_than_rounding = spec.rounds() and names & _ASKS
    return bool(names & _KEEPS or less_than_rounding or all(names & each for each in _DETACHED))


# -- settings -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a model is trained.

    ``numbers``: what decides about these, and ``weights``, of the losses of a step's micro-batches; ``how`` and
    ``where`` decide about none. ``torch``: the same optimizer; None: torch has none, and engines alone are compared.
    ``evaluates``: the model is evaluated between steps.
    """

    numbers: Mapping[str, Any]
    weights: tuple[float, ...] | None
    torch: Callable[[Any], torch.optim.Optimizer] | None
    how: Mapping[str, Any]
    where: Mapping[str, Any] = field(default_factory=dict)
    evaluates: bool = False

    def weights_of(self, count: int) -> list[float]:
        return [1 / count] * count if self.weights is None else list(self.weights[:count])


OPTIMIZERS = (
    (penstock.SGD(lr=0.1, momentum=0.9), partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    (penstock.AdamW(lr=1e-2, eps=1e-2), partial(torch.optim.AdamW, lr=1e-2, eps=1e-2, foreach=False)),
)
OF_OUR_OWN = (
    penstock.AdamW(lr=1e-2, moments="int8"),
    penstock.Muon(lr=0.02, adamw=penstock.AdamW(lr=1e-2)),
    penstock.Lion(lr=1e-3),
)
PLACES: tuple[Mapping[str, Any], ...] = (
    {},
    {"activations": "disk"},
    {"activations": "host"},
    {"weights": "host"},
    {"weights": "device", "state": "device", "durability": "none"},
    {"weights": "host", "state": "host", "durability": "none"},
    {"weights": None, "state": None, "durability": "none"},
)


def any_setting(drawn: random.Random) -> Setting:
    optimizer, torchs = drawn.choice(OPTIMIZERS)
    numbers: dict[str, Any] = {
        "optimizer": optimizer,
        "precision": "fp32",
        "clip_grad_norm": drawn.choice((None, 2, 2)),
    }
    own = drawn.random() < 0.25
    if own:
        numbers |= {"optimizer": drawn.choice(OF_OUR_OWN), "precision": drawn.choice(("fp32", "bf16"))}
    where = drawn.choice(PLACES)
    how = {
        "overlap": drawn.random() < 0.8,
        "schedule": drawn.choice(("vertical", "vertical", "horizontal")),
        "recompute": drawn.choice((None, None, True)),
    }
    if how["schedule"] == "vertical":
        how["delay"] = drawn.choice((0.0, 0.25, 1.0))
    if numbers["clip_grad_norm"] is not None and where.get("state") not in ("device", "host"):
        how["speculate"] = drawn.choice((None, True, False))
    return Setting(
        numbers=numbers,
        weights=drawn.choice((None, None, (0.3, 1.0, 0.0, 0.5))),
        torch=None if own else torchs,
        how=how,
        where=where,
        evaluates=drawn.random() < 0.3,
    )


def oracle(setting: Setting) -> Setting:
    """The same numbers, one op at a time."""
    how: dict[str, Any] = {"overlap": False, "recompute": True, "delay": 0.0}
    if setting.numbers["clip_grad_norm"] is not None:
        how["speculate"] = False
    return Setting(numbers=setting.numbers, weights=setting.weights, torch=setting.torch, how=how)


# -- training -----------------------------------------------------------------------------------------------------


class Untrainable(Exception):  # noqa: N818  no error of anybody's
    """torch cannot train the model, either."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What came of a model. ``stages``: of each step; ``blocks``: their names."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    stages: list[tuple[Stage, ...]] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    blocks: list[str] = field(default_factory=list)


def case_of(spec: Spec) -> Case:
    return Case(build=spec.build, micro_batch=lambda *_: {}, blocks=0, loss_fn=loss_of)


def built(spec: Spec, setting: Setting) -> AnyModel:
    """Always the same model, with parameters in the precision that they are trained in. A copy would have no hooks."""
    model = spec.build()
    for p in model.parameters():
        p.data = p.data.to(DTYPES[setting.numbers["precision"]])
    return model


def by_engine(spec: Spec, model: AnyModel, setting: Setting, folder: Path) -> Trained:
    found, settings = Trained(), {**setting.numbers, **setting.how}
    with wrap(case_of(spec), budget(folder, **setting.where), model=model, **settings) as engine:
        for micro_batches in spec.data():
            weights = None if setting.weights is None else setting.weights_of(len(micro_batches))
            stats = engine.step(micro_batches, loss_weights=weights)
            found.losses.append(stats.loss)
            found.norms.append(stats.grad_norm)
            found.stages.append(engine.plan.program.stages)
            if setting.evaluates:
                engine.evaluate(micro_batches)
        found.state.update(state_of(engine))
        found.parameters.update({name: p.clone() for name, p in engine.master_parameters()})
        found.buffers.update({name: b.clone() for name, b in model.named_buffers()})
        found.blocks.extend(site.name for site in engine.inside.resources.tape.sites)
    return found


def refuse_what_torch_cannot(spec: Spec, model: AnyModel) -> None:
    """Raises:
    Untrainable: a plain loop ends in an error, or in what is no number.
    """
    try:
        losses = [loss_of(model, mb) for micro_batches in spec.data() for mb in micro_batches]
        for loss in losses:
            loss.backward()
    except Exception as error:
        raise Untrainable(str(error)) from error
    gradients = [p.grad.to_dense() for p in model.parameters() if p.grad is not None]
    if not all(bool(t.isfinite().all()) for t in losses + gradients):
        raise Untrainable("not finite")


def compare_with_plain(spec: Spec, model: AnyModel, setting: Setting, found: Trained) -> None:
    """``model``: trained here, by torch."""
    assert setting.torch is not None
    modules, before = dict(model.named_modules()), copy.deepcopy(dict(model.named_parameters()))
    blocks = [Block(name=name, module=modules[name]) for name in found.blocks]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, clip = setting.torch(trained), setting.numbers["clip_grad_norm"]
    within = 1e-2 if spec.rounds() else 1e-4
    for number, micro_batches in enumerate(spec.data(), start=1):
        weights = setting.weights_of(len(micro_batches))
        stages = found.stages[number - 1]
        each, _ = plain_step(case_of(spec), model, blocks, stages, micro_batches, weights, number)
        for p in trained:
            p.grad = None if p.grad is None else p.grad.to_dense()
        norm = float(nn.utils.clip_grad_norm_(trained, torch.inf if clip is None else clip))
        optimizer.step()
        loss = sum(w * float(one) for w, one in zip(weights, each, strict=True))
        assert found.losses[number - 1] == pytest.approx(loss, rel=0.1 * within), f"loss of step {number}"
        assert found.norms[number - 1] == pytest.approx(norm, rel=within, abs=1e-6), f"norm of step {number}"
    moved = {name: p.detach() - before[name].detach() for name, p in model.named_parameters() if p.numel()}
    scale = max(1e-3, *(float(change.abs().max()) for change in moved.values()))
    for name, change in moved.items():
        off = float((found.parameters[name] - before[name].detach() - change).abs().max())
        assert off <= within * scale, f"{name} is off by {off}, where parameters have moved by {scale}"
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(found.buffers[name], buffer, rtol=within, atol=within)


def is_chaotic(spec: Spec, setting: Setting) -> bool:
    """True if a plain loop's own losses are others where its weights differ by a unit of rounding, in one way of
    several: in float64 (``tests.tape``) such a model is exact."""
    assert setting.torch is not None
    losses: list[list[float]] = []
    for draw, change in enumerate((0.0, *[2.0**-24] * 4)):
        model = built(spec, setting)
        torch.manual_seed(draw)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + change * torch.randn_like(p))
        optimizer = setting.torch([p for p in model.parameters() if p.requires_grad])
        losses.append([])
        for micro_batches in spec.data():
            optimizer.zero_grad()
            for weight, micro_batch in zip(setting.weights_of(len(micro_batches)), micro_batches, strict=True):
                loss = loss_of(model, micro_batch)
                (loss * weight).backward()
                losses[-1].append(float(loss))
            optimizer.step()
    return any(losses[0] != pytest.approx(others, rel=1e-5) for others in losses[1:])


def check(spec: Spec, setting: Setting, folder: Path) -> str:
    """Train a model. The words with which it is refused; empty: it is not.

    Raises:
        Untrainable: by torch, either.
        AssertionError: it is trained with other numbers.
    """
    refuse_what_torch_cannot(spec, built(spec, setting))
    said, found = [], []
    for number, each in enumerate((oracle(setting), setting)):
        shutil.rmtree(folder / str(number), ignore_errors=True)
        try:
            found.append(by_engine(spec, built(spec, setting), each, folder / str(number)))
        except (ModelError, ConfigError) as error:
            said.append(str(error))
    if said:  # of one engine alone, where it is for a schedule, or for what the other one has not moved
        return said[0]
    if goes_undetected(spec):
        return ""
    assert (found[0].losses, found[0].norms) == (found[1].losses, found[1].norms)
    assert_same_state(found[0].state, found[1].state)
    if setting.torch is not None:
        try:
            compare_with_plain(spec, built(spec, setting), setting, found[0])
        except AssertionError:
            if not is_chaotic(spec, setting):
                raise
    return ""


def fails(spec: Spec, setting: Setting, folder: Path) -> str:
    """The error, or the refusal that nothing is to blame for; empty: there is none."""
    try:
        said = check(spec, setting, folder)
    except Untrainable:
        return ""
    except Exception as error:  # noqa: BLE001  any is a finding
        return f"{type(error).__name__}: {error}"
    return "" if not said or is_fair(said, spec) else f"refused: {said}"


def shrunk(spec: Spec, setting: Setting, folder: Path, tries: int = 60) -> Spec:
    """The simplest model of those tried that fails in the same way, as far as the first words tell."""
    goal = fails(spec, setting, folder)[:20]
    simpler = spec.simpler()
    for _ in range(tries):
        other = next(simpler, None)
        if other is None:
            break
        if fails(other, setting, folder)[:20] == goal:
            spec, simpler = other, other.simpler()
    return spec


def test_a_model_of_any_kind_has_the_numbers_of_a_plain_loop_or_is_refused(
    campaign: Campaign, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = 0
    for seed in range(campaign.cases(3, 3000)):
        drawn = random.Random(seed)
        spec, setting = any_spec(drawn), any_setting(drawn)
        with monkeypatch.context() as patch:
            if setting.torch is not None:  # a chunk of int8 is longer
                patch.setattr(fit, "CHUNKS", (4096,))
            if words := fails(spec, setting, tmp_path):
                simple = shrunk(spec, setting, tmp_path)
                pytest.fail(f"seed {seed}: {words}\n{simple}\n{setting}\n{fails(simple, setting, tmp_path)}")
        trained += (tmp_path / "1").exists()
        shutil.rmtree(tmp_path / "1", ignore_errors=True)
    assert trained, "no model was trained"
