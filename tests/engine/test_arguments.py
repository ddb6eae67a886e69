"""Whatever is given to ``wrap``, a budget or an optimizer is taken, or refused by an error of ours that names it."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import penstock
from penstock.errors import BudgetError, ConfigError, ModelError
from penstock.fabric import PenstockStrategy
from penstock.hf import EngineArguments

OURS = (ConfigError, ModelError, BudgetError)
ANYTHING: list[Any] = [
    *(None, True, -1, 0, 10**400, 1.5, float("nan"), float("inf"), "", "x", "\0", b"x", [], [1], [None], {}, {"a": 1}),
    *((), object(), nn.Linear, lambda: 0, range(3), 1j, torch.ones(2), Path("x\0")),
]
BUDGET = penstock.Budget(device="64MiB", host="64MiB")


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))


def _model() -> nn.Module:
    return _Model()


def _wrap(**more: Any) -> None:
    given: dict[str, Any] = {"model": _model(), "optimizer": penstock.SGD(lr=0.1), "budget": BUDGET, "plan": None}
    penstock.wrap(**(given | {"device": "cpu"} | more)).close()


def _tried(make: Callable[[], Any]) -> str | None:
    """What is said to something; None: it is taken."""
    try:
        make()
    except OURS as error:
        return str(error)[:1000]
    return None


def test_blocks_may_come_from_a_generator() -> None:
    model = _model()
    _wrap(model=model, blocks=(block for block in model.layers.children()))
    assert "blocks is" in str(_tried(lambda: _wrap(blocks=(number for number in range(3)))))


WRAP = [name for name in penstock.wrap.__annotations__ if name != "return"]


@pytest.mark.parametrize("name", WRAP)
def test_whatever_wrap_is_given_is_taken_or_refused_by_name(name: str) -> None:
    for value in ANYTHING:
        said = _tried(lambda value=value: _wrap(**{name: value}))  # type: ignore[misc]
        assert said is None or name in said, f"{name}={value!r}: {said}"


@pytest.mark.parametrize("name", [field.name for field in fields(penstock.Budget)])
def test_whatever_a_budget_is_given_is_taken_or_refused_by_name(name: str) -> None:
    for value in ANYTHING:
        given: dict[str, Any] = {"device": 1, "host": 1, "disk": "x"} | {name: value}
        said = _tried(lambda given=given: penstock.Budget(**given).disk_paths)  # type: ignore[misc]
        assert said is None or name in said, f"{name}={value!r}: {said}"


@pytest.mark.parametrize("spec", [penstock.AdamW, penstock.Adam, penstock.SGD, penstock.Lion])
def test_whatever_an_optimizer_is_given_is_taken_or_refused_by_name(spec: Any) -> None:
    for name in (field.name for field in fields(spec)):
        for value in ANYTHING:
            said = _tried(lambda name=name, value=value: spec(**{name: value}).group_settings)  # type: ignore[misc]
            assert said is None or name in said, f"{name}={value!r}: {said}"


def test_whatever_an_override_is_given_is_taken_or_refused() -> None:
    for name in ("match", "lr", "weight_decay"):
        for value in ANYTHING:
            given: dict[str, Any] = {"match": "x", "lr": 1.0} | {name: value}
            said = _tried(lambda given=given: penstock.Override(**given))  # type: ignore[misc]
            assert said is None or name in said, f"{name}={value!r}: {said}"


def test_numbers_of_numpy_are_numbers() -> None:
    assert penstock.AdamW(lr=np.float32(0.5), betas=(np.float64(0.5), 0)).lr == 0.5
    _wrap(seed=np.int64(3))


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (torch.optim.AdamW, r"penstock.AdamW\(lr=0.25, betas=\(0.9, 0.999\), eps=1e-08, weight_decay=0.01\)"),
        (torch.optim.SGD, r"penstock.SGD\(lr=0.25, momentum=0, weight_decay=0, nesterov=False\)"),
        (torch.optim.Adagrad, r"one of penstock.AdamW\(...\), penstock.Adam"),
    ],
)
def test_an_optimizer_of_torch_is_told_in_the_engines_words(optimizer: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"which would hold all of the state in memory.*{said}"):
        _wrap(optimizer=optimizer(_model().parameters(), lr=0.25))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"optimizer": "adamw"}, r"give penstock.AdamW\(lr=...\)"),
        ({"optimizer": penstock.AdamW}, "is the class AdamW: give its settings too"),
        ({"optimizer": torch.optim.AdamW}, "is the class AdamW: give its settings too"),
        ({"budget": "8GiB"}, r"budget='8GiB' does not say of which memory: give a budget, as penstock.Budget\(device="),
        ({"budget": {"device": "1GiB", "host": 5}}, r"as penstock.Budget\(device='1GiB', host=5\)"),
        ({"model": "/models/my-8b"}, r"penstock.hf.load\('/models/my-8b'\)"),
        ({"model": nn.Linear}, "model is the class Linear"),
    ],
)
def test_what_is_meant_is_said_where_it_is_clear(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _wrap(**given)


def test_the_libraries_sides_say_the_same() -> None:
    wrong: Any = {"device": "1GiB", "host": "1GiB"}
    for take in (EngineArguments, PenstockStrategy):
        with pytest.raises(ConfigError, match=r"give a budget, as penstock.Budget\(device='1GiB', host='1GiB'\)"):
            take(budget=wrong)
