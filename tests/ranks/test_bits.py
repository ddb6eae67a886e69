"""Several ranks are one: whatever their number, the same losses, norms and state, bit by bit, as one that sums in as
many strands; and micro-batch by micro-batch the same as block by block.

The model has dropout, a tied head, and a group of every kind; micro-batches are of unequal length.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import penstock
from penstock.planner import fit
from penstock.schedule.place import SCALED
from penstock.state.layout import scales_of
from tests.conftest import Campaign
from tests.models import COLLECTING, MODELS, TIED
from tests.ranks.worlds import together
from tests.training import ADAMW, Result, budget, run_steps, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = MODELS | {"tied": TIED, "collecting": COLLECTING}
STRANDS = 4
LENGTHS = (12, 8, 10, 12, 9, 11, 12, 7)
STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What decides about a run's numbers, besides the number of strands."""

    model: str
    precision: str
    clip: float | None = 0.92
    grad_dtype: str = "fp32"
    optimizer: penstock.AdamW | penstock.Muon = ADAMW

    def settings(self) -> dict[str, Any]:
        return {
            "precision": self.precision,
            "clip_grad_norm": self.clip,
            "grad_dtype": self.grad_dtype,
            "optimizer": self.optimizer,
        }


def of_rank(model: str, mesh: DeviceMesh | None, count: int = STEPS, first: int = 1) -> list[Any]:
    """The micro-batches of each step that are a rank's."""
    steps = steps_of(CASES[model], count, first=first, lengths=LENGTHS)
    rank, size = (0, 1) if mesh is None else (mesh.get_rank(), mesh.size())
    share = len(LENGTHS) // size
    return [micro_batches[rank * share : (rank + 1) * share] for micro_batches in steps]


def results(engine: penstock.Engine, result: Result) -> dict[str, Any]:
    """What must be equal for any number of ranks."""
    return {
        "losses": result.losses,
        "norms": result.norms,
        "tokens": [s.tokens for s in result.stats],
        "clipped": [s.clipped for s in result.stats],
        "parameters": dict(engine.master_parameters()),
        "moments": whole_state(engine),
    }


