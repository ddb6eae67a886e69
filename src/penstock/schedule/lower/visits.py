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

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from penstock.config import Family
from penstock.config.step import SPLIT
from penstock.schedule.collection import no_collection
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.ir.references import VisitId, stage_op, visit
from penstock.schedule.lower.build import Builder
from penstock.schedule.lower.emitter import Emitter
from penstock.schedule.lower.fixed import Fixed
from penstock.schedule.lower.in_turn import in_turn_route
from penstock.schedule.lower.provision import Provision
from penstock.schedule.lower.rank import lower_rank
from penstock.schedule.lower.route import Message, Route, Visit
from penstock.schedule.lower.seat import ONE_RANK, Seat
from penstock.schedule.place import Settings
from penstock.schedule.program import Program


def vertical_route(program: Program, micro_batches: int, *, train: bool = True) -> Route:
    """All micro-batches visit a stage together: forward, epilogue, and in training backward."""
    everyone = tuple(range(micro_batches))
    visits = (Visit(name=stay, micro_batches=everyone) for stay in _there_and_back(program, train=train))
    walk = visits if program.dealt is None else (step for stay in visits for step in _among(program, stay, train=train))
    return Route(program, list(walk), train=train)


def _among(program: Program, stay: Visit, *, train: bool) -> Iterator[Visit | Message]:
    """A visit of a rank of a pipeline, with what it receives before and sends after; nothing where the stage is
    another rank's."""
    dealt, k = program.dealt, stay.stage
    assert dealt is not None
    if not dealt.has(k):
        return

    def messages(kind: str, stage: int, peer: int) -> Iterator[Message]:
        """``peer``: a stage of the other rank."""
        return (Message(stage_op(kind, stage, m), dealt.of_stages[peer]) for m in stay.micro_batches)

    back = train and k > 0 and dealt.crosses(k - 1) and program.stages[k - 1].gradient > 0
    if stay.kind == "B":
        if dealt.crosses(k) and program.stages[k].gradient:
            yield from messages("RD", k, k + 1)
        yield stay
        if back:
            yield from messages("SD", k - 1, k - 1)
        return
    ways = [messages("RX", k, 0)] if dealt.rank and dealt.besides[k] else []
    ways += [messages("RA", k - 1, k - 1)] if k and dealt.crosses(k - 1) else []
    yield from _in_turn(ways)
    yield stay
    if stay.kind == "E" and back:
        yield from messages("SD", k - 1, k - 1)
    further = [other for other in dealt.elsewhere(k) if dealt.rank == 0 and dealt.besides[other]]
    if dealt.crosses(k):
        ways = [messages("SX", other, other) for other in further if other == k + 1]
        yield from _in_turn([*ways, messages("SA", k, k + 1)])
    for other in further:
        if other > k + 1:
            yield from messages("SX", other, other)


def _in_turn(ways: Sequence[Iterable[Message]]) -> Iterator[Message]:
    """Messages of several kinds, micro-batch by micro-batch: none waits for what comes after another micro-batch's."""
    return chain.from_iterable(zip(*ways, strict=True))


def horizontal_route(program: Program, micro_batches: int) -> Route:
    """One micro-batch after the other visits every stage: forward, epilogue, backward."""
    visits = [
        Visit(name=stay, micro_batches=(m,))
        for m in range(micro_batches)
        for stay in _there_and_back(program, train=True, micro_batch=m)
    ]
    return Route(program, visits, train=True)


def route_of(program: Program, micro_batches: int, family: Family, *, train: bool = True) -> Route:
    """The route of a step in the order of a family. All evaluations are vertical."""
    if family == "vertical" or not train:
        return vertical_route(program, micro_batches, train=train)
    if family == "horizontal":
        return horizontal_route(program, micro_batches)
    return in_turn_route(program, micro_batches, split=family in SPLIT)


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


def in_turn(
    program: Program,
    settings: Settings,
    fixed: Fixed = (),
    name: str = "1f1b",
    seat: Seat = ONE_RANK,
    *,
    split: bool = False,
) -> Schedule:
    """The schedule of one training step of a rank of a pipeline that does forwards and backwards in turn. ``split``: as
    of ``in_turn_route``."""
    assert settings.train, "an evaluation has one micro-batch order: use vertical()"
    assert not settings.delay, "only the vertical schedule delays steps"
    return _lower(in_turn_route(program, settings.micro_batches, split=split), settings, fixed, name, seat)


@no_collection()
def _lower(route: Route, settings: Settings, fixed: Fixed, name: str, seat: Seat) -> Schedule:
    settings.place.check(route.program)
    provision = Provision(route, settings, seat)
    return lower_rank(Builder(provision, Emitter(provision.pools.values())), name, fixed)
