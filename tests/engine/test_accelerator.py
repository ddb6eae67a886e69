"""On an accelerator: the same bits as the serial oracle, from every tier and in every order, within the memory given.

On a GPU the model uses attention and losses whose kernels are deterministic; torch is told to insist on that.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock import accelerator
from penstock.errors import BudgetError, NonFiniteError
from penstock.optim import kernels
from penstock.state.memory import HostSlab
from tests.accelerator import DEVICE
from tests.engine import test_repair as repair
from tests.models import MODELS, TIED, causal_lm, llama
from tests.stacks import Layer, Stack, stack
from tests.training import (
    Result,
    assert_same,
    assert_same_state,
    budget,
    result_of,
    run_steps,
    state_of,
    steps_of,
    train,
    wrap,
)

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("deterministic")]

CASE = TIED  # dropout, a tied head
STEPS = steps_of(CASE, 3)
CLIP = 0.17
FORMATS: tuple[tuple[str, float | None], ...] = (
    ("bf16", CLIP),
    ("bf16", None),
    ("fp32", CLIP),
    ("fp32", None),
    ("fp16", CLIP),
)

Setting = dict[str, Any]
Where = Callable[[Path], penstock.Budget]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, float | None], Result]:
    @cache
    def run(precision: str, clip: float | None) -> Result:
        disk = tmp_path_factory.mktemp("oracle") / "store"
        settings: Setting = {"precision": precision, "clip_grad_norm": clip, "overlap": False, "recompute": True}
        return train(CASE, budget(disk), STEPS, device=DEVICE, **settings)

    return run


VARIANTS: dict[str, tuple[Where, Setting]] = {
    "disk": (lambda p: budget(p), {}),
    "disk_delayed": (lambda p: budget(p), {"delay": 0.5}),
    "disk_all_delayed": (lambda p: budget(p, activations="disk", gradients="disk"), {"delay": 0.5}),
    "weights_on_device_delayed": (lambda p: budget(p, weights="device"), {"delay": 0.5}),
    "striped_delayed": (lambda p: budget([p / "a", p / "b"]), {"io_threads": 1, "delay": 0.5}),
    "six_threads": (lambda p: budget(p), {"io_threads": 6}),
    "disk_horizontal": (lambda p: budget(p), {"schedule": "horizontal"}),
    "disk_all": (lambda p: budget(p, activations="disk", gradients="disk"), {}),
    "disk_all_horizontal": (lambda p: budget(p, activations="disk", gradients="disk"), {"schedule": "horizontal"}),
    "activations_on_host": (lambda p: budget(p, activations="host"), {}),
    "activations_on_disk_horizontal": (lambda p: budget(p, activations="disk"), {"schedule": "horizontal"}),
    "recomputed": (lambda p: budget(p), {"recompute": True}),
    "some_recomputed": (lambda p: budget(p, device="300KiB"), {}),
    "some_recomputed_16": (lambda p: budget(p, device="260KiB"), {}),
    "host": (lambda p: budget(None, weights="host", state="host"), {}),
    "host_horizontal": (lambda p: budget(None, weights="host", state="host"), {"schedule": "horizontal"}),
    "device": (lambda p: budget(None, weights="device", state="device"), {}),
    "device_horizontal": (lambda p: budget(None, weights="device", state="device"), {"schedule": "horizontal"}),
    "planned": (lambda p: budget(p, weights=None, state=None, durability="none"), {}),
    "weights_on_device": (lambda p: budget(p, weights="device"), {}),
    "weights_on_device_state_on_host": (lambda p: budget(None, weights="device", state="host"), {}),
    "weights_on_host": (lambda p: budget(p, weights="host"), {"schedule": "horizontal"}),
}


def possible(name: str, precision: str, clip: float | None) -> bool:
    """Where gradients wait is asked only if they do, and what has room for some graphs is not the same in 16 bits."""
    if name.startswith("some_recomputed"):
        return name.endswith("_16") == (precision != "fp32")
    return not (name.startswith("disk_all") and clip is None and precision != "fp16")


COMBINATIONS = [(name, *kind) for kind in FORMATS for name in VARIANTS if possible(name, *kind)]


@pytest.mark.sampled(12, values=False)
@pytest.mark.parametrize(("name", "precision", "clip"), COMBINATIONS)
def test_same_bits_as_the_oracle(
    name: str, precision: str, clip: float | None, reference: Callable[[str, float | None], Result], tmp_path: Path
) -> None:
    """Also: the optimizer on the device gives the bits of the optimizer on the host."""
    where, settings = VARIANTS[name]
    common: Setting = {"precision": precision, "clip_grad_norm": clip, "device": DEVICE}
    (tmp_path / "store").mkdir()
    assert_same(train(CASE, where(tmp_path / "store"), STEPS, **common, **settings), reference(precision, clip))


def rounded(precision: str) -> Setting:
    return {"precision": precision, "grad_dtype": "bf16", "clip_grad_norm": CLIP, "device": DEVICE}


@cache
def rounded_on_host(precision: str) -> Result:
    with TemporaryDirectory() as folder:
        where, serial = budget(Path(folder, "store")), {"schedule": "horizontal", "overlap": False}
        return train(CASE, where, STEPS, **serial, **rounded(precision))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["disk", "disk_all", "host", "device", "planned"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_are_rounded_to_the_same_bits_on_either_side(name: str, precision: str, tmp_path: Path) -> None:
    """Horizontal sums on the host, which rounds; vertical rounds on the device what is complete there."""
    where, settings = VARIANTS[name]
    with wrap(CASE, where(tmp_path / "found"), **settings, **rounded(precision)) as engine:
        assert_same(rounded_on_host(precision), run_steps(engine, STEPS))
        assert engine.plan.settings.cast == "device"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("variant", ["disk_all", "disk_horizontal", "device"])
@pytest.mark.parametrize("name", ["gpt2", "mixtral", "t5", "skips"])
def test_same_bits_with_other_shapes_of_model(name: str, variant: str, tmp_path: Path) -> None:
    case = MODELS[name]
    steps = steps_of(case, 2)
    common: Setting = {"precision": "fp32", "device": DEVICE}
    wanted = train(case, budget(tmp_path / "oracle"), steps, overlap=False, **common)
    where, settings = VARIANTS[variant]
    assert_same(train(case, where(tmp_path / variant), steps, **common, **settings), wanted)


class Scaled(Layer):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return super().forward(x * scale)


def scaled(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x, torch.full((), 0.5, device="cpu"))
    return x


def test_what_a_block_is_handed_from_the_processor_stays_there(tmp_path: Path) -> None:
    case = stack(Scaled, scaled)
    steps = steps_of(case, 2)
    common: Setting = {"precision": "fp32", "device": DEVICE}
    wanted = train(case, budget(None, weights="device", state="device"), steps, **common)
    assert_same(train(case, budget(tmp_path / "store", activations="host"), steps, **common), wanted)


@pytest.mark.parametrize(
    "optimizer",
    [penstock.Adam(lr=1e-3), penstock.SGD(lr=0.1), penstock.SGD(lr=0.1, momentum=0.9), penstock.Lion(lr=1e-4)],
    ids=str,
)
def test_each_optimizer_gives_the_same_bits_on_device_and_host(
    optimizer: penstock.AdamW | penstock.SGD | penstock.Lion, tmp_path: Path
) -> None:
    common: Setting = {"precision": "bf16", "device": DEVICE, "optimizer": optimizer}
    results = [train(CASE, budget(None, weights=tier, state=tier), STEPS[:2], **common) for tier in ("host", "device")]
    assert_same(*results)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_clipping_the_norm_on_the_device_is_found_as_it_steps(
    precision: str, reference: Callable[[str, float | None], Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass of its own over the gradients would read them all once more."""
    wanted = reference(precision, None)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a pass of its own")

    monkeypatch.setattr(kernels, "fold_squares", refuse)
    where, settings = VARIANTS["device"]
    common: Setting = {"precision": precision, "clip_grad_norm": None, "device": DEVICE}
    assert_same(train(CASE, where(tmp_path / "store"), STEPS, **common, **settings), wanted)


