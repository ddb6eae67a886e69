"""Optimizers and their settings: as users write them, and as the section of the YAML file.

    penstock.AdamW(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1,
                   overrides=(Override(match=r"norm|bias", weight_decay=0.0),))

Defaults are those of ``torch.optim``. Each optimizer keeps so many moments per parameter beside the master copy, named
``moment_names`` as torch names them. The section has the same settings under the same names, and is read into the same
classes, which check them.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from penstock.config.checked import check_fields, check_pattern
from penstock.errors import ConfigError

NS_STEPS, MOST_STEPS = 5, 100
"""Newton-Schulz iterations of an update: as many as torch.optim.Muon takes, and the most that it takes."""
OptimizerName = Literal["adamw", "adam", "sgd", "lion", "muon"]
Moments = Literal["fp32", "bf16", "int8"]
"""The form that an optimizer's moments are kept in."""
_LARGEST, _LEAST = 3.4028234663852886e38, 2.0**-149
"""The largest and the smallest positive number of fp32."""
AdjustLr = Literal["original", "match_rms_adamw"]
"""Rules by which Muon's learning rate follows a matrix's shape."""


def check_rates(prefix: str, given: Mapping[str, Any]) -> None:
    """Raises:
    ConfigError: ``lr``, ``weight_decay``, ``eps``, ``momentum`` or ``betas`` that is given is out of its range, by its
        name behind a ``prefix``.
    """
    for key in ("lr", "weight_decay", "eps", "momentum"):
        if (value := given.get(key)) is not None and not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{prefix}{key}={value!r}: must be a finite number of at least 0")
        if value is not None and value > _LARGEST:
            raise ConfigError(f"{prefix}{key}={value!r}: must be at most {_LARGEST:g}, as steps are taken in fp32")
    betas = given.get("betas")
    if betas is not None and (len(betas) != 2 or not all(0 <= beta < 1 for beta in betas)):
        raise ConfigError(f"{prefix}betas={betas!r}: must be two numbers of at least 0 and below 1")


def check_eps(prefix: str, eps: float | None, moments: Moments) -> None:
    """Check Adam's ``eps``, None for its default, beside the form of its moments.

    Raises:
        ConfigError: it is 0 in fp32, and moments are in 8 bits. An element without a gradient, such as padding, is then
            stepped by 0 / 0, and L2 decay takes that NaN to its moments, whose scale others share.
    """
    if eps is not None and eps <= _LEAST / 2 and moments == "int8":
        raise ConfigError(
            f"{prefix}eps={eps!r}: must be above {_LEAST / 2:g} with adam and moments in int8: an element without "
            "a gradient (0 / 0) would make its neighbours NaN"
        )


@dataclass(frozen=True, kw_only=True)
class Override:
    """Other settings for the parameters whose name ``match`` (a regular expression) finds; the first that does wins.

    Raises:
        ConfigError: ``match`` is not a regular expression, nothing is given for what it finds, or what is is out of its
            range.
    """

    match: str
    lr: float | None = None
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, "override")
        check_pattern("override match", self.match)
        if not self.settings:
            raise ConfigError(f"override match={self.match!r} changes nothing: give lr or weight_decay")
        check_rates(f"override match={self.match!r}: ", self.settings)

    @property
    def settings(self) -> Mapping[str, float]:
        given = {"lr": self.lr, "weight_decay": self.weight_decay}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Split:
    """Parameters that are several matrices side by side, each of which Muon makes orthogonal by itself.

    ``match``: a regular expression that finds their names; the first that does counts. ``parts``: into how many equal
    ones each is cut, or their sizes. ``dim``: what is cut, 0 the rows or 1 the columns; sizes are of rows.

    Raises:
        ConfigError: parts are none.
    """

    match: str
    parts: int | tuple[int, ...]
    dim: Literal[0, 1] = 0

    def __post_init__(self) -> None:
        check_fields(self, "split")
        if not isinstance(self.parts, int):
            object.__setattr__(self, "parts", tuple(self.parts))  # a list cannot be hashed
        check_pattern("split match", self.match)
        sizes = (self.parts,) if isinstance(self.parts, int) else self.parts
        if not sizes or min(sizes) < 1 or (isinstance(self.parts, int) and self.parts < 2):
            raise ConfigError(f"split match={self.match!r}: parts={self.parts!r} must be a number from 2 on, or sizes")
        if self.dim and not isinstance(self.parts, int):
            raise ConfigError(f"split match={self.match!r}: columns are cut into equal parts: give their number")


