"""Groups that are alike to a planner, and the homes that they may have."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.config import Tier
from penstock.planner.fit import base_placement
from penstock.planner.phases import Phases
from penstock.planner.request import Request

Home = tuple[Tier, Tier]
"""The tiers of a group's weights and of its optimizer state."""


@dataclass(frozen=True, kw_only=True)
class GroupClass:
    """Groups that cost the same wherever they live, but for weights that stay on the device between two visits: those
    of one block of many, whose loads a class spreads over all. ``homes``: those that the budget's pins and the format
    allow, highest first.
    """

    members: tuple[int, ...]
    homes: tuple[Home, ...]


def group_classes(request: Request, phases: Phases, tied: set[int]) -> tuple[GroupClass, ...]:
    """All groups, those that are alike together. Those that another rank of a pipeline has are one class, which lives
    as low as it goes."""
    found: dict[object, list[int]] = {}
    for group in request.program.groups:
        found.setdefault(_looks(request, phases, group.index, tied), []).append(group.index)
    return tuple(
        GroupClass(members=tuple(members), homes=tuple(_homes(request, members[0], tied))) for members in found.values()
    )


def _looks(request: Request, phases: Phases, g: int, tied: set[int]) -> object:
    """All that a group's loads and sizes depend on besides its home, and besides what stays on the device."""
    group, route = request.program.groups[g], request.route
    if not group.numel:
        return None
    visits = Counter(map(phases.load_row, route.readers.get(g, ())))
    looks = (group.trainable, group.frozen, group.compact, group.whole, tuple(sorted(visits.items())))
    if g not in route.gradient_visits:
        return looks
    made = route.gradient_visits[g]
    stepped = min(route.last_visit[g] + (group.whole is not None), len(route.visits) - 1)
    return (
        *looks,
        g in tied,
        tuple(map(phases.gradient_row, (*made, route.last_visit[g], stepped))),
        route.last_visit[g] > made[-1],
        tuple((g, stage) in route.summed for stage in route.uses[g]),
        g in route.program.last_stepped,
    )


def _homes(request: Request, g: int, tied: set[int]) -> Iterator[Home]:
    budget, trainable = request.budget, request.program.groups[g].trainable
    if not request.program.groups[g].numel:
        base = base_placement(request)
        yield base.weights[g], base.state[g]
        return
    tiers: tuple[Tier, ...] = ("device", "host", "disk") if request.bottom == "disk" else ("device", "host")
    if request.ranks > 1:  # their parts live below the device
        tiers = tiers[1:]
    bottom = budget.state or request.bottom
    for weights in tiers:
        for state in tiers if trainable else ("host" if bottom == "device" else bottom,):
            possible = state != "device" or (weights == "device" and g not in tied)
            if possible and _pinned(request, g, (weights, state), tied):
                yield weights, state


def _pinned(request: Request, g: int, home: Home, tied: set[int]) -> bool:
    """True if the budget's pins leave a group this home."""
    budget, trainable = request.budget, request.program.groups[g].trainable
    weights, state = budget.weights, budget.state
    if g in tied and state == "device":  # its gradient comes in parts: it steps in host memory
        state = "host"
    elif state == "device" and trainable and weights is None:
        weights = "device"
    return weights in (None, home[0]) and (not trainable or state in (None, home[1]))
