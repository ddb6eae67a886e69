"""What a commit says of a run is looked at, field by field, before anything is made of it."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from penstock.errors import StoreError
from penstock.optim.precision import LossScale
from penstock.state.record import NAMES, check_param_groups, check_progress, check_stored
from penstock.state.stats import StepStats
from tests.models import MODELS

CASE = MODELS["gpt2"]
STATS = StepStats(
    step=3, loss=1.5, grad_norm=0.5, tokens=10, seconds=0.1, lr=1e-3, clipped=False, skipped=False, loss_scale=1.0
)
RUN: dict[str, Any] = {
    "step": 3,
    "updates": 2,
    "seed": 0,
    "missed": {"1": 2},
    "param_groups": [{"lr": 1e-3}],
    "loss_scale": asdict(LossScale.of("fp16")),
    "last": STATS.numbers(),
    "position": {"row": 7},
}
STORED: dict[str, Any] = {"step": 3, "whole": True, "slots": "01"}


def check(record: dict[str, Any]) -> None:
    check_progress(record, "the record", trained=2, seed=0)


def test_what_a_run_writes_is_taken() -> None:
    check(RUN)
    check(RUN | {"last": None, "position": None})
    check(RUN | {"last": replace(STATS, loss=float("inf"), skipped=True).numbers()})
    check_stored(STORED, "the record")


@pytest.mark.parametrize("key", RUN)
def test_a_record_without_a_field_is_refused_by_its_name(key: str) -> None:
    with pytest.raises(StoreError, match=f"the record is not what a run of penstock writes: it lacks '{key}'"):
        check({k: v for k, v in RUN.items() if k != key})


@pytest.mark.parametrize("key", STORED)
def test_so_is_one_that_does_not_say_what_the_store_has(key: str) -> None:
    with pytest.raises(StoreError, match=f"it lacks '{key}'"):
        check_stored({k: v for k, v in STORED.items() if k != key}, "the record")


@pytest.mark.parametrize("key", STATS.numbers())
def test_and_one_whose_last_step_lacks_a_number(key: str) -> None:
    last = {k: v for k, v in STATS.numbers().items() if k != key}
    with pytest.raises(StoreError, match=f"last lacks '{key}'"):
        check(RUN | {"last": last})


def test_settings_of_an_optimizer_are_taken_over_by_the_same_parameters() -> None:
    mine = [{"lr": 1e-3, "adjust_lr_fn": None, NAMES: ["a", "b"]}, {"lr": 1e-2, NAMES: ["c"]}]
    other = {"lr": 1.0, NAMES: ["c"]}
    check_param_groups([{"lr": 1.0, "adjust_lr_fn": "original", NAMES: ("b", "a")}, other], mine, "it")
    for names in (["a", "c"], ["a", "b", "c"]):
        with pytest.raises(StoreError, match=r"'[bc]' was in another of the optimizer's param groups .* the overrides"):
            check_param_groups([{"lr": 1.0, NAMES: [*names]}, other], mine, "it")
    with pytest.raises(StoreError, match="it is not what a run of penstock writes: param_groups: lr=None"):
        check_param_groups([{"lr": None}, other], mine, "it")