def check_muon(prefix: str, momentum: float | None, ns_steps: int | None, elementwise: str | None) -> None:
    """Raises:
    ConfigError: a setting that is given is out of its range, by its name behind a ``prefix``.
    """
    if momentum is not None and not 0 <= momentum < 1:
        raise ConfigError(f"{prefix}momentum={momentum!r}: must be at least 0 and below 1")
    if ns_steps is not None and not 1 <= ns_steps < MOST_STEPS:
        raise ConfigError(f"{prefix}ns_steps={ns_steps!r}: must be from 1 to {MOST_STEPS - 1}")
    check_pattern(f"{prefix}elementwise", elementwise)


@dataclass(frozen=True, kw_only=True)
class Orthogonal:
    """The rule that makes updates of matrices orthogonal. ``steps``: of the Newton-Schulz iteration. ``elementwise``: a
    regular expression that finds the names of matrices that are AdamW's all the same."""

    steps: int
    splits: tuple[Split, ...] = ()
    elementwise: str | None = None

    def leaves(self, name: str) -> bool:
        """True if a matrix is AdamW's by its name."""
        return self.elementwise is not None and re.search(self.elementwise, name) is not None

    def split_of(self, name: str) -> Split | None:
        """The split of a parameter by its name: the first whose pattern is found in it; None: it stays whole."""
        return next((split for split in self.splits if re.search(split.match, name)), None)


