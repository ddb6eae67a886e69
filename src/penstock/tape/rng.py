"""Random state as a pure function of where in training we are.

Dropout must draw the same numbers when a block is recomputed, and whatever the schedule. So before each piece of work
the generators are seeded from (seed, step, micro-batch, stage, part) and from nothing else.
"""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

FORWARD = 0
"""``part`` of a stage's forward, and of its recomputation."""
BACKWARD = 1
"""``part`` of the backward of a segment, which draws nothing unless an op's own derivative is random."""

_MASK = (1 << 64) - 1
_NUMPY = (1 << 32) - 1
"""The largest seed of numpy's."""


def mix(*values: int) -> int:
    """A 64-bit hash of integers (splitmix64's finaliser, chained). Stable over processes, machines and versions."""
    state = 0
    for value in values:
        state = (state + (value & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed(
    seed: int, step: int, micro_batch: int, stage: int, part: int = FORWARD, device: torch.device | None = None
) -> None:
    """Seed the global generators of the CPU, and torch's of ``device``, from the arguments alone."""
    value = mix(seed, step, micro_batch, stage, part)
    seed_on_cpu(value)
    if device is not None and device.type not in ("cpu", "meta"):
        module = torch.get_device_module(device)
        with module.device(device):
            module.manual_seed(value)


def seed_on_cpu(value: int) -> None:
    """Seed the global generators of Python, of numpy and of torch on the CPU."""
    random.seed(value)
    np.random.seed(value & _NUMPY)  # noqa: NPY002  what models draw from
    torch.default_generator.manual_seed(value)


@dataclass(frozen=True, kw_only=True)
class TorchState:
    """The state of torch's generators, to be put back as it was."""

    cpu: torch.Tensor
    accelerator: torch.Tensor | None
    device: torch.device

    @classmethod
    def capture(cls, device: torch.device) -> "TorchState":
        on_cpu = device.type in ("cpu", "meta")
        accelerator = None if on_cpu else torch.get_device_module(device).get_rng_state(device)
        return cls(cpu=torch.get_rng_state(), accelerator=accelerator, device=device)

    def is_now(self) -> bool:
        """True if nothing was drawn, or seeded, since."""
        now = TorchState.capture(self.device)
        same = torch.equal(self.cpu, now.cpu)
        if self.accelerator is None or now.accelerator is None:
            return same
        return same and torch.equal(self.accelerator, now.accelerator)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            torch.get_device_module(self.device).set_rng_state(self.accelerator, self.device)


@dataclass(frozen=True, kw_only=True)
class RandomState:
    """The state of all global generators, to be put back as it was. To read or set Python's and numpy's takes as long
    as some operations of torch."""

    of_torch: TorchState
    of_python: tuple[Any, ...]
    of_numpy: Any

    @classmethod
    def capture(cls, device: torch.device) -> "RandomState":
        return cls(of_torch=TorchState.capture(device), of_python=random.getstate(), of_numpy=_numpy_state())

    def is_now(self) -> bool:
        """True if nothing was drawn, or seeded, since."""
        return self.of_torch.is_now() and self.only_torch_has_drawn()

    def only_torch_has_drawn(self) -> bool:
        """True if nothing was drawn from Python's or numpy's generators since."""
        return _same_state(self.of_numpy, _numpy_state()) and self.of_python == random.getstate()

    def restore(self) -> None:
        self.of_torch.restore()
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)  # noqa: NPY002  what models draw from


def _same_state(before: Any, now: Any) -> bool:
    kind, key, *others = before
    kind_now, key_now, *others_now = now
    return kind == kind_now and others == others_now and np.array_equal(key, key_now)


def _numpy_state() -> Any:
    return np.random.get_state()  # noqa: NPY002  what models draw from
