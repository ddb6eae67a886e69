"""A gradient that is infinite: all ranks name it alike."""

from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import NonFiniteError
from tests.engine.test_repair import CASE, steps
from tests.ranks.worlds import pipeline, together
from tests.training import budget, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK = 2


def spoiled(mesh: DeviceMesh, *, by_all: bool) -> list[str]:
    """The words on two steps that are skipped and one that is refused; one rank or all are given the fault."""
    good, bad, _ = steps(BLOCK, 1, float("inf") if by_all or mesh.get_rank() else 1.0)
    found = []
    how: Any
    for how in ({"clip_grad_norm": 1.0}, {"precision": "fp16", "clip_grad_norm": None}, {"clip_grad_norm": None}):
        with wrap(CASE, budget(None), mesh=mesh, **how) as engine:
            engine.step(good)
            try:
                found.append(str(engine.step(bad).non_finite))
            except NonFiniteError as error:
                found.append(str(error))
    return found


@pytest.mark.parametrize("run", [pipeline, together])
def test_all_ranks_name_the_gradient_alike(run: Any) -> None:
    first, other = run(2, spoiled, by_all=run is pipeline)
    assert first == other
    assert [f"layers.{BLOCK}.up.bias (layers.{BLOCK})" in said for said in first] == [True] * 3, first
    assert [said.startswith("step 2: ") for said in first] == [False, False, True]
