"""The order in which ranks' gradients are added up: one fixed binary tree, whoever adds.

    8 ranks   ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))
    6 ranks   ((0 + 1) + (2 + 3)) + (4 + 5)

Each level adds neighbours; one that is left over waits for the next level.
"""

from collections.abc import Sequence

import torch


def add_up(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Add tensors of one shape, by rank, into ``out``. ``parts`` are overwritten; ``out`` may be none of them."""
    left = list(parts)
    while len(left) > 2:
        pairs = [left[i].add_(left[i + 1]) for i in range(0, len(left) - 1, 2)]
        left = pairs + left[2 * len(pairs) :]
    if len(left) == 2:
        torch.add(left[0], left[1], out=out)
    else:
        out.copy_(left[0])
