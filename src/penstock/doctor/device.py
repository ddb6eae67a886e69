"""The device's rates: products of matrices, copies in its memory, and copies to it and back."""

import statistics
from contextlib import ExitStack
from typing import Any

import torch

from penstock import accelerator
from penstock.doctor import work
from penstock.doctor.pace import Span, medians, rate, rates

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192, 16384)}
LONGEST = 0.25
"""Seconds that one product may take: a dtype that a processor only emulates is not tried at larger sizes."""


def throughput(device: torch.device, seconds: float, longest: float = LONGEST) -> dict[str, float]:
    """FLOP/s of a matrix product per dtype: the best of several large sizes, each for about ``seconds``. One product
    takes ``longest`` at most, but for the smallest."""
    return {name: _best(device, dtype, seconds, longest) for name, dtype in _DTYPES.items()}


def _best(device: torch.device, dtype: torch.dtype, seconds: float, longest: float) -> float:
    best = 0.0
    for size in SIZES["cpu" if device.type == "cpu" else "cuda"]:
        too_long = best > 0 and 2 * size**3 / best > longest
        if too_long or (device.type != "cpu" and 4 * 4 * size**2 > accelerator.of(device).memory(device)[0]):
            break
        load = work.product(device, dtype, size)
        for worker in load.workers:
            worker()  # what the first call sets up does not count
        best = max(best, rate(load, Span(warm=0.0, seconds=seconds, calls=2, at_most=4 * seconds)))
    return best


def copies(device: torch.device, seconds: float, rounds: int) -> float:
    """Bytes/s of copies in the memory of a device that is not the CPU, counted once; the median of the rounds."""
    load, span = work.device_copies(device), Span(warm=min(0.05, seconds / 2), seconds=seconds)
    return statistics.median(rate(load, span) for _ in range(rounds))


def links(device: torch.device, seconds: float, rounds: int) -> dict[str, Any]:
    """Bytes/s of copies between host and device, as ``Device`` has them, alone and both at once; medians over the
    rounds. On the CPU: in host memory."""
    span = Span(warm=min(0.05, seconds / 2), seconds=seconds)
    with ExitStack() as closing:
        up, down = (work.copies(name, device, closing) for name in ("h2d", "d2h"))

        def measured() -> dict[str, float]:
            both = rates([up, down], span)
            return {"up": rate(up, span), "down": rate(down, span), **both}

        found = medians(rounds, measured)
    # What runs beside something else is not faster for it: where it seems so, that is noise.
    h2d, d2h = found["up"], found["down"]
    return {"h2d": h2d, "d2h": d2h, "h2d_both": min(found["h2d"], h2d), "d2h_both": min(found["d2h"], d2h)}
