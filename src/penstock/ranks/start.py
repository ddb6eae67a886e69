"""The mesh of the processes that ``torchrun`` has started."""

import os
from datetime import timedelta

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock import accelerator
from penstock.errors import ConfigError
from penstock.ranks.group import AXIS

_GIVEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_PATIENCE = timedelta(minutes=30)
"""that a rank has with others which load a model, or plan; one that is gone is noticed at once"""


def torchrun_mesh(device: str | None = None) -> DeviceMesh:
    """Start ``torch.distributed`` among the processes that ``torchrun`` has started, once, and give their mesh, for
    ``wrap(mesh=...)``. ``device``: ``"cuda"`` or ``"cpu"``; None: the GPUs if there are some. Each process gets one.

    A run that ``torchrun`` starts again finds nothing of the run before: by itself ``init_process_group`` may take the
    addresses of processes that are dead for those of the others (torch 2.13).

    Raises:
        ConfigError: this process was not started by torchrun, or not all are on one machine, or there are fewer GPUs
            than processes.
    """
    missing = [name for name in _GIVEN if name not in os.environ]
    if missing:
        raise ConfigError(f"{missing[0]} is not set: start this with torchrun --nproc-per-node N")
    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if int(os.environ.get("LOCAL_WORLD_SIZE", size)) != size:
        raise ConfigError(
            f"{size} processes on several machines are not there yet: start all on one (torchrun --nnodes 1)"
        )
    kind = device or accelerator.found() or "cpu"
    if kind != "cpu":
        if kind not in accelerator.KINDS:
            raise ConfigError(f"device={device!r}: give 'cuda' or 'cpu'")
        count = accelerator.KINDS[kind].count()
        if local >= count:
            raise ConfigError(f"process {local} has no GPU: there are {count}. Start as many")
        torch.accelerator.set_device_index(local)
    if not dist.is_initialized():
        agent = (
            os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        )  # it has the store, else the first process does
        store = dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=not agent and rank == 0,
            wait_for_workers=False,
            timeout=_PATIENCE,
        )
        attempt = dist.PrefixStore(  # type: ignore[attr-defined]
            f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store
        )
        dist.init_process_group(
            dist.get_default_backend_for_device(kind), store=attempt, rank=rank, world_size=size, timeout=_PATIENCE
        )
    return init_device_mesh(kind, (size,), mesh_dim_names=(AXIS,))
