"""The schedule never changes the numbers: whatever the order, the tier, the chunk size and the timing, the same bits.

The reference is the serial oracle, vertical, with everything on disk. The model has dropout and a tied head, and the
micro-batches of a step are of unequal length.
"""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import penstock
from penstock.config.optimizer import OptimizerSpec
from penstock.errors import BudgetError
from penstock.planner import fit
from penstock.schedule.ir.text import parse_schedule
from tests.models import COLLECTING, MODELS, TIED
from tests.training import (
    MicroBatches,
    Result,
    assert_same,
    assert_same_state,
    budget,
    run_steps,
    state_of,
    steps_of,
    train,
    wrap,
)

pytestmark = pytest.mark.usefixtures("one_thread")

CASE, CLIP = TIED, 0.17
STEPS = steps_of(CASE, 3)
FORMATS: tuple[tuple[str, float | None], ...] = (
    ("fp32", CLIP),
    ("fp32", None),
    ("bf16", CLIP),
    ("bf16", None),
    ("fp16", CLIP),
    ("fp16", None),
)
"""Precision and limit of the gradient norm, which some of the steps exceed."""

Setting = dict[str, Any]
Where = Callable[[Path], penstock.Budget]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """The oracle's result for a precision and a limit; each is computed once."""

    @cache
    def run(precision: str, clip: float | None, optimizer: OptimizerSpec | None = None) -> Result:
        disk = tmp_path_factory.mktemp("oracle") / "store"
        more: Setting = {"recompute": True} | ({} if optimizer is None else {"optimizer": optimizer})
        return train(CASE, budget(disk), STEPS, precision=precision, clip_grad_norm=clip, overlap=False, **more)

    return run


VARIANTS: dict[str, tuple[Where, Setting]] = {
    "overlapped": (lambda p: budget(p), {}),
    "horizontal": (lambda p: budget(p), {"schedule": "horizontal"}),
    "horizontal_serial": (lambda p: budget(p), {"schedule": "horizontal", "overlap": False}),
    "on_host": (lambda p: budget(None, weights="host", state="host"), {}),
    "on_host_horizontal": (lambda p: budget(None, weights="host", state="host"), {"schedule": "horizontal"}),
    "on_device": (lambda p: budget(None, weights="device", state="device"), {}),
    "on_device_horizontal": (lambda p: budget(None, weights="device", state="device"), {"schedule": "horizontal"}),
    "planned": (lambda p: budget(p, weights=None, state=None, durability="none"), {}),
    "activations_on_host": (lambda p: budget(p, activations="host"), {}),
    "activations_on_disk": (lambda p: budget(p, activations="disk"), {}),
    "activations_on_disk_horizontal": (lambda p: budget(p, activations="disk"), {"schedule": "horizontal"}),
    "all_on_disk": (lambda p: budget(p, activations="disk", gradients="disk"), {}),
    "all_on_disk_horizontal": (
        lambda p: budget(p, activations="disk", gradients="disk"),
        {"schedule": "horizontal"},
    ),
    "striped_one_thread": (lambda p: budget([p / "a", p / "b"]), {"io_threads": 1}),
    "six_threads": (lambda p: budget(p), {"io_threads": 6}),
    "weights_on_device": (lambda p: budget(p, weights="device"), {}),
    "weights_on_host": (lambda p: budget(p, weights="host"), {}),
    "recomputed": (lambda p: budget(p), {"recompute": True}),
    "recomputed_horizontal": (lambda p: budget(p), {"schedule": "horizontal", "recompute": True}),
    "some_recomputed": (lambda p: budget(p, device="240KiB"), {}),
    "some_recomputed_horizontal": (lambda p: budget(p, device="212KiB"), {"schedule": "horizontal"}),
    "some_recomputed_horizontal_16": (lambda p: budget(p, device="172KiB"), {"schedule": "horizontal"}),
    "state_on_host": (lambda p: budget(p, weights="device", state="host"), {"schedule": "horizontal"}),
}


