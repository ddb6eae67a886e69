"""The orders of one rank that streams its groups, and what lowers them.

*Vertical*: all micro-batches go through a block before the next block starts (GreedySnake). Weights move to the device
twice a step whatever the number of micro-batches (the last block's once), gradients leave it once.

*Horizontal*: each micro-batch goes through all blocks before the next one starts (ZeRO-Infinity). Weights move to the
device 2M times a step, but for what stays there in between (``stay``), and gradients are summed in host memory. Several
ranks exchange them when all micro-batches are in that sum, once a step as in the vertical order.

*Breadth first* is the vertical order of a rank of a pipeline (``dealt``): it visits its own stages, each for all
micro-batches, and between visits receives and sends what passes between its stages and those of others, one message for
each micro-batch.

*In turn* (``in_turn``) such a rank does forwards and backwards of one micro-batch at a time: 1F1B, and in loops
interleaved; or zero bubble, where backwards are split. Its weights move, and its gradients are summed, as horizontally.
"""

from penstock.config import Family
from penstock.config.step import IN_TURN, SPLIT
from penstock.schedule.collection import no_collection
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.ir.references import VisitId, visit
from penstock.schedule.lower.build import Builder
from penstock.schedule.lower.emitter import Emitter
from penstock.schedule.lower.fixed import Fixed
from penstock.schedule.lower.in_turn import in_turn_route
from penstock.schedule.lower.messages import received_before, sent_after
from penstock.schedule.lower.provision import Provision
from penstock.schedule.lower.rank import lower_rank
from penstock.schedule.lower.route import Message, Route, Visit
from penstock.schedule.lower.seat import ONE_RANK, Seat
from penstock.schedule.place import Settings
from penstock.schedule.program import Program


def route_of(program: Program, micro_batches: int, family: Family, *, train: bool = True) -> Route:
    """The route of a step in the order of a family. All evaluations are vertical."""
    if train and family in IN_TURN:
        return in_turn_route(program, micro_batches, split=family in SPLIT)
    everyone, one_by_one = tuple(range(micro_batches)), train and family == "horizontal"
    walk: list[Visit | Message] = []
    for together in [(m,) for m in everyone] if one_by_one else [everyone]:
        for name in _there_and_back(program, train=train, micro_batch=together[0] if one_by_one else -1):
            if program.has(name.stage):
                walk += received_before(program, name.kind, name.stage, together)
                walk.append(Visit(name=name, micro_batches=together))
                walk += sent_after(program, name.kind, name.stage, together, train=train)
    return Route(program, walk, train=train)


def _there_and_back(program: Program, *, train: bool, micro_batch: int) -> list[VisitId]:
    """The visits of micro-batches that go together: forward, epilogue, and in training backward. ``micro_batch``: -1:
    all of them."""
    last = len(program.stages) - 1
    forward = [visit("E" if k == last else "F", k, micro_batch) for k in range(last + 1)]
    return forward + [visit("B", k, micro_batch) for k in reversed(range(last))] if train else forward


@no_collection()
def lower_step(
    order: Family, program: Program, settings: Settings, fixed: Fixed = (), name: str = "", seat: Seat = ONE_RANK
) -> Schedule:
    """One rank's schedule of one step in an order; or, with ``settings.train`` off, of one evaluation, which has one
    order and one name. ``seat``: of one of several ranks, each of which has such a program, with what it has of the
    groups. ``name``: the schedule's, if not that of its order.
    """
    assert order == "vertical" or not settings.delay, "only the vertical schedule delays steps"
    settings.place.check(program)
    route = route_of(program, settings.micro_batches, order, train=settings.train)
    provision = Provision(route, settings, seat)
    name = (name or order) if settings.train else "evaluate"
    return lower_rank(Builder(provision, Emitter(provision.pools.values())), name, fixed)
