"""Calls whose graph is kept from their forward to their backward, so that the block is not computed again for it.

A graph holds what autograd saves of a call, many times the call's input, which stays on the device beside it. So a plan
says for how many there is room (``Depths.graphs``), and the route which calls these are: those that wait the shortest
time for their backward, which lets most calls of a step have one. All micro-batches that are under way at once are
between their forwards and their backwards together, so these are the calls of the last stages: of the first of them
that has not room for all of its micro-batches, the last ones, as the others' inputs have left the device by then.

Where forwards and backwards take turns, a stage keeps the graphs of all its micro-batches or of none, and a buffer
serves one after the other. A backward in two parts computes its block again, and keeps nothing.
"""

from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate

from penstock.schedule.lower.route import Route

GRAPHS = "graphs"
"""The pools of what graphs of calls hold until their backward, one for each size: blocks may be far from alike."""


def kept_graphs(route: Route, buffers: int) -> Mapping[int, int]:
    """Stage -> the number of its micro-batches under way whose graphs are kept, the last ones, in so many buffers."""
    found: dict[int, int] = {}
    if not buffers:
        return found
    for stage, needed in _most_needed(route):
        if buffers <= 0 or (route.takes_turns and needed > buffers):
            break
        found[stage] = needed if route.takes_turns else min(needed, buffers)
        buffers -= needed
    return found


def all_graphs(route: Route) -> int:
    """The buffers that it takes to keep the graphs of all calls that have one which can be kept."""
    return sum(needed for _, needed in _most_needed(route))


@lru_cache(maxsize=256)
def _most_needed(route: Route) -> tuple[tuple[int, int], ...]:
    """Stages whose graphs can be kept, the last one first, each with the buffers that it takes."""
    program = route.program
    if not route.train or any(visit.kind == "I" for visit in route.visits):
        return ()
    able = [s.index for s in reversed(program.stages) if s.graph is not None and program.has(s.index)]
    return tuple((k, _most_under_way(route, k) if route.takes_turns else route.at_once) for k in able)


def _most_under_way(route: Route, stage: int) -> int:
    """The most micro-batches at once between the forward and the backward of a stage."""
    own = (visit for visit in route.visits if visit.stage == stage)
    changes = (len(visit.micro_batches) * ((visit.kind == "F") - (visit.kind == "B")) for visit in own)
    return max(accumulate(changes, initial=0))
