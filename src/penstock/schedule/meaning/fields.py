"""Fields of an op that mean something: an op of a schedule for one rank says nothing that nobody does.

What is run finds an op's work by its kind and by some of its parts. A part that it does not look at would make a second
op of the same work (``OP5.1@B2`` beside ``OP5.1``), and a buffer of weights means something by its name: parameters are
views of it from the first stage that reads it to the one that gives it back.
"""

from collections.abc import Collection

from penstock.schedule.ir.ops import Op, refused
from penstock.schedule.ir.references import ALONE, COMPUTES, OF_STAGES, Buffer
from penstock.schedule.program import Program

_MOVES_NOTHING = frozenset((*COMPUTES, "AD", "ND", "OD", "NS", "NORM", "CM"))
_OF_GROUPS = frozenset(("ND", "OD", "GW", "HW", "GU", "HU", "NS", "DP", "UP"))
_FOR_VISITS = frozenset(("RW", "UW", "AD", "DG", "AG", "UG", "GW", "HW", "SG", "HG", "AR", "HR", "DP", "UP"))
"""All other ops of groups are of chunks, and done once in a step."""


def check_fields(op: Op, program: Program, *, brings: Collection[str] = ("UW",)) -> None:
    """``brings``: the kinds of ops that fill a buffer of a group's weights on the device, the one that takes it first.

    Raises ScheduleError: a field has no meaning for ops of its kind, or names what the model does not have."""
    _check_id(op, program)
    if op.items != 1:
        raise refused(op, f"computes {op.items} micro-batches at once, and training computes one: leave items out")
    if op.nbytes and op.id.kind in _MOVES_NOTHING:
        raise refused(op, f"says that it moves {op.nbytes} bytes, and moves none: leave bytes out")
    if op.elements is not None and op.id.kind not in ("RW", "UW"):
        raise refused(op, "has elements, which only loads of weights have")
    _check_weights(op, brings)


def _check_id(op: Op, program: Program) -> None:
    ident = op.id
    if ident.kind in OF_STAGES:
        if ident.stage >= len(program.stages):
            raise refused(op, "is of a stage that this model does not have")
    elif ident.kind not in ALONE:
        if ident.group >= len(program.groups):
            raise refused(op, "is of a group that this model does not have")
        if (ident.chunk < 0) != (ident.kind in _OF_GROUPS):
            what = "a group" if ident.kind in _OF_GROUPS else "a chunk"
            raise refused(op, f"is not of {what}, and every op {ident.kind} is")
        if (ident.visit is not None and ident.kind not in _FOR_VISITS) or (ident.use and ident.kind != "AG"):
            raise refused(op, f"is for a visit, and an op {ident.kind} is done once in a step: leave '@...' out")


def _check_weights(op: Op, brings: Collection[str]) -> None:
    """Check that only ops that bring a group's weights take its buffers and write them, and that only stages read them
    and give them back; but for what is brought in two ops, of which the second reads what the first has, and for what
    has crossed between hosts, which is left on the host (DP) and brought again (UP)."""

    def weights(names: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
        return tuple(name for name in names if name.kind == "W")

    first, *then = brings
    again = op.id.kind == "UP"
    loads, computes = op.id.kind in brings or again, op.id.kind in COMPUTES
    for verb, names, may in (
        ("takes", weights(tuple(name for name, _ in op.takes)), op.id.kind == first or again),
        ("writes", weights(op.writes), loads),
        ("reads", weights(op.reads), computes or op.id.kind in then or op.id.kind == "DP"),
        ("gives back", weights(op.gives), computes),
    ):
        for name in names:
            if not may:
                who = "stages" if verb in ("reads", "gives back") else "loads of their group"
                raise refused(op, f"{verb} {name}, which only {who} may do with weights on the device")
            if loads and name.group != op.id.group:
                raise refused(op, f"{verb} {name}, and is of group {op.id.group}")
    if loads and not all(name.kind == "W" for name in op.writes):
        raise refused(op, f"writes {op.writes[0]}, and weights on the device are in buffers W{op.id.group}@...")
