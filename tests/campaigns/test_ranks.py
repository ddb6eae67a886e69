"""Ranks that are killed at any moment, one of them or all, go on from the last step that any of them had returned, or
the one that was being committed, and end with the bits of a run that nobody disturbed.
"""

import os
import signal
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.conftest import Campaign
from tests.models import MODELS
from tests.ranks.worlds import RankFailedError, World, together
from tests.training import budget, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = MODELS["llama"]
LENGTHS = (12, 8, 10, 12)
STEPS = 6
WAYS: tuple[dict[str, Any], ...] = (
    {"precision": "fp32"},
    {"precision": "bf16", "delay": 0.5},
    {"precision": "bf16", "speculate": False},
    {"precision": "fp32", "delay": 0.5, "clip_grad_norm": 0.6},
)


def go_on(
    mesh: DeviceMesh, disk: Path, settings: dict[str, Any]
) -> tuple[int, dict[int, float], dict[str, torch.Tensor]]:
    """Train to the last step from wherever a store is; each step is noted once it has returned."""
    share, rank, losses = len(LENGTHS) // mesh.size(), mesh.get_rank(), {}
    with wrap(CASE, budget(disk), mesh=mesh, strands=4, **settings) as engine:
        begun = engine.step_count
        for step, micro_batches in enumerate(steps_of(CASE, STEPS, lengths=LENGTHS)[begun:], start=begun + 1):
            losses[step] = engine.step(micro_batches[rank * share : (rank + 1) * share]).loss
            noted = os.open(disk.parent / f"returned-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(noted, b"%d\n" % step)
            os.close(noted)
        return begun, losses, dict(engine.master_parameters())


def returned(disk: Path) -> int:
    """The last step that any rank has returned."""
    return max((int(n) for file in disk.parent.glob("returned-*") for n in file.read_text().split()), default=0)


def kill(world: World, rng: Random, longest: float) -> int:
    """Kill one rank, or all of them, at some moment; how many."""
    time.sleep(rng.uniform(0, longest))
    victims = [rng.randrange(world.size)] if rng.random() < 0.75 else list(range(world.size))
    for victim in victims:
        pid = world.processes[victim].pid
        if pid is not None and world.processes[victim].exitcode is None:
            os.kill(pid, signal.SIGKILL)
    return len(victims)


def test_ranks_that_are_killed_go_on_bit_by_bit(campaign: Campaign, tmp_path: Path) -> None:
    kills = alone = 0
    for case in range(campaign.cases(1, 60)):
        rng = Random(case)
        settings, size, folder = WAYS[case % len(WAYS)], rng.choice((2, 2, 4)), tmp_path / str(case)
        (folder / "whole").mkdir(parents=True)
        (folder / "killed").mkdir()
        _, wanted, parameters = together(size, go_on, folder / "whole" / "store", settings)[0]
        disk, losses = folder / "killed" / "store", dict[int, float]()
        for attempt in range(8):
            before = returned(disk)
            world = World(size, go_on, disk, settings)
            if attempt < (3 if campaign.full else 1):
                count = kill(world, rng, longest=3.0)
                kills, alone = kills + count, alone + (count == 1)
            found = world.outcomes()
            for one in found:
                if isinstance(one, RankFailedError):
                    assert one.kind == "RankError", one
                elif one is not None:
                    begun, new, last = one
                    late = bool(settings.get("delay"))  # then the last step is committed within the next one
                    assert before - late <= begun <= before + 1, (case, attempt, before, begun)
                    losses |= new
            if all(isinstance(one, tuple) for one in found):
                break
        else:
            raise AssertionError(f"case {case} does not end")
        assert {step: losses[step] for step in losses} == {step: wanted[step] for step in losses}, case
        assert all(torch.equal(last[name], tensor) for name, tensor in parameters.items()), case
    campaign.found(f"{kills} ranks killed, {alone} of them alone: every run went on from its last step, bit by bit")
