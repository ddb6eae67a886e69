"""What it is trained on."""

from dataclasses import dataclass
from typing import Literal

from penstock.config.sizes import parse_size
from penstock.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text, and the byte-level BPE that is trained on it at the start of the run.

    | field | meaning |
    |---|---|
    | ``source`` | ``stdlib``: the sources of Python's own standard library; ``files``: the files named below |
    | ``files`` | glob patterns of UTF-8 text files; with ``source: files`` only |
    | ``limit`` | bytes of text to use at most (or ``"8MB"``); None: all of it |
    | ``vocabulary`` | tokens in the vocabulary: 256 bytes, one end-of-text token and the merges |
    | ``tokenizer_sample`` | bytes of text that the BPE is trained on at most |
    | ``sequence_length`` | tokens in one sequence |
    """

    source: Literal["stdlib", "files"]
    vocabulary: int
    sequence_length: int
    files: tuple[str, ...] = ()
    limit: str | int | None = None
    tokenizer_sample: str | int = "4MB"

    @property
    def limit_bytes(self) -> int | None:
        return None if self.limit is None else parse_size(self.limit)

    @property
    def sample_bytes(self) -> int:
        return parse_size(self.tokenizer_sample)

    def __post_init__(self) -> None:
        if self.source == "files" and not self.files:
            raise ConfigError("data.source is files, but data.files names none: give glob patterns")
        if self.source != "files" and self.files:
            raise ConfigError(
                f"data.files has no effect with data.source={self.source!r}: drop it or use source: files"
            )
        if not 257 < self.vocabulary <= 2**31:
            raise ConfigError(f"data.vocabulary={self.vocabulary}: must be more than 257 (256 bytes and end of text)")
        if self.sequence_length < 2:
            raise ConfigError(f"data.sequence_length={self.sequence_length}: must be at least 2, to have a next token")
        for key, size in (("limit", self.limit_bytes), ("tokenizer_sample", self.sample_bytes)):
            if size == 0:
                raise ConfigError(f"data.{key} is 0 bytes: nothing would be left to train on")
