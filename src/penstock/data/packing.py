"""Best-fit decreasing: the longest piece first, each into the row with the least room that it fits in.

D. S. Johnson et al., "Worst-case performance bounds for simple one-dimensional packing algorithms", SIAM J. Comput.
3(4), 1974. Never more than 11/9 of the best possible number of rows, and for documents usually all but full.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def best_fit_decreasing(sizes: Ints, length: int) -> tuple[Ints, Ints]:
    """Pack pieces of ``sizes`` (each from 1 to ``length``) into rows of ``length``.

    Returns ``order``, the pieces' numbers row by row, and ``ends``, where in it each row ends. Of pieces and of rows
    that are equal the first given comes first, so that the result is a function of ``sizes``.

    Rows are kept in a stack for each room that they may have left; the bits of one integer say which stacks are not
    empty, so that the tightest row for a piece is a shift and a mask away.
    """
    row_of = np.empty(len(sizes), dtype=np.int64)
    stacks: list[list[int]] = [[] for _ in range(length + 1)]
    occupied = rows = 0
    decreasing = np.argsort(-sizes, kind="stable")
    for piece, size in zip(decreasing.tolist(), sizes[decreasing].tolist(), strict=True):
        assert 0 < size <= length
        fitting = occupied >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = stacks[room].pop()
            if not stacks[room]:
                occupied ^= 1 << room
        else:
            room, row = length, rows
            rows += 1
        row_of[piece] = row
        if left := room - size:
            stacks[left].append(row)
            occupied |= 1 << left
    order = decreasing[np.argsort(row_of[decreasing], kind="stable")]
    return order, np.cumsum(np.bincount(row_of, minlength=rows))
