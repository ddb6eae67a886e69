"""How much a step is trained on: the global batch, which the plan cuts into micro-batches."""

from dataclasses import dataclass

from penstock.errors import ConfigError


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
        return count
