"""A training run: the YAML file of ``penstock train``."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from penstock.config.batch import BatchConfig
from penstock.config.checked import check_least
from penstock.config.data import DataConfig
from penstock.config.engine import RunConfig
from penstock.config.layout import LayoutConfig
from penstock.config.lora import LoraConfig
from penstock.config.lr_schedule import LrScheduleConfig
from penstock.config.model import ModelConfig
from penstock.config.optimizer import OptimizerConfig
from penstock.config.step import Family, check_in_turn, check_pipeline, check_recompute
from penstock.errors import ConfigError

TrackerName = Literal["tensorboard", "wandb", "mlflow"]
"""Trackers that a run's numbers can go to, besides its own files."""

_MOST_EPOCHS = 1 << 20
"""More than anybody trains, and few enough that the steps they come to can be counted, and read back when a run goes
on."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Loss on the held-out documents (``data.validation``) during the run.

    | field | meaning |
    |---|---|
    | ``every`` | steps from one evaluation to the next; the last step is always followed by one |
    | ``batches`` | evaluation batches, each as large as a step's, of the first held-out documents; None: all of them |
    """

    every: int
    batches: int | None = None

    def __post_init__(self) -> None:
        check_least(self, "evaluate.", every=1, batches=1)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig, LayoutConfig):
    """One training run: the YAML file of ``penstock train``.

    | field | meaning |
    |---|---|
    | ``run`` | folder that the run writes its metrics, trace and resolved settings into |
    | ``model``, ``data``, ``optimizer``, ``batch`` | sections, as is ``budget`` |
    | ``lr_schedule``, ``evaluate`` | sections; may be left out |
    | ``steps`` | optimizer steps; either these or ``epochs`` |
    | ``epochs`` | times through the training data instead, 0.5 or 3, in whole steps |
    | ``micro_batch_size`` | sequences in a micro-batch; null: the plan chooses, once for the whole run |
    | ``lora`` | section: train low-rank adapters instead of the model; may be left out |
    | ``loss_tile`` | tokens whose logits are in memory at a time, in the loss and its gradient; null: all |
    | ``mlp_tile`` | tokens of a micro-batch that go through a block's feed-forward part at a time, and through norms,
    which are then computed once more in the backward: memory for longer sequences; null: all |
    | ``attention_heads`` | query heads of a block's attention that are computed at a time, and then once more in the
    backward: memory for longer sequences; null: all |
    | ``deterministic`` | whether torch uses only kernels that compute the same bits in every run: on a GPU some of them
    are slower. An operation that has no such kernel is an error |
    | ``plan`` | ``auto``: for this machine, measured first if it never was; null: by a fixed order of preference |
    | ``drive_tbw`` | terabytes (1e12 bytes) that each drive of ``budget.disk`` may be written in its life, to tell how
    long it lasts; null: as the machine's profile says, else 0.3 of its size a day over five years |
    | ``report_to`` | trackers that get the metrics, too: ``tensorboard``, ``wandb``, ``mlflow``, or a list of them |
    | ``trace_steps`` | number of first steps that the trace keeps; 0: no trace; null: all of them |

    ``{run}`` at the beginning of ``budget.disk`` stands for the run's folder, further on for its name: with
    ``/nvme/{run}`` each run has a directory of its own on the drive.
    """

    run: str
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    batch: BatchConfig
    steps: int | None = None
    epochs: float | None = None
    micro_batch_size: int | None = None
    lr_schedule: LrScheduleConfig = field(default_factory=LrScheduleConfig)
    evaluate: EvaluateConfig | None = None
    lora: LoraConfig | None = None
    loss_tile: int | None = 1024
    mlp_tile: int | None = None
    attention_heads: int | None = None
    deterministic: bool = False
    schedule: Family | Path = "vertical"
    plan: Literal["auto"] | None = "auto"
    device: str | None = None
    drive_tbw: float | None = None
    report_to: TrackerName | tuple[TrackerName, ...] = ()
    trace_steps: int | None = 50

    @property
    def trackers(self) -> tuple[TrackerName, ...]:
        """The trackers that ``report_to`` names."""
        return (self.report_to,) if isinstance(self.report_to, str) else self.report_to

    @property
    def sequences_per_step(self) -> int:
        """The global batch."""
        return self.batch.sequences_of(self.data.sequence_length)

    @property
    def split(self) -> tuple[int, int]:
        """(sequences in a micro-batch, micro-batches in a step), of a run whose micro-batches have a size."""
        assert self.micro_batch_size is not None, "a run has settled on a size before it begins"
        return self.micro_batch_size, self.sequences_per_step // self.micro_batch_size

    @property
    def step_count(self) -> int:
        """Steps of the whole run, of one that knows how long an epoch is."""
        assert self.steps is not None, "a run has turned epochs into steps before it begins"
        return self.steps

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_length()
        self._check_batch()
        self.check_layout()
        if self.pipeline > 1:
            self._check_pipeline()
        else:
            check_in_turn(self.schedule)
        check_recompute(self.recompute, self.schedule, self.compile, self.cp)
        if not self.run:
            raise ConfigError("run is empty: name a folder for the run")
        if self.lora is not None and self.model.init:
            raise ConfigError(
                "lora has no use with model.init: true, whose random weights it would freeze: give model.path, or drop "
                "lora"
            )
        if self.loss_tile is not None and self.loss_tile < 1:
            raise ConfigError(f"loss_tile={self.loss_tile}: must be at least 1 token, or null for whole logits")
        self._check_pieces()
        if self.drive_tbw is not None and not self.budget.disk_paths:
            raise ConfigError("drive_tbw has no effect without budget.disk, as nothing is written: drop it")
        if self.drive_tbw is not None and self.drive_tbw <= 0:
            raise ConfigError(f"drive_tbw={self.drive_tbw}: must be more than 0")
        self._check_evaluation()
        if len(set(self.trackers)) < len(self.trackers):
            raise ConfigError(f"report_to={list(self.trackers)!r} names one twice: keep one")
        check_least(self, trace_steps=0)
        if self.steps is not None:
            self.lr_schedule.phases(self.steps)

    def _check_pipeline(self) -> None:
        asked = f"pipeline={self.pipeline}"
        if isinstance(self.schedule, Path):
            raise ConfigError(
                f"{asked} with a schedule of your own ({self.schedule}), which is one rank's: leave one out"
            )
        # How many ranks have one place is known when they have started (``cli.split.check_shared``).
        check_pipeline(self, self.schedule, self.replan, asked, 2 if self.stage else 1)

    def _check_length(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            if self.steps is None:
                raise ConfigError("neither steps nor epochs is given: give one, for the length of the run")
            raise ConfigError(
                "steps and epochs are both given: give one, for the length of the run (as flags: --steps N --epochs "
                "null, or --epochs N --steps null)"
            )
        check_least(self, steps=1)
        if self.epochs is not None and self.epochs <= 0:
            raise ConfigError(f"epochs={self.epochs}: must be more than 0")
        if self.epochs is not None and self.epochs > _MOST_EPOCHS:
            raise ConfigError(f"epochs={self.epochs}: must be at most {_MOST_EPOCHS:,}")

    def _check_pieces(self) -> None:
        """Refuse pieces of nothing, and pieces of what is compiled as a whole."""
        for key, unit, whole in (("mlp_tile", "token", "parts"), ("attention_heads", "head", "attention")):
            if (count := getattr(self, key)) is not None and count < 1:
                raise ConfigError(f"{key}={count}: must be at least 1 {unit}, or null for whole {whole}")
            if count is not None and self.compile:
                raise ConfigError(f"{key} and compile: what is compiled computes a block as a whole. Leave one out")

    def _check_batch(self) -> None:
        """The batch is a whole number of sequences, and of micro-batches if their size is given."""
        sequences = self.sequences_per_step
        size = self.micro_batch_size
        if size is None:
            return
        check_least(self, micro_batch_size=1)
        if sequences % size:
            divisors = [n for n in range(1, min(sequences, 4 * size) + 1) if sequences % n == 0]
            near = sorted(sorted(divisors, key=lambda n: abs(n - size))[:3])
            raise ConfigError(
                f"micro_batch_size={size}: the {sequences} sequences of a step (batch) are not a whole number of such "
                f"micro-batches: give one of {', '.join(map(str, near))}, or null: the plan chooses"
            )

    def _check_evaluation(self) -> None:
        """The times of evaluations and their data are given together."""
        if self.evaluate is not None and self.data.validation is None:
            raise ConfigError(
                "evaluate needs data.validation, what to evaluate on: {share: 0.02} of the documents, or sources"
            )
        if self.evaluate is None and self.data.validation is not None and self.data.validation.sources is not None:
            raise ConfigError(
                "data.validation.sources has no effect without evaluate: say when (evaluate: {every: 100})"
            )
