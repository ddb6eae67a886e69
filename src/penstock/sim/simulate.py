"""A discrete-event simulation of all ranks' lanes. Deterministic: events of one moment happen in the order they arose.

An op starts when its turn in its lane has come, everything it waits for is done, and its pools have a buffer for it.
It takes its buffers when it starts, and gives buffers back when it is done. As in the executor, the ops of a lane count
as done in their order. A collective takes its buffers and blocks its lane from the moment the rank arrives, and starts
when the last one has.

Lanes that slow each other down (``Costs.contention``, ``Costs.widths``) are a fluid: an op has work left, and a speed
that changes whenever an op of its rank starts or ends.

The events are run by native code (``library``).
"""

from collections.abc import Sequence

from penstock.errors import ScheduleError
from penstock.schedule.check.worlds import check_world
from penstock.schedule.ir.worlds import World
from penstock.sim.costs import Costs
from penstock.sim.library import library
from penstock.sim.result import Simulation
from penstock.sim.template import ranks_of


def simulate(world: World, costs: Costs | Sequence[Costs]) -> Simulation:
    """Run one step of every rank. ``costs``: of all ranks, or by rank, where they are on machines that differ.

    Raises:
        ScheduleError: no rank can go on; says what lanes wait for. A message is lost.
        ConfigError: the native library is missing; says how to build it.
    """
    of_ranks = [costs] * len(world.ranks) if isinstance(costs, Costs) else costs
    ranks = ranks_of(world, of_ranks)
    found = library().run(world, ranks)
    if found is None:
        if not world.channels:  # else ranks have others' schedules, whose messages are not their own
            check_world(world)
        raise ScheduleError(f"{world!r} cannot be simulated: its ops wait for each other, or a message is lost")
    return Simulation.of(world, found, (rank.template.seconds for rank in ranks), serial=of_ranks[0].serial)
