"""Settings as frozen, keyword-only dataclasses. The strict YAML file of ``penstock train`` is these same classes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from penstock.errors import ConfigError

Tier = Literal["device", "host", "disk"]
TIERS: tuple[Tier, ...] = ("device", "host", "disk")
Precision = Literal["fp32", "bf16", "fp16"]
GradDtype = Literal["fp32", "bf16"]
Durability = Literal["step", "interval", "none"]

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {f"{_letter}iB": 1024**_power, f"{_letter}B": 1000**_power}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str | int) -> int:
    """Bytes meant by ``"256MiB"``, ``"1.5 GB"`` or a plain number of bytes.

    Raises:
        ConfigError: the text is not a size.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"{text!r} is not a size: write a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB")
    return int(float(match[1]) * _UNITS[match[2]])


def format_size(size: float) -> str:
    """A size for people: ``268435456`` is ``"256 MiB"``."""
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 999.5 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 99.95 else f"{size:.3g} {unit}"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much memory of each tier training may take, and where on disk the rest goes.

    | field | meaning |
    |---|---|
    | ``device`` | bytes (or ``"256MiB"``) of the accelerator's memory; on the CPU, of the memory that computes |
    | ``host`` | bytes of host memory for buffers and whatever state is kept there |
    | ``disk`` | a directory, or several that are striped; None: nothing goes to disk |
    | ``weights``, ``state``, ``gradients``, ``checkpoints`` | pin one kind to a tier; None: the planner chooses |
    | ``slots`` | copies of the state on disk: with 2 a run that is killed goes on from its last step; 1 takes half |
    | ``durability`` | what a kill may cost. ``step``: the step in flight; needs ``disk``, 2 ``slots``, and all state on
    disk. ``interval``: the steps since the last commit, one every ``interval`` steps, of state that may live in memory.
    ``none``: the whole run. None: ``step`` where all state is on disk in 2 slots, else ``none`` |
    | ``interval`` | steps from one commit to the next, with durability ``interval`` |
    """

    device: str | int
    host: str | int
    disk: str | Path | Sequence[str | Path] | None = None
    weights: Tier | None = None
    state: Tier | None = None
    gradients: Literal["host", "disk"] | None = None
    checkpoints: Tier | None = None
    slots: Literal[1, 2] = 2
    durability: Durability | None = None
    interval: int | None = None

    @property
    def device_bytes(self) -> int:
        return parse_size(self.device)

    @property
    def host_bytes(self) -> int:
        return parse_size(self.host)

    @property
    def disk_paths(self) -> tuple[Path, ...]:
        if self.disk is None:
            return ()
        paths = [self.disk] if isinstance(self.disk, str | Path) else self.disk
        return tuple(Path(path) for path in paths)

    def __post_init__(self) -> None:
        parse_size(self.device)
        parse_size(self.host)
        for kind in ("weights", "state", "gradients", "checkpoints"):
            tier = getattr(self, kind)
            tiers = TIERS[1:] if kind == "gradients" else TIERS
            if tier is not None and tier not in tiers:
                raise ConfigError(f"budget.{kind}={tier!r}: must be one of {', '.join(tiers)} or None")
            if tier == "disk" and not self.disk_paths:
                raise ConfigError(f"budget.{kind}='disk' needs budget.disk, a directory")
        if self.slots not in (1, 2):
            raise ConfigError(f"budget.slots={self.slots!r}: must be 1 or 2")
        self._check_durability()
        if self.disk is not None and not self.disk_paths:
            raise ConfigError("budget.disk is an empty list: give a directory or None")

    def with_pins(self, precision: Precision) -> "Budget":
        """The budget with what its durability asks for pinned: for ``step`` all state is on disk.

        Raises:
            ConfigError: in fp32, where the master copy is the weights, these are pinned elsewhere.
        """
        if self.durability != "step":
            return self
        if precision != "fp32":
            return replace(self, state="disk")
        if self.weights not in (None, "disk"):
            raise ConfigError(
                "budget.durability='step' needs all state on disk, and in fp32 the weights are part of it: "
                f"budget.weights={self.weights!r} must be 'disk', or durability 'interval'"
            )
        return replace(self, state="disk", weights="disk")

    def _check_durability(self) -> None:
        asked = f"budget.durability={self.durability!r}"
        if self.durability not in (None, *get_args(Durability)):
            raise ConfigError(f"{asked}: must be one of {', '.join(get_args(Durability))} or None")
        if (self.durability == "interval") != (self.interval is not None):
            raise ConfigError(
                f"{asked} with budget.interval={self.interval!r}: give both, as durability='interval' and "
                "interval=100 (steps), or neither"
            )
        if self.interval is not None and self.interval < 1:
            raise ConfigError(f"budget.interval={self.interval}: must be at least 1 step")
        if self.durability is not None and not self.disk_paths:
            raise ConfigError(f"{asked} needs budget.disk, a directory to keep the state in")
        if self.durability in ("step", "interval") and self.slots == 1:
            raise ConfigError(f"{asked} needs budget.slots=2: a commit must not overwrite the one before")
        if self.durability == "step" and self.state not in (None, "disk"):
            raise ConfigError(f"{asked} needs the state on disk, not budget.state={self.state!r}: use 'interval'")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model that is trained, from random weights.

    | field | meaning |
    |---|---|
    | ``config`` | a Hugging Face configuration: ``model_type`` and whatever that type can be told |
    """

    config: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.config.get("model_type"), str):
            raise ConfigError("model.config has no model_type: name a Hugging Face model type, for example llama")


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


