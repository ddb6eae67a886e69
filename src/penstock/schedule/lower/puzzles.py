"""Buffers that the known best solutions of the LLM training puzzles hold longer than anything needs them.

Nothing else does so: this is here because their peaks are what is to be reproduced (github.com/srush/LLM-Training-
Puzzles). It changes when buffers are given back, and what waits for that; the gradient of the model's input is one
of them. The order of ops stays.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from penstock.schedule.ir.ops import Pool, Take
from penstock.schedule.ir.references import Buffer, OpId, group_op, stage_buffer
from penstock.schedule.lower.emitter import Emitter
from penstock.schedule.lower.route import Message, Visit


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Habits of holding buffers. ``late``: what of that which a backward uses goes back only when this rank has its
    part of the gradient, besides the gradient. ``flush``: until when the ends stay (what a rank has put out, and the
    gradient that it passes back or, of the model's input, that nobody needs): until they are passed on; until the
    rank's last backward, or its optimizer's step on its first layer, which wait for the sends.
    """

    late: Literal["nothing", "weights", "all"] = "nothing"
    flush: Literal["passed", "backward", "step"] = "passed"


NONE = Habits()


class HoldingEmitter(Emitter):
    """Writes down the ops of a rank with such habits and this walk."""

    def __init__(self, pools: Iterable[Pool], lookahead: int, habits: Habits, walk: list[Visit | Message]) -> None:
        super().__init__(pools, lookahead=lookahead)
        self._habits = habits
        self._flush: OpId | None = None
        """the op after which the ends go back"""
        if habits.flush == "backward":
            self._flush = walk[-1].ident if isinstance(walk[-1], Message) else walk[-1].ops()[-1]
        elif habits.flush == "step":
            self._flush = group_op("OD", min(stay.stage for stay in walk if isinstance(stay, Visit)))
        self._ends: list[Buffer] = []
        self._sent: list[OpId] = []
        self._late: dict[int, list[Buffer]] = defaultdict(list)

    def emit(
        self,
        ident: OpId,
        *,
        after: Iterable[OpId] = (),
        takes: Iterable[Take] = (),
        writes: Iterable[Buffer] = (),
        gives: Iterable[Buffer] = (),
        **more: Any,
    ) -> OpId:
        """Write an op down, with what is given back at its end."""
        after, takes, writes, gives = [*after], [*takes], [*writes], [*gives]
        if self._flush is not None:
            if ident.kind in ("E", "SA", "SD"):
                self._ends += gives
                gives = []
            if ident.kind == "B" and not ident.stage:
                unread = stage_buffer("D", -1, ident.micro_batch)
                takes.append((unread, "activation_gradients"))
                writes.append(unread)
                self._ends.append(unread)
            if ident == self._flush:
                after += self._sent
                gives += self._ends
            if ident.lane == "send":
                self._sent.append(ident)
        if ident.kind == "SG" and (ident.chunk < 0 or any(name.holds == "gradient" for name in gives)):
            gives += self._late.pop(ident.group, ())
        held = [name for name in gives if self._is_late(ident, name)]
        if held:
            self._late[max(ident.stage, ident.group)] += held
            gives = [name for name in gives if name not in held]
        return super().emit(ident, after=after, takes=takes, writes=writes, gives=gives, **more)

    def _is_late(self, ident: OpId, name: Buffer) -> bool:
        backward = ident.kind == "B" or (ident.visit is not None and ident.visit.kind == "B")
        return backward and (self._habits.late == "all" or (self._habits.late == "weights" and name.holds == "weights"))
