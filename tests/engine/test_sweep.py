"""The table of all types of models that transformers has: whole, without a third case, and a sample of it run again."""

import functools
import random
from pathlib import Path

import pytest
import torch
import transformers

from tests.sweep import document, packages, rounded, trial
from tests.sweep.__main__ import read, version

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # of models that warn of what a tiny configuration asks of them
]

TABLE = read()
TRIED = sorted(name for name, r in TABLE.items() if r.verdict == "equal" and r.type not in packages.NEED_THEM)
SAMPLE = random.Random(11).sample(TRIED, 1)
"""seeded, so that a failure comes again"""


@functools.cache
def jobs() -> dict[str, trial.Job]:
    """By name. They take seconds, which no other process of the tests needs to spend."""
    return {job.name: job for job in trial.jobs()}


def test_every_type_equals_the_plain_loop_or_is_refused_with_a_reason() -> None:
    assert not [r for r in TABLE.values() if r.verdict not in ("equal", "refused", "skipped")]
    assert all(r.reason for r in TABLE.values() if r.verdict != "equal")
    if version() == transformers.__version__:
        assert set(TABLE) == set(jobs())


def test_the_documentation_says_what_the_table_says() -> None:
    text = document.PAGE.read_text()
    assert document.page(text, TABLE.values(), version()) == text, "run python -m tests.sweep --document"


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_the_table_comes_again(name: str, tmp_path: Path) -> None:
    found = trial.run(jobs()[name], tmp_path / "store")
    assert (found.verdict, found.labels, found.given) == ("equal", TABLE[name].labels, TABLE[name].given), found.reason


def test_in_bf16_a_step_is_that_of_what_transformers_loads_in_bf16(tmp_path: Path) -> None:
    """Of a model with saved tables, which are then in bf16."""
    found = rounded.run(jobs()["causal minimax MiniMaxForCausalLM"], tmp_path)
    assert found.verdict == "equal", found.reason


def test_a_model_that_ends_elsewhere_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth of a step in one value of one parameter is enough."""
    compare = trial.compare

    def off(before, after, wanted):  # type: ignore[no-untyped-def]
        name = next(n for n in after if n.endswith("norm.weight"))
        return compare(before, after | {name: after[name] + 1e-2 * trial.ADAMW["lr"] * torch.eye(1)[0]}, wanted)

    monkeypatch.setattr(trial, "compare", off)
    found = trial.run(jobs()["causal llama LlamaForCausalLM"], tmp_path / "store")
    assert found.verdict == "differs"
    assert "norm.weight" in found.reason