@pytest.mark.parametrize("clip", [1.0, None])
def test_a_gradient_that_is_infinite_is_named_by_the_sums_on_the_device(clip: float | None) -> None:
    where = budget(None, weights="device", state="device")
    good, bad, _ = repair.steps(2, 1, float("inf"))
    with wrap(repair.CASE, where, device=DEVICE, clip_grad_norm=clip) as engine:
        engine.step(good)
        try:
            said = engine.step(bad).non_finite
        except NonFiniteError as error:
            said = str(error)
        assert said is not None
        assert "layers.2.up.bias (layers.2)" in said


def test_training_on_the_gpu_is_close_to_training_on_the_cpu(tmp_path: Path) -> None:
    case = MODELS["llama"]
    steps = steps_of(case, 3)
    found = train(case, budget(tmp_path / "gpu"), steps, device=DEVICE)
    wanted = train(case, budget(tmp_path / "cpu"), steps, device="cpu")
    assert found.losses == pytest.approx(wanted.losses, rel=1e-5)
    assert found.norms == pytest.approx(wanted.norms, rel=1e-4)


def test_saved_on_one_tier_and_loaded_on_another(
    reference: Callable[[str, float | None], Result], tmp_path: Path
) -> None:
    common: Setting = {"precision": "bf16", "clip_grad_norm": CLIP, "device": DEVICE}
    wanted = reference("bf16", CLIP)
    with wrap(CASE, budget(None, weights="device", state="device"), **common) as engine:
        first = run_steps(engine, STEPS[:2])
        engine.save(tmp_path / "snapshot")
    with wrap(CASE, budget(tmp_path / "store"), model=CASE.model(seed=5), **common) as engine:
        engine.load(tmp_path / "snapshot")
        assert_same_state(state_of(engine), first.state)
        rest = run_steps(engine, STEPS[2:])
    assert first.losses + rest.losses == wanted.losses
    assert_same_state(rest.state, wanted.state)