def possible(name: str, precision: str, clip: float | None) -> bool:
    """Where gradients wait is asked only if they do, and what has room for some graphs is not the same in 16 bits."""
    if name.startswith("some_recomputed_horizontal"):
        return name.endswith("_16") == (precision != "fp32")
    return not (name.startswith("all_on_disk") and clip is None and precision != "fp16")


COMBINATIONS = [(name, *kind) for kind in FORMATS for name in VARIANTS if possible(name, *kind)]


@pytest.mark.sampled(6, values=False)
@pytest.mark.parametrize(("name", "precision", "clip"), COMBINATIONS)
def test_same_bits_as_the_oracle(
    name: str, precision: str, clip: float | None, reference: Callable[..., Result], tmp_path: Path
) -> None:
    where, settings = VARIANTS[name]
    (tmp_path / "store").mkdir()
    with wrap(CASE, where(tmp_path / "store"), precision=precision, clip_grad_norm=clip, **settings) as engine:
        found = run_steps(engine, STEPS)
        keeps_some = 0 < engine.plan.graphs_kept < engine.plan.calls
    wanted = reference(precision, clip)
    assert_same(found, wanted)
    assert keeps_some == name.startswith("some_recomputed")
    if clip is not None:
        assert {s.clipped for s in wanted.stats} == {True, False}


def smallest(tier: str, error: BudgetError) -> int:
    """The number of bytes that a refusal says would do."""
    found = re.search(rf"budget\.{tier}=.* the smallest that works is .*\((\d+) bytes\)", str(error))
    assert found is not None, error
    return int(found[1])


def partly_resident(path: Path, precision: str) -> penstock.Budget:
    """Room on the device for some of the weights, and on the host for some of the state, beyond what is needed."""
    tight = {"weights": None, "state": None, "durability": "none", "activations": "host", "gradients": "host"}
    sizes: dict[str, int | str] = {"device": 0, "host": 1 << 40}
    for tier, extra in (("device", 120_000), ("host", 100_000)):
        sizes[tier] = 0
        where = budget(path, **tight, **sizes)
        with wrap(CASE, where, precision=precision) as engine, pytest.raises(BudgetError) as refusal:
            engine.step(STEPS[0])
        shutil.rmtree(path)
        sizes[tier] = f"{smallest(tier, refusal.value) + extra}B"
    return budget(path, **tight, **sizes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_same_bits_when_some_groups_are_resident(
    precision: str, schedule: str, reference: Callable[..., Result], tmp_path: Path
) -> None:
    where = partly_resident(tmp_path / "store", precision)
    found = train(CASE, where, STEPS, precision=precision, clip_grad_norm=CLIP, schedule=schedule)
    assert found.placed == {"device", "host", "disk"}
    assert_same(found, reference(precision, CLIP))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("chunk", [4096, 8192])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("clip", "schedule"), [(CLIP, "vertical"), (None, "horizontal")])
