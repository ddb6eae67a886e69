"""Settings may be numbers of numpy's, and are Python's own from then on: a commit holds no others."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from penstock.config import Budget, Override
from penstock.config.optimizer import AdamW, Muon, OptimizerSpec
from penstock.engine.arguments import WrapArguments


def optimizer(kind: Any) -> OptimizerSpec:
    own = {"lr": kind(0.25), "betas": (kind(0.5), kind(0.75)), "eps": kind(0.125)}
    return AdamW(**own, overrides=(Override(match="norm", weight_decay=kind(0.5)),))


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16, Fraction])
def test_numbers_of_any_kind_become_pythons_own(kind: Any) -> None:
    assert repr(optimizer(kind)) == repr(optimizer(float))
    assert repr(Muon(ns_steps=np.int8(3), momentum=kind(0.5))) == repr(Muon(ns_steps=3, momentum=0.5))
    plain = {"optimizer": optimizer(float), "budget": Budget(device="1GiB", host="1GiB")}
    whole, share = {"seed": 3, "strands": 2}, {"clip_grad_norm": 0.5, "delay": 0.25}
    given: Any = {key: np.uint8(n) for key, n in whole.items()} | {key: kind(x) for key, x in share.items()}
    assert repr(WrapArguments(**plain, **given)) == repr(WrapArguments(**plain, **whole, **share))  # type: ignore[arg-type]


def test_what_is_no_number_stays_what_it_is() -> None:
    assert AdamW(decay_norms_and_biases=True).decay_norms_and_biases is True
    assert type(AdamW(lr=1).lr) is int
