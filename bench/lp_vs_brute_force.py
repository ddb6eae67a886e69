"""The planner's choice beside the best of a grid, both by the simulator: is the search missing anything?

    python -m bench.lp_vs_brute_force [--pairs N]

The grid: both families, three chunk sizes, three depths, saved activations and waiting gradients on every tier, shares
of weights and state on every tier in halves and quarters, the last groups or every n-th. A point of the grid is
simulated unless the sum of some lane's work already takes longer than the best found, which no order of the ops can
beat. Required: the choice takes at most 3% longer than the best of the grid, on every pair.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from bench.harness import BenchError, write_section
from penstock.config import Budget, Family, Tier
from penstock.hardware.profiles import shipped_machine
from penstock.hardware.sharing import room_of_each
from penstock.planner.classes import GroupClass, Home
from penstock.planner.fit import base_placement, settings_of, with_keep
from penstock.planner.phase_costs import PhaseCosts
from penstock.planner.probes import Probes
from penstock.planner.question import Question
from penstock.planner.request import Request
from penstock.planner.rounding import PATTERNS, assign
from penstock.planner.search import search
from penstock.planner.task import Task
from penstock.schedule.ir.worlds import World
from penstock.schedule.place import Depths, Settings
from penstock.shape.decoders import from_config
from penstock.shape.model import ModelShape
from penstock.shape.shipped import CONFIGS
from penstock.sim.simulate import simulate

WITHIN = 0.03
_DEPTHS = (
    Depths(),
    Depths(weights=1, gradients=1, stage_in=2, stage_out=2, state=2, activations=2),
    Depths(weights=3, gradients=3, stage_in=6, stage_out=6, state=6, activations=6),
)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A model on a machine, cut down to ``layers`` blocks so that a grid can be simulated."""

    name: str
    model: str
    layers: int
    machine: str
    device: str
    host: str
    micro_batches: int
    micro_batch_size: int = 1
    sequence_length: int = 2048
    waits: bool = False

    def task(self) -> Task:
        found = shipped_machine(self.machine)
        disk = [drive.path for drive in found.drives]
        return Task(
            shape=_shortened(self.model, self.layers),
            machine=found,
            budget=Budget(device=self.device, host=self.host, disk=disk),
            sequence_length=self.sequence_length,
            precision="bf16",
            optimizer="adamw",
            moment_count=2,
            clip_grad_norm=1.0 if self.waits else None,
            families=("vertical", "horizontal"),
            disk_free=room_of_each(found.drives, 1),
        )

    def question(self) -> Question:
        return self.task().question(self.micro_batch_size, self.micro_batches)


def _shortened(model: str, layers: int) -> ModelShape:
    config = dict(CONFIGS[model])
    config["n_layer" if "n_layer" in config else "num_hidden_layers"] = layers
    shape = from_config(config, name=f"{model}, {layers} blocks")
    assert shape is not None
    return shape


def _pair(name: str, model: str, layers: int, machine: str, device: int, host: int, m: int, **more: Any) -> Pair:
    """``device``, ``host``: GiB."""
    return Pair(
        name=name,
        model=model,
        layers=layers,
        machine=machine,
        device=f"{device}GiB",
        host=f"{host}GiB",
        micro_batches=m,
        **more,
    )


PAIRS = (
    _pair("disk bound", "gpt-13b", 16, "a100-40g", 12, 24, 4),
    _pair("disk and compute", "gpt-13b", 16, "a100-40g", 12, 24, 16),
    _pair("clipping", "gpt-13b", 16, "a100-80g", 16, 40, 8, waits=True),
    _pair("consumer", "llama-8b", 16, "rtx4090-24g", 16, 20, 8, micro_batch_size=2),
    _pair("workstation", "qwen3-8b", 18, "workstation", 10, 24, 8),
    _pair("half in memory", "qwen3-14b", 16, "h100-80g", 20, 64, 8),
    _pair("fast link", "llama-70b", 12, "gh200", 48, 96, 8),
    _pair("large blocks", "gpt-65b", 16, "a100-40g", 24, 48, 8),
)


def grid(question: Question) -> Iterator[tuple[Request, Settings]]:
    """Every point of the grid that fits."""
    families: tuple[Family, ...] = ("vertical", "horizontal")
    for family in families:
        request = replace(question.request, family=family)
        classes = _by_size(request)
        for chunk, depths in product(_chunks(request), _DEPTHS):
            base = settings_of(request, base_placement(request), chunk, depths)
            for placed in _placed(base, classes, question):
                for settings in dict.fromkeys((placed, with_keep(request, placed))):
                    if request.exceeded(settings, question.disk_free) is None:
                        yield request, settings


def _by_size(request: Request) -> list[GroupClass]:
    """Groups of one size together, with the homes that any of them may have."""
    found: dict[int, list[GroupClass]] = {}
    for kind in Probes(request, wait=request.wait, speculate=False, keep=False).classes:
        found.setdefault(request.program.groups[kind.members[0]].trainable, []).append(kind)
    return [
        GroupClass(members=tuple(sorted(g for kind in kinds for g in kind.members)), homes=kinds[0].homes)
        for kinds in found.values()
    ]


