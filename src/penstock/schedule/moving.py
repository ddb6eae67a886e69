"""The order in which arrays move between tiers, so that none holds more on the way than before or after."""

from collections.abc import Sequence

from penstock.config import TIERS, Tier


def move_order(sizes: Sequence[int], now: Sequence[Tier], wanted: Sequence[Tier]) -> tuple[int, ...]:
    """The order in which arrays move so that no tier holds more than it does now or will, if there is one."""
    held = held_by(sizes, now)
    final = held_by(sizes, wanted)
    most = {tier: max(held[tier], final[tier]) for tier in TIERS} | {"disk": sum(sizes)}
    pending = [i for i in range(len(sizes)) if now[i] != wanted[i]]
    order: list[int] = []
    while pending:
        fits = (i for i in pending if held[wanted[i]] + sizes[i] <= most[wanted[i]])
        i = next(fits, pending[0])
        held[now[i]] -= sizes[i]
        held[wanted[i]] += sizes[i]
        pending.remove(i)
        order.append(i)
    return tuple(order)


def fills_no_tier_more(sizes: Sequence[int], now: Sequence[Tier], wanted: Sequence[Tier]) -> bool:
    """True if there is such an order, as ``move_order`` goes about it."""
    held, final = held_by(sizes, now), held_by(sizes, wanted)
    most = {tier: max(held[tier], final[tier]) for tier in TIERS} | {"disk": sum(sizes)}
    for i in move_order(sizes, now, wanted):
        held[now[i]] -= sizes[i]
        held[wanted[i]] += sizes[i]
        if held[wanted[i]] > most[wanted[i]]:
            return False
    return True


def held_by(sizes: Sequence[int], tiers: Sequence[Tier]) -> dict[Tier, int]:
    """Bytes that each tier holds of arrays with these sizes and places."""
    held: dict[Tier, int] = dict.fromkeys(TIERS, 0)
    for nbytes, tier in zip(sizes, tiers, strict=True):
        held[tier] += nbytes
    return held
