"""Several processes of one command, as torchrun starts them: how many, which one this is, and its place among them."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.config.layout import LayoutConfig
    from penstock.ranks.group import Ranks

log = logging.getLogger("penstock")

MOST_RANKS = 64
"""Processes on one machine that are planned for and measured."""


def process_count() -> int:
    """The processes that torchrun has started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", 1)) if _under_torchrun() else 1


def this_process() -> int:
    """The number of this one among them."""
    return int(os.environ.get("RANK", 0)) if _under_torchrun() else 0


def _under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def seconds_to_end() -> int | None:
    """Seconds after a signal to torchrun within which its processes must have ended, before it kills them; as far as
    they know, who do not see its ``--shutdown-timeout``. None: there is no torchrun.
    """
    return int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30)) if _under_torchrun() else None


def in_words(ranks: int, hosts: int = 1, pipeline: int = 1) -> str:
    """The number of ranks that train, in words for messages; in pipelines of so many, if that is above 1."""
    if ranks == 1:
        return "one process"
    who = f"{ranks} ranks" if pipeline == 1 else f"a pipeline of {ranks} ranks"
    if 1 < pipeline < ranks:
        who = f"{ranks // pipeline} pipelines of {pipeline} ranks"
    return who + (f" on {hosts} hosts" if hosts > 1 else "")


def how_to_start(ranks: int, hosts: int = 1) -> str:
    """The beginning of a command line that starts so many ranks; of several ``hosts``, on each of them."""
    if ranks == 1:
        return "penstock"
    nodes = f"--nnodes {hosts} --rdzv-backend c10d --rdzv-endpoint HOST:29400 " if hosts > 1 else ""
    return f"torchrun {nodes}--nproc-per-node {ranks // hosts} -m penstock"


@contextmanager
def launched(device: str | None, layout: "LayoutConfig") -> Iterator["Ranks"]:
    """The ranks of this command, and this one's place among them. What fails within fails on all of them.

    ``device``: as the settings have it; each rank gets one of that kind. ``layout``: how they share the model.

    Raises:
        ConfigError: they cannot have so many copies, be such a pipeline or share sequences so; torchrun has not started
            as many on each host, or there are too few GPUs.
        RankError: another rank has failed.
    """
    from penstock.engine.device import resolve_device
    from penstock.ranks.group import ALONE
    from penstock.ranks.process_groups import join
    from penstock.ranks.start import torchrun_mesh

    count = process_count()
    layout.check_started(count)
    if count == 1:
        yield ALONE
        return
    kind = resolve_device(device).type
    mesh = torchrun_mesh(kind, copies=layout.copies, pp=layout.pipeline, cp=layout.cp)
    ranks = join(mesh, resolve_device(device))
    said = logging.StreamHandler()
    said.setFormatter(logging.Formatter(f"rank {ranks.rank}: %(message)s"))
    log.addHandler(said)
    try:
        with ranks.together("the run"):
            yield ranks
    finally:
        log.removeHandler(said)
        ranks.close()
