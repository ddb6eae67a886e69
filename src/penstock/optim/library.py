"""Finds the kernels that this machine has: ``_kernels.so`` beside this file, built from ``native/`` by CMake, for the
processor, and those of ``fused``, which Triton compiles at their first call, for a GPU."""

import ctypes
import functools
import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Literal, Protocol, cast

import torch

from penstock.errors import ConfigError, is_out_of_memory
from penstock.native import HOW_TO_BUILD, load
from penstock.optim.codes import Codes, Moment
from penstock.optim.formula import Hyper, Kind, scalars
from penstock.optim.formula import Scalars as ScalarValues
from penstock.optim.norm import BLOCK

ABI = 4  # penstock_abi() in native/api.cpp
LEVELS = ("baseline", "avx2", "avx512")
Level = Literal["baseline", "avx2", "avx512"]
KINDS: dict[Kind, int] = {  # enum Kind
    "adamw": 0,
    "adam": 1,
    "sgd": 2,
    "momentum": 3,
    "nesterov": 4,
    "lion": 5,
    "muon": 6,
    "nesterov-muon": 7,
    "orthogonal": 8,
}


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
    wanted = _wanted()
    if wanted == "torch":
        return None
    try:
        return _load(Path(__file__).with_name("_kernels.so"))
    except OSError as error:
        if wanted == "native":
            raise ConfigError(f"PENSTOCK_KERNELS=native, but {error}: {HOW_TO_BUILD}") from error
        warnings.warn(
            f"optimizer steps run in plain torch, with the same results but several times slower: {error}. "
            f"{HOW_TO_BUILD}",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


@functools.cache
def fused(device: torch.device) -> TorchKernels | None:
    """The kernels for a GPU; None when the environment asks for torch, or Triton is missing or cannot compile.

    Warns, once, when they should be there and are not.

    Raises:
        ConfigError: ``PENSTOCK_KERNELS`` is neither "native" nor "torch", or is "native" and there are none.
    """
    wanted = _wanted()
    if wanted == "torch":
        return None
    try:
        kernels = cast(TorchKernels, importlib.import_module("penstock.optim.fused"))
        _try(kernels, device)
    except Exception as error:  # Triton's, the compiler's and the driver's have nothing in common
        if is_out_of_memory(error):
            raise
        why = f"{type(error).__name__}: {error}"
        if wanted == "native":
            raise ConfigError(
                f"PENSTOCK_KERNELS=native, but there are none for the GPU ({why}): {_FOR_TRITON}"
            ) from error
        warnings.warn(
            f"optimizer steps on the GPU run in plain torch, with the same results but many times slower ({why}). "
            f"{_FOR_TRITON}",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    return kernels


def _try(kernels: TorchKernels, device: torch.device) -> None:
    """A norm and a step of zeros: a Triton that lacks what either is written in shows it here, and in no step."""
    grad, weights, first, second = torch.zeros(4, BLOCK, dtype=torch.float32, device=device)
    kernels.fold_squares(grad)
    s = scalars(Hyper(kind="adamw", lr=0.0, eps=1.0), 1)
    kernels.step("adamw", s, grad=grad, weights=weights, rest=None, moments=(first, second))


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
