"""From the linear program's shares to a placement of whole groups that fits: its pools are added up, not estimated."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from penstock.config import Tier
from penstock.planner.classes import GroupClass, Home
from penstock.planner.placement_lp import PlacementLP, Shares
from penstock.schedule.place import Placement, Settings

Pattern = Literal["last", "spread"]
"""The groups of a class that get the higher tiers: the last ones, whose backward comes first and whose update is the
first to be over; or every n-th, so that what the links carry is as even over the step as the compute that hides it."""
PATTERNS: tuple[Pattern, ...] = ("last", "spread")

_HEIGHT: Mapping[Tier, int] = {"device": 2, "host": 1, "disk": 0}


def height(home: Home) -> tuple[int, int]:
    """Homes in order of the memory that they cost, for comparison."""
    return _HEIGHT[home[0]] + _HEIGHT[home[1]], _HEIGHT[home[0]]


class Rounding:
    """Whole groups for one linear program's shares. ``counts[k]``: home -> number of groups of class k."""

    def __init__(self, lp: PlacementLP, shares: Shares) -> None:
        assert shares.whole
        self.lp = lp
        self.activations = shares.activation_tier
        self.gradients = shares.gradient_tier
        self._graphs = int(shares.graphs + 1e-6)
        floors = [_floors(kind, found) for kind, found in zip(lp.classes, shares.homes, strict=True)]
        self.counts: list[dict[Home, int]] = [counts for counts, _ in floors]
        self._left = [left for _, left in floors]

    def settings(self, pattern: Pattern) -> Settings | None:
        """The program's settings with a placement that fits; None if none does."""
        counts = [dict(found) for found in self.counts]
        for k, left in enumerate(self._left):
            for homes in left:  # each group that the floors have left over: as high as it fits
                for i, home in enumerate(homes):
                    counts[k][home] = counts[k].get(home, 0) + 1
                    if i == len(homes) - 1 or self._fits(counts, pattern):
                        break
                    counts[k][home] -= 1
        settled = self._lowered(counts, pattern)
        if settled is None and self._graphs:  # which cost what pools take besides
            self._graphs = 0
            return self.settings(pattern)
        return settled and self._raised(counts, pattern, settled)

    def _raised(self, counts: list[dict[Home, int]], pattern: Pattern, settled: Settings) -> Settings:
        """Try all groups of a class, and all groups, as high as they go: where the last few of a class would do without
        their pools, the linear program could not know that they fit."""
        for k, kind in enumerate(self.lp.classes):
            used = [home for home, n in counts[k].items() if n]
            together = {max(used, key=height): len(kind.members)}
            if len(used) > 1:
                option = self._settings([*counts[:k], together, *counts[k + 1 :]], pattern)
                if self._exceeded(option) is None:
                    counts[k], settled = together, option
        top = self._settings([{kind.homes[0]: len(kind.members)} for kind in self.lp.classes], pattern)
        return top if self._exceeded(top) is None else settled

    def _lowered(self, counts: list[dict[Home, int]], pattern: Pattern) -> Settings | None:
        """Move groups down, one by one, from a tier that is too full."""
        for _ in range(sum(len(kind.members) for kind in self.lp.classes) * 4):
            settings = self._settings(counts, pattern)
            full = self._exceeded(settings)
            if full is None:
                return settings
            if full == "disk" or not self._lower(counts, full):
                return None
        return None

    def _lower(self, counts: list[dict[Home, int]], full: Tier) -> bool:
        largest = sorted(range(len(counts)), key=lambda k: -len(self.lp.classes[k].members))
        for k in largest:
            used = sorted((home for home, n in counts[k].items() if n and full in home), key=height, reverse=True)
            for home in used:
                below = [h for h in self.lp.classes[k].homes if h.count(full) < home.count(full) and _under(h, home)]
                if below:
                    counts[k][home] -= 1
                    to = max(below, key=height)
                    counts[k][to] = counts[k].get(to, 0) + 1
                    return True
        return False

    def _fits(self, counts: Sequence[Mapping[Home, int]], pattern: Pattern) -> bool:
        """True if it fits if groups that are nowhere yet take nothing but their pools."""
        filled = [
            {**found, kind.homes[-1]: found.get(kind.homes[-1], 0) + len(kind.members) - sum(found.values())}
            for kind, found in zip(self.lp.classes, counts, strict=True)
        ]
        return self._exceeded(self._settings(filled, pattern)) is None

    def _exceeded(self, settings: Settings) -> Tier | None:
        return self.lp.request.exceeded(settings, self.lp.disk_free)

    def _settings(self, counts: Sequence[Mapping[Home, int]], pattern: Pattern) -> Settings:
        homes: dict[int, Home] = {}
        for kind, found in zip(self.lp.classes, counts, strict=True):
            homes |= assign(kind, found, pattern)
        place = Placement(
            weights=tuple(homes[g][0] for g in range(len(homes))),
            state=tuple(homes[g][1] for g in range(len(homes))),
            gradients=self.gradients,
            activations=self.activations,
        )
        depths = self.lp.s.depths
        return replace(self.lp.s, place=place, depths=replace(depths, graphs=depths.graphs + self._graphs))


def _under(home: Home, other: Home) -> bool:
    return all(_HEIGHT[a] <= _HEIGHT[b] for a, b in zip(home, other, strict=True))


def _floors(kind: GroupClass, shares: Mapping[Home, float]) -> tuple[dict[Home, int], list[list[Home]]]:
    """Whole groups of each home, and for each group that is left over the homes it may have, highest first."""
    counts = {home: int(share + 1e-6) for home, share in shares.items() if share > 1e-6}
    left = len(kind.members) - sum(counts.values())
    parts = sorted((home for home, share in shares.items() if share - int(share + 1e-6) > 1e-6), key=height)
    options = parts[::-1] or [max(counts, key=lambda home: counts[home])]
    return counts, [options] * left


def assign(kind: GroupClass, counts: Mapping[Home, int], pattern: Pattern) -> dict[int, Home]:
    """The home of each group of a class."""
    homes = sorted((home for home, n in counts.items() if n), key=height, reverse=True)
    members = kind.members[::-1]
    if pattern == "last":
        row = [home for home in homes for _ in range(counts[home])]
        return dict(zip(members, row, strict=True))
    taken, found = dict.fromkeys(homes, 0), {}
    for i, g in enumerate(members, start=1):  # each home's share of the first i groups is as near to its own as can be
        home = max(homes, key=lambda h: i * counts[h] / len(members) - taken[h])
        taken[home] += 1
        found[g] = home
    return found
