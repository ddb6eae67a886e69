"""Arrays keep their bits wherever they live and however they move."""

from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from penstock.config import Tier
from penstock.engine import start
from penstock.schedule.place import Format, Placement
from penstock.schedule.program import ALIGN, GroupSpec
from penstock.state import arrays as module
from penstock.state import snapshots
from penstock.state.arrays import StateArrays
from penstock.state.buffers import Buffers
from penstock.state.layout import parts_of
from penstock.state.memory import HostSlab
from penstock.state.slots import Slots
from penstock.store import Layout, Store
from penstock.tape.groups import group_parameters
from tests.accelerator import DEVICE, simulated

CPU = torch.device("cpu")
GROUPS = (
    GroupSpec(index=0, name="ends", trainable=2 * ALIGN, frozen=0),
    GroupSpec(index=1, name="block", trainable=5 * ALIGN, frozen=3 * ALIGN),
    GroupSpec(index=2, name="frozen", trainable=0, frozen=ALIGN),
)
SPLIT = Format.of("bf16", 2)
ONE = Format.of("fp32", 2)


def names(form: Format, dtype: torch.dtype) -> dict[str, tuple[int, torch.dtype]]:
    return {p.name: (p.numel // ALIGN, p.dtype) for g in GROUPS for p in parts_of(g, form, dtype)}


def test_the_arrays_of_each_format() -> None:
    half, full = torch.bfloat16, torch.float32
    trained = {f"moment{i}.{g}": (n, full) for g, n in ((0, 2), (1, 5)) for i in (0, 1)}
    copies = {"weights.0": (2, half), "weights.1": (8, half), "weights.2": (1, half)}
    lower = {"low.0": (2, torch.int16), "low.1": (5, torch.int16)}
    assert names(SPLIT, half) == trained | copies | lower
    assert names(Format.of("fp16", 2), half) == trained | copies | {"master.0": (2, full), "master.1": (5, full)}
    assert names(ONE, full) == trained | {"weights.0": (2, full), "weights.1": (8, full), "weights.2": (1, full)}
    no_state = Format.of("fp32", 0)
    assert names(no_state, full) == {"weights.0": (2, full), "weights.1": (8, full), "weights.2": (1, full)}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    parts = [part for group in GROUPS for part in parts_of(group, SPLIT, torch.bfloat16)]
    layout = Layout.build(((part.name, part.nbytes, 1) for part in parts), {part.name: part.grid for part in parts})
    with Store.create([tmp_path / "store"], layout, model={}) as made:
        yield made


def pages(dtype: torch.dtype, numel: int) -> torch.Tensor:
    """Page-aligned memory, as reads and writes of a drive need it."""
    return HostSlab(numel * dtype.itemsize).bytes[: numel * dtype.itemsize].view(dtype)


def fill(arrays: StateArrays) -> dict[str, torch.Tensor]:
    """Write other random numbers to every array; what was written."""
    generator, written = torch.Generator().manual_seed(0), {}
    for name, part in arrays.parts.items():
        piece = pages(part.dtype, part.numel)
        piece.copy_(torch.randn(part.numel, generator=generator))
        arrays.write(name, 0, piece)
        written[name] = piece
    return written


def check(arrays: StateArrays, written: dict[str, torch.Tensor]) -> None:
    for name, part in arrays.parts.items():
        whole = pages(part.dtype, part.numel)
        arrays.read(name, 0, whole)
        assert torch.equal(whole, written[name]), name
        if part.numel > ALIGN:
            rest = pages(part.dtype, part.numel - ALIGN)
            arrays.read(name, ALIGN, rest)
            assert torch.equal(rest, written[name][ALIGN:]), name


def placement(*tiers: tuple[Tier, Tier]) -> Placement:
    """(weights, state) of each group."""
    weights, state = zip(*tiers, strict=True)
    return Placement(weights=weights, state=state, gradients="host", activations="device")


ROUTE: tuple[Placement, ...] = (
    placement(("host", "host"), ("disk", "disk"), ("host", "disk")),
    placement(("device", "device"), ("host", "disk"), ("device", "disk")),
    placement(("device", "host"), ("device", "device"), ("disk", "disk")),
    placement(("disk", "disk"), ("disk", "host"), ("host", "host")),
    placement(("disk", "disk"), ("disk", "disk"), ("disk", "disk")),
)


@pytest.mark.accelerator
@pytest.mark.skipif(DEVICE != "sim", reason="the simulated accelerator tells which memory is page-locked")
def test_arrays_cross_to_a_device_through_page_locked_memory_that_is_given_back(store: Store, tmp_path: Path) -> None:
    """Where they move, are saved and loaded, and where a model's values come to begin with."""
    sim, device, none = simulated.start(), torch.device(DEVICE, 0), Buffers(nn.Module())
    with (
        mock.patch.object(sim, "lock_pages", wraps=sim.lock_pages) as locked,
        mock.patch.object(sim, "unlock_pages", wraps=sim.unlock_pages) as unlocked,
    ):
        with closing(StateArrays(GROUPS, SPLIT, torch.bfloat16, device, store, Slots(store), host_bytes=0)) as arrays:
            written = fill(arrays)
            for place in ROUTE:
                arrays.settle(place)
                snapshots.save(tmp_path / "saved", arrays, none, {"step": 0, "model": {}}, overwrite=True)
                with snapshots.opened(tmp_path / "saved", {}) as saved:
                    snapshots.restore(saved, arrays, none)
            assert sim.counts().keys() >= {"copies of page-locked memory"}
            assert "copies of other memory" not in sim.counts()
            check(arrays, written)
        model = nn.Linear(32, 32)
        groups = group_parameters(model, [])
        specs = [group.spec for group in groups]
        sim.clear()
        with closing(StateArrays(specs, SPLIT, torch.bfloat16, device, None, Slots(None), host_bytes=0)) as arrays:
            start.fill(model, groups, arrays, from_meta=False, seed=0)
            assert "copies of other memory" not in sim.counts()
    assert sorted(call.args[1] for call in locked.mock_calls) == sorted(call.args[1] for call in unlocked.mock_calls)


@pytest.mark.parametrize("bounce", [4 * ALIGN, 8 << 20])
def test_moving_keeps_every_bit(bounce: int, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through buffers smaller than an array, and larger."""
    monkeypatch.setattr(module, "BOUNCE", bounce)
    arrays = StateArrays(GROUPS, SPLIT, torch.bfloat16, CPU, store, Slots(store), host_bytes=0)
    written = fill(arrays)
    check(arrays, written)
    for place in ROUTE:
        arrays.settle(place)
        for group in GROUPS:
            first, *state = parts_of(group, SPLIT, torch.bfloat16)
            assert arrays.tier_of(first.name) == place.home(group)
            assert arrays.found_on(group.index) == place.weights[group.index]
            if place.weights[group.index] != "disk":
                assert torch.equal(arrays.weights(group.index), written[first.name])
            assert all(arrays.tier_of(part.name) == place.state[group.index] for part in state)
        check(arrays, written)
    arrays.close()


def test_what_is_written_in_memory_is_what_moves(store: Store) -> None:
    arrays = StateArrays(GROUPS, SPLIT, torch.bfloat16, CPU, store, Slots(store), host_bytes=0)
    fill(arrays)
    arrays.settle(ROUTE[0])
    written = fill(arrays)
    arrays.array("moment0.0")[5] = 7.0
    written["moment0.0"][5] = 7.0
    arrays.to_disk()
    assert arrays.tier_of("moment0.0") == "host"
    check(arrays, written)
    on_disk = StateArrays(GROUPS, SPLIT, torch.bfloat16, CPU, store, Slots(store), host_bytes=0)
    check(on_disk, written)
    arrays.close()


@pytest.fixture(params=[1, 2])
def stepped(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[StateArrays, int]]:
    """Arrays on disk, in one slot or two, that a commit names; group 1 has its weights in memory."""
    parts = [part for group in GROUPS for part in parts_of(group, SPLIT, torch.bfloat16)]
    entries = ((part.name, part.nbytes, request.param) for part in parts)
    layout = Layout.build(entries, {part.name: part.grid for part in parts})
    with Store.create([tmp_path / "store"], layout, model={}) as made:
        arrays = StateArrays(GROUPS, SPLIT, torch.bfloat16, CPU, made, Slots(made), host_bytes=0)
        for name in arrays.parts:
            arrays.zero(name)
        arrays.settle(placement(("disk", "disk"), ("host", "disk"), ("disk", "disk")))
        made.commit({"slots": arrays.slots.record()})
        arrays.slots.committed()
        arrays.begin_step()
        yield arrays, request.param
        arrays.close()


def write_some(arrays: StateArrays, name: str) -> None:
    piece = pages(torch.float32, ALIGN)
    piece.fill_(3.0)
    arrays.write(name, 0, piece)


def test_what_a_step_wrote_says_whether_it_can_be_dropped(stepped: tuple[StateArrays, int]) -> None:
    """Beside what counts, or copies of weights: yes. In place: no. Having begun says nothing."""
    arrays, slots = stepped
    arrays.note_step(1, late=False)
    arrays.weights(1)[:ALIGN] = 3.0
    assert arrays.droppable
    write_some(arrays, "moment1.1")
    assert arrays.droppable == (slots == 2)
    if arrays.droppable:
        arrays.drop_step()
        assert not arrays.weights(1).any(), "they are what is at home"


def test_state_in_memory_and_what_a_step_finishes_for_the_one_before_cannot_be_dropped(
    stepped: tuple[StateArrays, int],
) -> None:
    arrays, _ = stepped
    arrays.note_step(0, late=True)
    assert not arrays.droppable
    arrays.complete_late()
    assert arrays.droppable
    arrays.settle(placement(("disk", "disk"), ("host", "host"), ("disk", "disk")))
    arrays.note_step(1, late=False)
    assert not arrays.droppable
    arrays.begin_step()
    assert arrays.droppable


def test_without_a_store_everything_starts_as_zeros_in_host_memory() -> None:
    arrays = StateArrays(GROUPS, ONE, torch.float32, CPU, None, Slots(None), host_bytes=1 << 30)
    assert {arrays.tier_of(name) for name in arrays.parts} == {"host"}
    assert not any(arrays.array(name).any() for name in arrays.parts)
    written = fill(arrays)
    arrays.settle(placement(("device", "device"), ("host", "host"), ("device", "host")))
    check(arrays, written)
    arrays.close()


@pytest.mark.parametrize("step", range(1, len(ROUTE)))
def test_a_move_that_is_interrupted_keeps_the_state(step: int, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the interrupt comes while the old place is given back."""
    arrays = StateArrays(GROUPS, SPLIT, torch.bfloat16, CPU, store, Slots(store), host_bytes=0)
    fill(arrays)
    arrays.settle(ROUTE[step - 1])
    written = fill(arrays)
    homes = [slab for slab in arrays.slabs.values() if isinstance(slab, HostSlab)]
    close = HostSlab.close

    def interrupted(slab: HostSlab) -> None:
        if slab in homes:
            raise KeyboardInterrupt
        close(slab)

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(HostSlab, "close", interrupted)
        arrays.settle(ROUTE[step])
    check(arrays, written)
    arrays.settle(ROUTE[step])
    check(arrays, written)
    arrays.close()