def test_a_gpu_is_the_default_and_so_is_bf16(tmp_path: Path) -> None:
    settings: Setting = {"optimizer": penstock.AdamW(), "budget": budget(tmp_path / "store")}
    with penstock.wrap(MODELS["llama"].model(), **settings) as engine:
        engine.step(steps_of(MODELS["llama"], 1)[0])
        assert engine.device.type == DEVICE
        assert engine.plan.settings.form.weight_bytes == 2


def test_host_pools_are_page_locked(tmp_path: Path) -> None:
    """Else copies would neither overlap nor reach the link's rate."""
    with wrap(CASE, budget(tmp_path / "store"), device=DEVICE, precision="bf16") as engine:
        engine.step(STEPS[0])
        runner = engine.inside.planning.runner
        assert runner is not None
        slots = [slot for pool in engine.plan.schedule.pools for slot in runner.pools.slots.get(pool.name, ())]
        on_host = [slot for slot in slots if slot.device.type == "cpu"]
        assert on_host
        assert all(slot.is_pinned() for slot in on_host)


def test_a_page_lock_that_fails_fails_nothing_else() -> None:
    """CUDA keeps a call's error for whoever asks next, which is the next kernel."""
    device = torch.device(DEVICE, 0)
    its, slab = accelerator.of(device), HostSlab(1 << 20, beside=device)
    assert its.lock_pages(device, slab.bytes.data_ptr(), slab.nbytes), "it is locked already"
    assert torch.ones(3, device=device).sum() == 3
    slab.close()


def test_steps_on_another_stream_than_the_engine_was_made_on(
    reference: Callable[[str, float | None], Result], tmp_path: Path
) -> None:
    """Copies of inputs come after what made their micro-batches, and before what is done with these later."""
    device = torch.device(DEVICE, 0)
    its, stats = accelerator.of(device), []
    with wrap(CASE, budget(tmp_path / "store"), device=DEVICE, precision="bf16", clip_grad_norm=CLIP) as engine:
        with its.queued_on(its.stream(device)):
            for step in STEPS:
                micro_batches = [{k: t.to(device, non_blocking=True) for k, t in mb.items()} for mb in step]
                stats.append(engine.step(micro_batches))
                for micro_batch in micro_batches:
                    micro_batch["input_ids"].zero_()
        found = result_of(engine, stats)
    assert_same(found, reference("bf16", CLIP))


def test_traced_times_keep_the_order_of_the_schedule(tmp_path: Path) -> None:
    """Times of device lanes come from events on their streams; an op never starts before what it waits for ends."""
    # Seconds: events and the host's clock are read at different moments, and the simulated device's events by a thread
    # that a busy machine lets wait.
    slack = 1e-4 if DEVICE == "cuda" else 5e-3
    with wrap(CASE, budget(tmp_path / "store"), device=DEVICE, precision="bf16") as engine:
        run_steps(engine, STEPS)
        spans = {event.op: event for event in engine.trace}
        for op in engine.plan.schedule.ops:
            assert spans[op.id].start <= spans[op.id].end
            for other in op.after:
                assert spans[other].end <= spans[op.id].start + slack, (other, op.id)


def test_a_budget_beyond_what_is_free_is_refused_at_once() -> None:
    """What others hold counts, what torch's allocator keeps for its next tensors does not; nothing has been made by
    then, and the model can be wrapped with less."""
    model, device = CASE.model(), torch.device(DEVICE, 0)
    there = accelerator.room(device)
    held = torch.empty(there // 2, dtype=torch.uint8, device=device)
    refused = (
        rf"budget.device={there}: .* of the .* of {device} are free for it, beside .* Lower budget.device to that, or "
    )
    with pytest.raises(BudgetError, match=refused):
        wrap(CASE, budget(None, weights="host", state="host", device=there), model=model, device=DEVICE)
    del held
    with wrap(CASE, budget(None, weights="host", state="host", device=there), model=model, device=DEVICE) as engine:
        engine.step(STEPS[0])
    on_it, rounding = CASE.model().to(device), 1 << 15  # it gives back what it takes
    assert accelerator.room(device) < there - rounding
    less = budget(None, weights="host", state="host", device=there - rounding)
    with wrap(CASE, less, model=on_it, device=DEVICE) as engine:
        engine.step(STEPS[0])


class Wide(nn.Module):
    """Blocks whose inputs are all that takes memory: [rows, ``WIDTH``] each."""

    WIDTH = 32

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(self.WIDTH, self.WIDTH)) for _ in range(5))
        self.head = nn.Linear(self.WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).mean()


