"""The horizontal schedule: each micro-batch goes through all blocks before the next one starts (ZeRO-Infinity).

Weights move to the device 2M times a step, but for what stays there in between (``stay``), and gradients are summed in
host memory.
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


def horizontal_route(program: Program, micro_batches: int) -> Route:
    """One micro-batch after the other visits every stage: forward, epilogue, backward."""
    last = len(program.stages) - 1
    order = [("F", k) for k in range(last)] + [("E", last)] + [("B", k) for k in reversed(range(last))]
    visits = [Visit(name=visit(kind, k, m), micro_batches=(m,)) for m in range(micro_batches) for kind, k in order]
    return Route(program, visits, train=True)


def horizontal(
    program: Program, settings: Settings, fixed: tuple[tuple[Tier, str, int], ...] = (), name: str = "horizontal"
) -> Schedule:
    """Build the horizontal schedule of one training step."""
    assert settings.train, "an evaluation has one micro-batch order: use vertical()"
    assert not settings.delay, "only the vertical schedule delays steps"
    builder = Builder(horizontal_route(program, settings.micro_batches), settings)
    visits = builder.visits
    activations = Activations(builder)
    updates = Updates(builder)
    loads = Loads(builder, updates)
    waits: dict[int, list[OpId]] = {}
    for i, stay in enumerate(visits):
        (m,) = stay.micro_batches
        loads.until(i)
        builder.compute(i, m, waits.get(m, []), activations.buffers(stay, m))
        if stay.kind == "F":
            activations.down(stay.stage - 1, [m])
        following = visits[i + 1] if i + 1 < len(visits) else None
        waits = {}
        if following is not None and following.kind == "B":
            waits = activations.up(following.stage - 1, [m])
        loads.ahead(i + settings.depths.weights)
        updates.gradients_down(i)
    updates.steps_after_norm()
    return builder.finish(name, fixed)
