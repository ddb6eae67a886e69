"""Parameters per second of every optimizer, in every precision, with the engine's own kernels."""

import statistics

import torch

from penstock.config.optimizer import Moments
from penstock.doctor import work
from penstock.doctor.pace import Span, rate
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
    found = [{name: rate(load, span) for name, load in loads.items()} for _ in range(rounds)]
    return {name: statistics.median(one[name] for one in found) for name in loads}
