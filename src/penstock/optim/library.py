"""Finds the kernels that this machine has: ``_kernels.so`` beside this file, built from ``native/`` by CMake, for the
processor, and those of ``fused``, which Triton compiles at their first call, for a GPU."""

import ctypes
import functools
import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Literal, Protocol, TypeVar, cast

import torch

from penstock.errors import ConfigError, is_out_of_memory
from penstock.native import HOW_TO_BUILD, load
from penstock.optim.codes import Codes, Moment
from penstock.optim.formula import KINDS, Hyper, Kind, scalars
from penstock.optim.formula import Scalars as ScalarValues
from penstock.optim.norm import BLOCK

T = TypeVar("T")

ABI = 4  # penstock_abi() in native/api.cpp
LEVELS = ("baseline", "avx2", "avx512")
Level = Literal["baseline", "avx2", "avx512"]
NUMBERS: dict[Kind, int] = {kind: number for number, kind in enumerate(KINDS)}
"""Kind -> ``enum Kind`` of ``native/kernels.h``, which has their order."""


class TorchKernels(Protocol):
    """The kernels that ``fallback`` and ``fused`` both have."""

    def step(
        self,
        kind: Kind,
        s: ScalarValues,
        *,
        grad: torch.Tensor,
        weights: torch.Tensor,
        rest: torch.Tensor | None,
        moments: tuple[Moment, ...],
        grad_dtype: torch.dtype = ...,
        squares: torch.Tensor | None = ...,
    ) -> None: ...

    def fold_squares(self, grad: torch.Tensor, grad_dtype: torch.dtype = ...) -> torch.Tensor: ...

    def cast(self, dst: torch.Tensor, src: torch.Tensor) -> None: ...

    def split(self, weights: torch.Tensor, rest: torch.Tensor, master: torch.Tensor) -> None: ...

    def join(self, master: torch.Tensor, weights: torch.Tensor, rest: torch.Tensor) -> None: ...

    def encode(self, codes: Codes, values: torch.Tensor) -> None: ...

    def decode(self, values: torch.Tensor, codes: Codes) -> None: ...


class Scalars(ctypes.Structure):
    """``struct Scalars`` of ``native/kernels.h``."""

    _fields_ = [(field.name, ctypes.c_float) for field in fields(ScalarValues)]


class MomentArgs(ctypes.Structure):
    """``struct MomentArgs`` of ``native/kernels.h``."""

    _fields_ = [("values", ctypes.c_void_p), ("scales", ctypes.c_void_p)]


class StepArgs(ctypes.Structure):
    """``struct StepArgs`` of ``native/kernels.h``."""

    _fields_ = [
        ("grad", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("rest", ctypes.c_void_p),
        ("first", MomentArgs),
        ("second", MomentArgs),
        ("partials", ctypes.c_void_p),
        ("scalars", Scalars),
        ("kind", ctypes.c_int),
        ("grad_type", ctypes.c_int),
        ("form", ctypes.c_int),
        ("first_type", ctypes.c_int),
        ("second_type", ctypes.c_int),
    ]


_FOR_TRITON = "It needs triton, which pip install torch brings for a GPU, and a C compiler"

_INT, _POINTER, _SIZE = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
_SIGNATURES = {
    "penstock_step": (ctypes.POINTER(StepArgs), _SIZE, _INT),
    "penstock_norms": (_INT, _POINTER, _POINTER, _SIZE, _INT),
    "penstock_add": (_INT, _POINTER, _POINTER, _SIZE, _INT),
    "penstock_cast": (_INT, _POINTER, _INT, _POINTER, _SIZE, _INT),
    "penstock_split": (_POINTER, _POINTER, _POINTER, _SIZE, _INT),
    "penstock_join": (_POINTER, _POINTER, _POINTER, _SIZE, _INT),
    "penstock_encode": (_INT, _POINTER, _POINTER, _POINTER, _SIZE, _INT),
    "penstock_decode": (_INT, _POINTER, _POINTER, _POINTER, _SIZE, _INT),
    "penstock_use_level": (_INT,),
}


@functools.cache
def native() -> ctypes.CDLL | None:
    """The library; None when the environment asks for torch (``PENSTOCK_KERNELS=torch``) or it cannot be loaded.

    Calls through it release the GIL. Warns, once, when it should be there and is not.

    Raises:
        ConfigError: ``PENSTOCK_KERNELS`` is neither "native" nor "torch", or is "native" and there is no library.
    """
    path = Path(__file__).with_name("_kernels.so")
    return _or_torch(lambda: _load(path), OSError, "the processor", "several", HOW_TO_BUILD)


@functools.cache
def fused(device: torch.device) -> TorchKernels | None:
    """The kernels for a GPU; None when the environment asks for torch, or Triton is missing or cannot compile.

    Warns, once, when they should be there and are not.

    Raises:
        ConfigError: ``PENSTOCK_KERNELS`` is neither "native" nor "torch", or is "native" and there are none.
    """
    # What Triton, the compiler and the driver raise has nothing in common.
    return _or_torch(lambda: _tried(device), Exception, "the GPU", "many", _FOR_TRITON)


def _tried(device: torch.device) -> TorchKernels:
    """After a norm and a step of zeros: a Triton that lacks what either is written in shows it here, and in no step."""
    kernels = cast(TorchKernels, importlib.import_module("penstock.optim.fused"))
    grad, weights, first, second = torch.zeros(4, BLOCK, dtype=torch.float32, device=device)
    kernels.fold_squares(grad)
    s = scalars(Hyper(kind="adamw", lr=0.0, eps=1.0), 1)
    kernels.step("adamw", s, grad=grad, weights=weights, rest=None, moments=(first, second))
    return kernels


def _or_torch(find: Callable[[], T], failures: type[Exception], where: str, times: str, how: str) -> T | None:
    """The result of ``find``, if the environment does not ask for torch; None, and a warning, where that fails."""
    wanted = _wanted()
    if wanted == "torch":
        return None
    try:
        return find()
    except failures as error:
        if is_out_of_memory(error):
            raise
        why = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        if wanted == "native":
            raise ConfigError(f"PENSTOCK_KERNELS=native, but there are none for {where} ({why}): {how}") from error
        warnings.warn(
            f"optimizer steps on {where} run in plain torch, with the same results but {times} times slower ({why}). "
            f"{how}",
            RuntimeWarning,
            stacklevel=4,
        )
        return None


def _wanted() -> str:
    wanted = os.environ.get("PENSTOCK_KERNELS", "")
    if wanted not in ("", "native", "torch"):
        raise ConfigError(f"environment PENSTOCK_KERNELS={wanted!r}: must be 'native' or 'torch', or not set")
    return wanted


def _load(path: Path) -> ctypes.CDLL:
    library = load(path, ABI)
    library.penstock_best_level.restype = _INT
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def levels() -> tuple[str, ...]:
    """The instruction sets that this machine has kernels for, best last; the last is used. None without the library."""
    library = native()
    return LEVELS[: library.penstock_best_level() + 1] if library else ()


@contextmanager
def use_level(level: str) -> Iterator[None]:
    """Runs with the kernels of another instruction set, for tests and benchmarks. Not for use while a step runs."""
    library = native()
    if library is None or level not in levels():
        raise ValueError(f"level {level!r}: this machine has {levels()}")
    library.penstock_use_level(LEVELS.index(level))
    try:
        yield
    finally:
        library.penstock_use_level(library.penstock_best_level())
