"""A step that reaches only a part of the model changes that part only, wherever the state lives, killed or not.

``tests.unreached`` has the model, and the letters of the steps. What training must give is computed with all state in
memory, one op at a time, which has no slots; and that is compared with plain PyTorch.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.config import Tier
from penstock.optim import kernels
from penstock.planner import fit
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.place import Placement
from penstock.state.slots import Slots
from penstock.state.values import committed
from penstock.store import Store
from tests.conftest import Campaign
from tests.training import (
    Result,
    assert_same_state,
    budget,
    master_of,
    relative,
    run_steps,
    state_of,
    wrap,
)
from tests.unreached import ADAMW, CASE, KINDS, plain_loop, steps_of

pytestmark = pytest.mark.usefixtures("one_thread")

PLACES: dict[str, dict[str, Any]] = {
    "disk": {},
    "one slot": {"slots": 1},
    "weights in memory": {"weights": "host"},
    "weights on the device": {"weights": "device"},
    "interval": {"weights": "host", "state": "host", "durability": "interval", "interval": 2},
    "weights in memory, interval": {"weights": "host", "durability": "interval", "interval": 2},
    "host": {"weights": "host", "state": "host"},
    "mixed": {"weights": None, "state": None, "durability": "none", "device": "300KiB", "host": "1500KiB"},
    "mixed, interval": {
        "weights": None,
        "state": None,
        "device": "300KiB",
        "host": "1500KiB",
        "durability": "interval",
        "interval": 1,
    },
    "gradients and saved activations": {"gradients": "disk", "activations": "disk"},
}
CLIPS = {"none": None, "all": 0.5, "some": 2.1, "never": 1e9}


@cache
def in_memory(pattern: str, precision: str, clip: float | None) -> tuple[Result, torch.Tensor]:
    """Training with all state in memory, one op at a time, and its parameters in fp32."""
    common = {"optimizer": ADAMW, "overlap": False, "speculate": None, "delay": 0.0}
    with wrap(CASE, budget(None), precision=precision, clip_grad_norm=clip, **common) as engine:
        return run_steps(engine, steps_of(pattern)), master_of(engine)


def wanted(pattern: str, precision: str, clip: float | None) -> Result:
    return in_memory(pattern, precision, clip)[0]


@dataclass(frozen=True, kw_only=True)
class Run:
    """How the steps of a pattern are taken. ``kills``: numbers of steps after which the run is killed."""

    pattern: str
    place: str = "disk"
    precision: str = "fp32"
    clip: str = "some"
    kills: frozenset[int] = frozenset()
    chunk: int = 8192
    wrapped: Mapping[str, Any] = field(default_factory=dict)
    """more arguments of ``wrap``"""

    def engine(self, store: Path) -> penstock.Engine:
        common = {"optimizer": ADAMW, "precision": self.precision, "clip_grad_norm": CLIPS[self.clip]}
        wrapped, place = dict(self.wrapped), dict(PLACES[self.place])
        if CLIPS[self.clip] is None and self.precision != "fp16":  # no step waits for a norm: these are refused
            wrapped.pop("speculate", None)
            if not wrapped.get("delay"):
                place.pop("gradients", None)
        return wrap(CASE, budget(store, **place), **common | wrapped)


def check_run(run: Run, folder: Path) -> None:
    """Take the steps, through all kills: losses, norms and state are those of a run in memory, the store is whole."""
    expected, steps = wanted(run.pattern, run.precision, CLIPS[run.clip]), steps_of(run.pattern)
    losses: dict[int, tuple[float, float]] = {}
    lives, kills = 0, sorted(run.kills)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "CHUNKS", (run.chunk,))
        engine = run.engine(folder / "0")
        try:
            while engine.step_count < len(steps):
                stats = engine.step(steps[engine.step_count])
                losses[stats.step] = (stats.loss, stats.grad_norm)
                if kills and engine.step_count == kills[0]:
                    kills.pop(0)
                    lives += 1
                    ignored = shutil.ignore_patterns("lock", "scratch")
                    shutil.copytree(folder / str(lives - 1), folder / str(lives), ignore=ignored)
                    engine.close()
                    check_whole(folder / str(lives - 1), None)
                    engine = run.engine(folder / str(lives))
            state = state_of(engine)
        finally:
            engine.close()
    assert losses == dict(enumerate(zip(expected.losses, expected.norms, strict=True), start=1))
    assert_same_state(expected.state, state)
    check_whole(folder / str(lives), expected)


def check_whole(store: Path, expected: Result | None) -> None:
    """What a closed store holds is whole, and its values are those of the run."""
    with Store.open([store]) as opened:
        slots = Slots(opened)
        current = {extent.name: slots.current(extent.name) for extent in opened.layout.extents}
        assert not [text for _, damage in opened.verify(current) for text in damage]
    if expected is None:
        return
    with committed([[store]]) as last:
        for name, place in last.values.parameters.items():
            numel = place.shape.numel()
            parts = [expected.state[array][place.offset : place.offset + numel] for array in place.arrays]
            master = parts[0].float()
            if len(parts) == 2:
                kernels.join(master, parts[0].contiguous(), parts[1].contiguous())
            found = last.values.parameter(name).flatten()
            assert torch.equal(master, found), name


# ---- what is right


@pytest.mark.sampled(3, values=False)
@pytest.mark.parametrize(
    ("pattern", "clip"), [("tf", "none"), ("ft", "some"), ("fsf", "some"), ("ccf", "some"), ("ftcs", "some")]
)
def test_a_run_in_memory_gives_what_plain_torch_gives(pattern: str, clip: str) -> None:
    """A parameter without a gradient keeps its value and its moments, and counts no update."""
    (found, master), plain = in_memory(pattern, "fp32", CLIPS[clip]), plain_loop(steps_of(pattern), CLIPS[clip])
    assert found.losses == pytest.approx(plain.losses, rel=1e-5)
    assert found.norms == pytest.approx(plain.norms, rel=1e-5)
    names = sorted(name for name, _ in CASE.model().named_parameters())
    assert relative(master, torch.cat([plain.state[name].flatten() for name in names])) <= 1e-5
    clipped = [norm > CLIPS["some"] for norm in wanted("ftcs", "fp32", CLIPS["some"]).norms]  # type: ignore[operator]
    assert set(clipped) == {True, False}, "some of the steps are over the limit"


# ---- wherever the state lives


@pytest.mark.sampled(3, values=False)
@pytest.mark.parametrize(
    ("pattern", "place"),
    [(pattern, "disk") for pattern in ("t", "ft", "tf", "s", "cf")]
    + [("ftf", place) for place in PLACES if place != "weights on the device"],  # which fp32 has only with the state
)
def test_a_part_that_a_step_does_not_reach_keeps_its_weights(pattern: str, place: str, tmp_path: Path) -> None:
    check_run(Run(pattern=pattern, place=place), tmp_path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("pattern", ["fff", "ftf"])
def test_what_is_delayed_may_all_be_in_memory_while_other_groups_are_on_disk(
    pattern: str, precision: str, tmp_path: Path
) -> None:
    """The next step then writes beside what the one before has written: it is over the limit, and is repeated."""
    on_disk: tuple[Tier, ...] = ("host", "host", "host", "disk", "disk", "disk")
    weights = on_disk if precision == "fp32" else ("host",) * 6
    place = Placement(weights=weights, state=on_disk, gradients="host", activations="device")
    expected = wanted(pattern, precision, CLIPS["all"])
    settings = {"optimizer": ADAMW, "precision": precision, "clip_grad_norm": CLIPS["all"], "delay": 0.1}
    with wrap(CASE, budget(tmp_path, weights=None, state=None), speculate=True, **settings) as engine:
        engine.inside.planning.placed = place  # as a plan for other micro-batches has left it
        stats = [engine.step(micro_batches) for micro_batches in steps_of(pattern)]
        plan = engine.plan
        assert (plan.settings.place.state, plan.settings.place.weights) == (on_disk, weights)
        found = run_steps(engine, [])
    late = {int(name.partition(".")[0]) for name in _late(plan.schedule)}
    assert late, "something is delayed"
    assert not any(on_disk[g] == "disk" for g in late)
    assert [s.repeats for s in stats] == [1] * len(pattern), "groups on disk have stepped before the norm"
    assert [s.loss for s in stats] == expected.losses
    assert_same_state(expected.state, found.state)


def _late(schedule: Schedule) -> list[str]:
    """Group and chunk of what is stepped with the gradient of the step before."""
    return [op.id[2:] for op in schedule.lanes["cpu"] if op.id.kind == "OP" and op.reads[0][0] in "hr"]


DELAYS = st.sampled_from([0.0, 0.3, 0.7, 1.0])
RUNS = st.builds(
    lambda early, horizontally, kills, **common: Run(
        **common,
        kills=kills
        if common["place"] in ("disk", "weights in memory", "gradients and saved activations")
        else frozenset(),
        wrapped=({"schedule": "horizontal", "delay": 0.0} if horizontally else {"delay": early[0]})
        | ({"speculate": False} if not early[1] else {})
        | {"overlap": early[2]},
    ),
    pattern=st.text(KINDS, min_size=1, max_size=4),
    place=st.sampled_from(sorted(PLACES)),
    precision=st.sampled_from(["bf16", "fp16"]),
    clip=st.sampled_from(sorted(CLIPS)),
    kills=st.frozensets(st.integers(1, 3), max_size=2),
    chunk=st.sampled_from([8192, 1 << 21]),
    early=st.tuples(DELAYS, st.booleans(), st.booleans()),
    horizontally=st.booleans(),
)


def test_any_pattern_of_steps_gives_the_bits_of_a_run_in_memory(campaign: Campaign) -> None:
    """In vertical and horizontal schedules, with delays, speculation, clipping, overlap, and kills after some steps."""

    @settings(max_examples=campaign.cases(3, 400), deadline=None)
    @given(run=RUNS)
    def check(run: Run) -> None:
        with TemporaryDirectory() as folder:
            check_run(run, Path(folder))

    check()


class Injected(torch.autograd.Function):
    """A gradient for a parameter at whose shape alone the forward looks."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
        ctx.shape = parameter.shape
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> torch.Tensor:  # type: ignore[override] # as torch's own examples
        return torch.full(ctx.shape, 0.5)


class Unread(torch.nn.Module):
    """Two blocks, and a parameter beside them that is stepped, and that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.unread = torch.nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean() + Injected.apply(self.unread)  # type: ignore[no-untyped-call, no-any-return]


@pytest.mark.parametrize("delay", [0.0, 1.0])
@pytest.mark.parametrize("weights", ["host", "disk"])
def test_a_parameter_that_gets_a_gradient_is_stepped_though_nothing_reads_it(
    weights: Tier, delay: float, tmp_path: Path
) -> None:
    with penstock.wrap(
        Unread(),
        loss_fn=lambda model, micro_batch: model(**micro_batch),
        optimizer=penstock.SGD(lr=0.25),
        budget=budget(tmp_path, weights=weights),
        delay=delay,
        device="cpu",
        plan=None,
        clip_grad_norm=None,
    ) as engine:
        for _ in range(2):
            engine.step([{"x": torch.ones(2, 8)}], loss_weights=[1.0])
        assert dict(engine.master_parameters())["unread"].tolist() == [0.75] * 5
