"""Updates made orthogonal: each matrix of a parameter, alone, stacked or side by side, as torch's Muon makes it."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from penstock.config.optimizer import Orthogonal, Split
from penstock.optim.orthogonal import orthogonalise, ratio
from penstock.schedule.matrices import Piece, pieces

STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
BF16_ROUNDING = 2.0**-8
ADJUSTMENTS = "original", "match_rms_adamw"


def matrices(update: torch.Tensor, split: Split | None) -> Iterator[torch.Tensor]:
    """Each matrix of a parameter, a view, by what a user is told of ``Split``: stacked along the first dimension, and
    cut along the rows or the columns."""
    for one in update if update.dim() == 3 else [update]:
        if split is None:
            yield one
        elif isinstance(split.parts, int):
            yield from one.chunk(split.parts, dim=split.dim)
        else:
            yield from one.split(split.parts, dim=split.dim)


@st.composite
def parameters(draw: st.DrawFn) -> tuple[tuple[int, ...], Split | None]:
    """A shape, and how it is cut, if at all."""
    stacked = draw(st.sampled_from((None, 1, 2, 3)))
    rows, columns = draw(st.integers(2, 24)), draw(st.integers(2, 24))
    cut = draw(st.sampled_from(("not", "rows", "columns", "sizes")))
    split = None
    if cut == "sizes":
        stacked = None
        sizes = tuple(draw(st.lists(st.integers(1, 9), min_size=2, max_size=4)))
        rows, split = sum(sizes), Split(match="p", parts=sizes)
    elif cut != "not":
        parts = draw(st.integers(2, 4))
        rows, columns = (rows * parts, columns) if cut == "rows" else (rows, columns * parts)
        split = Split(match="p", parts=parts, dim=0 if cut == "rows" else 1)
    return (rows, columns) if stacked is None else (stacked, rows, columns), split


@given(parameters(), st.integers(0, 2**31))
def test_each_matrix_is_what_torchs_iteration_makes_of_it(
    parameter: tuple[tuple[int, ...], Split | None], seed: int
) -> None:
    """One alone has torch's bits; of several together products may be added up in another order."""
    shape, split = parameter
    rule = Orthogonal(steps=STEPS, splits=() if split is None else (split,))
    update = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    found, cut = update.clone(), pieces("p", shape, rule)
    orthogonalise(found, cut, STEPS)
    alone = all(piece.count == 1 for piece in cut)
    given_, made = list(matrices(update, split)), list(matrices(found, split))
    assert len(made) == sum(piece.count for piece in cut)
    for before, after in zip(given_, made, strict=True):
        wanted = _zeropower_via_newtonschulz(before, COEFFICIENTS, STEPS, 1e-7)
        if alone:
            assert torch.equal(after, wanted)
        else:
            off = (after.float() - wanted.float()).norm() / wanted.float().norm()
            assert off <= 4 * STEPS * BF16_ROUNDING, (shape, split)


@pytest.mark.parametrize("adjust", ADJUSTMENTS)
@given(parameters())
def test_the_rate_is_that_of_each_matrix(adjust: str, parameter: tuple[tuple[int, ...], Split | None]) -> None:
    shape, split = parameter
    rule = Orthogonal(steps=STEPS, splits=() if split is None else (split,))
    wanted = {_adjust_lr(1.0, adjust, one.shape) for one in matrices(torch.empty(shape), split)}
    assert {rate(piece, adjust) for piece in pieces("p", shape, rule)} == wanted


def rate(piece: Piece, adjust: str) -> float:
    found = ratio(piece, adjust)  # type: ignore[arg-type]
    assert math.isfinite(found)
    return found
