"""Plans that an engine could have chosen as well: settings of one request, at random, each of which fits."""

import random
from collections.abc import Iterator
from dataclasses import replace

from penstock.config import Tier
from penstock.planner.fit import fitted, tied_groups
from penstock.planner.request import Request
from penstock.schedule.place import Depths, Placement, Settings, on_grain
from penstock.schedule.program import ALIGN

CHUNKS = (ALIGN, 3 * ALIGN, 1 << 16)


def other_plans(request: Request, seed: int) -> Iterator[Settings]:
    """Settings of one request, at random, each of which fits: other tiers, chunks, buffers, delays, update modes."""
    rng, groups, tied = random.Random(seed), request.program.groups, tied_groups(request.program)
    tiers: tuple[Tier, ...] = ("host",) if request.ranks > 1 else ("device", "host")
    tiers += ("disk",) if request.budget.disk_paths else ()
    every_step = request.budget.durability == "step"
    while True:
        weights = [rng.choice(tiers) for _ in groups]
        state = ["disk" if every_step else rng.choice(tiers) for _ in groups]
        place = Placement(
            weights=tuple(weights), state=tuple(state), activations=rng.choice(tiers),  # type: ignore[arg-type]
            gradients=rng.choice(("host", "disk")) if "disk" in tiers else "host",
        )  # fmt: skip
        if any(place.fault(group) for group in groups) or any(state[g] == "device" for g in tied):
            continue
        delay = 0.0 if request.one_by_one else rng.choice((0.0, 0.3, 1.0))
        early = rng.choice((False, True)) and request.may_speculate
        asked = replace(request, delay=delay, speculate=early if request.wait else None)
        settings = fitted(asked, place)
        depths = Depths(**{name: rng.randint(2, 4) for name in vars(Depths())})
        settings = replace(
            settings, place=place, chunk=rng.choice(CHUNKS), depths=depths, cast=rng.choice(("device", "host")),
            keep=rng.choice((False, True)), secondary=request.may_cross_once and rng.choice((False, True)),
        )  # fmt: skip
        if not all(on_grain(group, settings.chunk) for group in groups):
            continue
        device, host = request.peaks(settings)
        if device <= request.budget.device_bytes and host <= request.budget.host_bytes:
            yield settings
