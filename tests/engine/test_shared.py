"""Models whose parameters are used by many stages train as plain PyTorch does, and with the same bits everywhere."""

import copy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import penstock
from tests.shared_models import SHARED
from tests.training import (
    Result,
    assert_same,
    budget,
    master_of,
    plain_loop,
    relative,
    run_steps,
    steps_of,
    torch_adamw,
    train,
    wrap,
)

pytestmark = pytest.mark.usefixtures("one_thread")

LEAST = {"device": "4MiB", "host": "3MiB"}
"""Little enough that buffers are few and chunks many."""


def small(disk: Path, **places: Any) -> penstock.Budget:
    return budget(disk, **LEAST | places)


@pytest.mark.parametrize("name", SHARED)
def test_parameters_of_many_stages_train_as_in_plain_torch(name: str, tmp_path: Path) -> None:
    case = SHARED[name]
    steps = steps_of(case, 3)
    model = case.model()
    plain_model = copy.deepcopy(model)
    with wrap(case, small(tmp_path / "store"), model=model, clip_grad_norm=0.5) as engine:
        found = run_steps(engine, steps)
        plain = plain_loop(case, plain_model, engine, steps, torch_adamw, 0.5)
        assert found.losses == pytest.approx(plain.losses, rel=1e-6)
        assert found.norms == pytest.approx(plain.norms, rel=1e-5)
        assert relative(master_of(engine), plain.parameters) <= 1e-6


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "horizontal": ({}, {"schedule": "horizontal"}),
    "delayed": ({"activations": "host"}, {"delay": 0.5}),
    "waiting on disk": ({"gradients": "disk", "activations": "disk"}, {"speculate": False}),
    "on the host": ({"disk": None, "weights": "host", "state": "host", "host": "64MiB"}, {}),
    "where there is room": ({"weights": None, "state": None, "durability": "none", "host": "4MiB"}, {}),
}


def run(name: str, disk: Path, places: dict[str, Any], more: dict[str, Any]) -> Result:
    case = SHARED[name]
    where = budget(**{"disk": disk} | LEAST | places)
    return train(case, where, steps_of(case, 2), clip_grad_norm=0.5, precision="bf16", **more)


@cache
def oracle(name: str) -> Result:
    """A serial run with everything on disk."""
    with TemporaryDirectory() as folder:
        return run(name, Path(folder, "store"), {}, {"overlap": False})


@pytest.mark.sampled(2, values=False)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["tied", "values"])
def test_parameters_of_many_stages_have_the_same_bits_under_any_schedule(
    name: str, setting: str, tmp_path: Path
) -> None:
    assert_same(run(name, tmp_path / "store", *SETTINGS[setting]), oracle(name))
