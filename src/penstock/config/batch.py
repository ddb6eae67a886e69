"""Settings of the global batch, which a step is trained on and which is cut into micro-batches."""

from dataclasses import dataclass

from penstock.errors import ConfigError

MOST_SEQUENCES = 1 << 20
_MOST = {"sequences": MOST_SEQUENCES, "tokens": 1 << 34}
"""More than any step has, and as many as can be counted through."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The global batch: what one optimizer step sees. Exactly one of the two is given.

    | field | meaning |
    |---|---|
    | ``sequences`` | sequences in a step |
    | ``tokens`` | tokens in a step instead: a multiple of ``data.sequence_length`` |
    """

    sequences: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        given = [key for key in ("sequences", "tokens") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"batch has {' and '.join(given) or 'neither sequences nor tokens'}: give one of batch.sequences and "
                "batch.tokens, what a step is trained on (as a flag in the place of the file's: --batch '{tokens: N}')"
            )
        if (amount := getattr(self, given[0])) < 1:
            raise ConfigError(f"batch.{given[0]}={amount}: must be at least 1")
        if amount > (most := _MOST[given[0]]):
            raise ConfigError(f"batch.{given[0]}={amount}: a step is trained on at most {most:,} {given[0]}")

    def sequences_of(self, sequence_length: int) -> int:
        """Sequences in a step.

        Raises:
            ConfigError: ``tokens`` are not a whole number of sequences.
        """
        if self.sequences is not None:
            return self.sequences
        assert self.tokens is not None
        count, rest = divmod(self.tokens, sequence_length)
        if rest:
            near = [n * sequence_length for n in (count, count + 1) if n]
            raise ConfigError(
                f"batch.tokens={self.tokens} is not a whole number of sequences of data.sequence_length="
                f"{sequence_length} tokens: give {' or '.join(map(str, near))}"
            )
        if count > MOST_SEQUENCES:
            raise ConfigError(
                f"batch.tokens={self.tokens} is {count:,} sequences of data.sequence_length={sequence_length} tokens: "
                f"give at most {MOST_SEQUENCES * sequence_length:,}"
            )
        return count


def dealt(count: int, what: str, ranks: int, advice: str, who: str = "ranks") -> int:
    """The part of a step's ``count`` that each of the ranks has, or of pipelines (``who``). ``advice``: what to do
    where that cannot be.

    Raises:
        ConfigError: they cannot all have as many.
    """
    each, rest = divmod(count, ranks)
    if rest or not each:
        raise ConfigError(f"batch: {count} {what} cannot be shared evenly by {ranks} {who}: {advice}")
    return each


def other_batch(ranks: int, size: int) -> str:
    """The advice to who may choose the batch. ``size``: of its micro-batches."""
    return f"give a batch of a multiple of {ranks * size} sequences"