def test_same_bits_with_any_chunk_size(
    chunk: int,
    precision: str,
    clip: float | None,
    schedule: str,
    reference: Callable[..., Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = reference(precision, clip)  # with chunks of the usual size, whichever test asks for it first
    monkeypatch.setattr(fit, "CHUNKS", (chunk,))
    where = budget(tmp_path / "store", activations="disk", gradients="disk" if clip else None)
    with wrap(CASE, where, precision=precision, clip_grad_norm=clip, schedule=schedule) as engine:
        found = run_steps(engine, STEPS)
        assert engine.plan.settings.chunk == chunk
        assert max(op.id.chunk for op in engine.plan.schedule.ops) >= 1
    assert_same(found, wanted)


def test_same_bits_where_outputs_that_a_model_collects_have_left(tmp_path: Path) -> None:
    found = [train(COLLECTING, budget(tmp_path / tier, activations=tier), STEPS[:1]) for tier in ("device", "disk")]
    assert_same(*found)


def test_same_bits_with_any_number_of_optimizer_threads(reference: Callable[..., Result], tmp_path: Path) -> None:
    torch.set_num_threads(3)
    with wrap(CASE, budget(tmp_path / "store"), clip_grad_norm=CLIP) as engine:
        torch.set_num_threads(1)  # for the model: what its own kernels do with threads is not ours
        assert_same(run_steps(engine, STEPS), reference("fp32", CLIP))


OPTIMIZERS = (
    penstock.Adam(lr=1e-3, weight_decay=0.01),
    penstock.SGD(lr=0.1),
    penstock.SGD(lr=0.1, momentum=0.9),
    penstock.Lion(lr=1e-4, weight_decay=0.1, overrides=(penstock.Override(match="bias", weight_decay=0.0),)),
)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("variant", ["overlapped", "on_device", "all_on_disk_horizontal"])
def test_same_bits_with_each_optimizer(
    optimizer: OptimizerSpec, precision: str, variant: str, reference: Callable[..., Result], tmp_path: Path
) -> None:
    where, settings = VARIANTS[variant]
    common: Setting = {"precision": precision, "clip_grad_norm": CLIP, "optimizer": optimizer}
    found = train(CASE, where(tmp_path / "store"), STEPS, **common, **settings)
    assert_same(found, reference(precision, CLIP, optimizer))


@cache
def steps_and_oracle(name: str, precision: str) -> tuple[list[MicroBatches], Result]:
    """Three steps of another model, and what the oracle makes of them."""
    case = MODELS[name]
    steps = steps_of(case, 3)
    with TemporaryDirectory() as folder:
        common: Setting = {"precision": precision, "overlap": False, "recompute": True}
        wanted = train(case, budget(Path(folder, "store")), steps, **common)
    return steps, wanted


@pytest.mark.sampled(2, values=False)
@pytest.mark.parametrize(
    "model",
    [("gpt2", "fp32"), ("gpt2", "bf16"), ("mixtral", "fp32"), ("mixtral", "bf16"), ("t5", "bf16"), ("skips", "fp32")],
    ids="/".join,
)
@pytest.mark.parametrize("variant", ["all_on_disk", "all_on_disk_horizontal", "on_device"])
def test_same_bits_with_other_shapes_of_model(model: tuple[str, str], variant: str, tmp_path: Path) -> None:
    """Attention with dropout; router losses that gather from all blocks; two stacks and what is handed between them;
    skips, batch norm."""
    name, precision = model
    steps, wanted = steps_and_oracle(name, precision)
    where, settings = VARIANTS[variant]
    assert_same(train(MODELS[name], where(tmp_path / "store"), steps, precision=precision, **settings), wanted)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("precision", "clip"), FORMATS)
@pytest.mark.parametrize(
    ("before", "after"), [("activations_on_disk_horizontal", "on_device"), ("on_host_horizontal", "overlapped")]
)
def test_same_bits_when_saved_and_loaded_in_the_middle(
    precision: str, clip: float | None, before: str, after: str, reference: Callable[..., Result], tmp_path: Path
) -> None:
    wanted = reference(precision, clip)
    (where, settings), (there, others) = VARIANTS[before], VARIANTS[after]
    common = {"precision": precision, "clip_grad_norm": clip}
    with wrap(CASE, where(tmp_path / "one"), **common, **settings) as engine:
        first = run_steps(engine, STEPS[:2])
        engine.save(tmp_path / "snapshot")
        engine.step(STEPS[0])  # what comes later is not in the snapshot
    with wrap(CASE, there(tmp_path / "two"), model=CASE.model(seed=5), **common, **others) as engine:
        engine.step(STEPS[1])  # nor does anything remain of what was before
        engine.load(tmp_path / "snapshot")
        assert engine.step_count == 2
        assert_same_state(state_of(engine), first.state)
        rest = run_steps(engine, STEPS[2:])
    assert [s.step for s in rest.stats] == [3]
    assert first.losses + rest.losses == wanted.losses
    assert first.norms + rest.norms == wanted.norms
    assert_same_state(rest.state, wanted.state)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("variant", ["overlapped", "planned"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_same_bits_when_closed_and_continued_on_its_store(
    variant: str, precision: str, reference: Callable[..., Result], tmp_path: Path
) -> None:
    wanted, where = reference(precision, CLIP), VARIANTS[variant][0](tmp_path / "store")
    first = train(CASE, where, STEPS[:2], precision=precision, clip_grad_norm=CLIP)
    with wrap(CASE, where, model=CASE.model(seed=5), precision=precision, clip_grad_norm=CLIP) as engine:
        assert engine.step_count == 2
        assert_same_state(state_of(engine), first.state)
        rest = run_steps(engine, STEPS[2:])
    assert first.losses + rest.losses == wanted.losses
    assert_same_state(rest.state, wanted.state)


@pytest.mark.parametrize(("order", "name"), [("vertical", "horizontal"), ("horizontal", "mine")])
def test_same_bits_with_a_schedule_of_ones_own(
    order: str, name: str, reference: Callable[..., Result], tmp_path: Path
) -> None:
    """A schedule goes through its text form, and is run as it stands, whatever it is called: here with every pool a
    buffer larger."""
    where = budget(tmp_path / "store", activations="disk")
    with wrap(CASE, where, clip_grad_norm=CLIP, schedule=order) as engine:
        engine.step(STEPS[0])
        built = parse_schedule(str(engine.plan.schedule))
    shutil.rmtree(tmp_path / "store")
    own = replace(built, name=name, pools=tuple(replace(p, count=p.count + 1) for p in built.pools))
    with wrap(CASE, where, clip_grad_norm=CLIP, schedule=own) as engine:
        before, found = engine.evaluate(STEPS[0]), run_steps(engine, STEPS)
        assert (engine.plan.schedule.ops, engine.plan.schedule.pools) == (own.ops, own.pools)
        assert engine.evaluate(STEPS[0]) < before
    assert_same(found, reference("fp32", CLIP))


def test_with_a_delayed_schedule_of_ones_own_an_evaluation_sees_what_its_steps_have_left(
    reference: Callable[..., Result], tmp_path: Path
) -> None:
    """An evaluation trains no group, and so has no update mode."""
    where = budget(tmp_path / "store")
    with wrap(CASE, where, clip_grad_norm=CLIP, delay=0.25) as engine:
        engine.step(STEPS[0])
        own = parse_schedule(str(engine.plan.schedule))
    assert own.carried
    shutil.rmtree(tmp_path / "store")
    with wrap(CASE, where, clip_grad_norm=CLIP, schedule=own) as engine:
        before = engine.evaluate(STEPS[0])
        found = run_steps(engine, STEPS)
        assert engine.plan.schedule.carried == own.carried
        assert engine.evaluate(STEPS[0]) < before
    assert_same(found, reference("fp32", CLIP))


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("variant", ["overlapped", "planned"])
def test_running_statistics_are_part_of_what_is_continued(variant: str, tmp_path: Path) -> None:
    """Batch norm's: in the store when it is closed, and in a snapshot."""
    case, where = MODELS["skips"], VARIANTS[variant][0]
    steps = steps_of(case, 3)
    wanted = train(case, where(tmp_path / "wanted"), steps)
    with wrap(case, where(tmp_path / "store")) as engine:
        first = run_steps(engine, steps[:2])
        engine.save(tmp_path / "snapshot")
    for name in ("store", "other"):
        with wrap(case, where(tmp_path / name), model=case.model(seed=5)) as engine:
            if name == "other":
                engine.load(tmp_path / "snapshot")
            assert_same_state(state_of(engine), first.state)
            assert_same_state(run_steps(engine, steps[2:]).state, wanted.state)
