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


def all_of_it(mesh: DeviceMesh, folder: Path) -> list[tuple[Any, Any]]:
    """Of each of the two without a hook, and with those of one rank. Any plan will do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.planner.search.SIMULATIONS", 1)
        return [
            (what(mesh, folder / what.__name__, ()), what(mesh, folder / f"{what.__name__}-1", (1,)))
            for what in (losses_with_hooks, losses_with_a_hook_that_comes_and_goes)
        ]


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("run", [together, pipeline])
def test_a_hook_on_the_model_of_one_rank_alone_has_all_probe_theirs_or_find_again_what_they_knew(
    run: Any, tmp_path: Path
) -> None:
    for (without, of_one), (steady, alternating) in run(2, all_of_it, tmp_path):
        assert of_one == without
        assert steady[1] == 1
        assert alternating == (steady[0], 2)
