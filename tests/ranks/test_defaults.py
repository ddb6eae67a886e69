"""Settings of torch for a whole process change nothing that ranks do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from penstock.state.values import Values
from tests.models import PLAIN
from tests.ranks.worlds import World
from tests.training import budget, wrap

CASE = PLAIN


def trained(mesh: DeviceMesh, device: str | None, where: Path) -> list[float]:
    """Losses of steps, of an evaluation and behind a snapshot, and what the first rank reads of all."""
    model, micro_batches = CASE.model(), CASE.micro_batches(4)
    if mesh.mesh_dim_names != ("pp",):
        micro_batches = micro_batches[2 * mesh.get_rank() :][:2]
    torch.set_default_device(device)
    found: list[float] = []

    def read(values: Values) -> None:
        found.extend(float(values.parameter(name).sum()) for name in values.parameters)

    with wrap(CASE, budget(where.with_suffix(".store")), model=model, plan=None, mesh=mesh) as engine:
        found += [engine.step(micro_batches).loss, engine.evaluate(micro_batches)]
        engine.save(where)
        engine.load(where)
        engine.on_first("read", read)
        found.append(engine.step(micro_batches).loss)
    return found


@pytest.mark.parametrize("axis", ["dp_shard", "pp"])
def test_the_default_device_changes_no_number(axis: str, tmp_path: Path) -> None:
    """As of who builds a model on the meta device, or has set the GPU for all that is his."""
    found: list[Any] = [World(2, trained, d, tmp_path / str(d), axis=axis).outcomes() for d in (None, "meta")]
    assert found[0] == found[1]
    assert len(found[0][0]) > 3
