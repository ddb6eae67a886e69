"""How ``penstock doctor`` measures: rates of work alone and side by side, on what the engine's lanes do."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.doctor import contention, device, optimizer, overhead, work
from penstock.doctor.pace import Load, Span, rate, rates
from penstock.errors import StoreError
from penstock.optim import kernels
from tests.accelerator import DEVICE

CPU = torch.device("cpu")


def sleeper(name: str, seconds: float, workers: int = 1) -> Load:
    return Load(name=name, workers=[lambda: time.sleep(seconds)] * workers, amount=2.0)


def customer(name: str, shared: ThreadPoolExecutor, seconds: float) -> Load:
    """Work that a resource which serves one after the other does, fairly."""
    return Load(name=name, workers=[lambda: shared.submit(time.sleep, seconds).result()], amount=1.0)


def test_a_rate_is_amounts_per_second_summed_over_the_workers() -> None:
    found = rate(sleeper("a", 0.01, workers=2), Span(warm=0.02, seconds=0.2))
    assert 100 < found <= 2 * 2 / 0.01


def test_loads_that_share_something_share_its_rate() -> None:
    with ThreadPoolExecutor(1) as shared:
        loads = [customer(name, shared, 0.01) for name in ("a", "b")]
        both = rates(loads, Span(warm=0.05, seconds=0.3, calls=10))
    assert both["a"] == pytest.approx(both["b"], rel=0.3)
    assert 30 < sum(both.values()) < 1.1 / 0.01


def test_a_call_that_takes_longer_than_the_span_still_has_its_rate() -> None:
    found = rate(sleeper("a", 0.1), Span(warm=0.0, seconds=0.01, calls=3))
    assert 10 < found <= 2 / 0.1


def test_a_call_that_takes_longer_than_there_is_time_has_a_rate_too() -> None:
    found = rate(sleeper("a", 0.1), Span(warm=0.05, seconds=0.01, calls=100, at_most=0.15))
    assert 5 < found <= 2 / 0.1


def test_a_burst_at_the_start_does_not_count() -> None:
    begun = time.perf_counter()

    def call() -> None:
        time.sleep(0.001 if time.perf_counter() - begun < 0.1 else 0.02)

    load = Load(name="a", workers=[call], amount=1)
    assert rate(load, Span(warm=0.15, seconds=0.3)) <= 1 / 0.02


def test_an_error_surfaces_and_no_thread_is_left() -> None:
    def fail() -> None:
        raise StoreError("broken")

    before = threading.active_count()
    with pytest.raises(StoreError, match="broken"):
        rates([sleeper("a", 0.01), Load(name="b", workers=[fail], amount=1)], Span(warm=0.1, seconds=5))
    assert threading.active_count() == before


@pytest.mark.parametrize("name", ["h2d", "d2h"])
def test_copies_move_what_they_say(name: str) -> None:
    with ExitStack() as closing:
        load = work.copies(name, CPU, closing)
        assert load.amount == work.CHUNK * 4
        load.workers[0]()
        assert rate(load, Span(warm=0, seconds=0.01)) > 1e6


def test_steps_step(one_thread: None) -> None:
    steps = work.Steps(CPU, threads=1)

    def masters() -> list[torch.Tensor]:
        """Master copies of weights in bf16, which are half of them."""
        found = [torch.empty(work.CHUNK) for _ in steps.states]
        for master, state in zip(found, steps.states, strict=True):
            weights, rest = state[4].view(torch.bfloat16), state[1].view(torch.int16)
            kernels.join(master, weights[: work.CHUNK], rest[: work.CHUNK])
        return found

    before = masters()
    for kind in optimizer.KINDS:
        load = steps.load(kind, torch.bfloat16)
        for _ in steps.states:
            load.workers[0]()
        after = masters()
        assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True)), kind
        before = after


def test_what_crosses_has_the_dtypes_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, torch.dtype, torch.dtype, int]] = []

    def moved(how: str) -> Callable[..., None]:
        def move(target: torch.Tensor, source: torch.Tensor, *staging: object) -> None:
            assert target.data_ptr() != source.data_ptr()
            seen.append((how, source.dtype, target.dtype, target.numel()))

        return move

    monkeypatch.setattr(work, "copy", moved("copy"))
    monkeypatch.setattr(work, "copy_cast", moved("cast"))
    fp32, bf16, n = torch.float32, torch.bfloat16, work.CHUNK
    with ExitStack() as closing:
        loads = work.crossings(CPU, closing)
        for load in loads:
            assert load.amount == n
            load.workers[0]()
    assert dict(zip([load.name for load in loads], seen, strict=True)) == {
        "grad_bf16": ("cast", fp32, bf16, n),
        "grad_fp32": ("copy", fp32, fp32, n),
    }


@pytest.mark.accelerator
def test_what_is_measured_with_is_there_before_other_streams_use_it() -> None:
    torch.accelerator.empty_cache()  # memory that was freed is overwritten then, and what is fresh when it is had
    with ExitStack() as closing:
        for load in work.crossings(torch.device(DEVICE, 0), closing):
            load.workers[0]()


def test_the_bytes_of_a_gradient_to_measure_with_are_one_in_either_dtype() -> None:
    """Else a step in bf16 would meet denormals, which are slow."""
    steps = work.Steps(CPU, threads=1)
    gradient = steps.states[0][0]
    halves = gradient.view(torch.bfloat16)
    assert (halves == gradient[0].bfloat16()).all()
    assert float(halves[0]) == pytest.approx(1e-3, rel=0.01)


@pytest.mark.parametrize("reads", [torch.float32, torch.bfloat16])
def test_steps_read_the_gradient_in_the_dtype_that_is_measured(
    reads: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[torch.dtype, int, torch.dtype]] = []
    real = kernels.step

    def step(*arguments: Any, **named: Any) -> None:
        seen.append((named["grad"].dtype, named["grad"].numel(), named["grad_dtype"]))
        real(*arguments, **named)

    monkeypatch.setattr(kernels, "step", step)
    work.Steps(CPU, threads=1).load("adamw", torch.bfloat16, grad=reads, grad_dtype=torch.bfloat16).workers[0]()
    assert seen == [(reads, work.CHUNK, torch.bfloat16)]


def test_every_way_across_has_a_rate() -> None:
    found = optimizer.crossings(CPU, 0.01, 1, threads=1)
    assert min(vars(found).values()) > 1e6


def test_every_optimizer_has_a_rate_in_every_precision_and_adamw_in_every_form_of_moments() -> None:
    found = optimizer.steps(CPU, 0.002, 1, threads=1)
    kinds = ("adamw", "adam", "sgd", "momentum", "nesterov", "lion")
    precisions = ("fp32", "bf16", "fp16")
    compact = {f"adamw.{precision}.{form}" for precision in precisions for form in ("bf16", "int8")}
    assert found.keys() == {f"{kind}.{precision}" for kind in kinds for precision in precisions} | compact
    assert min(found.values()) > 1e5


def test_a_dtype_that_is_only_emulated_is_not_tried_at_larger_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def product(device: torch.device, dtype: torch.dtype, size: int) -> Load:
        tried.append((dtype, size))
        flops = {torch.float32: 1e13, torch.bfloat16: 2e10, torch.float16: 5e9}[dtype]
        return replace(sleeper("compute", 2 * size**3 / flops), amount=2 * size**3)

    monkeypatch.setattr(work, "product", product)
    device.throughput(CPU, 0.001)
    assert [size for dtype, size in tried if dtype == torch.float32] == [512, 1024, 2048]
    assert [size for dtype, size in tried if dtype == torch.bfloat16] == [512, 1024]
    assert [size for dtype, size in tried if dtype == torch.float16] == [512]


def test_work_beside_other_work_is_never_reported_as_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "rates", lambda loads, span: {"h2d": 9e9, "d2h": 1e9})
    monkeypatch.setattr(device, "rate", lambda load, span: 5e9)
    monkeypatch.setattr(work, "copies", lambda name, where, closing: sleeper(name, 0))
    found = device.links(CPU, 0.01, 1)
    assert (found["h2d"], found["h2d_both"], found["d2h_both"]) == (5e9, 5e9, 1e9)


def test_lanes_that_share_a_resource_evenly_have_contention_one() -> None:
    """In the median of seven, once in three: a busy machine wakes one of the lanes late."""
    even = {"compute+cpu": pytest.approx(1.0, abs=0.4), "cpu+compute": pytest.approx(1.0, abs=0.4)}
    with ThreadPoolExecutor(1) as shared:
        lanes = {lane: customer(lane, shared, 0.01) for lane in ("compute", "cpu")}
        span = Span(warm=0.02, seconds=0.15, calls=8)
        assert any(contention.measure(lanes, span, 7, gpu=False) == even for _ in range(3))


def test_lanes_that_share_nothing_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention, "rate", lambda load, span: 100.0)
    monkeypatch.setattr(contention, "rates", lambda loads, span: {"compute": 98.0, "read": 101.0})
    lanes = {"compute": sleeper("compute", 1), "read": sleeper("read", 1)}
    assert contention.measure(lanes, Span(warm=0, seconds=0), 1, gpu=False) == {}


def test_the_pairs() -> None:
    lanes = {lane: sleeper(lane, 1) for lane in ("compute", "cpu", "h2d", "d2h", "read", "write")}
    alone = {frozenset(pair) for pair in contention.pairs(lanes, gpu=False)}
    assert len(alone) == 13
    assert frozenset(("h2d", "d2h")) not in alone
    assert frozenset(("read", "write")) not in alone
    gpu = {frozenset(pair) for pair in contention.pairs(lanes, gpu=True)}
    assert gpu == {pair for pair in alone if "compute" not in pair}


def test_an_op_costs_something_and_not_much() -> None:
    assert 1e-7 < overhead.hand_over(CPU) < 0.02
    assert 1e-6 < overhead.interpreter(CPU) < 0.005
    assert 1e-6 < overhead.dispatch(CPU) < 0.005


@pytest.mark.accelerator
def test_an_op_of_an_accelerator_costs_something_and_not_much() -> None:
    where = torch.device(DEVICE, 0)
    assert 1e-7 < overhead.hand_over(where) < 0.02
    assert 1e-6 < overhead.interpreter(where) < 0.005
    assert 1e-6 < overhead.dispatch(where) < 0.005


def test_what_is_measured_is_larger_than_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rates of chunks that stay there are not those of memory. What is walked through at least is 160 MiB."""
    plenty = replace(work.system.look(), available=1 << 40)
    monkeypatch.setattr(work.system, "look", lambda: plenty)
    monkeypatch.setattr(work.system, "cache_size", lambda: 100 << 20)
    assert sum(array.nbytes for state in work.Steps(CPU, threads=1).states for array in state) >= 200 << 20
    monkeypatch.setattr(work.system, "cache_size", lambda: 0)
    assert len(work.Steps(CPU, threads=1).states) == 4


def test_caches_as_large_as_memory_do_not_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work.system, "cache_size", lambda: 1 << 40)
    walked = sum(array.nbytes for state in work.Steps(CPU, threads=1).states for array in state)
    assert walked <= work.system.look().available / 50
