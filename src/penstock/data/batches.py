"""Token ids to micro-batches. Which sequences a step gets is a function of the seed and the step alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.data.tokens import TokenArray
from penstock.errors import ConfigError

MicroBatch = Mapping[str, torch.Tensor]


@dataclass(kw_only=True)
class Batches:
    """Sequences of ``sequence_length`` tokens in a new random order each epoch; what is left over at the end is unused.

    Every sequence comes once per epoch. A step takes ``micro_batches`` times ``micro_batch_size`` of them. With
    ``seed`` None the sequences come in the order of the text.
    """

    tokens: TokenArray
    name: str
    sequence_length: int
    micro_batches: int
    micro_batch_size: int
    seed: int | None
    _order: tuple[int, NDArray[np.int64]] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.sequences < self.micro_batch_size:
            raise ConfigError(
                f"the {self.name} text has {len(self.tokens):,} tokens: too few for one micro-batch of "
                f"{self.micro_batch_size} sequences of {self.sequence_length}. Give more text, or shorter sequences"
                + (" or a larger evaluate.share" if self.name == "validation" else "")
            )

    @property
    def sequences(self) -> int:
        return len(self.tokens) // self.sequence_length

    @property
    def per_step(self) -> int:
        return self.micro_batches * self.micro_batch_size

    def step(self, index: int) -> list[MicroBatch]:
        """Micro-batches of step ``index`` (from 0): ``input_ids`` and ``labels``, int64 [size, sequence_length].

        Both are the same tokens: Hugging Face's causal language models shift the labels themselves.
        """
        first = index * self.per_step
        rows = np.stack([self._sequence(first + i) for i in range(self.per_step)])
        ids = torch.from_numpy(rows).view(self.micro_batches, self.micro_batch_size, self.sequence_length)
        return [{"input_ids": part, "labels": part} for part in ids]

    def _sequence(self, count: int) -> NDArray[np.int64]:
        """The ``count``-th sequence since the beginning, int64 [sequence_length]."""
        epoch, place = divmod(count, self.sequences)
        index = place if self.seed is None else int(self._permutation(epoch, self.seed)[place])
        start = index * self.sequence_length
        return self.tokens[start : start + self.sequence_length].astype(np.int64)

    def _permutation(self, epoch: int, seed: int) -> NDArray[np.int64]:
        if self._order is None or self._order[0] != epoch:
            generator = np.random.Generator(np.random.PCG64([seed, epoch]))
            self._order = (epoch, generator.permutation(self.sequences))
        return self._order[1]
