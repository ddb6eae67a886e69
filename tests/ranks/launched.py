"""Commands of several processes as torchrun starts them, from the server that has imported torch."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from bench.cluster import Cluster, move_to
from torch import distributed as dist

from tests import warm
from tests.patience import PATIENCE


class Launched:
    """A program on each of some ranks: ``-m MODULE`` or ``-c CODE``, and what it is given. ``cluster``: on its hosts,
    as many on each. ``cwd``: or that of each rank."""

    def __init__(
        self,
        size: int,
        words: Sequence[str | Path],
        cwd: Path | Sequence[Path],
        *,
        cluster: Cluster | None = None,
        **more: str,
    ) -> None:
        hosts = 1 if cluster is None else cluster.hosts
        each = size // hosts
        address = "localhost" if cluster is None else cluster.address(0)
        self.store = _store(address, cluster)
        given = {
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": each,
            "GROUP_WORLD_SIZE": hosts,
            "MASTER_ADDR": address,
            "MASTER_PORT": self.store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": 0,
        }
        self.processes = []
        for rank in range(size):
            host, local = divmod(rank, each)
            environment = {**os.environ, **{key: str(value) for key, value in given.items()}, **more}
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(host)}
            there = words
            if cluster is not None:
                environment |= {"GLOO_SOCKET_IFNAME": "eth0", "ON": f"{cluster.namespace(host)} host{host}"}
                there = ["-c", _ON_A_HOST, *words]
            self.processes.append(warm.start(there, cwd=cwd if isinstance(cwd, Path) else cwd[rank], env=environment))

    def outcomes(self) -> list[tuple[int, str, str]]:
        """(exit code, output, errors) of each."""
        said = [process.communicate(PATIENCE) for process in self.processes]
        return [(process.wait(), *both) for process, both in zip(self.processes, said, strict=True)]


def _store(address: str, cluster: Cluster | None) -> "dist.TCPStore":
    """That of torchrun's agent on the first host."""
    found: list[dist.TCPStore] = []

    def make() -> None:
        if cluster is not None:
            move_to(cluster.namespace(0), "host0")
        found.append(dist.TCPStore(address, 0, is_master=True, wait_for_workers=False))

    thread = threading.Thread(target=make)  # a thread has a network of its own
    thread.start()
    thread.join()
    return found[0]


_ON_A_HOST = """
import os, sys
from bench.cluster import move_to
from tests import warm
move_to(*os.environ["ON"].split())
warm.become(sys.argv[1:])
"""


def launched(size: int, words: Sequence[str | Path], cwd: Path) -> list[tuple[int, str, str]]:
    """``penstock WORDS`` on each of some ranks, once it has ended."""
    return Launched(size, ["-m", "penstock", *words], cwd).outcomes()
