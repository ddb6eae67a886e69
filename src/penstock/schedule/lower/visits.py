"""The orders of one rank that streams its groups, and what lowers them.

*Vertical*: all micro-batches go through a block before the next block starts (GreedySnake). Weights move to the device
twice a step whatever the number of micro-batches (the last block's once), gradients leave it once.

*Horizontal*: each micro-batch goes through all blocks before the next one starts (ZeRO-Infinity). Weights move to the
device 2M times a step, but for what stays there in between (``stay``), and gradients are summed in host memory. Several
ranks exchange them when all micro-batches are in that sum, once a step as in the vertical order.
"""

from penstock.schedule.collection import no_collection
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.ir.references import VisitId, visit
from penstock.schedule.lower.build import Builder
from penstock.schedule.lower.emitter import Emitter
from penstock.schedule.lower.provision import Fixed, Provision
from penstock.schedule.lower.rank import lower_rank
from penstock.schedule.lower.route import Route, Visit
from penstock.schedule.lower.seat import ONE_RANK, Seat
from penstock.schedule.place import Settings
from penstock.schedule.program import Program


def vertical_route(program: Program, micro_batches: int, *, train: bool = True) -> Route:
    """All micro-batches visit a stage together: forward, epilogue, and in training backward."""
    everyone = tuple(range(micro_batches))
    visits = [Visit(name=stay, micro_batches=everyone) for stay in _there_and_back(program, train=train)]
    return Route(program, visits, train=train)


def horizontal_route(program: Program, micro_batches: int) -> Route:
    """One micro-batch after the other visits every stage: forward, epilogue, backward."""
    visits = [
        Visit(name=stay, micro_batches=(m,))
        for m in range(micro_batches)
        for stay in _there_and_back(program, train=True, micro_batch=m)
    ]
    return Route(program, visits, train=True)


def _there_and_back(program: Program, *, train: bool, micro_batch: int = -1) -> list[VisitId]:
    last = len(program.stages) - 1
    forward = [visit("E" if k == last else "F", k, micro_batch) for k in range(last + 1)]
    return forward + [visit("B", k, micro_batch) for k in reversed(range(last))] if train else forward


def vertical(
    program: Program, settings: Settings, fixed: Fixed = (), name: str = "vertical", seat: Seat = ONE_RANK
) -> Schedule:
    """The vertical schedule of one step (or, with ``settings.train`` off, of one evaluation). ``seat``: of one of
    several ranks, each of which has such a program, with what it has of the groups."""
    route = vertical_route(program, settings.micro_batches, train=settings.train)
    return _lower(route, settings, fixed, name if settings.train else "evaluate", seat)


def horizontal(
    program: Program,
    settings: Settings,
    fixed: Fixed = (),
    name: str = "horizontal",
    seat: Seat = ONE_RANK,
) -> Schedule:
    """The horizontal schedule of one training step. ``seat``: as of ``vertical``."""
    assert settings.train, "an evaluation has one micro-batch order: use vertical()"
    assert not settings.delay, "only the vertical schedule delays steps"
    return _lower(horizontal_route(program, settings.micro_batches), settings, fixed, name, seat)


@no_collection()
def _lower(route: Route, settings: Settings, fixed: Fixed, name: str, seat: Seat) -> Schedule:
    settings.place.check(route.program)
    provision = Provision(route, settings, seat)
    return lower_rank(Builder(provision, Emitter(provision.pools.values())), name, fixed)
