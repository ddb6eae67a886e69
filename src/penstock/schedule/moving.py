"""The order in which arrays move between tiers, so that none holds more on the way than before or after."""

from collections.abc import Iterator, Sequence

from penstock.config import TIERS, Tier


def move_order(sizes: Sequence[int], now: Sequence[Tier], wanted: Sequence[Tier]) -> tuple[int, ...]:
    """The order in which arrays move so that no tier holds more than it does now or will, if there is one."""
    return tuple(i for i, _ in _moves(sizes, now, wanted))


def fills_no_tier_more(sizes: Sequence[int], now: Sequence[Tier], wanted: Sequence[Tier]) -> bool:
    """True if there is such an order, as ``move_order`` goes about it."""
    return all(fits for _, fits in _moves(sizes, now, wanted))


def _moves(sizes: Sequence[int], now: Sequence[Tier], wanted: Sequence[Tier]) -> Iterator[tuple[int, bool]]:
    """The arrays in the order in which they move, and whether each fits where it is to be by then."""
    held = held_by(sizes, now)
    final = held_by(sizes, wanted)
    most = {tier: max(held[tier], final[tier]) for tier in TIERS} | {"disk": sum(sizes)}
    pending = [i for i in range(len(sizes)) if now[i] != wanted[i]]
    while pending:
        fitting = next((i for i in pending if held[wanted[i]] + sizes[i] <= most[wanted[i]]), None)
        i = pending[0] if fitting is None else fitting
        held[now[i]] -= sizes[i]
        held[wanted[i]] += sizes[i]
        pending.remove(i)
        yield i, fitting is not None


def held_by(sizes: Sequence[int], tiers: Sequence[Tier]) -> dict[Tier, int]:
    """Bytes that each tier holds of arrays with these sizes and places."""
    held: dict[Tier, int] = dict.fromkeys(TIERS, 0)
    for nbytes, tier in zip(sizes, tiers, strict=True):
        held[tier] += nbytes
    return held
