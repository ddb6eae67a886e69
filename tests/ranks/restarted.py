"""What torchrun starts in the tests: steps of a tiny model, from where its store is. ``restarted.py DISK STEPS``"""

import sys
import time
from pathlib import Path

import torch
from torch import nn

import penstock


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def main(disk: Path, steps: int) -> None:
    mesh = penstock.torchrun_mesh()
    rank = mesh.get_local_rank()
    torch.manual_seed(0)
    with penstock.wrap(
        Layers(),
        optimizer=penstock.AdamW(lr=1e-2),
        budget=penstock.Budget(device="16MiB", host="32MiB", disk=disk),
        loss_fn=lambda model, micro_batch: model(micro_batch["x"]),
        mesh=mesh,
    ) as engine:
        for step in range(engine.step_count, steps):
            x = torch.full((2, 8), float(1 + step % 2 + rank))
            engine.step([{"x": x}], loss_weights=[0.5])
            if rank == 0:
                print(f"step {engine.step_count}", flush=True)
            if step == 1:
                (disk / f"two-{rank}").touch()
                while (disk / "wait").exists():  # until a rank has been killed
                    time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
