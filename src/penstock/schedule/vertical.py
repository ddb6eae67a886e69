"""The vertical schedule: all micro-batches go through a block before the next block starts (GreedySnake).

Weights move to the device twice a step whatever the number of micro-batches (the last block's once), gradients leave it
once.
"""

from penstock.config import Tier
from penstock.schedule.activations import Activations
from penstock.schedule.build import Builder
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.ir.references import OpId, visit
from penstock.schedule.loads import Loads
from penstock.schedule.place import Settings
from penstock.schedule.program import Program
from penstock.schedule.route import Route, Visit
from penstock.schedule.update import Updates


def vertical_route(program: Program, micro_batches: int, *, train: bool = True) -> Route:
    """All micro-batches visit a stage together: forward, epilogue, and in training backward."""
    last = len(program.stages) - 1
    everyone = tuple(range(micro_batches))
    order = [("F", k) for k in range(last)] + [("E", last)]
    if train:
        order += [("B", k) for k in reversed(range(last))]
    visits = [Visit(name=visit(kind, k), micro_batches=everyone) for kind, k in order]
    return Route(program, visits, train=train)


def vertical(
    program: Program, settings: Settings, fixed: tuple[tuple[Tier, str, int], ...] = (), name: str = "vertical"
) -> Schedule:
    """Build the vertical schedule of one step (or, with ``settings.train`` off, of one evaluation)."""
    builder = Builder(vertical_route(program, settings.micro_batches, train=settings.train), settings)
    visits, everyone = builder.visits, range(settings.micro_batches)
    activations = Activations(builder)
    updates = Updates(builder)
    loads = Loads(builder, updates)
    waits: dict[int, list[OpId]] = {}
    for i, stay in enumerate(visits):
        loads.until(i)
        for m in everyone:
            builder.compute(i, m, waits.get(m, []), activations.buffers(stay, m))
        if stay.kind == "F":
            activations.down(stay.stage - 1, everyone)
        # What the next backward needs goes up before the weights of the one after it.
        following = visits[i + 1] if i + 1 < len(visits) else None
        waits = {}
        if following is not None and following.kind == "B":
            waits = activations.up(following.stage - 1, everyone)
        loads.ahead(i + settings.depths.weights)
        updates.gradients_down(i)
    if settings.train:
        updates.steps_after_norm()
    return builder.finish(name if settings.train else "evaluate", fixed)
