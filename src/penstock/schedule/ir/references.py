"""References of a schedule: the ids of its ops, its buffers and its visits. Text that knows its parts.

A reference *is* its text, so that it prints, sorts, hashes and compares as what people, files and tests write, at the
speed of a string. Nobody takes that text apart: who made the reference has said what it is made of, or the reader of
the text form has found out, once (``text``).

| reference | parts | text |
|---|---|---|
| ``stage_op("F", 3, 0)`` | kind, stage, micro-batch | ``F3m0`` |
| ``group_op("DG", 5, 1, visit=visit("B", 3))`` | kind, group, chunk, visit | ``DG5.1@B3`` |
| ``group_op("AG", 5, 1, use=2)`` | kind, group, chunk, use | ``AG5.1@sum2`` |
| ``single_op("NORM")`` | kind | ``NORM`` |
| ``stage_buffer("C", 3, 0, part=1)`` | kind, stage, micro-batch, part | ``C3m0.1`` |
| ``group_buffer("H", 5, 1, use=2)`` | kind, group, chunk, use | ``H5.1u2`` |
| ``visit("F", 3)``, ``visit("F", 3, 0)`` | kind, stage, micro-batch | ``F3``, ``F3m0`` |

What a reference does not have is -1 or, of a visit, None. References with the same parts are mostly the same object.
"""

from functools import lru_cache
from typing import Final, Literal, Self

from penstock.schedule.ir.lanes import Lane

COMPUTES = ("F", "B", "E", "I", "W")
"""Kinds of ops that run a stage."""
LANE_OF: dict[str, Lane] = {
    **dict.fromkeys((*COMPUTES, "AD", "ND", "OD", "NS"), "compute"),
    **dict.fromkeys(("RW", "RG", "RS", "RM", "RC"), "read"),
    **dict.fromkeys(("WG", "WS", "WM", "WW", "WC", "CM"), "write"),
    **dict.fromkeys(("UW", "UN", "UC", "UG", "UU", "UP"), "h2d"),
    **dict.fromkeys(("DG", "DC", "DU", "DP"), "d2h"),
    **dict.fromkeys(("AG", "NG", "MU", "OP", "NORM"), "cpu"),
    **dict.fromkeys(("GW", "GN", "AR", "SG", "GC", "GU", "AN"), "net"),
    **dict.fromkeys(("HW", "HG", "HU", "HR"), "nic"),
    **dict.fromkeys(("SA", "SD", "SX"), "send"),
    **dict.fromkeys(("RA", "RD", "RX"), "recv"),
}
"""Kinds of ops: what each does is in ``ops``."""
OF_STAGES = frozenset((*COMPUTES, "DC", "WC", "RC", "UC", "GC", "SA", "RA", "SD", "RD", "SX", "RX"))
OF_UPDATES = frozenset(("RG", "RS", "OP", "UN", "WS", "WW", "RM", "MU", "WM", "UU", "GU", "HU", "NS", "DU"))
"""Kinds of ops that step a chunk or, of matrices, a group, and bring home what is new."""
ALONE = frozenset(("NORM", "AN", "CM"))
"""Kinds of ops that there is one of."""

Holds = Literal[
    "weights",
    "chunk of weights",
    "gradient",
    "chunk of gradient",
    "state",
    "new weights",
    "momentum",
    "chunk of update",
    "update",
    "activation",
    "activation gradient",
    "saved",
    "saved activation",
    "unknown",
]
"""The contents of a buffer. A ``gradient`` is of a whole group, on the device, as is an ``update`` of matrices; a
``saved activation`` is kept elsewhere than where it is computed: ``C``, as it is activation checkpointing that keeps
it. What is ``unknown`` can be checked and simulated."""

HOLDS: dict[str, Holds] = {
    **dict.fromkeys(("W", "P@", "p"), "weights"),
    "i": "chunk of weights",
    **dict.fromkeys(("G", "g", "P"), "gradient"),
    **dict.fromkeys(("H", "h", "R", "r", "t", "c", "T", "L", "Y"), "chunk of gradient"),
    **dict.fromkeys(("S", "s"), "state"),
    **dict.fromkeys(("O", "o"), "new weights"),
    "M": "momentum",
    **dict.fromkeys(("U", "V"), "chunk of update"),
    **dict.fromkeys(("Q", "q"), "update"),
    **dict.fromkeys(("Am", "am", "Xm", "Nm"), "activation"),
    **dict.fromkeys(("Dm", "DXm"), "activation gradient"),
    "Km": "saved",
    **dict.fromkeys(("Cm", "cm"), "saved activation"),
}
"""By kind, with ``m`` where it is of a micro-batch and ``@`` where the visit makes the difference."""


class _Reference(str):
    """A text with parts, which are given beside it."""

    __slots__ = ()

    def __new__(cls, text: str, *_: object) -> Self:
        return str.__new__(cls, text)


class VisitId(_Reference):
    """One stay of a group's weights on the device: ``F3`` for all micro-batches of a stage, ``F3m0`` for one."""

    __slots__ = ("kind", "micro_batch", "stage")

    def __init__(self, _: str, kind: str, stage: int, micro_batch: int) -> None:
        self.kind: Final = kind
        self.stage: Final = stage
        self.micro_batch: Final = micro_batch


