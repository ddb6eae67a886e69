"""What crosses between device and optimizer, in which dtype: as a profile tells it, or derived from its rates."""

import json
from dataclasses import replace

import pytest

from penstock.hardware import profiles
from penstock.hardware.crossing import (
    compact_pace,
    crossing_of,
    faster_casts,
    gradient_seconds,
    step_rate,
    with_faster_link,
)
from penstock.hardware.machine import Crossing, Device, Host, Machine, parse_machine
from tests.hardware.test_profile import CROSSING
from tests.machines import gpu, host


def machine(device: Device | None = None, memory: Host | None = None, crossing: Crossing | None = None) -> Machine:
    known = host(optimizer={"adamw.bf16": 1e9, "lion.bf16": 2e9})
    return Machine(name="box", host=memory or known, device=device or gpu(), crossing=crossing)


def test_what_was_measured_is_what_counts() -> None:
    assert crossing_of(machine(crossing=CROSSING)) is CROSSING


def test_a_profile_from_when_casts_of_weights_were_measured_is_read() -> None:
    made = machine(crossing=CROSSING)
    data = json.loads(made.to_json())
    data["crossing"] |= {"weights_bf16": 1e10, "weights_fp32": 4e9, "step_no_copy": 1.2e9}
    assert parse_machine(json.dumps(data), "x") == made


def test_what_a_gpu_takes_is_derived_from_link_and_steps() -> None:
    found = crossing_of(machine(gpu(h2d=4e10, d2h=2e10, optimizer={"sgd.fp32": 1e10})))
    assert found.grad_fp32 == pytest.approx(5e9)  # 4 bytes at 20 GB/s
    assert 1 / found.grad_bf16 == pytest.approx(1e-10 + 1 / 3e10)  # 2 bytes, and a cast of three times SGD's rate
    assert (found.step, found.step_grad_rounded) == (1e9, 1e9)
    assert found.step_grad_bf16 == pytest.approx(1e9 * 28 / 26)


def test_a_gpu_whose_steps_are_not_known_casts_for_nothing() -> None:
    found = crossing_of(machine(gpu(d2h=2e10)))
    assert found.grad_bf16 == pytest.approx(1e10)


def test_in_one_memory_a_cast_is_a_copy_of_fewer_bytes() -> None:
    found = crossing_of(machine(gpu(kind="cpu"), host(copy=9e9, optimizer={})))
    assert found.grad_bf16 == pytest.approx(3e9)  # 6 bytes moved; a copy at 9 GB/s moves 18
    assert found.step == pytest.approx(18e9 / 28)  # 28 bytes


def test_the_two_ways_add_link_and_step() -> None:
    assert gradient_seconds(CROSSING) == {"device": 1 / 9e9 + 1 / 1.1e9, "host": 1 / 5e9 + 1 / 9e8}


def test_the_faster_side_is_named() -> None:
    assert faster_casts(CROSSING) == "gradients are 1.29x as fast if the device casts them"
    other = replace(CROSSING, grad_bf16=1e9)
    assert faster_casts(other) == "gradients are 1.46x as fast if the optimizer casts them"
    alike = replace(CROSSING, grad_bf16=CROSSING.grad_fp32, step_grad_bf16=CROSSING.step_grad_rounded)
    assert faster_casts(alike) == "gradients are as fast either way"


def test_over_pcie_the_device_had_better_round_gradients() -> None:
    for name in ("a100-40g", "a100-80g", "h100-80g", "rtx4090-24g", "workstation"):
        found = crossing_of(profiles.machine_named(name))
        gradient = gradient_seconds(found)
        assert gradient["device"] < gradient["host"], name
        assert found.grad_bf16 > 1.5 * found.grad_fp32, name


def test_over_a_link_as_fast_as_memory_the_cast_is_no_gain_on_the_link() -> None:
    found = crossing_of(profiles.machine_named("gh200"))
    assert found.grad_bf16 < 1.1 * found.grad_fp32


def test_a_step_is_faster_by_the_bytes_that_it_does_not_read() -> None:
    known = machine(crossing=CROSSING)
    assert step_rate(known, "lion.bf16", "fp32") == 2e9
    assert step_rate(known, "adamw.bf16", "bf16") == pytest.approx(1.1e9)
    assert step_rate(known, "adamw.bf16", "rounded") == pytest.approx(9e8)
    saved = 1 / 2e9 - 1 / step_rate(known, "lion.bf16", "bf16")
    assert saved == pytest.approx(1e-9 - 1 / 1.1e9)
    absurd = machine(crossing=replace(CROSSING, step_grad_bf16=1e12))
    assert step_rate(absurd, "lion.bf16", "bf16") == pytest.approx(4e9)
    with pytest.raises(KeyError):
        step_rate(known, "sgd.bf16", "bf16")


def test_a_faster_link_leaves_the_casts_as_slow_as_they_were() -> None:
    slow = machine(gpu(h2d=2e10, d2h=2e10, optimizer={"sgd.fp32": 1e9}))
    fast = with_faster_link(slow, 2.0)
    assert (fast.device.h2d, fast.device.d2h_both) == (4e10, 4e10)
    assert fast.crossing is not None
    expected = crossing_of(replace(fast, crossing=None))
    for name, rate in vars(expected).items():
        assert getattr(fast.crossing, name) == pytest.approx(rate), name


def test_compact_moments_take_what_was_measured_of_them_or_as_long_as_full_ones() -> None:
    rates = {"adamw.bf16": 2e9, "adamw.bf16.int8": 3e9, "lion.bf16": 1e9}
    assert compact_pace(rates, "adamw.bf16", "int8") == 1.5
    assert compact_pace(rates, "adamw.bf16", "bf16") == compact_pace(rates, "lion.bf16", "int8") == 1.0
    assert compact_pace({}, "adamw.bf16", "int8") == 1.0
