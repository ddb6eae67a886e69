"""Several drives of a disk tier together. A store is striped over them by *weights*, small whole numbers: of every
``sum(weights)`` stripes in a row each drive has as many as its weight. Drives that are equally fast have weight 1 each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from penstock.hardware.machine import HEAVIEST, Drive

TB = 1e12
_RATES = ("read", "write", "read_both", "write_both")
_SAME = 0.93
"""Share of the best rate that is as good: what two measurements of the same drive may differ by."""
_NEAR = 0.97
"""Share of the best rate with which smaller weights do as well as larger ones."""


@dataclass(frozen=True, kw_only=True)
class Together:
    """Rates of several drives together, striped: bytes/s, in one direction alone and in both at once."""

    read: float
    write: float
    read_both: float
    write_both: float


def together(drives: Sequence[Drive]) -> Together:
    """The rates of a stripe over one drive or several, with their weights; the sustained ones, where they are known."""
    weights, steady = stripe_weights(drives), [drive.steady for drive in drives]
    return Together(**{name: spread([getattr(drive, name) for drive in steady], weights) for name in _RATES})


def spread(each: Sequence[float], weights: Sequence[int]) -> float:
    """The amount that all drives bear together (bytes/s, free bytes, bytes of their life). ``each``: the amount that
    each bears; they get shares by their ``weights``, so that the first at its limit sets that of all.
    """
    return sum(weights) * min(own / weight for own, weight in zip(each, weights, strict=True))


def striped_room(free: Sequence[int], drives: Sequence[Drive]) -> int:
    """Bytes that a store may have on drives with so many free bytes. One for whose weights there is no room is striped
    evenly."""
    if not free:
        return 0
    return int(max(spread(free, stripe_weights(drives)), spread(free, (1,) * len(free))))


def with_room(drives: Sequence[Drive], nbytes: int) -> tuple[Drive, ...]:
    """The drives as if so many bytes were free on all of them together, on each its share of the stripe."""
    weights = stripe_weights(drives)
    pairs = zip(drives, weights, strict=True)
    return tuple(replace(drive, free=nbytes * weight // sum(weights)) for drive, weight in pairs)


def count_of(drives: Sequence[Drive]) -> int:
    """The number of drives that directories are on."""
    return round(sum(1 / drive.directories for drive in drives))


def part_of(drive: Drive, users: int) -> Drive:
    """The part of a drive that each of so many users has, which all use it at the same time."""
    left, less = drive.sustained, {name: getattr(drive, name) / users for name in _RATES}
    if left is not None:
        left = replace(left, **{name: getattr(left, name) / users for name in _RATES[1:]})
    tbw = None if drive.tbw is None else drive.tbw / users
    return replace(drive, free=drive.free // users, tbw=tbw, sustained=left, **less)


def rated_bytes(drives: Sequence[Drive]) -> float | None:
    """Bytes that all drives together may be written in their life, striped; None: of some nobody says it."""
    known = [drive.tbw for drive in drives if drive.tbw is not None]
    return spread(known, stripe_weights(drives)) * TB if known and len(known) == len(drives) else None


def stripe_weights(drives: Sequence[Drive]) -> tuple[int, ...]:
    """The weights by which a store is striped over drives: those of one that is there, else by the drives' rates."""
    given = [drive.weight for drive in drives if drive.weight is not None]
    if len(given) == len(drives):
        return tuple(given)
    return weights_of([_pace(drive.steady) for drive in drives])


def _pace(drive: Drive) -> float:
    """Bytes per second that are read and written again, as a step does with state: both directions at once."""
    return 1 / (1 / drive.read_both + 1 / drive.write_both)


def weights_of(paces: Sequence[float]) -> tuple[int, ...]:
    """The weights with which drives of so many bytes/s are fastest together, up to ``HEAVIEST``: smaller ones where
    these do nearly as well, and all alike where the drives differ by no more than measurements do.
    """
    even = (1,) * len(paces)
    exact = [Fraction(pace) for pace in paces]
    # Each weight is the largest with which its drive is not the slowest; which one is, and with which weight, is tried.
    scales = {pace / weight for pace in exact for weight in range(1, HEAVIEST + 1)}
    tried = {tuple(max(1, min(HEAVIEST, int(pace / scale))) for pace in exact) for scale in scales}
    best = max(spread(paces, weights) for weights in tried)
    if spread(paces, even) >= _SAME * best:
        return even
    good = (weights for weights in tried if spread(paces, weights) >= _NEAR * best)
    return min(good, key=lambda weights: (sum(weights), -spread(paces, weights), weights))


def in_proportion(weights: Sequence[int]) -> str:
    """Weights for people: ``3:1``."""
    return ":".join(map(str, weights))


def used_rates(drives: Sequence[Drive]) -> str:
    """The rates of writing that plans for state on disk take, in a line."""
    known = [drive for drive in drives if drive.sustained is not None]
    if len(known) == len(drives):
        return "plans write at the sustained rate"
    if known:
        paths = ", ".join(drive.path for drive in drives if drive.sustained is None)
        return f"plans write at the sustained rate, but for {paths}, where it is not known"
    return "plans write at the rate of the first seconds: doctor --sustained measures what is left of it"
