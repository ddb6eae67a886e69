"""What a Trainer has to be told about the engine, beside its own arguments."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from penstock.config import Budget, GradDtype
from penstock.engine.arguments import check_arguments
from penstock.engine.start import WeightSource
from penstock.errors import ConfigError
from penstock.hardware.machine import Machine
from penstock.schedule.ir.ops import Schedule


@dataclass(frozen=True, kw_only=True)
class EngineArguments:
    """The engine's side of a training run by a library's own loop. Everything else follows from the loop's arguments.

    | field | meaning |
    |---|---|
    | ``budget`` | memory per tier, and the directories of the disk tier |
    | ``overwrite`` | whether another run's store in these directories is deleted; without it, finding one is an error |
    | ``weights`` | where the values of a model on the meta device come from: ``penstock.hf.load(folder).weights`` |
    | ``init`` | whether a model of ``penstock.hf.load`` begins with random values instead, without ``weights`` |
    | ``loss_tile`` | tokens whose logits are there at a time, in training and where evaluation wants the loss alone;
    None: all of a micro-batch. Not for ``SFTTrainer``, whose own head does without logits |
    | ``schedule``, ``plan``, ``speculate``, ``delay``, ``grad_dtype``, ``blocks``, ``compile``, ``io_threads`` | as in
    ``penstock.wrap`` |
    """

    budget: Budget
    overwrite: bool = False
    weights: WeightSource | None = None
    init: bool = False
    loss_tile: int | None = None
    schedule: Literal["vertical", "horizontal"] | Schedule = "vertical"
    plan: Machine | Literal["auto"] | None = "auto"
    speculate: bool | None = None
    delay: float | None = None
    grad_dtype: GradDtype | None = None
    blocks: Sequence[nn.Module] | None = None
    compile: bool | str = False
    io_threads: int = 4

    def for_wrap(self) -> dict[str, Any]:
        """What ``wrap`` takes from here."""
        return {key: value for key, value in vars(self).items() if key not in ("overwrite", "loss_tile")}

    def __post_init__(self) -> None:
        check_arguments(vars(self))
        if self.loss_tile is not None and self.loss_tile < 1:
            raise ConfigError(f"loss_tile={self.loss_tile}: must be at least 1 token, or None for whole logits")
