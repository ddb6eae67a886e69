"""The arguments of ``penstock.plan``, checked before anything is computed: callers need not use a type checker."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from penstock.config import Budget, OptimizerName, StepConfig
from penstock.config.batch import MOST_SEQUENCES
from penstock.config.checked import check_fields
from penstock.config.optimizer import MomentsConfig, moment_count
from penstock.config.quantities import parse_count
from penstock.config.sizes import MEMORY_LEAST, check_size
from penstock.config.step import IN_TURN, StreamedFamily
from penstock.errors import ConfigError
from penstock.hardware.machine import Machine


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """The settings of every plan, of a settings file's run or of a model.

    | field | meaning |
    |---|---|
    | ``batch`` | sequences in a step, which are cut into micro-batches as is best |
    | ``disk_free`` | disk space that may be used, if not what the profile says is free |
    | ``tbw`` | terabytes that each drive is rated for, if not what the profile says |
    """

    common: ClassVar[bool] = True

    batch: int | None = None
    disk_free: str | int | float | None = None
    tbw: float | None = None

    def check_inputs(self) -> None:
        """Raises:
        ConfigError: one is out of its range.
        """
        if self.batch is not None and self.batch < 1:
            raise ConfigError(f"batch={self.batch}: must be a whole number of at least 1")
        if self.batch is not None and self.batch > MOST_SEQUENCES:
            raise ConfigError(f"batch={self.batch}: a step is trained on at most {MOST_SEQUENCES:,} sequences")
        check_drives(self.disk_free, self.tbw)


@dataclass(frozen=True, kw_only=True)
class PlanSettings(StepConfig, MomentsConfig, PlanInputs):
    """The settings of a plan for a model that is no settings file, from Python and on the command line.

    | field | meaning |
    |---|---|
    | ``micro_batches``, ``micro_batch_size`` | how a step is cut, instead of ``batch``; both or neither. None of the
    three: the smallest batch with which more would gain less than 3% |
    | ``sequence_length`` | tokens in a sequence |
    | ``optimizer`` | its name |
    | ``momentum`` | that of ``sgd`` |
    | ``schedule`` | a family; None: the better one |
    | ``tokens`` | tokens of training in all, ``"100M"``: how long they take, and what share of the drives' life; None:
    that is not said |
    """

    clip_grad_norm: float | None = None
    micro_batches: int | None = None
    micro_batch_size: int | None = None
    sequence_length: int = 2048
    optimizer: OptimizerName = "adamw"
    momentum: float = 0.0
    schedule: StreamedFamily | None = None
    tokens: str | int | float | None = None

    def __post_init__(self) -> None:
        check_streamed(self.schedule)
        check_fields(self, of=PlanSettings)
        super().__post_init__()
        self.check_inputs()
        for key in ("micro_batches", "micro_batch_size", "sequence_length"):
            if (count := getattr(self, key)) is not None and count < 1:
                raise ConfigError(f"{key}={count}: must be a whole number of at least 1")
        if (self.micro_batches is None) != (self.micro_batch_size is None):
            raise ConfigError("micro_batches and micro_batch_size belong together: give both, or batch")
        if self.micro_batches is not None and self.batch is not None:
            raise ConfigError("batch is cut into micro-batches by the planner: give it without micro_batches")
        if self.momentum and self.optimizer != "sgd":
            raise ConfigError(f"momentum has no effect with optimizer={self.optimizer!r}: leave it out")
        self.check_moments(moment_count(self.optimizer, self.momentum))
        if self.tokens is not None:
            parse_count("tokens", self.tokens)

    @property
    def split(self) -> tuple[int, int] | None:
        """(sequences in a micro-batch, micro-batches), if that is asked for."""
        if self.micro_batches is None or self.micro_batch_size is None:
            return None
        return self.micro_batch_size, self.micro_batches


@dataclass(frozen=True, kw_only=True)
class PlanArguments(PlanSettings):
    """The keyword arguments of ``penstock.plan``.

    | field | meaning |
    |---|---|
    | ``machine`` | a profile, its file, or the name of one that ships (``"a100-40g"``); None: what ``penstock doctor``
    has stored for this host and the budget's directories. It computes with as many of its drives as the budget has
    directories |
    | ``budget`` | memory and directories; None: most of the machine's memory, and its drives |
    """

    machine: str | Path | Machine | None = None
    budget: Budget | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
        if self.budget is not None:
            self.budget.check_units()
            self.check_with(self.budget)


def check_streamed(schedule: object) -> None:
    """Raises:
    ConfigError: it is an order of the ranks of a pipeline, which only a settings file has.
    """
    if schedule in IN_TURN:
        raise ConfigError(
            f"schedule={schedule!r} is an order of the ranks of a pipeline, and there is none without a settings file: "
            f"give 'vertical' or 'horizontal', or plan a file: penstock plan FILE --pipeline N --schedule {schedule}"
        )


def check_model(model: object) -> None:
    """Raises ConfigError: it is of a type that means no model."""
    if not isinstance(model, str | Path | Mapping) and not callable(getattr(model, "profile", None)):
        raise ConfigError(
            f"model={model!r:.80}: must be a name, the path of a config.json, a configuration as a mapping or a "
            "ModelShape (penstock.shape.meta.MetaModel makes one of a module)"
        )


def check_drives(disk_free: str | int | float | None, tbw: float | None, budget: Budget | None = None) -> None:
    """Raises ConfigError: what is said of drives cannot be, or there are none in the ``budget`` that it is for."""
    if disk_free is not None:
        check_size("disk_free", disk_free, MEMORY_LEAST)
    if tbw is not None and tbw <= 0:
        raise ConfigError(f"tbw={tbw:g}: must be a number of more than 0")
    for name, value in (("disk_free", disk_free), ("tbw", tbw)):
        if value is not None and budget is not None and not budget.disk_paths:
            raise ConfigError(
                f"{name} has no effect without a disk tier: leave it out, or give a budget with a directory on disk"
            )
