"""Memory outside of steps: what the engine takes while it loads, probes, places, saves and resumes is as planned."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import penstock
from penstock.config import TIERS, Precision, Tier
from penstock.config.optimizer import Moments
from penstock.planner.phase_memory import Phase, arrays, peaks_outside_steps
from penstock.schedule.moving import move_order
from penstock.schedule.place import BOUNCE, PAGE, Format, Placement, page_up
from penstock.schedule.program import ALIGN, GroupSpec, Program, Whole
from penstock.state.layout import parts_of
from penstock.state.memory import DeviceSlab, HostSlab
from penstock.store.snapshot import DATA
from penstock.tape import probe
from penstock.tape.watch import Watch
from tests.models import MODELS, PLAIN
from tests.programs import transformer
from tests.tape_reference import Bench
from tests.training import budget, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = PLAIN
FORM = Format.of("fp32", 2)


class Slabs:
    """Bytes of all slabs that live, and at most since ``peak`` was last asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.live: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        self._most = dict(self.live)
        self._tier: dict[int, Tier] = {}
        self._making: Tier = "host"
        make_host, close_host, make_device = HostSlab.__init__, HostSlab.close, DeviceSlab.__init__

        def host(slab: HostSlab, nbytes: int, **more: Any) -> None:
            make_host(slab, nbytes, **more)
            self._tier[id(slab)] = self._making
            self.live[self._making] += slab.nbytes
            self._most[self._making] = max(self._most[self._making], self.live[self._making])

        def close(slab: HostSlab) -> None:
            self.live[self._tier.pop(id(slab))] -= slab.nbytes
            close_host(slab)

        def device(slab: DeviceSlab, nbytes: int, where: torch.device) -> None:
            self._making = "device"
            try:
                make_device(slab, nbytes, where)
            finally:
                self._making = "host"

        monkeypatch.setattr(HostSlab, "__init__", host)
        monkeypatch.setattr(HostSlab, "close", close)
        monkeypatch.setattr(DeviceSlab, "__init__", device)

    def peak(self, tier: Tier) -> int:
        most, self._most[tier] = self._most[tier], self.live[tier]
        return most


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return CASE.build().train()


def planned(engine: penstock.Engine) -> dict[Phase, dict[Tier, int]]:
    plan = engine.plan
    return peaks_outside_steps(
        plan.program,
        plan.settings.form,
        plan.settings.place,
        step={"device": plan.device_bytes, "host": plan.host_bytes},
        disk=bool(engine.budget.disk_paths),
        host_bytes=engine.budget.host_bytes,
        slots=engine.budget.slots,
    )


def about(nbytes: int) -> Any:
    """An empty slab takes a page, and a page is what sizes are rounded up to."""
    return pytest.approx(nbytes, abs=4 * PAGE)


@pytest.mark.parametrize(
    "places",
    [
        {"disk": True},
        {"disk": True, "state": "host"},
        {"disk": True, "weights": "device", "state": "device"},
        {"disk": False, "weights": "host", "state": "host"},
        {"disk": False, "weights": "device", "state": "device"},
    ],
    ids=lambda places: ",".join(f"{k}={v}" for k, v in places.items()),
)
def test_each_phase_takes_what_is_planned(
    places: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "store" if places.pop("disk") else None
    slabs = Slabs(monkeypatch)
    engine = wrap(CASE, budget(disk, **places), model=on_meta())
    loaded = {tier: slabs.peak(tier) for tier in TIERS}
    engine.step(steps_of(CASE, 1)[0])
    peaks = planned(engine)
    assert loaded["host"] == about(peaks["load"]["host"])
    assert loaded["device"] == about(peaks["load"]["device"])
    first_step = max(peaks["probe"]["host"], peaks["place"]["host"], engine.plan.host_bytes)
    assert slabs.peak("host") == about(first_step)
    assert slabs.peak("device") <= max(peaks[p]["device"] for p in ("probe", "place", "save"))
    engine.save(tmp_path / "snapshot")
    assert slabs.peak("host") == about(peaks["save"]["host"])
    engine.load(tmp_path / "snapshot")
    assert slabs.peak("host") == about(peaks["save"]["host"])
    assert peaks["resume"]["host"] >= peaks["save"]["host"]
    engine.close()
    assert slabs.peak("host") <= max(peaks["close"]["host"], engine_pools(peaks)) + 4 * PAGE
    assert slabs.live == dict.fromkeys(TIERS, 0)
    if disk is not None:
        stored = (disk / "penstock.store").stat().st_size
        assert stored == peaks["close"]["disk"]
        assert stored + (tmp_path / "snapshot" / DATA).stat().st_size == peaks["save"]["disk"]


def engine_pools(peaks: dict[Phase, dict[Tier, int]]) -> int:
    """What the engine still holds when it begins to close: a step's pools and arrays."""
    return peaks["save"]["host"] - BOUNCE


@contextmanager
def measured(bench: Bench) -> Iterator[list[int]]:
    """The most bytes of activations and attached weights that a probe of ``bench`` holds at once."""
    most = [0]

    class Counting(Watch):
        def follow(self, key: int, storage: torch.UntypedStorage) -> None:
            super().follow(key, storage)
            weights = sum(flat.numel() * flat.itemsize for flat in bench.attached.values())
            most[0] = max(most[0], self.live + weights)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "Watch", Counting)
        yield most


