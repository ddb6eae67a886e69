"""A linear program, with or without whole numbers, by HiGHS: the same answer on any machine, and nothing printed."""

import threading
from collections.abc import Mapping
from typing import Any

import highspy
import numpy as np
import xxhash
from numpy.typing import NDArray

_HIGHS: Mapping[str, bool | int | float | str] = {
    "output_flag": False,
    "threads": 1,
    "mip_rel_gap": 2e-3,
    "mip_max_nodes": 1000,  # nodes, not seconds: the same answer on any machine
    # For programs as small as these branching is faster than what HiGHS does before it and around it: half of the time,
    # for answers that are a little better.
    "presolve": "off",
    "mip_allow_restart": False,
    "mip_pscost_minreliable": 0,
    "mip_heuristic_run_feasibility_jump": False,
    "mip_heuristic_run_rens": False,
    "mip_heuristic_run_rins": False,
    "mip_heuristic_run_root_reduced_cost": False,
    "mip_heuristic_run_shifting": True,
}
_FEASIBLE = int(highspy.SolutionStatus.kSolutionStatusFeasible)

SOLVED: dict[bytes, NDArray[np.float64] | None] = {}
"""Optima by the digest of their program: a search comes back to some of its programs, and the advice that follows, a
plan in another form or for the next shape of batch, to most of them. An integer program takes up to 60 ms."""
_KEPT = 4096


def optimum(
    matrix: NDArray[np.float64],
    cost: NDArray[np.float64],
    low: NDArray[np.float64],
    high: NDArray[np.float64],
    first_integer: int | None,
) -> NDArray[np.float64] | None:
    """The x >= 0 of the least ``cost @ x`` with ``low <= matrix @ x <= high``, shape (columns,), not to be written to;
    None if there is none. Columns from ``first_integer`` on are whole numbers; None: none has to be."""
    digest = xxhash.xxh3_128(repr((matrix.shape, first_integer)).encode())
    for array in (matrix, cost, low, high):
        digest.update(array.tobytes())
    key = digest.digest()
    if key not in SOLVED:
        if len(SOLVED) >= _KEPT:
            SOLVED.clear()
        SOLVED[key] = _solved(matrix, cost, low, high, first_integer)
    return SOLVED[key]


def _solved(
    matrix: NDArray[np.float64],
    cost: NDArray[np.float64],
    low: NDArray[np.float64],
    high: NDArray[np.float64],
    first_integer: int | None,
) -> NDArray[np.float64] | None:
    height, width = matrix.shape
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = width, height
    lp.col_cost_ = cost
    lp.col_lower_ = np.zeros(width)
    lp.col_upper_ = np.full(width, highspy.kHighsInf)
    lp.row_lower_, lp.row_upper_ = low, high
    if first_integer is not None:
        kinds = [highspy.HighsVarType.kContinuous] * first_integer
        lp.integrality_ = kinds + [highspy.HighsVarType.kInteger] * (width - first_integer)
    filled = matrix != 0
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.concatenate(([0], np.cumsum(filled.sum(axis=1)))).astype(np.int32)
    lp.a_matrix_.index_ = np.nonzero(filled)[1].astype(np.int32)
    lp.a_matrix_.value_ = matrix[filled]
    solver = _SOLVERS.own
    solver.passModel(lp)
    solver.run()
    if solver.getInfo().primal_solution_status != _FEASIBLE:
        return None
    found = np.array(solver.getSolution().col_value)
    found.setflags(write=False)
    return found


class Solver(highspy.Highs):
    """HiGHS, which prints nothing: since 1.16 it names itself as soon as callbacks are enabled, which is before whoever
    makes one can set an option."""

    def enableCallbacks(self) -> Any:  # noqa: N802 - HiGHS calls it so
        self.setOptionValue("output_flag", False)
        return super().enableCallbacks()  # type: ignore[no-untyped-call]


class _Solvers(threading.local):
    """Each thread's solver: one takes as long to make as a small program to solve."""

    def __init__(self) -> None:
        self.own = Solver()  # type: ignore[no-untyped-call]
        for name, value in _HIGHS.items():
            status = self.own.setOptionValue(name, value)
            assert status == highspy.HighsStatus.kOk, name


_SOLVERS = _Solvers()
