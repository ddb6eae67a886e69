"""The mesh of the processes that ``torchrun`` has started."""

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock import accelerator
from penstock.errors import ConfigError, RankError
from penstock.ranks.axes import CONTEXT, PIPELINE, REPLICATE, SHARD
from penstock.ranks.parent import is_orphan
from penstock.ranks.waiting import beside

log = logging.getLogger("penstock")

_GIVEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_PATIENCE = timedelta(minutes=30)
"""Patience of a rank with others that load a model, or plan; one that is gone is noticed at once."""
_started = False


def can_start_again() -> bool:
    """True if a run that ``torchrun`` starts again (``--max-restarts``) finds nothing of the run before, or will not be
    started again."""
    return _started or int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) == 0


def started_together() -> int:
    """The number of processes that torch.distributed, or torchrun, has started together with this one; 1: none."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1)) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def torchrun_mesh(device: str | None = None, *, copies: int = 1, pp: int | None = None, cp: int = 1) -> DeviceMesh:
    """Start ``torch.distributed`` among the processes that ``torchrun`` has started, once, and give their mesh, for
    ``wrap(mesh=...)``. ``device``: ``"cuda"`` or ``"cpu"``; None: the GPUs if there are some. Each process gets one.
    ``copies``: of the state, each of as many neighbouring processes (HSDP): a copy on each host, say. ``pp``: the
    number of ranks of each pipeline; with more processes there are several beside each other, of micro-batches of their
    own, and so many neighbours share what is one rank's. None: they share all state. ``cp``: so many
    neighbouring processes share each sequence, and a copy of the state (context parallel).

    A run that ``torchrun`` starts again finds nothing of the run before: by itself ``init_process_group`` may take the
    addresses of processes that are dead for those of the others (torch 2.13).

    Raises:
        ConfigError: this process was not started by torchrun, or not as many as on each other host, or there are fewer
            GPUs than processes.
        RankError: another process is gone, or torchrun is.
    """
    missing = [name for name in _GIVEN if name not in os.environ]
    if missing:
        raise ConfigError(f"{missing[0]} is not set: start this with torchrun --nproc-per-node N")
    size = _number("WORLD_SIZE", range(1, sys.maxsize))
    rank, local = _number("RANK", range(size)), _number("LOCAL_RANK", range(size))
    here, hosts = (
        _number(name, range(1, size + 1), n) for name, n in (("LOCAL_WORLD_SIZE", size), ("GROUP_WORLD_SIZE", 1))
    )
    _number("MASTER_PORT", range(1, 1 << 16))
    if here * hosts != size:
        raise ConfigError(
            f"{size} processes on {hosts} hosts, of which {here} are on this one: start as many on each "
            "(torchrun --nproc-per-node)"
        )
    if copies < 1 or size % copies:
        raise ConfigError(f"copies={copies}: {size} processes cannot have as many copies of the state, each of as many")
    if pp is not None and (pp < 1 or size % pp):
        raise ConfigError(f"pp={pp}: {size} processes cannot be pipelines of as many each: give a divisor of {size}")
    if pp is not None and pp > 1 and copies != 1:
        raise ConfigError(f"pp={pp} with copies={copies}: pipelines have one copy of the state. Leave one out")
    each = size // copies // (pp or 1)
    if cp < 1 or each % cp:
        raise ConfigError(
            f"cp={cp}: of {size} processes {each} have the same copy of the state or place in a pipeline, and cannot "
            f"share sequences {cp} by {cp}: give a divisor of {each}, or start a multiple of {copies * (pp or 1) * cp}"
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
        with _joining(size):
            _start(kind, local, rank, size)
        global _started
        _started = True
    axes = {REPLICATE: copies, PIPELINE: pp or 1, SHARD: each // cp, CONTEXT: cp}
    names = tuple(name for name, count in axes.items() if count > 1)
    names += (SHARD,) if names in ((), (REPLICATE,)) else ()
    with _joining(size):
        return init_device_mesh(kind, tuple(axes[name] for name in names), mesh_dim_names=names)


def _number(name: str, among: range, default: int = 0) -> int:
    """A number of the environment, which ``torchrun`` sets."""
    said = os.environ.get(name, str(default))
    if not said.isdecimal() or int(said) not in among:
        what = f"a number from {among.start}" + (f" to {among.stop - 1}" if among.stop < sys.maxsize else "")
        raise ConfigError(f"{name}={said!r} in the environment is not {what}: leave it to torchrun to set it")
    return int(said)


@contextmanager
def _joining(size: int) -> Iterator[None]:
    """Raises:
    RankError: torch could not bring all processes together within.
    """
    try:
        yield
    except RankError:
        raise
    except RuntimeError as error:  # all that torch has for it
        raise RankError(
            f"this process could not join the other ones of {size} ranks, of which one may be gone: {error}"
        ) from error


def _start(kind: str, local: int, rank: int, size: int) -> None:
    """Start ``torch.distributed``, which waits for all processes. A SIGTERM meanwhile, by which ``torchrun`` ends those
    that are left when one has ended, is heard, and says who is missing.

    Raises:
        RankError: the process is asked to end, ``torchrun`` or another process is gone, and not all have joined.
    """
    asked: list[int] = []
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ

    def start() -> None:
        # Else NCCL's own watchdog ends the process where another one is gone, and nobody says which: ours does.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        if kind != "cpu":
            torch.accelerator.set_device_index(local)
        backend = dist.get_default_backend_for_device(kind)
        dist.init_process_group(backend, store=attempt, rank=rank, world_size=size, timeout=_PATIENCE)

    def check_parent() -> None:
        if by_torchrun and is_orphan():  # at its address there may be another torchrun by now, with other processes
            raise RankError(f"torchrun, which has started this process, was gone before all {size} ranks had joined")

    def look() -> None:
        check_parent()
        if asked:
            missing = [other for other in range(size) if not own.check([f"here/{other}"])]
            who = ", ".join(f"rank {other}" for other in missing) or "another one"
            raise RankError(f"ended by SIGTERM before all {size} ranks had joined, without {who}")

    hears = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    try:
        attempt = beside(partial(_meet, rank), check_parent)
        own = attempt.clone()  # with a connection of its own: the other's is taken by what waits
        if hears:
            signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
        look()
        own.set(f"here/{rank}", "")
        beside(start, look)
    finally:
        if hears:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if asked:  # as all had joined
        os.kill(os.getpid(), signal.SIGTERM)


def _meet(rank: int) -> Any:
    """The store of this attempt, at which all processes meet."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # it has the store, else the first process does
    address = os.environ["MASTER_ADDR"]
    try:
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError) as error:  # it may get its name yet, as where all hosts are started at once
        log.warning(
            "MASTER_ADDR=%r, where all processes are to meet, is no host that this one knows (%s): it is waited for, "
            "%d minutes at most",
            address,
            getattr(error, "strerror", error),
            _PATIENCE.total_seconds() // 60,
        )
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address,
        int(os.environ["MASTER_PORT"]),
        is_master=not agent and rank == 0,
        wait_for_workers=False,
        timeout=_PATIENCE,
    )
    number = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    return dist.PrefixStore(f"attempt-{number}", store)  # type: ignore[attr-defined]
