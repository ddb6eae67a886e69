"""Ranks whose models are changed between two steps probe them again together, also where only one of them was."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

from penstock.hardware.machine import Between
from tests.models import PLAIN
from tests.questions import DRIVE, MACHINE
from tests.ranks.worlds import pipeline, together
from tests.training import budget, wrap

BETWEEN = Between(ranks=2, bandwidth=1e8, latency=1e-3)

pytestmark = pytest.mark.usefixtures("one_thread")


def losses_with_hooks(mesh: DeviceMesh, folder: Path, hooked: tuple[int, ...]) -> list[float]:
    """Of steps and evaluations on a machine that is known, so that probes are timed: all ranks at once. From the second
    step on, but for the last, models of these ranks have a hook that only looks, as those that log have on one rank."""
    known = replace(MACHINE, drives=(replace(DRIVE, path=str(folder)),), between=(BETWEEN,))
    with wrap(PLAIN, budget(folder), mesh=mesh, plan=known) as engine:
        step: list[Any] = PLAIN.micro_batches(2)
        losses, handle = [engine.step(step).loss, engine.evaluate(step)], None
        if mesh.get_rank() in hooked:
            handle = engine.model.register_forward_hook(lambda module, args, output: None)
        losses += [engine.step(step).loss, engine.evaluate(step), engine.step(step).loss]
        if handle is not None:
            handle.remove()
        return [*losses, engine.step(step).loss]


def all_of_it(mesh: DeviceMesh, folder: Path) -> list[list[float]]:
    """Without a hook, and with that of one rank. Any plan will do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.planner.search.SIMULATIONS", 1)
        return [losses_with_hooks(mesh, folder / f"{len(hooked)}", hooked) for hooked in ((), (1,))]


@pytest.mark.parametrize("run", [together, pipeline])
def test_a_hook_on_the_model_of_one_rank_alone_has_all_probe_theirs(run: Any, tmp_path: Path) -> None:
    for without, of_one in run(2, all_of_it, tmp_path):
        assert of_one == without