SLACK = 64 << 20 if DEVICE == "cuda" else 1 << 18
"""Bytes that torch's allocator may reserve beyond a plan: what it rounds up, and cuBLAS's workspace."""


def reserved_for_what_comes_back(schedule: str, disk: Path) -> tuple[int, int]:
    """Bytes that torch's allocator reserves at most in a step whose saved activations come back from the host, and that
    the plan counts."""
    rows = 1 << 17 if DEVICE == "cuda" else 4096
    where = budget(disk, activations="host", device="1GiB", host="1GiB", durability="none")
    settings: Setting = {"device": DEVICE, "precision": "fp32", "schedule": schedule, "optimizer": penstock.AdamW()}
    settings["recompute"] = True
    micro_batches = [{"x": torch.randn(rows, Wide.WIDTH)} for _ in range(6)]
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_reserved()
    with penstock.wrap(Wide(), budget=where, loss_fn=lambda model, mb: model(mb["x"]), **settings) as engine:
        engine.step(micro_batches)  # with the probe, which is not planned so
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        engine.step(micro_batches)
        assert {"DC", "UC"} <= {op.id.kind for op in engine.plan.schedule.ops}
        return torch.accelerator.max_memory_reserved() - before, engine.plan.device_bytes


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_what_the_allocator_reserves_for_saved_activations_that_come_back_is_planned(
    schedule: str, tmp_path: Path
) -> None:
    """It has memory of its own for each stream, and keeps it: what compute's has is no memory for what comes back."""
    reserved, planned = reserved_for_what_comes_back(schedule, tmp_path / "store")
    assert reserved <= planned + SLACK


class OnItsOwnStream(Wide):
    """Suspended in its blocks, each forward leaves a stream of its own current."""

    own = 0
    """not False: a switch is a reason to probe again"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.own:
            return super().forward(x)
        before = torch.accelerator.current_stream()
        own = torch.Stream(before.device)
        own.wait_stream(before)
        with own:
            for layer in self.layers:
                x = layer(x)
        before.wait_stream(own)
        return self.head(x).mean()


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_a_model_may_call_its_blocks_on_a_stream_of_its_own(schedule: str) -> None:
    """Blocks run on the engine's, in order with what it brings for them."""
    torch.manual_seed(0)
    micro_batches = [{"x": torch.randn(32, Wide.WIDTH)} for _ in range(3)]
    settings: Setting = {"device": DEVICE, "precision": "fp32", "schedule": schedule, "optimizer": penstock.AdamW()}
    found, before = [], torch.accelerator.current_stream()
    for own in (0, 1):
        torch.manual_seed(1)
        model = OnItsOwnStream()
        where = budget(None, weights="host", state="host", durability="none")
        with penstock.wrap(model, budget=where, loss_fn=lambda model, mb: model(mb["x"]), **settings) as engine:
            engine.step(micro_batches)
            model.own = own
            found.append([(stats.loss, stats.grad_norm) for stats in (engine.step(micro_batches) for _ in range(2))])
    assert found[0] == found[1]
    assert torch.accelerator.current_stream() == before


def test_device_memory_stays_within_the_budget(tmp_path: Path) -> None:
    """33M parameters, half a gigabyte of state; beyond the budget torch's allocator holds cuBLAS's workspace only.

    On the simulated accelerator, which has none, an eighth of all that, and no third step: the second has all that
    stays from one to the next.
    """
    part, workspace, steps = (1, 64 << 20, 3) if DEVICE == "cuda" else (8, 1 << 20, 2)
    width = 512 if DEVICE == "cuda" else 176
    case = replace(
        MODELS["llama"],
        build=lambda: llama(
            vocab_size=8192 // part,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=8,
            head_dim=width // 4,
        ),
        micro_batch=causal_lm,
    )
    device, host = f"{160 // part}MiB", f"{256 // part}MiB"
    where = budget(tmp_path / "store", device=device, host=host, weights=None, state=None, durability="none")
    model = case.model()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    with wrap(case, where, model=model, device=DEVICE, precision="bf16") as engine:
        for micro_batches in steps_of(case, steps, lengths=(64, 64)):
            stats = engine.step(micro_batches)
            assert stats.peak_bytes["device"] <= engine.plan.device_bytes <= where.device_bytes
    assert torch.accelerator.max_memory_allocated() - before <= where.device_bytes + workspace
    assert torch.accelerator.memory_allocated() - before <= workspace  # and everything was given back
