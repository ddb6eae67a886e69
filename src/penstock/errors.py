"""Errors that a user can act on. Each message says what was asked, what is the case, and what to do.

``is_out_of_memory`` knows one that others raise, in many forms.
"""

import errno

_NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "Cannot allocate memory",
    "_STATUS_ALLOC_FAILED",
)
"""Words by which a plain RuntimeError of torch's allocators, CUDA's, or cuBLAS's and its like is known to be about
memory."""
_NOT_BEGUN = "STATUS_NOT_INITIALIZED"
"""Words of cuBLAS and its like where they could not begin: for want of memory, or of a driver that they know."""
_LITTLE = 128 << 20
"""Bytes of a device's memory: cuBLAS takes some tens of MiB as it begins."""


class ConfigError(ValueError):
    """A setting is unknown, impossible, or has no effect in this configuration."""


class BudgetError(ValueError):
    """The run does not fit in the memory or the disk that it was given."""


class ModelError(ValueError):
    """The model or its inputs cannot be run block by block, with the reason."""


class ScheduleError(ValueError):
    """A schedule breaks a rule: the op that breaks it is named.

    ``op`` and ``rank``: the op and its rank for who wants to look it up; empty and -1 where the rule is not about one.
    Where it is about a pool or the like, ``op`` is how its line in the text begins: ``pool state``.
    """

    def __init__(self, message: str, *, op: str = "", rank: int = -1) -> None:
        super().__init__(message)
        self.op = op
        self.rank = rank


class StoreError(OSError):
    """The disk tier cannot be used as asked: missing, locked, foreign, damaged or full.

    ``strerror``, for who says of any OSError what the system has said: that, or the message where it has said nothing.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.strerror = message

    def __str__(self) -> str:
        return str(self.args[0])


class NonFiniteError(ArithmeticError):
    """A loss or a gradient is infinite or NaN; names the step, and the micro-batch of a loss."""


class RankError(RuntimeError):
    """Another of the ranks that train together has failed, was killed or does not answer: names it."""


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error says that there was no memory: Python's, the system's, torch's, or a library's of the device."""
    import torch  # here: planning imports errors, and no torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    said = str(error)
    return any(words in said for words in _NO_MEMORY) or (_NOT_BEGUN in said and _is_full())


def _is_full() -> bool:
    """True if the current accelerator has so little memory left that none of its libraries could begin there."""
    import torch

    try:
        return torch.accelerator.is_available() and bool(torch.get_device_module().mem_get_info()[0] < _LITTLE)
    except (RuntimeError, AttributeError):  # a device that has failed, or one of a kind that does not tell
        return False
