"""Proves that a schedule computes the step that it is for, whatever made it.

The checker's rules order every two accesses to a buffer of which one writes it. Here the same is asked of what lies
outside the pools: weights and state at home, what waits on disk, the sums of the norm, the commit. Then every timing
gives the values that one order gives. That order is gone through once, with values that say what they are: "chunk 1 of
group 5's weights, not stepped yet", "the gradient of stage 3, of micro-batches 0 and 1, added up in this order".

An op is refused when something that it takes is not what it has to be. In the end every chunk that has a gradient is
stepped once, from the sum that all schedules make (micro-batches in order within a stage, then stages in backward
order), or is left to the next step with that gradient kept, and all of it is where it lives.
"""

from collections.abc import Callable

from penstock.errors import ScheduleError
from penstock.schedule.check.order import run_order
from penstock.schedule.ir.ops import Op, Schedule, refused
from penstock.schedule.ir.references import COMPUTES
from penstock.schedule.meaning.between import BetweenRules
from penstock.schedule.meaning.compute import ComputeRules
from penstock.schedule.meaning.crossing import CrossingRules
from penstock.schedule.meaning.fields import check_fields
from penstock.schedule.meaning.matrices import MatrixRules
from penstock.schedule.meaning.values import AFTER, NOW, Activation, Gradient, Needs
from penstock.schedule.meaning.waiting import WaitingRules

__all__ = ["Needs", "prove"]


def prove(schedule: Schedule, needs: Needs) -> None:
    """Prove a schedule that the checker's rules hold for.

    Raises:
        ScheduleError: names the op that takes something else than it has to, or what is missing in the end.
    """
    order = list(run_order(schedule))
    step = _Step(schedule, needs, order)
    for op in order:
        step.run(op)
    step.finish()


class _Step(ComputeRules, MatrixRules, WaitingRules, BetweenRules, CrossingRules):
    """All ops of a step, one after the other."""

    def __init__(self, schedule: Schedule, needs: Needs, order: list[Op]) -> None:
        super().__init__(schedule, needs, order)
        self._kinds: dict[str, Callable[[Op], None]] = {
            **dict.fromkeys(COMPUTES, self._compute),
            "AD": self._add_strand,
            "RW": self._read_weights,
            "UW": self._load,
            "WW": self._write_weights,
            "UN": self._renew,
            "DG": self._down,
            "AG": self._add,
            "NG": self._measure,
            "ND": self._measure_on_device,
            "NORM": self._norm,
            "WG": self._put_aside,
            "RG": self._fetch,
            "RS": self._read_state,
            "OP": self._step,
            "WS": self._write_state,
            "OD": self._step_on_device,
            "CM": self._commit,
            "RM": self._read_momentum,
            "MU": self._make_update,
            "WM": self._write_momentum,
            "UU": self._lift_update,
            "NS": self._orthogonalise,
            "DU": self._update_down,
            "DC": self._leave,
            "WC": self._write_saved_activation,
            "RC": self._read_saved_activation,
            "UC": self._come_back,
        }
        if needs.shared:
            self._kinds |= {"UG": self._lift, "SG" if needs.cut else "AR": self._exchange}
        if needs.copies > 1:
            self._kinds["HR"] = self._between_copies
        if needs.cut:
            self._kinds |= {"GW": self._gather, "GU": self._gather_updates}
            self._kinds |= {"DP": self._leave_crossed, "UP": self._bring_crossed}
        if needs.cut and needs.hosts > 1:
            self._kinds |= {"HW": self._gather_of_place, "HU": self._gather_updates_of_place}
        if needs.adds_on_levels:
            self._kinds |= {"SG": self._exchange_within, "HG": self._exchange_between}
        if needs.normed_apart:
            self._kinds |= {"AN": self._gather_norm}
        if needs.program.dealt is not None:
            self._kinds |= dict.fromkeys(("SA", "RA", "SD", "RD"), self._cross)
            self._kinds |= dict.fromkeys(("SX", "RX"), self._cross_besides)

    def run(self, op: Op) -> None:
        what = self._kinds.get(op.id.kind)
        if what is None:
            raise refused(op, f"is for other ranks than {'one' if self.needs.ranks == 1 else 'those that train'}")
        check_fields(op, self.needs.program, brings=self.needs.brings)
        self.pool_of |= {name: self.pools[pool] for name, pool in op.takes}
        what(op)
        for name in op.gives:
            value = self.values.pop(name, None)
            if isinstance(value, Activation) and self.activations.get(value[:2]) == name and not value.gradient:
                raise refused(op, f"gives {name} back, which a saved activation is still in")

    def finish(self) -> None:
        """All stages have run, what crosses has crossed, and everything that has a gradient is stepped, or left with
        it."""
        for m, (forward, backward) in enumerate(zip(self.forward, self.backward, strict=True)):
            if forward < len(self.stages) or (self.needs.train and backward >= 0):
                stage = f"F{forward}m{m}" if forward < len(self.stages) - 1 else f"E{forward}m{m}"
                raise self._lacks(stage if forward < len(self.stages) else f"B{backward}m{m}")
        if self.halves:
            k, m = min(self.halves)
            raise self._lacks(f"W{k}m{m}")
        for ident in self._to_cross():
            if ident not in self.crossed:
                raise self._lacks(ident)
        for g, c in sorted(self.trained):
            if (g, c) not in self.stepped:
                raise self._lacks(f"OD{g}" if self.place.state[g] == "device" else f"OP{g}.{c}")
            if (g, c) not in self.partials:
                raise self._lacks(f"NG{g}.{c}")
            if self.needs.normed_apart and not self.gathered:
                raise self._lacks("AN")
            want = NOW if (g, c) in self.late else AFTER
            if self.state[g, c] != want:
                raise self._lacks(f"WS{g}.{c}")
            if self.momentum.get((g, c), want) != want:
                raise self._lacks(f"WM{g}.{c}")
            if self.at_home[g, c] != want:
                raise self._lacks(f"WW{g}.{c}")
            if self.weights[g, c] != want:
                raise self._lacks(f"UN{g}.{c}")
        for tag in sorted(self.late):
            kept = self.values.get(self.kept_gradients[tag]) if tag in self.kept_gradients else self.extents.get(tag)
            if kept != Gradient(*tag, self.whole[tag[0]]):
                what = f"chunk {tag[0]}.{tag[1]} is left to the next step, and its gradient is not kept for that"
                raise ScheduleError(what, op=f"OP{tag[0]}.{tag[1]}")
        for name, value in self.read_ahead.items():
            if (type(self.values.get(name)), self.values.get(name)) != (type(value), value):
                start = next(start for start, end, _ in self.schedule.carried if end == name)
                what = f"{name} is read for the next step, and does not have what that finds at home"
                raise ScheduleError(what, op=f"carry {start}")
