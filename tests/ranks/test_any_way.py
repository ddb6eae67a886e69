"""Ranks do what one process does, whatever is asked of them at once: drawn at random, as nobody would think of it.

A case has a model, parts of which may be frozen, and settings that decide the numbers; ``Way`` is how several ranks get
there, which must not: schedule, stage, tiers, chunks, hosts, and what happens between the steps.
"""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import penstock
from penstock.planner import fit
from tests.conftest import Campaign
from tests.models import MODELS
from tests.ranks.test_bits import equal, whole_state
from tests.ranks.worlds import together
from tests.training import ADAMW, budget, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 3
LENGTHS = (12, 8, 10, 12, 9, 11, 12, 7, 12, 10, 8, 9)
NAMES = ("llama", "qwen3", "gpt2", "mixtral", "qwen3_moe", "gemma3", "bert", "t5", "vit")
MUON = penstock.Muon(lr=0.02, adamw=ADAMW)
FROZEN = ("", "", "", "embed", "norm", ".1.", "lm_head", "mlp")
"""what parameters that are not trained have in their names"""


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What decides about the numbers."""

    model: str
    frozen: str
    strands: int
    settings: dict[str, Any]

    def build(self) -> nn.Module:
        model = MODELS[self.model].model()
        names = [name for name, _ in model.named_parameters()]
        for name, parameter in model.named_parameters():
            if self.frozen and self.frozen in name and name != names[-1]:
                parameter.requires_grad = False
        return model


@dataclass(frozen=True, kw_only=True)
class Way:
    """How they are got to."""

    size: int
    settings: dict[str, Any]
    budget: dict[str, Any]
    disk: bool
    chunk: int
    hosts: int = 1
    between: dict[int, str] = field(default_factory=dict)
    """step after which something happens -> what: evaluate, save and load, close and go on, or let weights cross
    between hosts once a step, or for each use, where it was the other"""


def numbers_of(rng: Random) -> Numbers:
    clip = rng.choice((None, 0.5, 0.92, 50.0))
    settings: dict[str, Any] = {
        "precision": rng.choice(("fp32", "bf16", "bf16", "fp16")),
        "clip_grad_norm": clip,
        "grad_dtype": rng.choice(("fp32", "fp32", "bf16")),
    }
    made = rng.choice((penstock.SGD(lr=0.05, momentum=0.9), MUON, ADAMW, ADAMW))
    settings["optimizer"] = replace(made, moments=rng.choice(("fp32", "fp32", "bf16", "int8")))
    return Numbers(
        model=rng.choice(NAMES), frozen=rng.choice(FROZEN), strands=rng.choice((2, 4, 4, 8)), settings=settings
    )


def way_of(rng: Random, numbers: Numbers) -> Way:
    size = rng.choice([n for n in (1, 2, 2, 4) if n <= numbers.strands])
    settings: dict[str, Any] = {"schedule": rng.choice(("vertical", "vertical", "horizontal"))}
    settings["stage"] = rng.choice((0, 1, 2, 3, None))
    settings["overlap"] = rng.random() < 0.8
    disk = rng.random() < 0.7
    places: dict[str, Any] = {}
    if disk:
        places["weights"], places["state"] = rng.choice((("disk", "disk"), ("disk", "disk"), ("host", "disk")))
        places["durability"] = rng.choice(("step", "step", "interval", "none", None))
        if places["durability"] == "interval":
            places["interval"] = rng.choice((1, 2))
            if rng.random() < 0.5:
                places |= {"weights": "host", "state": "host"}
        elif rng.random() < 0.2:
            places |= {"slots": 1, "durability": None}
    norm = numbers.settings["clip_grad_norm"] is not None or numbers.settings["precision"] == "fp16"
    if settings["schedule"] == "vertical":
        settings["delay"] = rng.choice((None, 0, 0.5, 1))
    can = disk and norm and places.get("slots") != 1 and places["durability"] != "interval"
    if can and places["state"] == "disk":
        settings["speculate"] = rng.choice((None, True, False))
    if disk and norm and not settings.get("speculate") and rng.random() < 0.3:
        places["gradients"] = "disk"
    if disk and rng.random() < 0.3:
        places["activations"] = "disk"
    compact = numbers.settings["optimizer"].moments != "fp32"
    hosts = rng.choice([n for n in (1, 2, 2, 4) if n <= size])
    happens = ("evaluate", "snapshot", *["again"] * disk, *["crossing"] * (2 * (hosts > 1)))
    between = {step: rng.choice(happens) for step in range(1, STEPS)}
    return Way(
        size=size,
        settings=settings,
        budget=places,
        disk=disk,
        chunk=rng.choice((1 << 16, 1 << 18) if compact else (4096, 1 << 14, 1 << 18)),
        hosts=hosts,
        between={step: what for step, what in between.items() if rng.random() < 0.5},
    )


def trained(mesh: DeviceMesh | None, numbers: Numbers, way: Way, folder: Path) -> dict[str, Any]:
    rank, size = (0, 1) if mesh is None else (mesh.get_rank(), mesh.size())
    share, case = len(LENGTHS) // size, MODELS[numbers.model]
    steps = [step[rank * share : (rank + 1) * share] for step in steps_of(case, STEPS, lengths=LENGTHS)]
    where = budget(folder / "store" if way.disk else None, **way.budget)
    if mesh is not None:
        os.environ["GROUP_RANK"] = str(rank * way.hosts // size)  # as torchrun on several hosts says it

    def opened() -> penstock.Engine:
        given = numbers.settings | way.settings | {"strands": numbers.strands}
        return wrap(case, where, model=numbers.build(), mesh=mesh, **given)

    found: dict[str, Any] = {"losses": [], "norms": [], "clipped": []}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "CHUNKS", (way.chunk,))
        engine = opened()
        try:
            for number, micro_batches in enumerate(steps, start=1):
                stats = engine.step(micro_batches)
                found["losses"].append(stats.loss)
                found["norms"].append(stats.grad_norm)
                found["clipped"].append(stats.clipped)
                match way.between.get(number):
                    case "evaluate":
                        engine.evaluate(micro_batches)
                    case "snapshot":
                        engine.save(folder / f"snapshot-{number}")
                        engine.load(folder / f"snapshot-{number}")
                    case "again":
                        engine.close()
                        engine = opened()
                        assert engine.step_count == number
                    case "crossing" if engine.inside.planning.request.may_cross_once:
                        settings = engine.plan.settings
                        engine.inside.planning.change(replace(settings, secondary=not settings.secondary))
            return found | {"parameters": dict(engine.master_parameters()), "moments": whole_state(engine)}
        finally:
            engine.close()


def test_ranks_do_what_one_process_does_whatever_is_asked_at_once(campaign: Campaign, tmp_path: Path) -> None:
    several = 0
    for seed in range(campaign.cases(1, 150)):
        rng = Random(seed)
        numbers = numbers_of(rng)
        way = way_of(rng, numbers)
        plain = Way(size=1, settings={}, budget={}, disk=False, chunk=1 << 20)
        wanted = trained(None, numbers, plain, tmp_path)
        (folder := tmp_path / str(seed)).mkdir()
        asked = (numbers, way, folder)
        try:
            for found in together(way.size, trained, *asked) if way.size > 1 else [trained(None, *asked)]:
                equal(found, wanted)
        except BaseException as error:
            error.add_note(f"seed {seed}: {numbers}, {way}")
            raise
        several += way.size > 1
    campaign.found(f"{several} random ways of several ranks to train: all with the bits of one process")
