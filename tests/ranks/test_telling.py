"""Small things that ranks tell each other, over collectives that threads make."""

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.errors import RankError
from penstock.ranks.telling import Telling

T = TypeVar("T")
PATIENCE = 30.0
AT_ONCE, HEAD = 1024, 8


class Thread(Telling):
    """A rank that is a thread. ``rows``: where all meet, one for each; ``gathers``: the bytes of each collective so
    far."""

    def __init__(self, rank: int, rows: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(rows)
        self.gathers: list[int] = []
        self._rows, self._barrier = rows, barrier

    @property
    def in_call(self) -> str:
        return "step"

    def _gather_control(self, out: torch.Tensor, part: torch.Tensor) -> None:
        self.gathers.append(part.numel())
        self._rows[self.rank] = part
        self._barrier.wait(PATIENCE)
        out.copy_(torch.cat(self._rows))  # fails unless all have given as much
        self._barrier.wait(PATIENCE)


def together(size: int, does: Callable[[Thread], T]) -> list[tuple[T, list[int]]]:
    """The results of what each of so many ranks does, and the collectives that it has made."""
    rows, barrier = [torch.empty(0)] * size, threading.Barrier(size)
    ranks = [Thread(rank, rows, barrier) for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(does, ranks))
    return [(one, rank.gathers) for one, rank in zip(found, ranks, strict=True)]


@given(st.lists(st.integers(0, 1100) | st.integers(960, 1040), min_size=2, max_size=4))
@example([0, 5000])
@example([70_000, 70_000, 1])
def test_each_learns_what_all_tell_in_one_collective_or_two_where_it_is_long(lengths: list[int]) -> None:
    told = [bytes([rank + 1]) * length for rank, length in enumerate(lengths)]
    for found, gathers in together(len(told), lambda rank: rank.gather_objects("plan", told[rank.rank])):
        assert found == told
        longest = max(len(pickle.dumps(("plan", "step", value))) for value in told)
        assert gathers == ([AT_ONCE] if longest <= AT_ONCE - HEAD else [AT_ONCE, longest])


@pytest.mark.parametrize("length", [1, 3000])
def test_who_tells_something_else_is_told_so(length: int) -> None:
    def tells(rank: Thread) -> str:
        with pytest.raises(RankError) as caught:
            rank.gather_objects("plan" if rank.rank else "losses", "x" * length)
        return str(caught.value)

    words = [said for said, _ in together(2, tells)]
    assert words[0].startswith("rank 1 tells its plan in step where rank 0 tells its losses in step")
    assert words[1].startswith("rank 0 tells its losses in step where rank 1 tells its plan in step")
