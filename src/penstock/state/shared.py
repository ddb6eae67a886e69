"""The arrays of a run whose ranks share every group, read as if they were one: by all of them, or by one."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from penstock.ranks.group import Ranks
from penstock.ranks.share import Share
from penstock.state.arrays import StateArrays
from penstock.state.parts import WholeArrays
from penstock.state.values import Arrays


class SharedArrays(WholeArrays):
    """All arrays of whole groups. All ranks read the same ranges, in the same order, which is compared; each reads what
    it has, and lends it to the others."""

    def __init__(self, arrays: StateArrays, model: Mapping[str, Any], ranks: Ranks, share: Share) -> None:
        """``arrays``: of this rank's ``share``."""
        super().__init__(model, share, self._lent)
        self._arrays, self._ranks = arrays, ranks

    def fetch(self, names: Sequence[str], offset: int, flat: torch.Tensor) -> None:
        """As ``StateArrays.fetch``; ConfigError: another rank reads something else."""
        with self._ranks.together("a read of values"):
            self._ranks.agree("values to read", (tuple(names), offset, flat.numel()))
            super().fetch(names, offset, flat)

    def _lent(self, rank: int, names: Sequence[str], start: int, into: torch.Tensor) -> None:
        if rank == self.share.rank:
            self._arrays.fetch(names, start, into)
        self._ranks.lend(into.view(torch.uint8), rank)  # of any dtype


class CalledArrays:
    """Arrays of an engine, each read of which is a ``call`` of it: what is pending is done before, and not within a
    step, in a forked child or after the end."""

    def __init__(self, arrays: Arrays, call: Callable[[Callable[[], None]], None]) -> None:
        self._arrays, self.form = arrays, arrays.form
        self._call = call

    def fetch(self, names: Sequence[str], offset: int, flat: torch.Tensor) -> None:
        """As ``StateArrays.fetch``, with the errors of any call of the engine."""
        self._call(partial(self._arrays.fetch, names, offset, flat))


class LedArrays:
    """Values of all ranks, of which the first rank alone says what is read. The others ``follow`` until it is ``done``:
    they read the same, and thereby lend it what they have."""

    def __init__(self, arrays: Arrays, ranks: Ranks) -> None:
        self._arrays, self.form = arrays, arrays.form
        self._ranks = ranks

    def fetch(self, names: Sequence[str], offset: int, flat: torch.Tensor) -> None:
        """As ``StateArrays.fetch``, on the first rank."""
        self._wanted((tuple(names), offset, flat.numel()))
        self._arrays.fetch(names, offset, flat)

    def done(self) -> None:
        """The first rank has read all that it wants."""
        self._wanted(None)

    def follow(self) -> None:
        while (wanted := self._wanted(None)) is not None:
            names, offset, numel = wanted
            self._arrays.fetch(names, offset, torch.empty(numel, dtype=torch.float32, device="cpu"))

    def _wanted(self, said: tuple[tuple[str, ...], int, int] | None) -> tuple[tuple[str, ...], int, int] | None:
        return self._ranks.gather_objects("values to read", said)[0]
