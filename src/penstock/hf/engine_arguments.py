"""A Trainer's arguments for the engine, beside its own."""

from dataclasses import dataclass

from penstock.config.layout import LayoutConfig
from penstock.config.meanings import named_arguments
from penstock.config.optimizer import MomentsConfig
from penstock.engine.arguments import LoopArguments
from penstock.errors import ConfigError


@named_arguments
@dataclass(frozen=True, kw_only=True)
class EngineArguments(LoopArguments, MomentsConfig, LayoutConfig):
    """The engine's side of a training run by a library's own loop. Everything else follows from the loop's arguments.

    | field | meaning |
    |---|---|
    | ``budget`` | memory per tier, and the directories of the disk tier. A store that lies there is not gone on with by
    itself: the checkpoint decides, and ``overwrite`` |
    | ``overwrite`` | whether another run's store in the budget's directories is deleted; without it, finding one is an
    error |
    | ``loss_tile`` | tokens whose logits are there at a time, in training and where evaluation wants the loss alone;
    None: all of a micro-batch. Not for TRL's trainers, whose losses do without logits |
    """

    overwrite: bool = False
    loss_tile: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_layout()
        if self.loss_tile is not None and self.loss_tile < 1:
            raise ConfigError(f"loss_tile={self.loss_tile}: must be at least 1 token, or None for whole logits")
