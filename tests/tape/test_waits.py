"""Where a model waits for the device is found in its probe, line by line: as often as the device is waited for."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from penstock.tape.waits import Wait, sentence
from tests.accelerator import DEVICE, simulated
from tests.models import MODELS, Case
from tests.tape_reference import Bench


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[torch.arange(len(x), device=x.device)]
        kept = x[x.detach().sum(-1) > 0]
        return torch.tanh(self.linear(x)) + 0 * kept.sum()


class Waiting(nn.Module):
    """Waits for a number in front of its blocks, for copies to the device of a tensor and of Python's values, for a
    shape in each of them, and for a copy to the host behind them. An index by numbers of rows waits for nothing, nor
    does a number on the host that is added, or a copy that is not to be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x == 0).all():
            x = x + 1
        x = x + torch.arange(4).to(x.device) + torch.tensor(2.0) + torch.arange(4).to(x.device, non_blocking=True)
        x = x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)
        for block in self.blocks:
            x = block(x)
        loss: torch.Tensor = self.head(x).square().mean()
        return loss * (1 + 0 * float(x.detach().cpu().sum()))


def loss_of(model: nn.Module, micro_batch: Mapping[str, Any]) -> torch.Tensor:
    loss: torch.Tensor = model(micro_batch["x"])
    return loss


WAITING = Case(
    build=Waiting,
    micro_batch=lambda generator, rows, _: {"x": torch.randn(rows, 4, generator=generator)},
    blocks=2,
    loss_fn=loss_of,
)


def probed(case: Case, device: str) -> tuple[Bench, tuple[Wait, ...]]:
    bench = Bench(case, case.model().to(device), moving=True)
    bench.probe({k: t.to(device) for k, t in case.micro_batches(1)[0].items()})
    return bench, bench.learned.waits


@pytest.mark.accelerator
def test_each_line_that_waits_is_named_with_its_block() -> None:
    _, waits = probed(WAITING, DEVICE)
    assert {w.where.partition(":")[0] for w in waits} == {__name__}
    assert {w.where.partition(" ")[2] for w in waits} == {"(forward)"}
    assert [(w.block, w.op) for w in waits] == [
        (None, "aten._local_scalar_dense"),
        (None, "aten._to_copy"),
        (None, "aten.lift_fresh"),
        ("blocks.0", "aten.index"),
        ("blocks.1", "aten.index"),
        (None, "aten._to_copy"),
    ]


@pytest.mark.accelerator
@pytest.mark.skipif(DEVICE != "sim", reason="needs the simulated accelerator's counts")
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_a_forward_waits_as_often_as_was_found(name: str) -> None:
    case, sim = MODELS[name], simulated.start()
    bench, waits = probed(case, DEVICE)
    bench.load_all()
    micro_batch = {k: t.to(DEVICE) for k, t in case.micro_batches(1)[0].items()}
    sim.clear()
    with torch.no_grad():
        case.loss_fn(bench.tape.model, micro_batch)
    numbers = sum(w.op == "aten._local_scalar_dense" for w in waits)
    counts = sim.counts()
    assert counts.get("host waits: for a number", 0) == numbers == {"llama": 1, "gpt2": 1, "t5": 0}[name]
    assert counts.get("host waits: for a stream", 0) == len(waits)


def test_on_the_processor_nothing_waits() -> None:
    assert probed(WAITING, "cpu")[1] == ()


def test_what_is_said_of_waits() -> None:
    assert sentence(()) is None
    mask = Wait(block=None, where="masks:7 (all_ones)", op="aten._local_scalar_dense")
    rows = [Wait(block=f"blocks.{i}", where="experts:9 (forward)", op="aten.nonzero") for i in range(3)]
    said = sentence([mask, *rows])
    assert said is not None
    assert said.startswith("the model waits for the device 4 times in the forward of a micro-batch")
    assert "experts:9 (forward) for aten.nonzero, 3 times in 3 blocks; masks:7 (all_ones)" in said
    assert said.endswith("aten._local_scalar_dense, 1 time outside of blocks")
    many = sentence([Wait(block=None, where=f"lines:{i} (f)", op="aten.nonzero") for i in range(6)])
    assert many is not None
    assert many.endswith("; and 2 more lines")
