"""Low-rank adapters: what is trained instead of the model itself."""

from dataclasses import dataclass
from typing import Literal

from penstock.config.checked import check_least
from penstock.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685): the model's own weights are read and never written.

    | field | meaning |
    |---|---|
    | ``rank`` | rank of each adapter: the rows of A and the columns of B |
    | ``alpha`` | scale of adapters: B·A is added times ``alpha`` / ``rank`` |
    | ``dropout`` | share of the adapters' inputs that is dropped, from 0 to below 1 |
    | ``target_modules`` | ends of the names of the layers that get one, as ``[q_proj, v_proj]``; ``all-linear``: all
    linear layers but the head; null: those that peft has for this type of model |
    """

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.0
    target_modules: tuple[str, ...] | Literal["all-linear"] | None = "all-linear"

    def __post_init__(self) -> None:
        check_least(self, "lora.", rank=1, alpha=1)
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"lora.dropout={self.dropout}: must be at least 0 and less than 1")
        if self.target_modules == ():
            raise ConfigError("lora.target_modules is an empty list: name layers, as [q_proj, v_proj], or all-linear")