def whole_state(engine: penstock.Engine) -> dict[str, torch.Tensor]:
    """Every array of the state, of all ranks, without what pads it."""
    resources = engine.inside.resources
    values = resources.values()
    found = {}
    for name, place in values.parameters.items():
        if place.trainable:
            group = int(place.arrays[0].rpartition(".")[2])
            spec, form = resources.groups[group].spec, resources.arrays.form
            for moment in range(form.moments_of(spec)):
                flat = torch.empty(place.shape.numel())
                resources.whole_arrays.fetch((f"moment{moment}.{group}",), place.offset, flat)
                found[f"{name}/{moment}"] = flat
                if (scale := f"scale{moment}.{group}") in scales_of(spec, form):
                    scales = torch.empty(flat.numel() // SCALED, dtype=torch.int16)
                    resources.whole_arrays.fetch((scale,), place.offset, scales)
                    found[f"{name}/{moment}/scales"] = scales
    return found


@dataclass(frozen=True, kw_only=True)
class Run:
    """A way to train that changes no bit: what is asked of ``wrap``, of the budget, and the largest chunk."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    disk: bool = False
    budget: Mapping[str, Any] = field(default_factory=dict)
    chunk: int | None = None


def trained(mesh: DeviceMesh | None, numbers: Numbers, run: Run, disk: Path | None) -> dict[str, Any]:
    """What a run has found, and left."""
    with pytest.MonkeyPatch.context() as patch:
        if run.chunk is not None:
            patch.setattr(fit, "CHUNKS", (run.chunk,))
        where = budget(disk if run.disk else None, **run.budget)
        with wrap(
            CASES[numbers.model], where, mesh=mesh, strands=STRANDS, **numbers.settings(), **run.settings
        ) as engine:
            found = results(engine, run_steps(engine, of_rank(numbers.model, mesh)))
            assert engine.plan.schedule.name == run.settings.get("schedule", "vertical")
            return found


def equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        if isinstance(value, dict):
            assert found[key].keys() == value.keys()
            other = [n for n, t in value.items() if not torch.equal(t, found[key][n])]
            assert not other, f"other bits in {key} of {other}"
        else:
            assert found[key] == value, key


@cache
def alone(numbers: Numbers) -> dict[str, Any]:
    """What one rank does, in memory and block by block."""
    return trained(None, numbers, Run(), None)


FP32, BF16 = (Numbers(model="tied", precision=precision, clip=0.1075) for precision in ("fp32", "bf16"))
FP16 = Numbers(model="gpt2", precision="fp16")
HORIZONTAL = {"schedule": "horizontal"}
WAYS: dict[str, tuple[Numbers, Run]] = {
    "in memory": (FP32, Run()),
    "in memory, bf16": (BF16, Run()),
    "in memory, fp16": (FP16, Run()),
    "one op at a time": (FP32, Run(settings={"overlap": False})),
    "on disk, early": (FP32, Run(disk=True, settings={"speculate": True})),
    "on disk, early, bf16": (BF16, Run(disk=True, settings={"speculate": True})),
    "on disk, after the norm": (BF16, Run(disk=True, settings={"speculate": False})),
    "gradients and saved activations on disk": (
        FP32,
        Run(disk=True, chunk=4096, settings={"speculate": False}, budget={"gradients": "disk", "activations": "disk"}),
    ),
    "weights on the host": (BF16, Run(disk=True, budget={"weights": "host"})),
    "delayed": (FP32, Run(disk=True, settings={"delay": 0.5})),
    "delayed, bf16, after the norm": (BF16, Run(disk=True, settings={"delay": 0.5, "speculate": False})),
    "delayed in memory": (BF16, Run(settings={"delay": 0.5})),
    "small chunks": (BF16, Run(disk=True, chunk=4096)),
    "small chunks, delayed": (FP32, Run(disk=True, chunk=4096, settings={"delay": 0.5})),
    "gradients in bf16": (replace(BF16, grad_dtype="bf16"), Run(disk=True)),
    "no limit": (replace(BF16, clip=None), Run(disk=True)),
    "experts": (Numbers(model="qwen3_moe", precision="fp32", clip=0.5), Run(disk=True, chunk=4096)),
    "a router's loss": (Numbers(model="mixtral", precision="fp32", clip=0.5), Run()),
    "two stacks": (Numbers(model="t5", precision="fp32", clip=0.5), Run(disk=True, settings={"delay": 0.5})),
    "horizontal": (FP32, Run(settings=HORIZONTAL)),
    "horizontal, fp16": (FP16, Run(settings=HORIZONTAL)),
    "horizontal, one op at a time": (BF16, Run(settings=HORIZONTAL | {"overlap": False})),
    "horizontal, on disk, early": (FP32, Run(disk=True, settings=HORIZONTAL | {"speculate": True})),
    "horizontal, on disk, early, bf16": (BF16, Run(disk=True, settings=HORIZONTAL | {"speculate": True})),
    "horizontal, on disk, after the norm": (BF16, Run(disk=True, settings=HORIZONTAL | {"speculate": False})),
    "horizontal, gradients and saved activations on disk": (
        FP32,
        Run(
            disk=True,
            settings=HORIZONTAL | {"speculate": False},
            budget={"gradients": "disk", "activations": "disk"},
        ),
    ),
    "horizontal, weights on the host": (BF16, Run(disk=True, settings=HORIZONTAL, budget={"weights": "host"})),
    "horizontal, small chunks": (BF16, Run(disk=True, chunk=4096, settings=HORIZONTAL)),
    "horizontal, gradients in bf16": (
        replace(BF16, grad_dtype="bf16"),
        Run(disk=True, chunk=4096, settings=HORIZONTAL),
    ),
    "horizontal, no limit": (replace(BF16, clip=None), Run(disk=True, settings=HORIZONTAL)),
    "horizontal, experts": (
        Numbers(model="qwen3_moe", precision="fp32", clip=0.5),
        Run(disk=True, settings=HORIZONTAL),
    ),
    "horizontal, a router's loss": (
        Numbers(model="mixtral", precision="fp32", clip=0.5),
        Run(settings=HORIZONTAL),
    ),
    "horizontal, two stacks": (Numbers(model="t5", precision="fp32", clip=0.5), Run(disk=True, settings=HORIZONTAL)),
}
WAYS |= {
    f"{name}, stage {stage}": (numbers, replace(run, settings={**run.settings, "stage": stage}))
    for name, (numbers, run) in WAYS.items()
    for stage in (0, 2)
}


IN_SHORT = (
    ("in memory, fp16", 2),
    ("gradients and saved activations on disk, stage 0", 2),
    ("small chunks, delayed, stage 2", 4),
    ("experts", 2),
    ("horizontal, on disk, early, bf16", 2),
)
"""Ways and ranks of which every run of the tests takes some; a campaign takes all."""


@pytest.mark.sampled(2, values=False)
@pytest.mark.parametrize(("way", "size"), IN_SHORT)
def test_any_number_of_ranks_gives_the_same_bits(way: str, size: int, tmp_path: Path) -> None:
    compare(way, size, tmp_path / "store")


@pytest.mark.parametrize("way", ["horizontal, fp16", "horizontal, small chunks"])
def test_one_rank_gives_the_same_bits_micro_batch_by_micro_batch(way: str, tmp_path: Path) -> None:
    compare(way, 1, tmp_path / "store")


def test_every_way_of_any_number_of_ranks_gives_the_same_bits(campaign: Campaign, tmp_path: Path) -> None:
    if not campaign.full:
        pytest.skip("ten minutes: make products does it")
    for size in (1, 2, 4):
        for number, way in enumerate(WAYS):
            compare(way, size, tmp_path / f"{number}-{size}")


def compare(way: str, size: int, disk: Path) -> None:
    numbers, run = WAYS[way]
    wanted = alone(numbers)
    if numbers.model in ("gpt2", "tied") and numbers.clip is not None:
        assert set(wanted["clipped"]) == {True, False}
    for found in together(size, trained, numbers, run, disk) if size > 1 else [trained(None, numbers, run, disk)]:
        equal(found, wanted)
