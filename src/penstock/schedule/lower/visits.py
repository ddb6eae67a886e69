"""The orders of one rank that streams its groups, and their lowering.

*Vertical*: all micro-batches go through a block before the next block starts (GreedySnake). Weights move to the device
twice a step whatever the number of micro-batches (the last block's once), gradients leave it once.

*Horizontal*: each micro-batch goes through all blocks before the next one starts (ZeRO-Infinity). Weights move to the
device 2M times a step, but for what stays there in between (``stay``), and gradients are summed in host memory.
"""

from penstock.config import Tier
from penstock.schedule.collection import no_collection
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.ir.references import OpId, VisitId, stage_op, visit
from penstock.schedule.lower.activations import Activations
from penstock.schedule.lower.build import Builder
from penstock.schedule.lower.loads import Loads
from penstock.schedule.lower.mesh import ALONE, ProcessGroup
from penstock.schedule.lower.route import Route, Visit
from penstock.schedule.lower.update import Updates
from penstock.schedule.place import Settings
from penstock.schedule.program import Program

Fixed = tuple[tuple[Tier, str, int], ...]


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
    program: Program, settings: Settings, fixed: Fixed = (), name: str = "vertical", shards: ProcessGroup = ALONE
) -> Schedule:
    """The vertical schedule of one step (or, with ``settings.train`` off, of one evaluation). ``shards``: the ranks of
    which each has such a program, with its parts of the groups."""
    route = vertical_route(program, settings.micro_batches, train=settings.train)
    return _lower(route, settings, fixed, name if settings.train else "evaluate", shards)


def horizontal(
    program: Program, settings: Settings, fixed: Fixed = (), name: str = "horizontal", shards: ProcessGroup = ALONE
) -> Schedule:
    """The horizontal schedule of one training step. ``shards``: as of ``vertical``."""
    assert settings.train, "an evaluation has one micro-batch order: use vertical()"
    assert not settings.delay, "only the vertical schedule delays steps"
    return _lower(horizontal_route(program, settings.micro_batches), settings, fixed, name, shards)


@no_collection()
def _lower(route: Route, settings: Settings, fixed: Fixed, name: str, shards: ProcessGroup) -> Schedule:
    """Visit by visit: its loads, its compute, the checkpoints around it, and what its gradients complete."""
    builder = Builder(route, settings, shards)
    activations, updates = Activations(builder), Updates(builder)
    loads = Loads(builder, updates)
    waits: dict[int, list[OpId]] = {}
    for i, stay in enumerate(route.visits):
        loads.until(i)
        for m in stay.micro_batches:
            op = builder.touched(i, m)
            activations.touched(op, stay, m)
            after = [*builder.ready.pop(stay.name, ()), *waits.get(m, ())]
            builder.compute(stage_op(stay.kind, stay.stage, m), op, after=after)
        if stay.kind == "F":
            activations.down(stay.stage - 1, stay.micro_batches)
        # What the next backward needs goes up before the weights of the one after it.
        following = route.visits[i + 1] if i + 1 < len(route.visits) else None
        waits = {}
        if following is not None and following.kind == "B":
            waits = activations.up(following.stage - 1, following.micro_batches)
        loads.ahead(i + settings.depths.weights)
        updates.gradients_down(i)
    if settings.train:
        updates.steps_after_norm()
    return builder.schedule(
        name,
        micro_batches=settings.micro_batches,
        chunk=settings.chunk,
        fixed=fixed,
        speculative=builder.speculates(),
    )
