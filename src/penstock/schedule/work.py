"""The work of stages: products, bytes of memory, and messages, before anything is known of a machine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import add, sub


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The work of one micro-batch in one direction of a stage.

    ``flops``: of matrix products, a multiplication and an addition counted as two. ``traffic``: bytes that all other
    ops read from the device's memory and write to it. ``sent``: bytes that attention sends to ranks that share each
    sequence, in so many ``exchanges``. ``ops``: of torch, below autograd, each of which takes the host some time,
    however small it is. ``again``: those of ``flops`` that compute once more what a forward has computed.
    """

    flops: int = 0
    traffic: int = 0
    sent: int = 0
    exchanges: int = 0
    ops: int = 0
    again: int = 0

    def __add__(self, other: "Work") -> "Work":
        return self._each(add, other)

    def __sub__(self, other: "Work") -> "Work":
        return self._each(sub, other)

    def _each(self, combine: Callable[[int, int], int], other: "Work") -> "Work":
        return Work(**{f.name: combine(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)})


NOTHING = Work()
BothWays = tuple[Work, Work]
"""The work of a stage's forward, and that of its backward, which includes the recomputation of a call's forward, but
for a product that nothing reads (``tape.early_stop``). The epilogue's backward runs at once: it is part of its
forward."""


def shares_again(work: Sequence[BothWays]) -> tuple[float, ...]:
    """Of each stage, the share of the forward's FLOP that its backward computes again; 1 where it has none."""
    return tuple(
        backward.again / forward.flops if forward.flops and backward.flops else 1.0 for forward, backward in work
    )


def model_flops(work: Sequence[BothWays]) -> int:
    """FLOP without what is computed a second time: what model FLOPs utilisation (MFU) counts."""
    return sum(one.flops - one.again for both in work for one in both)