OptimizerName = Literal["adamw", "adam", "sgd", "lion"]


@dataclass(frozen=True, kw_only=True)
class OverrideConfig:
    """Other optimizer settings for the parameters whose name ``match``, a regular expression, finds."""

    match: str
    lr: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer. What is not given keeps the default that torch has for it.

    | field | meaning |
    |---|---|
    | ``name`` | ``adamw``, ``adam``, ``sgd`` or ``lion`` |
    | ``lr`` | learning rate before any schedule |
    | ``betas`` | two decay rates of the moments (adamw, adam, lion) |
    | ``eps`` | added to the denominator (adamw, adam) |
    | ``weight_decay`` | weight decay (decoupled in adamw and lion) |
    | ``momentum`` | momentum (sgd) |
    | ``nesterov`` | Nesterov's form of momentum (sgd) |
    | ``overrides`` | other ``lr`` or ``weight_decay`` for parameters whose name a regular expression ``match`` finds |
    """

    name: OptimizerName = "adamw"
    lr: float
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    momentum: float | None = None
    nesterov: bool | None = None
    overrides: tuple[OverrideConfig, ...] = ()

    def given(self) -> dict[str, Any]:
        """The settings that were given, but for the overrides, as keyword arguments of the optimizer's own class."""
        values = {key: getattr(self, key) for key in ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov")}
        return {key: value for key, value in values.items() if value is not None}

    def __post_init__(self) -> None:
        takes = {"lr", "weight_decay"} | {
            "adamw": {"betas", "eps"},
            "adam": {"betas", "eps"},
            "sgd": {"momentum", "nesterov"},
            "lion": {"betas"},
        }[self.name]
        for key in self.given():
            if key not in takes:
                raise ConfigError(
                    f"optimizer.{key} has no effect with optimizer.name={self.name!r}, which takes "
                    f"{', '.join(sorted(takes))}: drop it or choose another optimizer"
                )


@dataclass(frozen=True, kw_only=True)
class LrScheduleConfig:
    """The learning rate over the run, as a factor on ``optimizer.lr``.

    | field | meaning |
    |---|---|
    | ``kind`` | ``constant``, or ``linear`` or ``cosine`` decay to the end of the run |
    | ``warmup_steps`` | steps of linear warm-up, the last of them at the full rate |
    | ``final`` | the factor at the end of a decay; 0 if not given |
    """

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    final: float | None = None

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ConfigError(f"lr_schedule.warmup_steps={self.warmup_steps}: must not be negative")
        if self.kind == "constant" and self.final is not None:
            raise ConfigError("lr_schedule.final has no effect with kind 'constant': drop it or use linear or cosine")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Loss on held-out text during the run. Without this section nothing is held out.

    | field | meaning |
    |---|---|
    | ``every`` | steps from one evaluation to the next; the last step is always followed by one |
    | ``batches`` | evaluation batches, each of ``micro_batches`` micro-batches |
    | ``share`` | share of the text that is held out |
    """

    every: int
    batches: int = 1
    share: float = 0.02

    def __post_init__(self) -> None:
        for key in ("every", "batches"):
            if getattr(self, key) < 1:
                raise ConfigError(f"evaluate.{key}={getattr(self, key)}: must be at least 1")
        if not 0 < self.share < 1:
            raise ConfigError(f"evaluate.share={self.share}: must be between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run: the YAML file of ``penstock train``.

    | field | meaning |
    |---|---|
    | ``run`` | folder that the run writes its metrics, trace and resolved settings into |
    | ``model``, ``data``, ``optimizer``, ``budget`` | sections |
    | ``lr_schedule``, ``evaluate`` | sections; may be left out |
    | ``steps`` | optimizer steps |
    | ``micro_batches`` | micro-batches that a step accumulates gradients over |
    | ``micro_batch_size`` | sequences in a micro-batch |
    | ``precision`` | ``fp32``, ``bf16`` or ``fp16``; None: bf16 on a GPU, fp32 on the CPU |
    | ``grad_dtype`` | ``fp32``, or ``bf16``: each step's gradient is rounded to it, once, before norm and optimizer |
    | ``schedule`` | ``vertical`` (block by block), ``horizontal`` (micro-batch by micro-batch), or a schedule's file |
    | ``plan`` | ``auto``: for this machine, measured first if it never was; None: by a fixed order of preference |
    | ``delay`` | share of each group's chunks that steps in the next step's forward, 0 to 1; None: the plan chooses |
    | ``speculate`` | whether groups step before the norm is known, and again if it was over; None: the plan chooses |
    | ``clip_grad_norm`` | gradients are scaled down to this norm; None: off |
    | ``device`` | a torch device; None: the accelerator if there is one, else ``cpu`` |
    | ``seed`` | everything random follows from it |
    | ``trace_steps`` | steps that the trace keeps, the first ones; 0: no trace; None: all of them |

    ``{run}`` in ``budget.disk`` stands for the run's folder.
    """

    run: str
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    budget: Budget
    steps: int
    micro_batches: int = 1
    micro_batch_size: int = 1
    lr_schedule: LrScheduleConfig = LrScheduleConfig()
    evaluate: EvaluateConfig | None = None
    precision: Precision | None = None
    grad_dtype: GradDtype = "fp32"
    schedule: Literal["vertical", "horizontal"] | Path = "vertical"
    plan: Literal["auto"] | None = "auto"
    delay: float | None = None
    speculate: bool | None = None
    clip_grad_norm: float | None = None
    device: str | None = None
    seed: int = 0
    trace_steps: int | None = 50

    def __post_init__(self) -> None:
        for key in ("steps", "micro_batches", "micro_batch_size"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key}={getattr(self, key)}: must be at least 1")
        if not self.run:
            raise ConfigError("run is empty: name a folder for the run")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed}: must not be negative")
        if self.clip_grad_norm is not None and self.clip_grad_norm <= 0:
            raise ConfigError(f"clip_grad_norm={self.clip_grad_norm}: must be positive, or null for no clipping")
        self._check_overlap()
        if self.trace_steps is not None and self.trace_steps < 0:
            raise ConfigError(f"trace_steps={self.trace_steps}: must not be negative")
        decays = self.lr_schedule.kind != "constant"
        if decays and self.lr_schedule.warmup_steps >= self.steps:
            raise ConfigError(
                f"lr_schedule.warmup_steps={self.lr_schedule.warmup_steps} leaves no step of the {self.steps} for the "
                f"{self.lr_schedule.kind} decay: lower it, or use kind: constant"
            )

    def _check_overlap(self) -> None:
        """``delay`` and ``speculate`` are refused where they would have no effect."""
        if self.delay is not None and not 0 <= self.delay <= 1:
            raise ConfigError(f"delay={self.delay}: must be from 0 to 1, or null: the plan chooses")
        for key in ("delay", "speculate"):
            if getattr(self, key) is not None and isinstance(self.schedule, Path):
                raise ConfigError(
                    f"{key} has no effect with a schedule of your own ({self.schedule}), which says it itself"
                )
        if self.delay is not None and self.schedule == "horizontal":
            raise ConfigError(
                "delay has no effect with schedule 'horizontal', which delays no step: drop it or use vertical"
            )
        if self.speculate is not None and self.clip_grad_norm is None and self.precision != "fp16":
            raise ConfigError(
                "speculate has no effect without clip_grad_norm or precision: fp16, as no step waits for a norm then: "
                "drop it, or set clip_grad_norm"
            )