class OpId(_Reference):
    """The id of an op. ``use``: which of a group's stages an addition is of, 0 if the op names none."""

    __slots__ = ("chunk", "group", "kind", "lane", "micro_batch", "stage", "use", "visit")

    def __init__(
        self, _: str, kind: str, stage: int, group: int, chunk: int, micro_batch: int, visit: VisitId | None, use: int
    ) -> None:
        self.kind: Final = kind
        self.lane: Final[Lane] = LANE_OF[kind]
        self.stage: Final = stage
        self.group: Final = group
        self.chunk: Final = chunk
        self.micro_batch: Final = micro_batch
        self.visit: Final = visit
        self.use: Final = use

    def of(self, kind: str) -> "OpId":
        """The id of the op of another kind on the same thing: ``WG5.1`` of ``RG5.1``."""
        if kind in OF_STAGES:
            return stage_op(kind, self.stage, self.micro_batch)
        return group_op(kind, self.group, self.chunk)


class Buffer(_Reference):
    """A buffer, and what it ``holds``. ``use``: which of a group's stages a chunk's gradient is of, in backward order;
    ``part``: of a saved activation that takes several.
    """

    __slots__ = ("chunk", "group", "holds", "kind", "micro_batch", "part", "stage", "use", "visit")

    def __init__(
        self,
        _: str,
        holds: Holds,
        kind: str = "",
        stage: int = -1,
        group: int = -1,
        chunk: int = -1,
        micro_batch: int = -1,
        visit: VisitId | None = None,
        use: int = -1,
        part: int = 0,
    ) -> None:
        self.holds: Final[Holds] = holds
        self.kind: Final = kind
        self.stage: Final = stage
        self.group: Final = group
        self.chunk: Final = chunk
        self.micro_batch: Final = micro_batch
        self.visit: Final = visit
        self.use: Final = use
        self.part: Final = part


_CACHED = 1 << 17
"""References: schedules of one model have mostly the same."""


@lru_cache(maxsize=1 << 12)
def visit(kind: str, stage: int, micro_batch: int = -1) -> VisitId:
    text = f"{kind}{stage}" if micro_batch < 0 else f"{kind}{stage}m{micro_batch}"
    return VisitId(text, kind, stage, micro_batch)


@lru_cache(maxsize=_CACHED)
def stage_op(kind: str, stage: int, micro_batch: int) -> OpId:
    """The id of an op on a stage, or on what passes between two, for a micro-batch."""
    return OpId(f"{kind}{stage}m{micro_batch}", kind, stage, -1, -1, micro_batch, None, 0)


@lru_cache(maxsize=_CACHED)
def group_op(kind: str, group: int, chunk: int = -1, *, visit: VisitId | None = None, use: int = 0) -> OpId:
    """The id of an op on a group, or on a chunk of it; for a visit if that has several."""
    at = f"@{visit}" if visit is not None else f"@sum{use}" if use else ""
    return OpId(f"{kind}{group}{'' if chunk < 0 else f'.{chunk}'}{at}", kind, -1, group, chunk, -1, visit, use)


@lru_cache(maxsize=len(ALONE))
def single_op(kind: str) -> OpId:
    """The id of an op that there is one of."""
    return OpId(kind, kind, -1, -1, -1, -1, None, 0)


_ANSWERS = {"SA": "RA", "SD": "RD", "SX": "RX", "RA": "SA", "RD": "SD", "RX": "SX"}


def answer_to(ident: OpId) -> str:
    """The id, as text, of the op on the peer that a send or a recv meets."""
    return f"{_ANSWERS[ident.kind]}{ident.stage}m{ident.micro_batch}"


@lru_cache(maxsize=_CACHED)
def stage_buffer(kind: str, stage: int, micro_batch: int, *, part: int = 0) -> Buffer:
    """A buffer of what a stage puts out, or of the gradient with respect to it, for a micro-batch. Stage -1 is the
    model's input."""
    text = f"{kind}{stage}m{micro_batch}" if stage >= 0 else f"{_OF_INPUT[kind]}m{micro_batch}"
    text = f"{text}.{part}" if part else text
    return Buffer(text, HOLDS[f"{kind}m"], kind, stage, -1, -1, micro_batch, None, -1, part)


_OF_INPUT = {"A": "X", "D": "DX"}


@lru_cache(maxsize=_CACHED)
def group_buffer(kind: str, group: int, chunk: int = -1, *, visit: VisitId | None = None, use: int = -1) -> Buffer:
    """A buffer of a group's weights, gradient or state, or of a chunk's."""
    text = f"{kind}{group}{'' if chunk < 0 else f'.{chunk}'}{'' if use < 0 else f'u{use}'}"
    if visit is not None:
        text = f"{text}@{visit}"
    holds = HOLDS["P@" if kind == "P" and visit is not None else kind]
    return Buffer(text, holds, kind, -1, group, chunk, -1, visit, use)
