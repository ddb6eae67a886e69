"""Small things that ranks tell each other: pickled, by gathers of bytes in host memory."""

import pickle
from typing import TypeVar

import torch

from penstock.errors import RankError
from penstock.ranks.group import Ranks

T = TypeVar("T")
_AT_ONCE = 1024
"""bytes that each rank tells in one collective, of which the first say how many there are in all; a second one, after
which all of it is known, takes as long, and most of what is told in a step is shorter"""
_HEAD = 8


class Telling(Ranks):
    """One of several ranks that tell each other things."""

    @property
    def in_call(self) -> str:
        """The name of the call that this rank is in, for people."""
        raise NotImplementedError

    def gather_objects(self, what: str, value: T) -> list[T]:
        text = pickle.dumps((what, self.in_call, value))
        first = len(text).to_bytes(_HEAD, "little") + text[: _AT_ONCE - _HEAD]
        rows = self._gather_bytes(first, _AT_ONCE)
        sizes = [int.from_bytes(row[:_HEAD], "little") for row in rows]
        longest = max(sizes)
        texts = [row[_HEAD:] for row in rows] if longest <= _AT_ONCE - _HEAD else self._gather_bytes(text, longest)
        found = [pickle.loads(text[:size]) for text, size in zip(texts, sizes, strict=True)]
        for other, (theirs, call, _) in enumerate(found):
            if theirs != what:
                raise RankError(
                    f"rank {self.number_of(other)} tells its {theirs} in {call} where rank {self.number_of(self.rank)} "
                    f"tells its {what} in {self.in_call}: give all ranks the same calls, in the same order"
                )
        return [said for *_, said in found]

    def _gather_bytes(self, own: bytes, length: int) -> list[bytes]:
        """So many bytes of each rank, whose own are filled up with zeros."""
        rows = torch.empty(self.size, length, dtype=torch.uint8, device="cpu")  # whatever torch's default device is
        self._gather_control(rows.view(-1), torch.frombuffer(bytearray(own.ljust(length, b"\0")), dtype=torch.uint8))
        return [row.numpy().tobytes() for row in rows]

    def _gather_control(self, out: torch.Tensor, part: torch.Tensor) -> None:
        """``gather`` of what they tell, in host memory."""
        raise NotImplementedError
