"""Pools of a step: their names, and the sizes and depths that follow from nothing but a chunk and the ranks."""

from collections.abc import Iterable, Mapping, Sequence

from penstock.schedule.ir.ops import Pool
from penstock.schedule.lower.seat import Seat
from penstock.schedule.place import FP32, Depths

EXCHANGE = "exchange"
"""The pool of what ranks send each other of a chunk of their gradients, and of what they receive."""


def exchanged_bytes(seat: Seat, numel: int) -> int:
    """Bytes of what ranks send each other of a chunk of ``numel`` elements, and of as much that they receive: a chunk
    of every rank's part; or of what all have, which for that is cut into as many pieces."""
    ranks = seat.shards.size
    return 2 * ranks * FP32 * (numel if seat.parts > 1 else -(-numel // ranks))


BETWEEN_COPIES = "exchange_of_copies"
"""The pool of what ranks of different copies of the state send each other of a chunk, and of what they receive."""


def exchanged_between_copies(seat: Seat, numel: int) -> int:
    """As ``exchanged_bytes``, of a chunk that the ranks of all copies have the same part of."""
    return 2 * seat.copies.size * FP32 * -(-numel // seat.copies.size)


SUMS = "gradient_sums"
"""The pool of what one of several ranks has summed on the host of a chunk's gradient, of all ranks' parts of it."""

UPDATES = "updates_of_visits"
"""The pool of updates of matrices on their way up, where a visit's are all there before the first goes."""


def secondary_pool(nbytes: int) -> str:
    """The pool of what stays in host memory of groups' weights that have crossed between hosts, so many bytes each."""
    return f"secondary.{nbytes}"


KEPT = "kept_weights"
"""The pool of weights that stay in host memory from their last load until they are stepped."""

STAGED: Mapping[str, str] = {
    "stage_in": "stage_in",
    "gradients_out": "stage_out",
    "sums_out": "stage_out",
    "gradients_in": "stage_out",
    "state": "state",
    "new_weights": "stage_out",
    "momentum": "state",
    "updates_up": "stage_out",
    "updates_down": "stage_out",
    "saved_activations_out": "activations",
    "saved_activations_in": "activations",
}
"""Pools on the host that have as many buffers as a field of ``Depths`` says."""


def staged(name: str, size: int, depths: Depths) -> Pool:
    """A pool of ``STAGED``."""
    return Pool(name=name, tier="host", size=size, count=getattr(depths, STAGED[name]))


def size_classes(sizes: Iterable[int]) -> list[int]:
    """Buffer sizes such that every size fits in a class at most twice as large."""
    classes: list[int] = []
    for size in sorted(set(sizes), reverse=True):
        if size and (not classes or size < classes[-1] / 2):
            classes.append(size)
    return classes


def class_of(size: int, classes: Sequence[int]) -> int:
    """The size of the smallest class that holds ``size``."""
    return min(c for c in classes if c >= size)
