"""Precisions, and the dynamic loss scale that fp16 needs."""

import logging
from dataclasses import dataclass

import torch
from torch import nn

from penstock.config import Precision
from penstock.errors import ConfigError

log = logging.getLogger("penstock")

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def precision_of_weights(model: nn.Module) -> Precision:
    """The precision that a model's weights are in: fp32, or bf16 where some are.

    Raises:
        ConfigError: some are fp16, which does not say whether gradients are to be scaled.
    """
    found = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if torch.float16 in found:
        raise ConfigError("the model is in fp16, whose gradients need a loss scale: ask for fp16 (or bf16) precision")
    precision: Precision = "bf16" if torch.bfloat16 in found else "fp32"
    say_what_is_left(model, precision)
    return precision


def say_what_is_left(model: nn.Module, precision: Precision) -> None:
    """A line in the log where nobody has named the precision, and the model's own is one that there is none of here:
    fp64, or bf16 with a few weights in fp32. Adapters, which peft makes in fp32, are no such weights."""
    found = {p.dtype for p in model.parameters()}
    wide = [name for name, p in model.named_parameters() if p.dtype == torch.float32 and ".lora_" not in name]
    if precision == "bf16" and torch.bfloat16 in found and wide:
        log.warning(
            "%d of the model's parameters are in fp32, such as %s, and the engine has one precision: they train "
            "in bf16, with a master copy in fp32 (convert it first, as by model.float(), if fp32 is meant)",
            len(wide),
            wide[0],
        )
    if torch.float64 in found:
        log.warning(
            "the model is in fp64, which the engine does not compute in: it trains in %s "
            "(convert it first, as by model.float(), if that is meant)",
            precision,
        )


@dataclass(kw_only=True)
class LossScale:
    """A power of two that the loss is multiplied by, so that fp16 gradients neither vanish nor overflow.

    Halved whenever a gradient overflows (that step is skipped); doubled after ``interval`` good steps in a row, as in
    ``torch.amp.GradScaler``. Other precisions keep it at 1.
    """

    value: float = 1.0
    interval: int = 2000
    good: int = 0
    dynamic: bool = False

    @classmethod
    def of(cls, precision: Precision) -> "LossScale":
        return cls(value=2.0**16, dynamic=True) if precision == "fp16" else cls()

    def update(self, *, overflow: bool) -> None:
        if not self.dynamic:
            return
        if overflow:
            self.value, self.good = max(self.value / 2, 2.0**-14), 0
            return
        self.good += 1
        if self.good == self.interval:
            self.value, self.good = min(self.value * 2, 2.0**24), 0
