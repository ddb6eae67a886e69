"""Attributes that a forward puts on the model, of a pipeline: the first rank has all of the model's own code."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.ranks.test_bits import equal, results
from tests.ranks.worlds import RankFailedError, pipeline
from tests.stacks import Stack, of
from tests.tape.test_own_values import Scaled
from tests.training import budget, run_steps, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")


def read_behind(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.scale = float(x.detach().abs().max())
    for layer in model.layers:
        x = layer(x)
    return x * model.scale


def put_on_blocks(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        layer.scale = 1 / x.shape[1]
        x = layer(x)
    return x


def trained(mesh: DeviceMesh | None, run: Any, disk: Path) -> Any:
    case = of(lambda: Stack(Scaled, run))
    with wrap(case, budget(disk), mesh=mesh) as engine:
        return results(engine, run_steps(engine, steps_of(case, 2, lengths=(12, 8, 12))))


def test_the_models_own_code_finds_those_of_its_micro_batch(tmp_path: Path) -> None:
    wanted = trained(None, read_behind, tmp_path / "alone")
    for found in pipeline(2, trained, read_behind, tmp_path / "several"):
        equal(found, wanted)


def test_one_put_on_a_block_of_another_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=r"assigns attribute 'scale' of block 'layers\.\d', which another rank"):
        pipeline(2, trained, put_on_blocks, tmp_path)
