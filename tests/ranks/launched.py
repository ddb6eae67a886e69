"""Commands of several processes as torchrun starts them, from the server that has imported torch."""

import os
from collections.abc import Sequence
from pathlib import Path

from torch import distributed as dist

from tests import warm
from tests.patience import PATIENCE


class Launched:
    """A program on each of some ranks: ``-m MODULE`` or ``-c CODE``, and what it is given."""

    def __init__(self, size: int, words: Sequence[str | Path], cwd: Path) -> None:
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # that of torchrun's agent
        given = {
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": self.store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": 0,
        }
        self.processes = []
        for rank in range(size):
            environment = {**os.environ, **{key: str(value) for key, value in given.items()}}
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self.processes.append(warm.start(words, cwd=cwd, env=environment))

    def outcomes(self) -> list[tuple[int, str, str]]:
        """(exit code, output, errors) of each."""
        said = [process.communicate(PATIENCE) for process in self.processes]
        return [(process.wait(), *both) for process, both in zip(self.processes, said, strict=True)]


def launched(size: int, words: Sequence[str | Path], cwd: Path) -> list[tuple[int, str, str]]:
    """``penstock WORDS`` on each of some ranks, once it has ended."""
    return Launched(size, ["-m", "penstock", *words], cwd).outcomes()
