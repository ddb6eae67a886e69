"""Cost models that stand for no machine: the LLM training puzzles', and the unit costs of the pipeline papers."""

from dataclasses import dataclass

from penstock.errors import ScheduleError
from penstock.schedule.ir.ops import Op
from penstock.schedule.lower.request import Sizes
from penstock.sim.costs import Costs

PUZZLE_UNIT = 512 * 256
"""Elements of an activation of one batch in the puzzles (256 positions of 512); a weight matrix has twice as many."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """A cost model: ``costs`` for the simulator; ``sizes`` and ``stage_ops`` for a ``FamilyRequest``."""

    costs: Costs
    sizes: Sizes
    stage_ops: bool


def puzzle() -> CostModel:
    """The LLM training puzzles (github.com/srush/LLM-Training-Puzzles): a forward or a backward of a layer takes 1 for
    each batch, half of that where the backward is split, a loss nothing, an optimizer step 0.5, a collective 0.3
    whatever its size, and a pass 0.2 at each end; a rank does one thing at a time. Sizes are in elements.
    """
    unit = PUZZLE_UNIT
    return CostModel(
        costs=Costs(name="puzzle", seconds=_puzzle_seconds, serial=True),
        sizes=Sizes(activation=unit, activation_gradient=unit, weights=2 * unit, gradient=2 * unit, state=2 * unit),
        stage_ops=False,
    )


_PUZZLE_COMPUTE = {"F": 1.0, "B": 1.0, "I": 0.5, "W": 0.5, "E": 0.0}
_PUZZLE_LANES = {"net": 0.3, "send": 0.2, "recv": 0.2}


def _puzzle_seconds(op: Op) -> float:
    kind = op.id.kind
    if kind in _PUZZLE_COMPUTE:
        return _PUZZLE_COMPUTE[kind] * op.items
    if kind == "OD":
        return 0.5
    if op.lane in _PUZZLE_LANES:
        return _PUZZLE_LANES[op.lane]
    what = f"op {kind}" if op.lane == "compute" else f"lane {op.lane}"
    raise ScheduleError(f"op {op.id}: the puzzles know no {what}: simulate offload on a machine profile")


def unit() -> CostModel:
    """A stage's forward takes 1 for each micro-batch, its backward 2 (1 + 1 where it is split), all else 0. Memory
    counts micro-batches in flight: 1 for each that a stage keeps something of for its backward.
    """
    return CostModel(
        costs=Costs(name="unit", seconds=_unit_seconds),
        sizes=Sizes(activation=0, activation_gradient=0, weights=0, gradient=0, state=0, saved=1),
        stage_ops=True,
    )


_UNIT_COMPUTE = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def _unit_seconds(op: Op) -> float:
    return _UNIT_COMPUTE.get(op.id.kind, 0.0) * op.items
