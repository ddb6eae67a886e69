"""Random state as a pure function of where in training we are.

Dropout must draw the same numbers when a block is recomputed, and whatever the schedule. So before each piece of work
the generators are seeded from (seed, step, micro-batch, stage, part) and from nothing else.
"""

import ctypes
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

FORWARD = 0
"""``part`` of a stage's forward, and of its recomputation."""
BACKWARD = 1
"""``part`` of the backward of a segment, which draws nothing unless an op's own derivative is random."""

_MASK = (1 << 64) - 1
_NUMPY = (1 << 32) - 1
"""The largest seed of numpy's."""
_TWISTER = 625 * 4
"""Bytes of a Mersenne twister: 624 words, and which is next."""


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
    global _seeded
    random.seed(value)
    np.random.seed(value & _NUMPY)  # noqa: NPY002  what models draw from
    _seeded = _numpy_memory()
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

    def only_torch_has_drawn(self) -> bool:
        """True if nothing was drawn from Python's or numpy's generators since."""
        return _same_state(self.of_numpy, _numpy_state()) and self.of_python == random.getstate()

    def restore(self) -> None:
        self.of_torch.restore()
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)  # noqa: NPY002  what models draw from


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Tells whether anything is drawn from a global generator from now on. Cheaper than a ``RandomState``, which can be
    put back: numpy takes longer to give its state than all others together."""

    of_torch: TorchState
    of_python: tuple[Any, ...]
    memory: bytes | None
    of_numpy: Any
    """None: nothing was drawn from numpy's generator since it was seeded, and all of its state is in ``memory``"""

    @classmethod
    def mark(cls, device: torch.device) -> "Drawn":
        memory = _numpy_memory()
        untouched = memory is not None and memory == _seeded
        return cls(
            of_torch=TorchState.capture(device),
            of_python=random.getstate(),
            memory=memory,
            of_numpy=None if untouched else _numpy_state(),
        )

    @property
    def anything(self) -> bool:
        """True if something was drawn, or seeded, since."""
        if not self.of_torch.is_now() or self.of_python != random.getstate() or self.memory != _numpy_memory():
            return True
        return self.of_numpy is not None and not _same_state(self.of_numpy, _numpy_state())


_seeded: bytes | None = None
"""numpy's memory when it was seeded last, from when on it has kept no second number of a pair of normal ones"""


def _numpy_memory() -> bytes | None:
    """The memory of numpy's global generator; None: it is of another kind than it usually is."""
    generator = mtrand.get_bit_generator()
    if type(generator) is not np.random.MT19937:
        return None
    return ctypes.string_at(generator.ctypes.state_address, _TWISTER)


def _same_state(before: Any, now: Any) -> bool:
    kind, key, *others = before
    kind_now, key_now, *others_now = now
    return kind == kind_now and others == others_now and np.array_equal(key, key_now)


def _numpy_state() -> Any:
    return np.random.get_state()  # noqa: NPY002  what models draw from
