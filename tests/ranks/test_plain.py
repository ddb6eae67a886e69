"""Ranks train as torch's own DDP and FSDP2 do, as closely as one process trains as a plain loop."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.models import MODELS
from tests.ranks.worlds import together
from tests.training import budget, items, master_of, relative, run_steps, steps_of, wrap

CASE, LENGTHS, CLIP = MODELS["llama"], (12, 8, 10, 12), 1.09
Trained = tuple[list[float], list[float], torch.Tensor]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def by_torch(mesh: DeviceMesh, model: nn.Module, kind: str) -> Trained:
    """Both average gradients over ranks: each rank's loss counts as often as there are ranks."""
    trained: Any = model
    if kind == "ddp":
        trained = DistributedDataParallel(model, process_group=mesh.get_group())
    else:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    rank, ranks, losses, norms = mesh.get_rank(), mesh.size(), [], []
    for micro_batches in steps_of(CASE, 3, lengths=LENGTHS):
        counts = [items(model, mb) for mb in micro_batches]
        share = len(micro_batches) // ranks
        loss = torch.zeros(())
        for m in range(rank * share, (rank + 1) * share):
            part = trained(**micro_batches[m]).loss * counts[m] / sum(counts)
            (part * ranks).backward()
            loss += part.detach()
        dist.all_reduce(loss)
        losses.append(float(loss))
        norms.append(float(whole(nn.utils.clip_grad_norm_(trained.parameters(), CLIP))))
        optimizer.step()
        optimizer.zero_grad()
    named = sorted((name.removeprefix("module."), whole(p.detach())) for name, p in trained.named_parameters())
    return losses, norms, torch.cat([tensor.flatten() for _, tensor in named])


def both(mesh: DeviceMesh, disk: Path, kind: str) -> tuple[Trained, Trained]:
    model = CASE.model()
    plain = by_torch(mesh, copy.deepcopy(model), kind)
    share, rank = len(LENGTHS) // mesh.size(), mesh.get_rank()
    steps = [mbs[rank * share : (rank + 1) * share] for mbs in steps_of(CASE, 3, lengths=LENGTHS)]
    with wrap(CASE, budget(disk), model=model, mesh=mesh, clip_grad_norm=CLIP) as engine:
        found = run_steps(engine, steps)
        return plain, (found.losses, found.norms, master_of(engine))


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ranks_train_as_torchs_own(kind: str, tmp_path: Path) -> None:
    for (losses, norms, parameters), found in together(2, both, tmp_path / "store", kind):
        assert found[0] == pytest.approx(losses, rel=1e-6)
        assert found[1] == pytest.approx(norms, rel=1e-5)
        assert relative(found[2], parameters) <= 1e-6
        assert {norm > CLIP for norm in norms} == {True, False}