@pytest.mark.parametrize(("name", "above"), [("llama_sdpa", 1.02), ("gpt2", 1.03), ("bert", 1.05), ("t5", 1.15)])
def test_a_probe_takes_what_is_planned(name: str, above: float) -> None:
    """Gradients that collect where an output has several readers count from the forward on, as they do in a step."""
    case = MODELS[name]
    bench = Bench(case, case.model(), moving=True)
    with measured(bench) as most:
        bench.probe(case.micro_batches(1)[0])
    program = Program(groups=tuple(g.spec for g in bench.groups), stages=bench.stages)
    everywhere: tuple[Tier, ...] = ("disk",) * len(program.groups)
    place = Placement(weights=everywhere, state=everywhere, gradients="host", activations="host")
    peaks = peaks_outside_steps(program, FORM, place, step={"device": 0, "host": 0}, disk=True, host_bytes=0, slots=2)
    assert most[0] <= peaks["probe"]["device"] <= above * most[0]


@st.composite
def groups(draw: st.DrawFn) -> tuple[GroupSpec, ...]:
    counts = st.integers(0, 300).map(lambda blocks: blocks * ALIGN)
    wholes = st.sampled_from([None, Whole(flop=1, scratch=1)])
    return tuple(
        GroupSpec(
            index=g,
            name=str(g),
            trainable=draw(counts),
            frozen=draw(counts),
            compact=draw(st.booleans()),
            whole=draw(wholes),
        )
        for g in range(draw(st.integers(1, 4)))
    )


@given(
    groups(), st.sampled_from(["fp32", "bf16", "fp16"]), st.sampled_from(["fp32", "bf16", "int8"]), st.integers(0, 2)
)
def test_the_arrays_that_are_planned_are_those_of_the_state(
    groups: tuple[GroupSpec, ...], precision: Precision, moments: Moments, count: int
) -> None:
    form = Format.of(precision, count, moments)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    parts = [part for group in groups for part in parts_of(group, form, dtype)]
    found = arrays(replace(transformer(1), groups=groups), form)
    assert [(a.group, a.nbytes) for a in found] == [(p.group, p.nbytes) for p in parts]
    assert [a.state for a in found] == [not p.name.startswith("weights") for p in parts]


@given(
    st.lists(
        st.tuples(st.integers(min_value=1, max_value=50), st.sampled_from(TIERS), st.sampled_from(TIERS)), max_size=8
    )
)
def test_each_array_that_has_to_move_moves_once(moves: list[tuple[int, Tier, Tier]]) -> None:
    sizes = [n for n, _, _ in moves]
    now: list[Tier] = [tier for _, tier, _ in moves]
    wanted: list[Tier] = [tier for _, _, tier in moves]
    order = move_order(sizes, now, wanted)
    assert sorted(order) == [i for i in range(len(moves)) if now[i] != wanted[i]]


def test_arrays_are_those_that_the_engine_keeps(tmp_path: Path) -> None:
    with wrap(CASE, budget(tmp_path / "store"), precision="bf16") as engine:
        parts = engine.inside.resources.arrays.parts.values()
        program = Program.__new__(Program)
        object.__setattr__(program, "groups", engine.inside.resources.arrays.groups)
        found = arrays(program, Format.of("bf16", 2))
        assert [(a.group, a.nbytes) for a in found] == [(p.group, p.nbytes) for p in parts]
        assert [a.state for a in found] == [not p.name.startswith("weights") for p in parts]
        assert sum(page_up(p.nbytes) for p in parts) == sum(page_up(a.nbytes) for a in found)


def test_scratch_is_on_disk_beside_a_snapshot() -> None:
    program = transformer(2)
    everywhere: tuple[Tier, ...] = ("disk",) * len(program.groups)
    place = Placement(weights=everywhere, state=everywhere, gradients="disk", activations="disk")

    def disk(scratch: int) -> dict[Phase, int]:
        step: dict[Tier, int] = {"device": 0, "host": 0}
        peaks = peaks_outside_steps(program, FORM, place, step=step, disk=True, host_bytes=0, slots=2, scratch=scratch)
        return {phase: sizes["disk"] for phase, sizes in peaks.items()}

    none, some = disk(0), disk(1000)
    assert {phase: some[phase] - none[phase] for phase in none if some[phase] != none[phase]} == {
        "save": 1000,
        "resume": 1000,
    }
