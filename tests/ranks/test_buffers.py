"""Buffers that a forward changes: after a step all ranks have the same ones, and nothing else is other than without."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.config.step import SyncBuffers
from penstock.ranks.group import Ranks
from penstock.state.buffers import Buffers
from penstock.state.values import committed
from penstock.tape.buffers import ModulesBefore
from tests.models import MODELS, Skips
from tests.ranks.worlds import together
from tests.training import budget, wrap


def without_dropout() -> nn.Module:
    """A process of its own would drop other numbers than the second rank does."""
    model = Skips()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


CASE = replace(MODELS["skips"], build=without_dropout)
HOW: tuple[SyncBuffers, ...] = ("mean", "first")


def of_rank(rank: int, step: int) -> Any:
    return CASE.micro_batches(2, seed=2 * step + rank)


def buffers_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.inside.resources.buffers.tensors().items()}


def stepped(mesh: DeviceMesh, disk: Path) -> list[Any]:
    """The buffers for both ways: after one step, after two and a new start, the same ones."""
    found = []
    for how in HOW:
        settings = {"mesh": mesh, "sync_buffers": how}
        with wrap(CASE, budget(disk / how), **settings) as engine:
            engine.step(of_rank(mesh.get_rank(), 0))
            first = buffers_of(engine)
            engine.step(of_rank(mesh.get_rank(), 1))
            second = buffers_of(engine)
        with wrap(CASE, budget(disk / how), **settings) as engine:
            assert engine.step_count == 2
            again = buffers_of(engine)
            assert again.keys() == second.keys()
            assert all(torch.equal(again[name], second[name]) for name in second)
            found.append((first, second))
    return found


@pytest.mark.usefixtures("one_thread")
def test_all_ranks_go_on_with_the_same_buffers(tmp_path: Path) -> None:
    """The first step's oracle: what each rank's micro-batches make of the same buffers in a process of their own."""
    of_all = together(2, stepped, tmp_path)
    alone = []
    for rank in range(2):
        with wrap(CASE, budget(None)) as engine:
            engine.step(of_rank(rank, 0))
            alone.append(buffers_of(engine))
    assert any(not torch.equal(alone[0][name], alone[1][name]) for name in alone[0])
    with wrap(CASE, budget(tmp_path / "one"), strands=2) as engine:
        for step in range(2):
            engine.step([*of_rank(0, step), *of_rank(1, step)])
    for way, how in enumerate(HOW):
        (first, second), (_, theirs) = (found[way] for found in of_all)
        for name, tensor in first.items():
            both = [buffers[name].double() for buffers in alone]
            wanted = both[0] if how == "first" else (both[0] + both[1]) / 2
            assert torch.equal(tensor, wanted.to(tensor.dtype)), (how, name)
        assert all(torch.equal(theirs[name], tensor) for name, tensor in second.items())
        parts = [[tmp_path / how / f"rank-{rank}"] for rank in range(2)]
        with committed(parts) as shared, committed([[tmp_path / "one"]]) as one:
            for name in dict(CASE.model().named_parameters()):
                assert torch.equal(shared.values.parameter(name), one.values.parameter(name)), (how, name)


class Several(Ranks):
    """There are as many ranks as models; what each says is known."""

    def __init__(self, bits: list[torch.Tensor]) -> None:
        self.size, self.bits = len(bits), bits

    def gather(self, out: torch.Tensor, part: torch.Tensor) -> None:
        out.copy_(torch.cat(self.bits))


KINDS = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.bool,
]


@given(st.data())
def test_buffers_of_any_kind_are_synchronised(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
    shapes = [data.draw(st.sampled_from([(), (1,), (3,), (2, 3)])) for _ in kinds]
    size, how = data.draw(st.integers(2, 4)), data.draw(st.sampled_from(HOW))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    models = []
    for _ in range(size):
        models.append(model := nn.Module())
        for index, (kind, shape) in enumerate(zip(kinds, shapes, strict=True)):
            value = (torch.randn(shape, generator=generator) * 2).to(kind)
            model.register_buffer(f"b{index}", value.t().contiguous().t() if value.ndim == 2 else value)
    names = sorted(Buffers(models[0]).tensors())
    said = [
        torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in Buffers(model).tensors().values()])
        for model in models
    ]
    before = [{name: tensor.clone() for name, tensor in Buffers(model).tensors().items()} for model in models]
    records = [ModulesBefore(model).copies() for model in models]
    refused = {Buffers(model).synchronise(names, Several(said), how) for model in models}
    assert len(refused) == 1
    (name,) = refused
    values = {key: [copies[key] for copies in before] for key in names}
    whole = [key for key in names if not (values[key][0].is_floating_point() or values[key][0].is_complex())]
    other = [key for key in whole if any(not torch.equal(value, values[key][0]) for value in values[key])]
    if how == "mean" and other:
        assert name in other
        assert all(not Buffers(model).changed(record) for model, record in zip(models, records, strict=True))
        return
    assert name is None
    for model in models:
        for key, tensor in Buffers(model).tensors().items():
            if how == "first" or key in whole:
                assert torch.equal(tensor, values[key][0])
            else:
                wide = torch.complex128 if tensor.is_complex() else torch.float64
                mean = torch.stack([value.to(wide) for value in values[key]]).mean(0)
                assert torch.equal(tensor, mean.to(tensor.dtype))
