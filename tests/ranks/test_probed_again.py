"""Ranks whose models are changed between two steps probe them again together, also where only one of them was."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn
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
    step on, models of these ranks have a hook that only looks, as those that log have on one rank."""
    known = replace(MACHINE, drives=(replace(DRIVE, path=str(folder)),), between=(BETWEEN,))
    with wrap(PLAIN, budget(folder), mesh=mesh, plan=known) as engine:
        step: list[Any] = PLAIN.micro_batches(2)
        losses = [engine.step(step).loss, engine.evaluate(step)]
        if mesh.get_rank() in hooked:
            engine.model.register_forward_hook(lambda module, args, output: None)
        return [*losses, engine.step(step).loss, engine.evaluate(step), engine.step(step).loss]


@pytest.mark.parametrize("run", [together, pipeline])
def test_a_hook_on_the_model_of_one_rank_alone_has_all_probe_theirs(run: Any, tmp_path: Path) -> None:
    without, of_one = (
        run(2, losses_with_hooks, tmp_path / str(number), hooked) for number, hooked in enumerate([(), (1,)])
    )
    assert of_one == without


def losses_with_a_hook_that_comes_and_goes(mesh: DeviceMesh, folder: Path, hooked: tuple[int, ...]) -> Any:
    """Of six steps; and how many of this rank's findings they have used."""

    def look(module: nn.Module, args: Any, output: Any) -> None:
        pass

    known = replace(MACHINE, drives=(replace(DRIVE, path=str(folder)),), between=(BETWEEN,))
    with wrap(PLAIN, budget(folder), mesh=mesh, plan=known) as engine:
        losses, found = [], []
        for i in range(6):
            handle = engine.model.register_forward_hook(look) if mesh.get_rank() in hooked and i % 2 else None
            losses.append(engine.step(PLAIN.micro_batches(2, seed=i)).loss)
            found += engine.inside.planning.probing.found[True].values()
            if handle is not None:
                handle.remove()
        return losses, len({id(probed) for probed in found})


@pytest.mark.parametrize("run", [together, pipeline])
def test_ranks_find_again_together_what_they_knew_of_the_model_of_one_that_alternates(run: Any, tmp_path: Path) -> None:
    without, of_one = (
        run(2, losses_with_a_hook_that_comes_and_goes, tmp_path / str(number), hooked)
        for number, hooked in enumerate([(), (1,)])
    )
    assert [count for _, count in without] == [1, 1]
    assert of_one == [(losses, 2) for losses, _ in without]
