"""The cost of an op: seconds when it runs alone, and how much slower it is beside ops of other lanes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.schedule.ir.lanes import LANES, Lane
from penstock.schedule.ir.ops import Op

Pair = tuple[Lane, Lane]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """A machine as the simulator sees it.

    ``seconds``: how long an op takes when nothing else runs.

    ``contention[a, b]`` = c: while lane b is busy, lane a runs at 1 / (1 + c) of its speed; several busy lanes add up,
    1 / (1 + c1 + c2); absent means independent. Two lanes that share one resource evenly have c = 1 both ways; a drive
    that reads at rate r alone and r' beside writes has ``contention["read", "write"] = r / r' - 1``.

    ``widths``: how many ops a lane keeps in flight, which share the lane's speed; 1 if absent.

    ``interpreter``: seconds that compute takes longer for each op of another lane. Python runs one thread at a time, so
    that while another lane's op is begun and queued, compute queues nothing.

    ``serial``: a rank does one op at a time, in the schedule's order, whatever the lane.
    """

    name: str
    seconds: Callable[[Op], float]
    contention: Mapping[Pair, float] = field(default_factory=dict)
    widths: Mapping[Lane, int] = field(default_factory=dict)
    interpreter: float = 0.0
    serial: bool = False

    @property
    def sharing(self) -> bool:
        """True if lanes slow each other down, or ops of one lane."""
        return not self.serial and bool(self.contention or any(width > 1 for width in self.widths.values()))

    @property
    def in_flight(self) -> list[int]:
        """Ops that each lane keeps in flight."""
        return [1 if self.serial else self.widths.get(lane, 1) for lane in LANES]
