"""Small training runs, and everything there is to know about how they ended.

``train`` runs an engine for a few steps; a ``Result`` holds what two runs must agree on: losses, gradient norms, every
array of the state with its padding, and the model's buffers. ``plain_loop`` is the same training by plain PyTorch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import penstock
from penstock.engine.fate import State
from penstock.state.memory import HostSlab
from penstock.tape.blocks import Block
from tests.models import Case, MicroBatch
from tests.tape_reference import SEED, plain_step

MicroBatches = list[MicroBatch]
LENGTHS = (12, 8, 10)
"""Micro-batches of a step are of unequal length: their weights differ, and plans must have room for the longest."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run did and what it left: bits, not approximations."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    stats: list[penstock.StepStats] = field(default_factory=list)
    placed: set[str] = field(default_factory=set)
    """tiers that an array of the state lived on at the end"""


def steps_of(case: Case, count: int, *, first: int = 1, lengths: Sequence[int] = LENGTHS) -> list[MicroBatches]:
    """The micro-batches of steps ``first``, ``first + 1``, ...; step i has the same ones in every run."""
    return [
        [case.micro_batches(1, seed=100 * step + m, length=length)[0] for m, length in enumerate(lengths)]
        for step in range(first, first + count)
    ]


def budget(disk: Path | Sequence[Path] | None, **places: Any) -> penstock.Budget:
    """Room for everything; what is on disk, and what is not, is given by ``places``."""
    if disk is not None:
        places = {"weights": "disk", "state": "disk"} | places
    return penstock.Budget(**{"device": "64MiB", "host": "64MiB", "disk": disk} | places)


AT_ONCE: Mapping[str, Any] = {"delay": 0}
"""Nothing is left to the next step, so that a step is committed when it returns. A plan may choose otherwise."""

WITHIN = 100.0
"""A limit of the norm that steps of the small models keep to. They are over that of the settings, 1.0: each step that
speculates then runs twice, which is the subject of tests that say a limit of their own."""

ADAMW = penstock.AdamW(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


def wrap(case: Case, where: penstock.Budget, *, model: nn.Module | None = None, **settings: Any) -> penstock.Engine:
    """An engine on a case's model (a new one if none is given), on the CPU unless ``settings`` say otherwise; of ranks
    on what their mesh is of."""
    mesh = settings.get("mesh")
    device = "cpu" if mesh is None else mesh.device_type
    common = {"optimizer": ADAMW, "clip_grad_norm": WITHIN, "seed": SEED, "loss_fn": case.loss_fn, "device": device}
    settings = common | {"precision": "fp32"} | settings
    return penstock.wrap(case.model() if model is None else model, budget=where, **settings)


def state_of(engine: penstock.Engine) -> dict[str, torch.Tensor]:
    """A copy of every array of an engine's state, and of the model's buffers, with all delayed steps done."""
    engine.inside.rest()
    arrays = engine.inside.resources.arrays
    found = {}
    for name, part in arrays.parts.items():
        slab = HostSlab(part.nbytes)
        piece = slab.bytes[: part.nbytes].view(part.dtype)
        arrays.read(name, 0, piece)
        found[name] = piece.clone()
        del piece
        slab.close()
    return found | {f"buffer {n}": b.detach().clone().cpu() for n, b in engine.model.named_buffers()}


def abandon(engine: penstock.Engine) -> None:
    """Leave an engine as a kill does: closing it brings nothing to its store."""
    engine.inside.durability.state = State.BROKEN


def run_steps(engine: penstock.Engine, steps: Sequence[MicroBatches]) -> Result:
    """Run the steps on an engine and look at it; leaves it open."""
    return result_of(engine, [engine.step(micro_batches) for micro_batches in steps])


def result_of(engine: penstock.Engine, stats: list[penstock.StepStats]) -> Result:
    """Of an engine that has taken steps, and does nothing more."""
    arrays = engine.inside.resources.arrays
    return Result(
        losses=[s.loss for s in stats],
        norms=[s.grad_norm for s in stats],
        state=state_of(engine),
        stats=stats,
        placed={arrays.tier_of(name) for name in arrays.parts} | {arrays.found_on(g.index) for g in arrays.groups},
    )


def train(case: Case, where: penstock.Budget, steps: Sequence[MicroBatches], **settings: Any) -> Result:
    """Wrap, run the steps, close."""
    with wrap(case, where, **settings) as engine:
        return run_steps(engine, steps)


def assert_same_state(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [n for n in a if not torch.equal(a[n].flatten().view(torch.uint8), b[n].flatten().view(torch.uint8))]
    assert not different, f"other bits in {different}"


def assert_same(a: Result, b: Result) -> None:
    """Losses, norms and state of two runs are equal, bit by bit."""
    assert a.losses == b.losses
    assert a.norms == b.norms
    assert_same_state(a.state, b.state)


def items(model: nn.Module, micro_batch: MicroBatch) -> int:
    """What a micro-batch's mean loss is the mean over, by the definitions of the models' own losses."""
    labels = micro_batch.get("labels")
    if labels is None:
        return 1
    shifted = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    return int((labels[:, 1:] if shifted else labels).ne(-100).sum())


@dataclass(frozen=True, kw_only=True)
class Plain:
    """What a plain PyTorch loop did: ``parameters`` are all parameters in the order of their names."""

    losses: list[float]
    norms: list[float]
    parameters: torch.Tensor


def plain_loop(
    case: Case,
    model: nn.Module,
    engine: penstock.Engine,
    steps: Sequence[MicroBatches],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    clip: float | None,
    grad_dtype: torch.dtype = torch.float32,
) -> Plain:
    """Gradient accumulation and a torch optimizer on ``model``, drawing the random numbers that the engine draws.

    ``grad_dtype``: what the accumulated gradients are rounded to, before all else. Only where blocks begin is taken
    from ``engine``, which has run a step.
    """
    named = dict(model.named_modules())
    blocks = [Block(name=site.name, module=named[site.name]) for site in engine.inside.resources.tape.sites]
    torch_optimizer = optimizer(model)
    losses, norms = [], []
    for number, micro_batches in enumerate(steps, start=1):
        counts = [items(model, mb) for mb in micro_batches]
        weights = [count / sum(counts) for count in counts]
        each, _ = plain_step(case, model, blocks, engine.plan.program.stages, micro_batches, weights, number)
        losses.append(sum(w * float(loss) for w, loss in zip(weights, each, strict=True)))
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(parameter.grad.to(grad_dtype))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip if clip is not None else torch.inf)))
        torch_optimizer.step()
    flat = [p.detach().flatten() for _, p in sorted(model.named_parameters())]
    return Plain(losses=losses, norms=norms, parameters=torch.cat(flat))


def torch_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """torch's own, with settings that ``plain_loop`` and an engine are compared with."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


def master_of(engine: penstock.Engine) -> torch.Tensor:
    """All of an engine's parameters, in the order of their names."""
    return torch.cat([tensor.flatten() for _, tensor in sorted(engine.master_parameters())])


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """|found - wanted| / |wanted| in the L2 norm."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within, torch's default dtype is another one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
