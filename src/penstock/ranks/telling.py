"""Small things that ranks tell each other: pickled, by gathers of bytes in host memory."""

import pickle
from typing import TypeVar

import torch

from penstock.errors import RankError
from penstock.ranks.group import Ranks

T = TypeVar("T")


class Telling(Ranks):
    """One of several ranks that tell each other things."""

    @property
    def in_call(self) -> str:
        """The name of the call that this rank is in, for people."""
        raise NotImplementedError

    def gather_objects(self, what: str, value: T) -> list[T]:
        text = torch.frombuffer(bytearray(pickle.dumps((what, self.in_call, value))), dtype=torch.uint8)
        sizes = torch.empty(self.size, dtype=torch.int64, device="cpu")  # whatever torch's default device is
        self._gather_control(sizes, torch.tensor([text.numel()], device="cpu"))
        longest = int(sizes.max())
        texts = torch.empty(self.size, longest, dtype=torch.uint8, device="cpu")
        self._gather_control(texts.view(-1), torch.nn.functional.pad(text, (0, longest - text.numel())))
        found = [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(texts, sizes.tolist(), strict=True)]
        for other, (theirs, call, _) in enumerate(found):
            if theirs != what:
                raise RankError(
                    f"rank {self.number_of(other)} tells its {theirs} in {call} where rank {self.number_of(self.rank)} "
                    f"tells its {what} in {self.in_call}: give all ranks the same calls, in the same order"
                )
        return [said for *_, said in found]

    def _gather_control(self, out: torch.Tensor, part: torch.Tensor) -> None:
        """``gather`` of what they tell, in host memory."""
        raise NotImplementedError
