"""The walk of one rank over its visits: the one way in which a step is written down."""

from penstock.schedule.ir.ops import Schedule
from penstock.schedule.ir.references import stage_op
from penstock.schedule.lower.activations import Activations
from penstock.schedule.lower.build import Builder
from penstock.schedule.lower.fixed import Fixed
from penstock.schedule.lower.loads import Loads
from penstock.schedule.lower.route import Message
from penstock.schedule.lower.update import Updates


def lower_rank(builder: Builder, name: str, fixed: Fixed) -> Schedule:
    """One rank's schedule. A visit: its weights come, it computes for one micro-batch after the other, saved
    activations leave and come back around it, and what its gradients complete follows. Between visits, results are
    received from the ranks that have the stages beside, and sent to them. At the end come the steps that wait.
    """
    activations, updates = Activations(builder), Updates(builder)
    loads = Loads(builder, updates)
    settings, items, emit, ahead = builder.s, builder.seat.items, builder.emit, builder.s.depths.weights
    i = -1  # of the visit
    for stay in builder.route.walk:
        if isinstance(stay, Message):
            activations.cross(stay)
            continue
        i += 1
        activations.recall(stay)
        loads.until(i)
        for m in stay.micro_batches:
            op = builder.touched(i, m)
            after = [*builder.ready.pop(stay.name, ()), *activations.touched(op, stay, m)]
            if m == stay.micro_batches[-1]:
                after += builder.outlast.pop(stay.name, ())
            ident = stage_op(stay.kind, stay.stage, m)
            emit(ident, after=after, takes=op.takes, reads=op.reads, writes=op.writes, gives=op.gives, items=items)
            if settings.strands > 1:
                updates.strand_made(i, m)
        activations.around(i)
        loads.ahead(i + ahead)
        updates.gradients_down(i)
    if settings.train:
        updates.steps_at_the_end()
        updates.chunks.read_ahead()
    return builder.emitter.schedule(
        name,
        micro_batches=settings.micro_batches,
        chunk=settings.chunk,
        fixed=fixed,
        speculative=builder.speculates(),
    )
