"""Bytes moved over each lane, and the peak of each tier: what was planned, what the papers' formulas say, what was run.

The model has blocks between an embedding and a head that are param groups of their own, with everything on disk unless
a test says otherwise. N counts elements with the padding of each group to 4,096.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.config import TIERS
from penstock.errors import BudgetError
from penstock.schedule.check.late import late_moves
from penstock.schedule.ir.lanes import LOCAL_LANES
from penstock.schedule.program import ALIGN
from tests import campaign
from tests.models import Case, causal_lm
from tests.training import budget, run_steps, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY, HIDDEN, LAYERS, ROWS, LENGTH, M = 8192, 32, 3, 2, 12, 3


class LargeEnds(nn.Module):
    """Blocks between an embedding and a norm with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.ReLU(), nn.Linear(4 * HIDDEN, HIDDEN))
            for _ in range(LAYERS)
        )
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


CASE = Case(build=LargeEnds, micro_batch=causal_lm, blocks=LAYERS, loss_fn=lambda m, mb: m(**mb))
STEPS = steps_of(CASE, 2, lengths=(LENGTH,) * M)


def padded(elements: int) -> int:
    return -(-elements // ALIGN) * ALIGN


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Elements of the param groups."""

    block: int = padded(2 * 4 * HIDDEN * HIDDEN + 5 * HIDDEN)
    embedding: int = VOCABULARY * HIDDEN
    head: int = VOCABULARY * HIDDEN
    norm: int = padded(HIDDEN)

    @property
    def blocks(self) -> int:
        return LAYERS * self.block

    @property
    def all(self) -> int:
        return self.blocks + self.embedding + self.head + self.norm

    def loaded(self, times: int) -> int:
        """Elements that go to the device for ``times`` passes: a block for its forward and for its backward, the ends
        once. (An embedding's backward reads no weights; those of the head and the norm follow their forward at once.)
        The last block's stay for its backward, and the first one's for its forward in the next pass.
        """
        ends = self.embedding + self.head + self.norm
        return times * (2 * self.blocks + ends - self.block) - (times - 1) * self.block

    @property
    def kept(self) -> int:
        """Elements that the optimizer finds in host memory, since they were loaded for the visit that it follows, or
        shortly before: all but the embedding's."""
        return self.blocks + self.head + self.norm


SIZES = Sizes()
ACTIVATION = ROWS * LENGTH * HIDDEN
"""Elements at a block boundary, of one micro-batch."""


def moved(engine: penstock.Engine) -> dict[str, int]:
    """Bytes per lane of the last step's trace, without those of the optimizer's arithmetic."""
    counted: Counter[str] = Counter()
    for event in engine.trace:
        counted[event.lane] += event.bytes
    return {lane: counted[lane] for lane in ("h2d", "d2h", "read", "write")}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("clip", [1e9, None])
@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
@pytest.mark.parametrize(("precision", "weight"), [("fp32", 4), ("bf16", 2)])
def test_bytes_of_each_lane_follow_from_the_formulas(
    precision: str, weight: int, schedule: str, clip: float | None, tmp_path: Path
) -> None:
    """Per parameter: weights twice (2M times if horizontal) but for what stays on the device, gradients down in fp32
    once (M times), master and moments read and written once. In bf16 the weights are the master copy's upper half. They
    are read no further time for the optimizer: 16 + 12 bytes of a block in fp32, 14 + 12 in bf16."""
    where = budget(tmp_path / "store", activations="device")
    times = 1 if schedule == "vertical" else M
    with wrap(CASE, where, precision=precision, schedule=schedule, clip_grad_norm=clip) as engine:
        stats = run_steps(engine, STEPS).stats[-1]
        wanted = {
            "h2d": weight * SIZES.loaded(times),
            "d2h": times * 4 * SIZES.all,
            "read": weight * (SIZES.loaded(times) - SIZES.kept) + 12 * SIZES.all,
            "write": 12 * SIZES.all,
        }
        assert moved(engine) == wanted
        assert {lane: stats.bytes_moved[lane] for lane in wanted} == wanted
        assert stats.bytes_moved == engine.plan.schedule.bytes_per_lane()


@pytest.mark.parametrize("gradients", ["host", "disk"])
def test_a_step_that_nothing_was_left_to_moves_what_late_chunks_do_not_take_home(
    gradients: str, tmp_path: Path
) -> None:
    """The first step, and one after somebody has looked at the state. They read for their own first chunks, too."""
    with wrap(campaign.CASE, budget(tmp_path / "store", gradients=gradients), delay=0.5) as engine:
        engine.prepare(campaign.step_data(1))
        store, scratch = engine.inside.resources.commits.store, engine.inside.planning.runner.scratch
        assert store is not None
        steps, read = [], []
        for n in (1, 2, 3):
            if n == 3:
                engine.inside.rest()
            before = store.stats.bytes_read + (scratch.stats.bytes_read if scratch else 0)
            steps.append(engine.step(campaign.step_data(n)).bytes_moved)
            read.append(store.stats.bytes_read + (scratch.stats.bytes_read if scratch else 0) - before)
        schedule = engine.plan.schedule
        planned, late = schedule.bytes_per_lane(), late_moves(schedule)
        first = {lane: n - sum(op.nbytes for op in late if op.lane == lane) for lane, n in planned.items()}
        ends = {end for _, end, _ in schedule.carried}
        ahead = [op.nbytes for op in schedule.lanes["read"] if not ends.isdisjoint(op.writes)]
        assert late
        assert ahead
        first["read"] += sum(ahead)
        assert steps == [first, planned, first]
        assert read == [moved["read"] for moved in steps]


def test_bytes_of_the_cpu_lane(tmp_path: Path) -> None:
    """Optimizer: gradient in, master and moments in and out. Norm: gradient. Each sum of gradients: two in, one out."""
    for precision, clip, schedule, per_element in (
        ("fp32", None, "vertical", 4 + 24),
        ("fp32", 1.0, "vertical", 4 + 24 + 4),
        ("bf16", None, "vertical", 4 + 24),
        ("fp16", None, "vertical", 4 + 24 + 2),
        ("fp32", None, "horizontal", 4 + 24 + 12 * (M - 1)),
    ):
        where = budget(tmp_path / f"{precision}.{clip}.{schedule}")
        with wrap(
            CASE, where, precision=precision, clip_grad_norm=clip, schedule=schedule, speculate=False if clip else None
        ) as engine:
            assert engine.step(STEPS[0]).bytes_moved["cpu"] == per_element * SIZES.all


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_bytes_of_saved_activations_and_waiting_gradients(schedule: str, tmp_path: Path) -> None:
    """Down and up once for each micro-batch: inputs of all blocks but the last. (Its outputs are used at once, and its
    inputs stay where the device has room for them, as here.)"""
    bytes_of: dict[str, dict[str, int]] = {}
    for name, places in {
        "device": {"activations": "device"},
        "host": {"activations": "host"},
        "disk": {"activations": "disk", "gradients": "disk"},
    }.items():
        with wrap(CASE, budget(tmp_path / name, **places), schedule=schedule, recompute=True) as engine:
            engine.step(STEPS[0])
            bytes_of[name] = moved(engine)
    each, base = 4 * ACTIVATION, bytes_of["device"]
    count = (LAYERS - 1) * M
    both = {lane: base[lane] + count * each for lane in ("d2h", "h2d")}
    pages = count * padded(each) + 4 * SIZES.all  # a page has as many bytes as a group's padding has elements
    assert bytes_of["host"] == base | both
    waited = 4 * SIZES.kept  # gradients that wait on disk do so for the norm: the optimizer reads the weights again
    assert bytes_of["disk"] == base | both | {"read": base["read"] + pages + waited, "write": base["write"] + pages}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_drives_move_exactly_the_bytes_of_the_trace(precision: str, tmp_path: Path) -> None:
    where = budget([tmp_path / "a", tmp_path / "b"], activations="disk", gradients="disk")
    (tmp_path / "a").mkdir()
    with wrap(CASE, where, precision=precision) as engine:
        engine.step(STEPS[0])
        runner = engine.inside.planning.runner
        assert runner is not None
        stores = (engine.inside.resources.commits.store, runner.scratch)
        before = [store.stats for store in stores if store is not None]
        engine.step(STEPS[1])
        after = [store.stats for store in stores if store is not None]
        assert len(before) == 2
        traced = moved(engine)
        assert sum(b.bytes_read - a.bytes_read for a, b in zip(before, after, strict=True)) == traced["read"]
        assert sum(b.bytes_written - a.bytes_written for a, b in zip(before, after, strict=True)) == traced["write"]


def test_the_trace_has_every_op_of_the_schedule_once_and_in_lane_order(tmp_path: Path) -> None:
    with wrap(CASE, budget(tmp_path / "store")) as engine:
        stats = run_steps(engine, STEPS).stats[-1]
        schedule = engine.plan.schedule
        assert Counter(e.op for e in engine.trace) == Counter(op.id for op in schedule.ops)
        assert {e.step for e in engine.trace} == {2}
        spans = {e.op: e for e in engine.trace}
        for op in schedule.ops:
            assert 0 <= spans[op.id].start <= spans[op.id].end
            assert all(spans[other].end <= spans[op.id].start for other in op.after), op
        for lane in ("compute", "h2d", "d2h", "cpu"):  # a lane that does one thing at a time
            events = [spans[op.id] for op in schedule.lanes[lane]]
            assert all(a.end <= b.start for a, b in pairwise(events)), lane
        assert set(stats.lane_seconds) == set(LOCAL_LANES)
        assert all(stats.lane_seconds[lane] > 0 for lane in LOCAL_LANES)
        assert all(stats.lane_seconds[lane] <= stats.seconds for lane in LOCAL_LANES)
        moments = sorted({moment for e in engine.trace for moment in (e.start, e.end)})
        for lane in LOCAL_LANES:  # of a lane that has two ops under way at once, a second counts once
            events = [e for e in engine.trace if e.lane == lane]
            under_way = [b - a for a, b in pairwise(moments) if any(e.start <= a and b <= e.end for e in events)]
            assert stats.lane_seconds[lane] == pytest.approx(sum(under_way)), lane


PLACES: dict[str, dict[str, Any]] = {
    "disk": {},
    "all_on_disk": {"activations": "disk", "gradients": "disk"},
    "planned": {"weights": None, "state": None, "durability": "none"},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
@pytest.mark.parametrize("places", PLACES)
def test_peaks_stay_within_plan_and_budget(places: str, schedule: str, tmp_path: Path) -> None:
    where = budget(tmp_path / "store", device="9MiB", host="12MiB", **PLACES[places])
    with wrap(CASE, where, schedule=schedule, precision="bf16") as engine:
        for micro_batches in STEPS:
            check_peaks(engine, engine.step(micro_batches), where)


def check_peaks(engine: penstock.Engine, stats: penstock.StepStats, where: penstock.Budget) -> None:
    """What the last step's peaks must satisfy."""
    plan = engine.plan
    limits = {"device": (plan.device_bytes, where.device_bytes), "host": (plan.host_bytes, where.host_bytes)}
    for tier, (planned, given) in limits.items():
        assert 0 < stats.peak_bytes[tier] <= planned <= given
        assert stats.peak_bytes[tier] == max(s.bytes for s in engine.counters if s.tier == tier)
    assert set(stats.peak_bytes) == set(TIERS)


def smallest(where: penstock.Budget, tier: str, **settings: Any) -> int:
    """What the refusal of a budget that is too small on one tier says would do."""
    with wrap(CASE, where, **settings) as engine, pytest.raises(BudgetError) as refusal:
        engine.step(STEPS[0])
    wanted = rf"budget\.{tier}=.* is too small .* smallest that works is .*\((\d+) bytes\)"
    found = re.search(wanted, str(refusal.value))
    assert found is not None, refusal.value
    return int(found[1])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_refused_budget_names_the_smallest_that_works(tier: str, schedule: str, tmp_path: Path) -> None:
    def where(name: str, nbytes: int) -> penstock.Budget:
        return budget(tmp_path / name, **{tier: f"{nbytes}B"})

    settings: Mapping[str, Any] = {"schedule": schedule, "precision": "bf16"}
    nbytes = smallest(where("none", 0), tier, **settings)
    assert smallest(where("less", nbytes - 1), tier, **settings) == nbytes
    with wrap(CASE, where("enough", nbytes), **settings) as engine:
        for micro_batches in STEPS:
            check_peaks(engine, engine.step(micro_batches), where("enough", nbytes))


def test_a_larger_step_that_does_not_fit_is_refused_before_it_starts(tmp_path: Path) -> None:
    with wrap(CASE, budget(tmp_path / "store", device="9MiB")) as engine:
        engine.step(STEPS[0])
        with pytest.raises(BudgetError, match=r"budget\.device=9MiB is too small"):
            engine.step(steps_of(CASE, 1, lengths=(64,) * 16)[0])
        assert engine.step(STEPS[1]).step == 2


def test_memory_alone_must_hold_the_state() -> None:
    model = CASE.model()
    with pytest.raises(BudgetError, match=r"take 6\.47 MiB, and the budget gives 2 MiB.*budget\.disk"):
        wrap(CASE, penstock.Budget(device="1MiB", host="1MiB"), model=model)
    assert CASE.loss_fn(model, STEPS[0][0]).isfinite()  # the model is as it was


def test_what_a_dropped_run_has_moved_counts_in_the_step(tmp_path: Path) -> None:
    moved_by = []
    for clip in (1e9, 1e-3):
        with wrap(CASE, budget(tmp_path / str(clip)), clip_grad_norm=clip, speculate=True, delay=0.0) as engine:
            store = engine.inside.resources.commits.store
            assert store is not None
            stats = [engine.step(STEPS[0]), engine.step(STEPS[0])][-1]
            assert stats.repeats == (clip < 1)
            moved_by.append(stats.bytes_moved)
            assert sum(e.bytes for e in engine.trace if e.lane == "read") == moved_by[0]["read"]
    assert moved_by[1] == {lane: 2 * n for lane, n in moved_by[0].items()}
