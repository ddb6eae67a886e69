"""Optimizers and their settings, as users write them and as the YAML file has them.

    penstock.AdamW(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1,
                   overrides=(Override(match=r"norm|bias", weight_decay=0.0),))

Defaults are those of ``torch.optim``. Each optimizer keeps so many moments per parameter beside the master copy, named
``moment_names`` as torch names them.
"""

from dataclasses import dataclass, field, fields
from typing import ClassVar

from penstock.config.checked import check_fields
from penstock.config.optimizer import (
    NS_STEPS,
    AdjustLr,
    MomentsConfig,
    Orthogonal,
    Override,
    Split,
    check_eps,
    check_muon,
    check_rates,
)
from penstock.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec(MomentsConfig):
    """The settings of all optimizers. Not used itself.

    ``decay_norms_and_biases``: False takes ``weight_decay`` from parameters of fewer than two dimensions and from those
    called a bias. It does not touch the ``weight_decay`` of an override.

    Raises:
        ConfigError: a setting is out of its range.
    """

    group_keys: ClassVar[tuple[str, ...]]
    """the settings that torch has in a param group"""
    _moment_names: ClassVar[tuple[str, ...]]
    """``moment_names``, where they follow from no setting"""

    lr: float
    weight_decay: float
    overrides: tuple[Override, ...] = ()
    decay_norms_and_biases: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        self.check_moments(self.moment_count)
        check_rates("", {f.name: getattr(self, f.name) for f in fields(self)})

    @property
    def moment_names(self) -> tuple[str, ...]:
        """Names, as torch has them, of the moments that each parameter has."""
        return self._moment_names

    @property
    def moment_count(self) -> int:
        """The number of moments that each parameter has beside its master copy."""
        return len(self.moment_names)

    @property
    def whole(self) -> Orthogonal | None:
        """The rule that makes updates of blocks' matrices orthogonal; None: every step goes element by element."""
        return None

    @property
    def group_settings(self) -> dict[str, object]:
        """The keys and values of a torch param group, named as in ``torch.optim``."""
        return {key: getattr(self, key) for key in self.group_keys}


@dataclass(frozen=True, kw_only=True)
class AdamW(OptimizerSpec):
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101)."""

    group_keys = ("lr", "betas", "eps", "weight_decay")
    _moment_names = ("exp_avg", "exp_avg_sq")

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2


@dataclass(frozen=True, kw_only=True)
class Adam(AdamW):
    """Adam with weight decay as an L2 term in the gradient (Kingma and Ba, arXiv 1412.6980)."""

    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_eps("", self.eps, self.moments)


@dataclass(frozen=True, kw_only=True)
class SGD(OptimizerSpec):
    """Stochastic gradient descent, with momentum (no dampening) when ``momentum`` is above 0."""

    group_keys = ("lr", "momentum", "weight_decay", "nesterov")

    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and self.momentum == 0:
            raise ConfigError("nesterov=True has no effect without momentum: give momentum > 0")

    @property
    def moment_names(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()


@dataclass(frozen=True, kw_only=True)
class Lion(OptimizerSpec):
    """The sign of an interpolated momentum (Chen et al., arXiv 2302.06675); a third less state than AdamW."""

    group_keys = ("lr", "betas", "weight_decay")
    _moment_names = ("exp_avg",)

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Muon(OptimizerSpec):
    """Momentum whose update is made orthogonal, for the matrices of blocks, and AdamW for all other parameters.

    After Jordan et al. (kellerjordan.github.io/posts/muon), with the arithmetic and the defaults of
    ``torch.optim.Muon``. A matrix is a trained parameter of two dimensions, of three a stack of them (experts), that
    one block alone has, that is not called a bias, and that no module called a norm has. What it does not take are
    embeddings, head, norms and biases, and the matrices whose names ``elementwise``, a regular expression, finds.

    ``ns_steps``: of the Newton-Schulz iteration. ``adjust_lr_fn``: how the learning rate follows a matrix's shape, as
    in torch; with ``match_rms_adamw`` (arXiv 2502.16982) rates that were tuned for AdamW hold. ``adamw``: for the
    others; ``moments`` and ``overrides`` are given here, for all. ``splits``: parameters that are several matrices
    side by side.

    Raises:
        ConfigError: a setting is out of its range, or given in the wrong place.
    """

    group_keys = ("lr", "momentum", "weight_decay", "nesterov", "ns_steps", "adjust_lr_fn")

    lr: float = 1e-3
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = NS_STEPS
    adjust_lr_fn: AdjustLr | None = "original"
    weight_decay: float = 0.1
    adamw: AdamW = field(default_factory=AdamW)
    elementwise: str | None = None
    splits: tuple[Split, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "splits", tuple(self.splits))  # a list cannot be hashed
        check_muon("", self.momentum, self.ns_steps, self.elementwise)
        for key, value, where in (
            ("adamw.moments", self.adamw.is_compact, "moments"),
            ("adamw.overrides", bool(self.adamw.overrides), "overrides"),
            ("decay_norms_and_biases", not self.decay_norms_and_biases, "adamw.decay_norms_and_biases"),
        ):
            if value:
                raise ConfigError(f"Muon({key}=...) has no effect: give {where}")
        if type(self.adamw) is not AdamW:
            raise ConfigError(f"adamw={self.adamw!r}: must be an AdamW")

    @property
    def moment_names(self) -> tuple[str, ...]:
        """Names of the moments that AdamW keeps. A matrix has one, called ``momentum_buffer``."""
        return self.adamw.moment_names

    @property
    def whole(self) -> Orthogonal:
        return Orthogonal(steps=self.ns_steps, splits=self.splits, elementwise=self.elementwise)