@dataclass(frozen=True, kw_only=True)
class MomentsConfig:
    """The form of an optimizer's moments, whoever is asked for it.

    | field | meaning |
    |---|---|
    | ``moments`` | the form that moments are kept in: ``fp32``; ``bf16``; or ``int8``, codes of 8 bits with a scale for
    32 of them. Parameters of fewer than 4,096 elements keep theirs in fp32. Changes the numbers. A run that goes on
    with another form is converted once |
    """

    moments: Moments = "fp32"

    @property
    def is_compact(self) -> bool:
        """True if moments take less than fp32."""
        return self.moments != "fp32"

    def check_moments(self, kept: int) -> None:
        """Check the form against the number of moments that are ``kept``.

        Raises:
            ConfigError: there are none to have it.
        """
        if self.is_compact and not kept:
            raise ConfigError("moments has no effect without momentum: give it, or drop moments")


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
        raise NotImplementedError

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

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2

    @property
    def moment_names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")


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
            raise ConfigError("nesterov has no effect without momentum: give it, or drop nesterov")

    @property
    def moment_names(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()


@dataclass(frozen=True, kw_only=True)
class Lion(OptimizerSpec):
    """The sign of an interpolated momentum (Chen et al., arXiv 2302.06675); a third less state than AdamW."""

    group_keys = ("lr", "betas", "weight_decay")

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    @property
    def moment_names(self) -> tuple[str, ...]:
        return ("exp_avg",)


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


_SPECS: Mapping[OptimizerName, type[OptimizerSpec]] = {
    "adamw": AdamW,
    "adam": Adam,
    "sgd": SGD,
    "lion": Lion,
    "muon": Muon,
}
_ASIDE = {"name", "adamw", "decay_norms_and_biases", "overrides"}
"""Settings of the section that an optimizer does not have, or that it is given in a way of their own."""


def moment_count(optimizer: OptimizerName, momentum: float) -> int:
    """The number of an optimizer's moments beside the master copy; Muon's are of what goes element by element."""
    own: dict[str, Any] = {"momentum": momentum} if optimizer == "sgd" else {}
    return _SPECS[optimizer](lr=0.0, weight_decay=0.0, **own).moment_count


def _given(section: "AdamWConfig | OptimizerConfig") -> dict[str, Any]:
    """The settings that were given, as keyword arguments of the optimizer's own class."""
    own = (f for f in fields(section) if f.name not in _ASIDE)
    return {f.name: value for f in own if (value := getattr(section, f.name)) != f.default}


@contextmanager
def _within(section: str) -> Iterator[None]:
    """Inside, an error names the setting with its section."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{section}.{error}") from None


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """AdamW, for the parameters that Muon leaves.

    | field | meaning |
    |---|---|
    | ``lr`` | learning rate before any schedule |
    | ``betas`` | decay rates of the two moments; null: 0.9 and 0.999 |
    | ``eps`` | added to the denominator; null: 1e-8 |
    | ``weight_decay`` | decoupled weight decay; null: 0.01 |
    | ``decay_norms_and_biases`` | as in ``optimizer`` |
    """

    lr: float
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    decay_norms_and_biases: bool | None = None

    @property
    def spec(self) -> AdamW:
        """As ``OptimizerConfig.spec``."""
        return AdamW(**_given(self), decay_norms_and_biases=bool(self.decay_norms_and_biases))

    def __post_init__(self) -> None:
        with _within("optimizer.adamw"):
            self.spec  # noqa: B018 - its class checks them
        if self.decay_norms_and_biases is not None and self.weight_decay == 0:
            raise ConfigError("optimizer.adamw.decay_norms_and_biases has no effect without weight decay: drop it")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(MomentsConfig):
    """The optimizer, with torch's defaults.

    | field | meaning |
    |---|---|
    | ``name`` | ``adamw``, ``adam``, ``sgd``, ``lion`` or ``muon`` |
    | ``lr`` | learning rate before any schedule |
    | ``betas`` | decay rates of the two moments (adamw, adam, lion); null: 0.9 and 0.999, of lion 0.99 |
    | ``eps`` | added to the denominator (adamw, adam); null: 1e-8 |
    | ``weight_decay`` | weight decay (decoupled in adamw, lion and muon); null: 0.01 in adamw, 0.1 in muon,
    else 0 |
    | ``decay_norms_and_biases`` | whether weight decay holds for norms and biases too: for parameters of fewer than two
    dimensions, and those called a bias; null: false. With muon it is ``adamw``'s |
    | ``momentum`` | momentum (sgd, muon); null: 0, of muon 0.95 |
    | ``nesterov`` | Nesterov's form of momentum (sgd, muon); null: false, of muon true |
    | ``ns_steps`` | steps of the iteration that makes updates orthogonal (muon); null: 5 |
    | ``adjust_lr_fn`` | how the learning rate follows a matrix's shape (muon): ``original``, or ``match_rms_adamw``,
    with which rates tuned for AdamW hold; null: ``original`` |
    | ``adamw`` | a mapping of ``lr``, ``betas``, ``eps``, ``weight_decay``, ``decay_norms_and_biases``: AdamW for what
    muon leaves, which are all parameters but the matrices of blocks |
    | ``elementwise`` | a regular expression: matrices of blocks whose names it finds are ``adamw``'s, too (muon), such
    as convolutions or routers; norms always are |
    | ``splits`` | mappings of ``match``, ``parts``, ``dim``: parameters that are several matrices side by side (muon),
    such as fused projections or heads: the number of equal parts, or their sizes; ``dim`` 0 cuts rows, 1 columns |
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
    ns_steps: int | None = None
    adjust_lr_fn: AdjustLr | None = None
    adamw: AdamWConfig | None = None
    elementwise: str | None = None
    splits: tuple[Split, ...] = ()
    decay_norms_and_biases: bool | None = None
    overrides: tuple[Override, ...] = ()

    @property
    def spec(self) -> OptimizerSpec:
        """The optimizer: what the settings leave out keeps its default, but for the weight decay of norms and biases,
        which is off unless it is asked for."""
        if self.adamw is not None:
            return Muon(**_given(self), overrides=self.overrides, adamw=self.adamw.spec)
        decay = bool(self.decay_norms_and_biases)
        return _SPECS[self.name](**_given(self), overrides=self.overrides, decay_norms_and_biases=decay)

    def __post_init__(self) -> None:
        takes = {f.name for f in fields(_SPECS[self.name])} - _ASIDE
        for key in _given(self):
            if key not in takes:
                raise ConfigError(
                    f"optimizer.{key} has no effect with optimizer.name={self.name!r}, which takes "
                    f"{', '.join(sorted(takes))}: drop it or choose another optimizer"
                )
        if (self.adamw is not None) != (self.name == "muon"):
            raise ConfigError(
                "optimizer.adamw is missing: with muon, other parameters than the matrices of blocks are AdamW's. Give "
                "optimizer.adamw.lr"
                if self.adamw is None
                else f"optimizer.adamw has no effect with optimizer.name={self.name!r}: drop it"
            )
        if self.name == "muon" and self.decay_norms_and_biases is not None:
            raise ConfigError(
                "optimizer.decay_norms_and_biases: with muon, give optimizer.adamw.decay_norms_and_biases"
            )
        with _within("optimizer"):
            decays = self.spec.weight_decay
        if self.decay_norms_and_biases is not None and not decays:
            raise ConfigError(
                "optimizer.decay_norms_and_biases has no effect without weight decay: drop it, or give "
                "optimizer.weight_decay"
            )
