"""A script whose last rank is killed in a step. The others end as Python does: one takes long about it, while those
for which it still waits are gone.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from tests.models import PLAIN
from tests.training import budget, wrap


class Lingers:
    """As Python ends, it takes a second about this."""

    def __del__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        sleep(1.0)


def main(axis: str, lingers: int) -> None:
    """``lingers``: the rank that is ending as the others are gone."""
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if rank == lingers:
        vars(sys)["lingers"] = Lingers()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=(axis,))

    def ends(*_: Any) -> None:
        if engine.step_count == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        with wrap(PLAIN, budget(None), mesh=mesh) as engine:
            if rank == ranks - 1:
                for layer in engine.model.layers:
                    layer.down.register_forward_hook(ends)
            for _ in range(3):
                engine.step(PLAIN.micro_batches(2))
    except Exception:  # noqa: BLE001 - as Python itself
        sys.excepthook(*sys.exc_info())
        time.sleep(0.0 if rank == lingers else 0.5)
        ctypes.pythonapi.Py_Exit(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
