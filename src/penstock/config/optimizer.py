"""How parameters are changed: the optimizer and its learning rate over the run."""

from dataclasses import dataclass
from typing import Any, Literal

from penstock.errors import ConfigError

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
