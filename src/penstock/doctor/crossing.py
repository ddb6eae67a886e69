"""Rates of a gradient's way through the optimizer and of weights back, by the side that casts them."""

import statistics
from contextlib import ExitStack

import torch

from penstock.doctor import work
from penstock.doctor.pace import Span, rate
from penstock.hardware.machine import Crossing

FP32, BF16 = torch.float32, torch.bfloat16


def measure(device: torch.device, seconds: float, rounds: int, *, threads: int) -> Crossing:
    """Every way alone, each for about ``seconds``; medians over the rounds, each of which goes through all of them.

    Without a GPU the device is host memory, and a cast between the two is a copy at the same time.
    """
    steps = work.Steps(torch.device("cpu"), threads=threads)
    span = Span(warm=min(0.05, seconds / 2), seconds=seconds)
    with ExitStack() as closing:
        loads = (
            *work.crossings(device, closing),
            steps.load("adamw", BF16, name="step"),
            steps.load("adamw", BF16, grad=BF16, grad_dtype=BF16, name="step_grad_bf16"),
            steps.load("adamw", BF16, grad=FP32, grad_dtype=BF16, name="step_grad_rounded"),
            steps.load("adamw", None, name="step_no_copy"),
        )
        found = [{load.name: rate(load, span) for load in loads} for _ in range(rounds)]
    return Crossing(**{load.name: statistics.median(one[load.name] for one in found) for load in loads})
