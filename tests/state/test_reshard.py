"""State cut for another number of ranks, and back: every element is where it was, in stores as wrap makes them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.engine.start import describe_model
from penstock.errors import StoreError
from penstock.state.buffers import Buffers
from penstock.state.reshard import described, reshard
from penstock.state.values import committed
from penstock.store.facts import facts_of_all
from penstock.store.parts import of_rank
from penstock.tape.blocks import find_blocks
from penstock.tape.groups import group_parameters
from tests.models import PLAIN
from tests.training import ADAMW, budget, run_steps, steps_of, wrap

CASE = PLAIN


class Rows(nn.Module):
    """Blocks of any sizes, each with a trained and a frozen part."""

    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ParameterList(torch.zeros(n) for n in (*pair, 3)) for pair in sizes)
        for block in self.blocks:
            block[1].requires_grad = False


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(*[st.integers(1, 40_000)] * 2), min_size=1, max_size=3), *[st.integers(1, 9)] * 2)
def test_stores_are_described_as_wrap_does(sizes: list[tuple[int, int]], before: int, after: int) -> None:
    def wanted(ranks: int, rank: int) -> dict[str, Any]:
        model = Rows(sizes)
        groups = group_parameters(model, find_blocks(model, list(model.blocks)), ranks)
        return describe_model(groups, Buffers(model), "bf16", ADAMW, 8) | of_rank(rank, ranks, whole=False)

    found = described(wanted(before, 0), after, 8)
    for model in found:
        model.pop("world", None)
    assert found == [wanted(after, rank) for rank in range(after)]


def stores(folder: Path, ranks: int) -> list[list[Path]]:
    folder.mkdir()
    return [[folder / f"rank-{rank}"] for rank in range(ranks)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("numbers", [{"precision": "fp32"}, {"precision": "bf16"}], ids=str)
@pytest.mark.parametrize("ways", [(4, 2, 1), (3, 7, 1)], ids=str)
def test_what_is_cut_otherwise_and_back_goes_on_with_the_same_bits(
    tmp_path: Path, numbers: dict[str, Any], ways: Sequence[int]
) -> None:
    """Weights of bf16 live in memory, so that the commit says which follow from their master copy."""
    places = budget(tmp_path / "store", weights="host" if numbers["precision"] == "bf16" else "disk")
    with wrap(CASE, places, **numbers) as engine:
        run_steps(engine, steps_of(CASE, 2))
        wanted = {name: tensor.clone() for name, tensor in engine.master_parameters()}
    last = [[tmp_path / "store"]]
    for number, ranks in enumerate(ways):
        new = stores(tmp_path / str(number), ranks)
        reshard(last, new, names=new, strands=1, whole=number == 1)  # of all ranks of stage 0
        last = new
        facts = facts_of_all(last)
        assert facts is not None
        assert [record and record["step"] for record in facts.records.values()] == [2, 2]  # whichever can be read
        with committed(last) as found:
            assert found.step == 2
            for name, tensor in wanted.items():
                assert torch.equal(found.values.parameter(name), tensor)
    with wrap(CASE, budget(tmp_path / "store"), **numbers) as engine:
        undisturbed = run_steps(engine, steps_of(CASE, 2, first=3))
    with wrap(CASE, budget(last[0][0]), **numbers) as engine:
        assert engine.step_count == 2
        found_state = run_steps(engine, steps_of(CASE, 2, first=3))
    assert found_state.losses == undisturbed.losses
    assert found_state.norms == undisturbed.norms
    for name, tensor in undisturbed.state.items():
        assert torch.equal(found_state.state[name], tensor), name


def test_damage_is_not_copied(tmp_path: Path) -> None:
    with wrap(CASE, budget(tmp_path / "store")) as engine:
        run_steps(engine, steps_of(CASE, 1))
    data = tmp_path / "store" / "penstock.store"
    facts = facts_of_all([[tmp_path / "store"]])
    assert facts is not None
    whole = bytearray(data.read_bytes())
    for at in range(0, len(whole), 4096):
        whole[at] ^= 1
    data.write_bytes(whole)
    with pytest.raises(StoreError, match="damaged"):
        reshard([[tmp_path / "store"]], new := stores(tmp_path / "new", 2), names=new, strands=2)
