"""Trains a tiny model for two steps with an installed Penstock, and says what it ran on: ``python tests/two_steps.py``.

It needs no more than the package itself, so it is also what a new wheel is tried with, in an environment of its own.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import penstock
from penstock.optim import library
from penstock.store import kernel


class Model(nn.Module):
    """Three blocks between two linear maps: [rows, 8] fp32 -> a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.rise = nn.Linear(8, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3))
        self.fall = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.rise(x)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.mse_loss(self.fall(x), y)


def streamed(steps: list[list[dict[str, torch.Tensor]]], disk: Path) -> list[float]:
    """The losses of a run with all of its state on disk."""
    torch.manual_seed(0)
    with penstock.wrap(
        Model(),
        loss_fn=lambda model, micro_batch: model(**micro_batch),
        optimizer=penstock.AdamW(lr=1e-2),
        budget=penstock.Budget(device="64MiB", host="64MiB", disk=disk),
        device="cpu",
        plan=None,
    ) as engine:
        return [engine.step(micro_batches).loss for micro_batches in steps]


def plain(steps: list[list[dict[str, torch.Tensor]]]) -> list[float]:
    """The losses of a loop of torch."""
    torch.manual_seed(0)
    model, losses = Model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for micro_batches in steps:
        found = [model(**micro_batch) / len(micro_batches) for micro_batch in micro_batches]
        for loss in found:
            loss.backward()
        losses.append(sum(loss.item() for loss in found))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main() -> None:
    levels = library.levels()
    assert levels, "the optimizers' native library is missing, or cannot be loaded"
    assert kernel.library() is not None, "the store's native library is missing, or cannot be loaded"
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, 2, 4, 9, generator=generator)
    steps = [[{"x": rows[:, :8], "y": rows[:, 8:]} for rows in step] for step in drawn]
    with tempfile.TemporaryDirectory() as folder:
        losses = streamed(steps, Path(folder) / "store")
    torch.testing.assert_close(losses, plain(steps), rtol=1e-5, atol=0)
    assert losses[1] < losses[0]
    print(f"{Path(penstock.__file__).parent}: losses {losses[0]:.4f}, {losses[1]:.4f}; kernels for {levels[-1]}")


if __name__ == "__main__":
    main()
