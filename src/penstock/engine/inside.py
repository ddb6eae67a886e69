"""An engine's parts, for tests and benchmarks: users need none of them, and they may change at any time."""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.engine.durability import Durability
from penstock.engine.planning import Planning
from penstock.engine.resources import EngineResources


@dataclass(frozen=True, kw_only=True)
class Inside:
    """The parts of an engine, for tests and benches. ``rest``: does what is pending (delayed steps, writes), as
    ``save`` does first."""

    resources: EngineResources
    durability: Durability
    planning: Planning
    rest: Callable[[], None]
