"""Several ranks that change their plan between steps, all to the same one, give the bits of one rank that does not."""

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

from tests.other_plans import other_plans
from tests.ranks.test_bits import BF16, CASES, STRANDS, alone, equal, of_rank, results
from tests.ranks.worlds import together
from tests.training import Result, budget, state_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")


def changing(mesh: DeviceMesh, disk: Path) -> dict[str, Any]:
    """What a run has found and left whose plan was changed before each step."""
    where = budget(disk, weights=None, state=None)
    with wrap(CASES[BF16.model], where, mesh=mesh, strands=STRANDS, **BF16.settings()) as engine:
        steps = of_rank(BF16.model, mesh)
        engine.prepare(steps[0])
        plans, stats = other_plans(engine.inside.planning.request, seed=2), []
        for micro_batches in steps:
            chosen = next(plans)
            engine.inside.planning.change(chosen)
            stats.append(engine.step(micro_batches))
            assert engine.plan.settings == chosen
        result = Result(
            losses=[s.loss for s in stats], norms=[s.grad_norm for s in stats], state=state_of(engine), stats=stats
        )
        return results(engine, result)


def test_ranks_that_change_their_plan_give_the_same_bits(tmp_path: Path) -> None:
    for found in together(2, changing, tmp_path / "store"):
        equal(found, alone(BF16))
