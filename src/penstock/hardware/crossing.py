"""Costs of gradients between the device and the optimizer on the host, by the side that casts them.

Casting on the device sends 2 bytes per parameter and not 4, and takes time on the device. Casting on the host costs no
pass over memory, because the optimizer rounds what it reads and writes anyway. Which is faster depends on the link, and
changes no bit (docs/numerics.md). SuperOffload (arXiv 2509.21271) found that fp32 should cross where the link is
NVLink-C2C; but a cast on its host is a pass of its own.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from penstock.hardware.machine import Crossing, Machine, at_pace
from penstock.schedule.place import Side

Reads = Literal["fp32", "bf16", "rounded"]
"""Forms of the gradient that a step on the host reads: in fp32, in bf16, or in fp32 to be rounded to bf16."""

_FP32, _BF16 = 4, 2
_STEP = 28
"""bytes per parameter that an AdamW step touches: the fp32 gradient, weights and state in and out"""
_CASTS_PER_STEP = 3
"""A plain SGD step of torch in fp32 moves 48 bytes per parameter through the memory of a GPU; a cast, in three kernels
(the rounding, and NaNs to one pattern), 16."""
_AS_FAST = 1.03
"""ratio of two times up to which one is not called less: repeated measurements differ by as much"""
_CAST = 6
"""bytes per parameter that a cast in host memory moves; a copy moves each of its bytes twice"""


def compact_pace(rates: Mapping[str, float], optimizer: str, moments: str) -> float:
    """A step's rate with moments in this form, over that with fp32 ones; 1 where nobody has measured either. ``rates``:
    of the host's optimizer steps, or the device's."""
    full = rates.get(optimizer)
    return rates.get(f"{optimizer}.{moments}", full) / full if full else 1.0


def crossing_of(machine: Machine) -> Crossing:
    """As measured; for a profile that does not tell, derived from its rates of links, copies and optimizer steps.

    A GPU's cast is taken from its rate of SGD steps, and to cost nothing where there is none; the processor's from its
    copies, and the steps from the AdamW step by the bytes that they touch.
    """
    if machine.crossing is not None:
        return machine.crossing
    device, host = machine.device, machine.host
    step = host.optimizer.get("adamw.bf16", 2 * host.copy / _STEP)
    down = _BF16 / device.d2h
    if device.kind == "cpu":  # one memory: the cast is the copy
        down = _CAST / (2 * host.copy)
    elif "sgd.fp32" in device.optimizer:
        down += 1 / (_CASTS_PER_STEP * device.optimizer["sgd.fp32"])
    return Crossing(
        grad_bf16=1 / down,
        grad_fp32=device.d2h / _FP32,
        step=step,
        step_grad_bf16=step * _STEP / (_STEP - _BF16),
        step_grad_rounded=step,
    )


def gradient_seconds(crossing: Crossing) -> dict[Side, float]:
    """Seconds per parameter from the device through an AdamW step, by the side that rounds the gradient to bf16."""
    return {
        "device": 1 / crossing.grad_bf16 + 1 / crossing.step_grad_bf16,
        "host": 1 / crossing.grad_fp32 + 1 / crossing.step_grad_rounded,
    }


def faster_casts(crossing: Crossing) -> str:
    """A line on the side that had better cast gradients to bf16, by the link and the step together."""
    seconds = gradient_seconds(crossing)
    ratio = seconds["host"] / seconds["device"]
    if max(ratio, 1 / ratio) < _AS_FAST:
        return "gradients are as fast either way"
    who = "device" if ratio > 1 else "optimizer"
    return f"gradients are {max(ratio, 1 / ratio):.2f}x as fast if the {who} casts them"


def step_rate(machine: Machine, optimizer: str, reads: Reads) -> float:
    """Parameters/s of a step on the host of ``optimizer`` (a key of the host's rates, ``"lion.bf16"``).

    What another way to meet the gradient costs or saves per parameter is what it does for AdamW: these steps are bound
    by memory, and it is the same bytes for all of them.

    Raises:
        KeyError: the machine has no rate for this optimizer.
    """
    base = machine.host.optimizer[optimizer]
    if reads == "fp32":
        return base
    crossing = crossing_of(machine)
    other = crossing.step_grad_bf16 if reads == "bf16" else crossing.step_grad_rounded
    adamw = machine.host.optimizer.get("adamw.bf16", crossing.step)
    more = (crossing.step / other - 1) / adamw
    return 1 / max(1 / base + more, 1 / (2 * base))  # never better than twice as fast, whatever the noise


def with_faster_link(machine: Machine, factor: float) -> Machine:
    """The machine with a link between host and device ``factor`` times as fast; casts take as long as before."""
    old, crossing = machine.device, crossing_of(machine)
    device = at_pace(old, h2d=factor, d2h=factor, h2d_both=factor, d2h_both=factor)
    if old.kind == "cpu":  # what is copied and cast in one memory crosses no link
        return replace(machine, device=device)
    spared = 1 - 1 / factor

    def faster(rate: float, link: float) -> float:
        """Less time by what the bytes on the link take less, but never more than all of it at the new speed."""
        return 1 / max(1 / rate - spared * link, 1 / (factor * rate))

    scaled = replace(
        crossing,
        grad_bf16=faster(crossing.grad_bf16, _BF16 / old.d2h),
        grad_fp32=faster(crossing.grad_fp32, _FP32 / old.d2h),
    )
    return replace(machine, device=device, crossing=scaled)
