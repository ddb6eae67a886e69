"""Parameters that are matrices, whose updates Muon makes orthogonal, and the pieces they are cut into. Plain data."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from penstock.config.optimizer import Orthogonal, Split
from penstock.errors import ConfigError
from penstock.schedule.place import BF16
from penstock.schedule.program import Whole

_DIMENSIONS = (2, 3)
"""Dimensions of a matrix, and of a stack of them, such as a block's experts."""
_NORM = re.compile(r"norm(_?\w{1,2})?$", re.IGNORECASE)
"""Names of modules that are norms: ``q_norm``, ``input_layernorm``, ``norm1``, ``norm_q``."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """``count`` matrices of ``rows`` x ``columns`` in a parameter: those of its rows (``dim`` 0) or columns (1) from
    ``start`` on, ``size`` of them. Cut along ``dim`` that is one matrix, or several that are equal."""

    dim: int
    start: int
    size: int
    count: int
    rows: int
    columns: int


def is_matrix(name: str, shape: Sequence[int], rule: Orthogonal) -> bool:
    """True if a block's parameter is a matrix or a stack of some, no bias and no norm's, and not left out by name."""
    module, _, own = name.rpartition(".")
    of_norm = _NORM.search(module.rpartition(".")[2]) is not None
    return (
        len(shape) in _DIMENSIONS and min(shape[-2:]) > 1 and not (of_norm or own.endswith("bias") or rule.leaves(name))
    )


def pieces(name: str, shape: Sequence[int], rule: Orthogonal) -> tuple[Piece, ...]:
    """The matrices of a parameter, in order.

    Raises:
        ConfigError: it cannot be cut as it is asked for.
    """
    rows, columns = shape[-2:]
    stacked, split = prod(shape[:-2]), rule.split_of(name)
    if split is None:
        return (Piece(dim=0, start=0, size=rows, count=stacked, rows=rows, columns=columns),)
    whole = shape[-2:][split.dim]
    if isinstance(split.parts, int):
        each, rest = divmod(whole, split.parts)
        if rest:
            raise _uneven(name, split, whole)
        rows, columns = (rows, each) if split.dim else (each, columns)
        count = stacked * split.parts
        return (Piece(dim=split.dim, start=0, size=whole, count=count, rows=rows, columns=columns),)
    if sum(split.parts) != whole or stacked > 1:
        raise _uneven(name, split, whole)
    starts = [sum(split.parts[:i]) for i in range(len(split.parts))]
    return tuple(
        Piece(dim=0, start=start, size=size, count=1, rows=size, columns=columns)
        for start, size in zip(starts, split.parts, strict=True)
    )


def _uneven(name: str, split: Split, whole: int) -> ConfigError:
    what = "columns" if split.dim else "rows"
    return ConfigError(
        f"split match={split.match!r}: {name} has {whole} {what}, which parts={split.parts!r} do not make up: give a "
        "number that divides them, or of one matrix the rows of each part"
    )


def orthogonal_flop(piece: Piece, steps: int) -> int:
    """FLOP of as many steps of the iteration. Each makes three products: a matrix by itself transposed, the square of
    that, and that with the matrix; of the shorter side m and the longer one n, 4 m m n + 2 m m m."""
    m, n = sorted((piece.rows, piece.columns))
    return steps * piece.count * (4 * m * m * n + 2 * m * m * m)


def whole_of(parameters: Iterable[tuple[str, Sequence[int]]], rule: Orthogonal) -> Whole:
    """FLOP, and bytes of temporaries, of a step of these matrices, given as names and shapes. Beside a matrix there are
    its square, the polynomial of that, and the next matrix.

    Raises:
        ConfigError: as ``pieces``.
    """
    flop = scratch = 0
    for piece in (piece for name, shape in parameters for piece in pieces(name, shape, rule)):
        m, n = sorted((piece.rows, piece.columns))
        flop += orthogonal_flop(piece, rule.steps)
        scratch = max(scratch, BF16 * piece.count * (3 * m * n + 2 * m * m))
    return Whole(flop=flop, scratch=scratch)