def _chunks(request: Request) -> Sequence[int]:
    """A third of the largest block, about, and chunks two and four times as small."""
    largest = max(group.trainable for group in request.program.groups)
    power = max(largest // 3, 1 << 16).bit_length()
    return [1 << power, 1 << (power - 1), 1 << (power - 2)]


def _placed(base: Settings, classes: Sequence[GroupClass], question: Question) -> Iterator[Settings]:
    tiers: tuple[Tier, ...] = ("device", "host", "disk")
    waits = ("host", "disk") if base.wait else ("host",)
    seen = set()
    for homes, activations, gradients in product(_homes(classes), tiers, waits):
        place = replace(
            base.place,
            weights=tuple(home[0] for home in homes),
            state=tuple(home[1] for home in homes),
            activations=activations,
            gradients=gradients,
        )
        if place not in seen:
            seen.add(place)
            yield replace(base, place=place)


def _homes(classes: Sequence[GroupClass]) -> Iterator[list[Home]]:
    """Homes of all groups by index: the largest class in shares, the others in host memory."""
    largest = max(classes, key=lambda kind: len(kind.members))
    n = len(largest.members)
    halves, quarters = (0.0, 0.5, 1.0), (0.0, 0.25, 0.5, 0.75, 1.0)
    for device, up, weights, state, pattern in product(halves, (0.0, 1.0), halves, quarters, PATTERNS):
        on_device = round(device * n)
        both = round(device * n * up)
        rest = n - on_device
        counts: dict[Home, int] = {("device", "device"): both}
        host_weights = round(weights * rest)
        in_host = round(state * (n - both))
        for home, count in _paired(on_device - both, host_weights, rest - host_weights, in_host):
            counts[home] = counts.get(home, 0) + count
        if any(home not in largest.homes for home, count in counts.items() if count):
            continue
        found: dict[int, Home] = {}
        for kind in classes:
            found |= assign(kind, counts if kind is largest else {("host", "host"): len(kind.members)}, pattern)
        yield [found[g] for g in range(len(found))]


def _paired(device: int, host: int, disk: int, state_host: int) -> Iterator[tuple[Home, int]]:
    """So many groups with weights on each tier; the first ``state_host`` of them have their state in host memory."""
    rows: tuple[tuple[Tier, int], ...] = (("device", device), ("host", host), ("disk", disk))
    for tier, count in rows:
        up = min(state_host, count)
        state_host -= up
        yield (tier, "host"), up
        yield (tier, "disk"), count - up


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best of a grid. ``points``: those that fit; ``simulated``: those that were not ruled out by a lane's work."""

    seconds: float
    points: int
    simulated: int


def brute_force(question: Question) -> Best:
    """Simulate the grid."""
    loads: dict[tuple[Family, int], PhaseCosts] = {}
    points = []
    for request, settings in grid(question):
        key = (request.family, settings.chunk)
        if key not in loads:
            loads[key] = PhaseCosts(request, settings, question.costs)
        work = loads[key].of(settings.place).sum(axis=0).max()
        points.append((work, len(points), request, settings))
    seconds, simulated = float("inf"), 0
    for work, _, request, settings in sorted(points, key=lambda point: point[:2]):
        if work >= seconds * 0.999:
            continue
        simulated += 1
        seconds = min(seconds, simulate(World.of(request.build(settings)), question.costs).time)
    return Best(seconds=seconds, points=len(points), simulated=simulated)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=len(PAIRS), help="only the first so many")
    arguments = parser.parse_args()
    rows, worst = [], 0.0
    for pair in PAIRS[: arguments.pairs]:
        begin = time.process_time()
        choice = search(pair.question())
        took = time.process_time() - begin
        best = brute_force(pair.question())
        over = choice.seconds / best.seconds - 1
        grid_size = f"{best.simulated:,}/{best.points:,}"
        worst = max(worst, over)
        rows.append(
            f"| {pair.name} | {pair.model}, {pair.layers} blocks, M = {pair.micro_batches} | {pair.machine} | "
            f"{choice.seconds:.2f} s, {choice.request.family} | {best.seconds:.2f} s of {grid_size} | "
            f"{over:+.1%} | {choice.simulated} in {took:.1f} s |"
        )
        print(rows[-1], flush=True)
    header = "| pair | model | machine | planner | best of the grid (simulated/fitting) | planner over it | simulated |"
    text = "\n".join([header, "|---" * 7 + "|", *rows, "", f"Worst: {worst:+.1%}; required: at most {WITHIN:+.0%}."])
    if arguments.pairs >= len(PAIRS):
        write_section("The planner's choice beside a brute-force grid", text)
    return 0 if worst <= WITHIN else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as error:
        sys.exit(str(error))
