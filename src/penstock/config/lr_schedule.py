"""The learning rate over the run."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.config.checked import check_least
from penstock.errors import ConfigError

DecayShape = Literal["linear", "cosine", "1-sqrt"]

_DECAYS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda progress: progress,
    "cosine": lambda progress: (1 - math.cos(math.pi * progress)) / 2,
    "1-sqrt": math.sqrt,
}
"""By the shape of a decay: its progress from 0 to 1 after a share of its steps, also from 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class LrScheduleConfig:
    """The learning rate over the run, as a factor on ``optimizer.lr``.

    | field | meaning |
    |---|---|
    | ``kind`` | ``constant``, ``linear`` or ``cosine`` decay after the warm-up, or ``wsd``: warm-up, stable, decay |
    | ``warmup_steps`` | steps of linear warm-up, the last of them at the full rate; null: none |
    | ``warmup_share`` | the same as a share of all steps, from 0 to 1 |
    | ``decay_steps`` | steps of decay at the end, with kind ``wsd`` |
    | ``decay_share`` | the same as a share of all steps, from 0 to 1 |
    | ``decay_shape`` | ``linear``, ``cosine`` or ``1-sqrt``, with kind ``wsd``; null: ``1-sqrt`` |
    | ``final`` | the factor at the end of a decay; null: 0 |
    """

    kind: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    warmup_steps: int | None = None
    warmup_share: float | None = None
    decay_steps: int | None = None
    decay_share: float | None = None
    decay_shape: DecayShape | None = None
    final: float | None = None

    def __post_init__(self) -> None:
        check_least(self, "lr_schedule.", warmup_steps=0, decay_steps=0)
        for key in ("warmup_share", "decay_share"):
            if (share := getattr(self, key)) is not None and not 0 <= share <= 1:
                raise ConfigError(f"lr_schedule.{key}={share}: must be from 0 to 1")
        for key in ("warmup", "decay"):
            if getattr(self, f"{key}_steps") is not None and getattr(self, f"{key}_share") is not None:
                raise ConfigError(
                    f"lr_schedule.{key}_share beside lr_schedule.{key}_steps says the same thing twice: keep one"
                )
        self._check_decay()

    def _check_decay(self) -> None:
        if self.kind == "constant" and self.final is not None:
            raise ConfigError(
                "lr_schedule.final has no effect with kind 'constant': drop it or use linear, cosine or wsd"
            )
        check_least(self, "lr_schedule.", final=0)
        decay = [key for key in ("decay_steps", "decay_share", "decay_shape") if getattr(self, key) is not None]
        if self.kind != "wsd" and decay:
            more = "" if self.kind == "constant" else ", which decays from the warm-up to the end"
            raise ConfigError(
                f"lr_schedule.{decay[0]} has no effect with kind {self.kind!r}{more}: drop it or use kind: wsd"
            )
        if self.kind == "wsd" and not (self.decay_steps or self.decay_share):
            raise ConfigError(
                "lr_schedule.kind='wsd' decays at the end, but neither decay_steps nor decay_share says for how long: "
                "give one, for example decay_share: 0.2"
            )

    def phases(self, steps: int) -> tuple[int, int]:
        """(steps of warm-up, steps of decay) of ``steps`` in all. ``linear`` and ``cosine`` decay after the warm-up.

        Raises:
            ConfigError: they leave no step for the decay, or are more steps than there are.
        """
        warmup = self.warmup_steps or round((self.warmup_share or 0.0) * steps)
        key = "warmup_share" if self.warmup_share is not None else "warmup_steps"
        if self.kind == "constant":
            return warmup, 0
        if warmup >= steps:
            raise ConfigError(
                f"lr_schedule.{key}={getattr(self, key)} leaves no step of the {steps} for the {self.kind} decay: "
                "lower it, or use kind: constant"
            )
        if self.kind != "wsd":
            return warmup, steps - warmup
        decay = self.decay_steps or max(round((self.decay_share or 0.0) * steps), 1)
        if warmup + decay > steps:
            shown = "decay_share" if self.decay_share is not None else "decay_steps"
            raise ConfigError(
                f"lr_schedule.{shown}={getattr(self, shown)}: {decay} steps of decay after {warmup} of warm-up are "
                f"more than the {steps} steps of the run: lower one of them"
            )
        return warmup, decay

    def factor(self, step: int, steps: int) -> float:
        """The factor on the learning rate of a step, from 0, of so many: warm-up to 1, then a decay that ends at
        ``final``. ``wsd`` stays at 1 in between; its ``1-sqrt`` is Hägele et al., arXiv 2405.18392.

        Raises: as ``phases``.
        """
        warmup, decay = self.phases(steps)
        if step < warmup:
            return (step + 1) / warmup
        if not decay:
            return 1.0
        down = _DECAYS[self.decay_shape or ("1-sqrt" if self.kind == "wsd" else self.kind)]
        progress = min(max((step - (steps - decay)) / decay, 0.0), 1.0)
        return 1.0 + ((self.final or 0.0) - 1.0) * down(progress)
