"""How parameters are changed."""

from dataclasses import dataclass
from typing import Any, Literal

from penstock.errors import ConfigError

OptimizerName = Literal["adamw", "adam", "sgd", "lion"]
Moments = Literal["fp32", "bf16", "int8"]
"""The form that an optimizer's moments are kept in."""


@dataclass(frozen=True, kw_only=True)
class OverrideConfig:
    """Other optimizer settings for the parameters whose name ``match``, a regular expression, finds."""

    match: str
    lr: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, with torch's defaults.

    | field | meaning |
    |---|---|
    | ``name`` | ``adamw``, ``adam``, ``sgd`` or ``lion`` |
    | ``lr`` | learning rate before any schedule |
    | ``betas`` | decay rates of the two moments (adamw, adam, lion); null: 0.9 and 0.999, of lion 0.99 |
    | ``eps`` | added to the denominator (adamw, adam); null: 1e-8 |
    | ``weight_decay`` | weight decay (decoupled in adamw and lion); null: 0.01 in adamw, else 0 |
    | ``decay_norms_and_biases`` | whether weight decay holds for norms and biases too: for parameters of fewer than two
    dimensions, and those called a bias; null: false |
    | ``momentum`` | momentum (sgd); null: 0 |
    | ``nesterov`` | Nesterov's form of momentum (sgd); null: false |
    | ``moments`` | the form that moments are kept in: ``fp32``; ``bf16``; or ``int8``, codes of 8 bits with a scale for
    32 of them. Parameters of fewer than 4,096 elements keep theirs in fp32. Changes the numbers. A run that goes on
    with another form is converted once |
    | ``overrides`` | mappings of ``match``, ``lr``, ``weight_decay``: others for parameters whose name the regular
    expression ``match`` finds |
    """

    name: OptimizerName = "adamw"
    lr: float
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    momentum: float | None = None
    nesterov: bool | None = None
    decay_norms_and_biases: bool | None = None
    moments: Moments = "fp32"
    overrides: tuple[OverrideConfig, ...] = ()

    def given(self) -> dict[str, Any]:
        """The settings that were given, but for the overrides, as keyword arguments of the optimizer's own class."""
        keys = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov")
        values = {key: getattr(self, key) for key in keys} | ({"moments": self.moments} if self.is_compact else {})
        return {key: value for key, value in values.items() if value is not None}

    @property
    def is_compact(self) -> bool:
        """Whether moments take less than fp32."""
        return self.moments != "fp32"

    def __post_init__(self) -> None:
        takes = {"lr", "weight_decay", "moments"} | {
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
        decays = self.weight_decay if self.weight_decay is not None else self.name == "adamw"  # as torch has them
        if self.decay_norms_and_biases is not None and not decays:
            raise ConfigError(
                "optimizer.decay_norms_and_biases has no effect without weight decay: drop it, or give "
                "optimizer.weight_decay"
            )
