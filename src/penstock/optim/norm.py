"""The norm of all gradients, and clipping by it: independent of chunk sizes, threads and schedules.

Every block of ``BLOCK`` elements gives one partial sum of squares by a fixed binary fold in double (``kernels.step``
computes them in passing, ``kernels.partial_norms`` alone). Here they are summed one after the other, in group and
element order.
"""

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.program import ALIGN

BLOCK = ALIGN
"""Elements of one partial."""


def grad_norm(partials: Iterable[NDArray[np.float64]]) -> float:
    """The L2 norm from the partials of all groups, in group and element order (each an array of any length).

    The sum is sequential in double, so how the partials are cut into arrays does not matter. Infinite or NaN when a
    gradient is.
    """
    total = 0.0
    for part in partials:
        if part.size:
            # accumulate adds one after the other; np.sum adds pairwise, in an order that depends on the length
            total = float(np.add.accumulate(np.concatenate(([total], part)))[-1])
    return math.sqrt(total)


def clip_scale(norm: float, max_norm: float) -> float:
    """The factor that brings a gradient of L2 norm ``norm`` to at most ``max_norm``, as ``clip_grad_norm_`` has it."""
    return min(1.0, max_norm / (norm + 1e-6))
