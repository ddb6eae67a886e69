"""What is asked of the search for a plan."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from penstock.config import Tier
from penstock.plan.costs import machine_costs
from penstock.plan.fit import Family, Request, base_placement
from penstock.plan.machine import Machine
from penstock.plan.model import StageTimes
from penstock.plan.outside import Peaks, Phase, beyond, peaks_outside_steps
from penstock.schedule.place import Placement
from penstock.sim.costs import Costs

SIMULATED_OPS = 50_000
"""How many ops all simulations of one search may have together; the first is done whatever it takes."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked: a request, the machine's costs, and how far the search may go.

    ``disk_free``: bytes that may be used on disk; None: enough. ``delays``: delay ratios that the executor can run.
    ``most_ops``: ops of the largest schedule that may be chosen; None: any. ``room``: bytes of device and host memory
    for what comes before and after steps (``outside``); None: enough.
    """

    request: Request
    machine: Machine
    times: StageTimes
    optimizer: str
    families: tuple[Family, ...] = ("vertical", "horizontal")
    delays: tuple[float, ...] = (0.0,)
    disk_free: int | None = None
    io_threads: int = 4
    most_ops: int | None = None
    room: Mapping[Tier, int] | None = None
    simulated_ops: int = SIMULATED_OPS

    @cached_property
    def unstartable(self) -> str | None:
        """Why no step would ever begin, wherever things are placed: loading or probing takes too much memory."""
        peaks = self.peaks(base_placement(self.request), {"device": 0, "host": 0})
        why = beyond({"load": peaks["load"], "probe": peaks["probe"]}, self.room or {})
        return why and f"{why}: use smaller micro-batches or shorter sequences, or lower budget.host"

    def peaks(self, place: Placement, step: Mapping[Tier, int]) -> Mapping[Phase, Peaks]:
        """What phases outside of steps take; ``step``: bytes of device and host that steps take."""
        request = self.request
        return peaks_outside_steps(
            request.program,
            request.form,
            place,
            step=step,
            disk=request.bottom == "disk",
            host_bytes=request.budget.host_bytes,
            slots=request.budget.slots,
        )

    @cached_property
    def costs(self) -> Costs:
        request = self.request
        return machine_costs(
            self.machine, request.program, request.form, self.times, self.optimizer, io_threads=self.io_threads
        )
