"""Parameters per second of every optimizer, in every precision, with the engine's own kernels; and of a gradient's way
through the optimizer and of weights back, by the side that casts them."""

from contextlib import ExitStack

import torch

from penstock.config.optimizer import Moments
from penstock.doctor import work
from penstock.doctor.pace import Span, medians, rate
from penstock.hardware.machine import Crossing
from penstock.optim.formula import Kind
from penstock.optim.precision import DTYPES

KINDS: tuple[Kind, ...] = ("adamw", "adam", "sgd", "momentum", "nesterov", "lion")


def steps(
    device: torch.device, seconds: float, rounds: int, *, threads: int, only: str | None = None
) -> dict[str, float]:
    """Parameters/s of a step by ``"adamw.fp32"``, ``"adamw.bf16"``, ...; the gradient and the moments are fp32, but in
    ``"adamw.bf16.int8"`` and the like, which say the moments' form.

    ``sgd`` is without momentum; ``momentum`` and ``nesterov`` are with it. Medians over the rounds, each of which goes
    through all of them, or through ``only`` one with all forms of moments: on a GPU each has kernels that are compiled
    first.
    """
    steps = work.Steps(device, threads=threads)
    loads = {
        f"{kind}.{precision}": steps.load(kind, None if precision == "fp32" else dtype)
        for kind in KINDS
        for precision, dtype in DTYPES.items()
    }
    compact: tuple[Moments, ...] = ("bf16", "int8")
    loads |= {
        f"adamw.{precision}.{form}": steps.load("adamw", None if precision == "fp32" else dtype, moments=form)
        for precision, dtype in DTYPES.items()
        for form in compact
    }
    if only is not None:
        loads = {name: load for name, load in loads.items() if name == only or name.startswith(f"{only}.")}
    span = Span(warm=seconds / 5, seconds=seconds, calls=2, at_most=1.0)
    return medians(rounds, lambda: {name: rate(load, span) for name, load in loads.items()})


def crossings(device: torch.device, seconds: float, rounds: int, *, threads: int) -> Crossing:
    """Every way alone, each for about ``seconds``; medians over the rounds, each of which goes through all of them.

    Without a GPU the device is host memory, and a cast between the two is a copy at the same time.
    """
    steps, bf16 = work.Steps(torch.device("cpu"), threads=threads), torch.bfloat16
    span = Span(warm=min(0.05, seconds / 2), seconds=seconds)
    with ExitStack() as closing:
        loads = (
            *work.crossings(device, closing),
            steps.load("adamw", bf16, name="step"),
            steps.load("adamw", bf16, grad=bf16, grad_dtype=bf16, name="step_grad_bf16"),
            steps.load("adamw", bf16, grad_dtype=bf16, name="step_grad_rounded"),
        )
        return Crossing(**medians(rounds, lambda: {load.name: rate(load, span) for load in loads}))
