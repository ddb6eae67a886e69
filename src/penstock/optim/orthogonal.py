"""Updates made orthogonal, as ``torch.optim.Muon`` makes them: a Newton-Schulz iteration in bf16.

All its products are torch's own, so that bits are those of one kind of device; a matrix is always taken whole, and so
they do not depend on how a schedule moves it.
"""

import math
from collections.abc import Sequence

import torch

from penstock.config.optimizer import AdjustLr
from penstock.schedule.matrices import Piece

_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Coefficients of the polynomial (Jordan et al., kellerjordan.github.io/posts/muon)."""
_LEAST = 1e-7
"""The least norm that an update is divided by."""


def orthogonalise(update: torch.Tensor, pieces: Sequence[Piece], steps: int) -> None:
    """Make the matrices of a parameter's update orthogonal, each by itself and in place.

    ``update``: [..., rows, columns] bf16. ``pieces``: what it consists of (``matrices.pieces``).
    """
    stacked = update.view(-1, *update.shape[-2:])
    for piece in pieces:
        part = stacked.narrow(1 + piece.dim, piece.start, piece.size)
        if piece.count == 1:
            part.copy_(_of_one(part[0], steps))
            continue
        cut = _cut(part, piece)
        one_by_one = cut.movedim(2, 1) if piece.dim else cut  # [stacked, parts, rows, columns]
        done = _of_many(one_by_one.reshape(piece.count, piece.rows, piece.columns), steps)
        one_by_one.copy_(done.view(one_by_one.shape))


def _cut(part: torch.Tensor, piece: Piece) -> torch.Tensor:
    """[stacked, parts, rows, columns], or of columns [stacked, rows, parts, columns]: a view."""
    before, behind = part.shape[: 1 + piece.dim], part.shape[2 + piece.dim :]
    return part.view(*before, -1, piece.columns if piece.dim else piece.rows, *behind)


def ratio(piece: Piece, adjust: AdjustLr) -> float:
    """The factor that a matrix's learning rate is multiplied by."""
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(piece.rows, piece.columns))
    return math.sqrt(max(1, piece.rows / piece.columns))


def _of_one(x: torch.Tensor, steps: int) -> torch.Tensor:
    """[rows, columns]. The same operations as torch's, which has no stacks."""
    upright = x.size(0) > x.size(1)
    x = x.T if upright else x
    x = x / x.norm().clamp(min=_LEAST)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if upright else x


def _of_many(x: torch.Tensor, steps: int) -> torch.Tensor:
    """[count, rows, columns]."""
    upright = x.size(1) > x.size(2)
    x = x.mT if upright else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=_LEAST)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if upright else x
