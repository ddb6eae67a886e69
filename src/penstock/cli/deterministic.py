"""The setting ``deterministic``: torch uses only kernels that compute the same bits in every run."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

from penstock.errors import ConfigError

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_FIXED = (":4096:8", ":16:8")
"""Values of it with which cuBLAS computes the same bits in every run, by its manual."""
_FILLING: Any = torch.utils.deterministic  # torch's type information leaves its property out
_NO_SUCH_KERNEL = re.compile(r"(\S+) does not have a deterministic implementation")


@contextmanager
def deterministic_kernels(asked: bool) -> Iterator[None]:
    """Within, and if ``asked``, an operation of torch computes the same bits in every run, or is an error.

    Begin before anything is computed on a GPU: cuBLAS reads the environment when it is first used.

    Raises:
        ConfigError: an operation has no such kernel, or the environment has cuBLAS compute otherwise.
    """
    if not asked:
        yield
        return
    set_here = _WORKSPACE not in os.environ
    workspace = os.environ.setdefault(_WORKSPACE, _FIXED[0])
    if workspace not in _FIXED:
        raise ConfigError(
            f"deterministic with {_WORKSPACE}={workspace} in the environment, where cuBLAS may compute other bits in "
            f"each run: unset it, or set it to {_FIXED[0]}"
        )
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = _FILLING.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    _FILLING.fill_uninitialized_memory = False  # it finds reads of what was never written, and takes time
    try:
        yield
    except RuntimeError as error:
        if (found := _NO_SUCH_KERNEL.search(str(error))) is None:
            raise
        raise ConfigError(
            f"deterministic: the model computes {found[1]}, of which torch has no kernel with the same bits in every "
            "run: leave the setting out"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        _FILLING.fill_uninitialized_memory = filled
        if set_here:
            os.environ.pop(_WORKSPACE, None)
