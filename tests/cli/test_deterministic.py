"""``deterministic: true``: kernels of torch that compute the same bits in every run, or an error that says so."""

import os
from pathlib import Path

import pytest
import torch
import torch.utils.deterministic

from penstock.cli import main, train
from penstock.cli.deterministic import deterministic_kernels
from penstock.cli.loop import run_steps
from penstock.errors import ConfigError

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")  # so that what a test sets is undone
    monkeypatch.delenv(VARIABLE)


def switches() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.usefixtures("one_thread")
def test_a_run_computes_with_such_kernels_from_its_first_step_and_what_comes_after_it_does_not(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[tuple[bool, bool]]()

    def looking(*arguments: object) -> int:
        seen.append(switches())
        return run_steps(*arguments)  # type: ignore[arg-type] # as it is called

    monkeypatch.setattr(train, "run_steps", looking)
    before = switches()
    for word in ("true", "false"):
        assert main(["train", str(config), "--steps", "1", "--deterministic", word, "--overwrite"]) == 0
    assert seen == [(True, False), before]
    assert switches() == before
    assert VARIABLE not in os.environ


def test_an_operation_without_such_a_kernel_is_named() -> None:
    before = switches()
    with pytest.raises(ConfigError, match="computes put_, of which torch has no kernel"), deterministic_kernels(True):
        torch.zeros(3).put_(torch.tensor([1]), torch.ones(1))
    assert switches() == before
    with deterministic_kernels(False):
        torch.zeros(3).put_(torch.tensor([1]), torch.ones(1))


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="a model's own"), deterministic_kernels(True):
        raise RuntimeError("a model's own")


def test_the_environment_may_not_say_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, ":0:0")
    with (
        pytest.raises(ConfigError, match=rf"{VARIABLE}=:0:0 in the environment.*unset it"),
        deterministic_kernels(True),
    ):
        pass
    monkeypatch.setenv(VARIABLE, ":16:8")
    with deterministic_kernels(True):
        assert torch.are_deterministic_algorithms_enabled()
