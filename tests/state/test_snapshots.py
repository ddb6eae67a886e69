"""Snapshots hold every bit of a run, whatever it is made of, and are taken over only whole and by the same run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.config.optimizer import Moments
from penstock.errors import StoreError
from penstock.ranks.group import ALONE
from penstock.ranks.share import WHOLE, Share
from penstock.schedule.place import Format
from penstock.schedule.program import ALIGN, GroupSpec
from penstock.state import snapshots
from penstock.state.arrays import StateArrays
from penstock.state.buffers import Buffers
from penstock.state.slots import Slots
from tests.state.test_convert import FORMS, arrays_of, by_parameter, described, fill_at_random, in_memory
from tests.training import ADAMW

FORM = Format.of("bf16", 1)
GROUPS = (
    GroupSpec(index=0, name="ends", trainable=ALIGN, frozen=ALIGN),
    GroupSpec(index=1, name="block", trainable=3 * ALIGN, frozen=0),
)
META: dict[str, Any] = {"model": {"precision": "bf16", "groups": ["ends", "block"]}, "step": 7, "betas": [0.9, 0.95]}


class Buffered(nn.Module):
    """Buffers of every kind: derived, odd sizes, no dimension, no element, integers, booleans, not contiguous."""

    def __init__(self, fill: int) -> None:
        super().__init__()
        self.register_buffer("odd", torch.full((3, 7), fill, dtype=torch.float64))
        self.register_buffer("scalar", torch.tensor(fill))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("mask", torch.full((5,), bool(fill)))
        self.register_buffer("derived", torch.full((5,), fill), persistent=False)
        self.register_buffer("turned", torch.full((4, 6), float(fill), dtype=torch.bfloat16).t())
        self.norm = nn.BatchNorm1d(3, affine=False)
        self.norm.running_mean.fill_(fill)


def arrays(fill: float) -> StateArrays:
    made = StateArrays(GROUPS, FORM, torch.bfloat16, torch.device("cpu"), None, Slots(None), host_bytes=1 << 30)
    for number, name in enumerate(made.parts):
        made.array(name).copy_(torch.arange(made.array(name).numel()) % 97 * fill + number)
    return made


def test_every_bit_comes_back(tmp_path: Path) -> None:
    saved, model = arrays(0.5), Buffered(1)
    snapshots.save(tmp_path / "snapshot", saved, Buffers(model), META, overwrite=False)
    loaded, other = arrays(0.0), Buffered(0)
    with snapshots.opened(tmp_path / "snapshot", META["model"]) as snapshot:
        assert snapshot.meta == META
        snapshots.restore(snapshot, loaded, Buffers(other))
    for name in saved.parts:
        assert torch.equal(loaded.array(name).view(torch.uint8), saved.array(name).view(torch.uint8)), name
    for name, buffer in model.state_dict().items():
        assert torch.equal(other.get_buffer(name), buffer), name
        assert other.get_buffer(name).stride() == buffer.stride()
    assert other.derived.eq(0).all()  # not part of the state_dict: it is the model's own business


def test_saving_changes_nothing(tmp_path: Path) -> None:
    saved, model = arrays(0.5), Buffered(1)
    before = {name: saved.array(name).clone() for name in saved.parts}
    snapshots.save(tmp_path / "snapshot", saved, Buffers(model), META, overwrite=False)
    assert all(torch.equal(saved.array(name), array) for name, array in before.items())


@pytest.mark.parametrize("key", ["precision", "groups"])
def test_a_snapshot_of_something_else_is_refused(key: str, tmp_path: Path) -> None:
    snapshots.save(tmp_path / "snapshot", arrays(0.5), Buffers(Buffered(1)), META, overwrite=False)
    description = META["model"] | {key: "other"}
    with (
        pytest.raises(StoreError, match=f"made with another {key} than this engine"),
        snapshots.opened(tmp_path / "snapshot", description),
    ):
        pytest.fail("it was opened")


def test_damage_is_found_before_anything_is_taken_over(tmp_path: Path) -> None:
    snapshots.save(tmp_path / "snapshot", arrays(0.5), Buffers(Buffered(1)), META, overwrite=False)
    (data,) = [path for path in (tmp_path / "snapshot").iterdir() if path.suffix != ".json"]
    for place in (0, data.stat().st_size // 2, data.stat().st_size - 1):
        original = data.read_bytes()
        damaged = bytearray(original)
        damaged[place] ^= 1
        data.write_bytes(damaged)
        with (
            pytest.raises(StoreError, match="damaged"),
            snapshots.opened(tmp_path / "snapshot", META["model"]),
        ):
            pytest.fail("it was opened")
        data.write_bytes(original)
    with snapshots.opened(tmp_path / "snapshot", META["model"]):
        pass


@pytest.mark.parametrize("moments", FORMS)
def test_each_of_several_ranks_takes_over_its_part(moments: Moments, tmp_path: Path) -> None:
    """Of scales of moments a part has less than whole pages."""
    sizes, optimizer, none = [[70_000, 5_000, 9_000], [12_345, 1, 4_096]], replace(ADAMW, moments=moments), nn.Module()
    whole = described(sizes, optimizer, "bf16")
    saved = arrays_of(whole, WHOLE)
    fill_at_random(saved, 0)
    meta = {"model": whole, "step": 1}
    snapshots.save(tmp_path / "snapshot", saved, Buffers(none), meta, overwrite=False)
    wanted, _ = by_parameter(whole, [in_memory(saved)])
    for ranks in (2, 3):
        model, parts = described(sizes, optimizer, "bf16", ranks), []
        for rank in range(ranks):
            share = Share(rank=rank, size=ranks)
            parts.append(arrays_of(model, share))
            with snapshots.opened(tmp_path / "snapshot", model, ALONE, share) as snapshot:
                snapshots.restore(snapshot, parts[-1], Buffers(none))
        found, _ = by_parameter(model, list(map(in_memory, parts)))
        assert found.keys() == wanted.keys()
        for name, arrays_there in wanted.items():
            for kind, array in arrays_there.items():
                assert torch.equal(found[name][kind].view(torch.uint8), array.view(torch.uint8)), (ranks, name, kind)
