"""Advice is worked out for every task that can be asked for: a change that contradicts its settings is none."""

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from penstock.config import TIERS, Budget
from penstock.errors import BudgetError, ConfigError
from penstock.hardware.profiles import shipped_machine
from penstock.planner.advice import advice
from penstock.planner.ask import PlanReport, plan
from penstock.planner.forecast import Forecast
from tests.questions import MACHINE

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "vocab_size": 256,
}
PINS: list[dict[str, Any]] = [{}, *({kind: tier} for kind, tier in product(("weights", "state"), TIERS))]
PINS += [{"gradients": tier} for tier in ("host", "disk")] + [{"activations": tier} for tier in TIERS]


def planned(pins: dict[str, Any], **settings: Any) -> PlanReport:
    budget = Budget(device="16MiB", host="64MiB", disk=[d.path for d in MACHINE.drives], **pins)
    cut = {"micro_batches": 2, "micro_batch_size": 1, "sequence_length": 32}
    return plan(LLAMA, machine=MACHINE, budget=budget, schedule="vertical", **cut, **settings)


@pytest.fixture(scope="module")
def found() -> Forecast:
    return planned({}, delay=0.0).forecast


def test_every_task_gets_its_advice(found: Forecast, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is estimated is no matter here: the tasks that are compared have to be possible."""
    asked: list[object] = []

    def estimate(question: object, family: object) -> float:
        asked.append(question)
        return 1.0

    monkeypatch.setattr("penstock.planner.advice.estimate", estimate)
    monkeypatch.setattr("penstock.planner.advice.SMALL", 0)
    settings = list(product(PINS, (None, 1.0), (None, 0.0, 0.5), (None, True, False)))
    refused = 0
    for pins, clip, delay, speculate in settings:
        try:
            task = replace(
                found.task,
                budget=replace(found.task.budget, **pins),
                clip_grad_norm=clip,
                delay=delay,
                speculate=speculate,
            )
        except ConfigError:
            refused += 1
            continue
        assert advice(task, 1, found.choice)
    assert len(settings) - refused > 100
    assert len(asked) > 500


def test_no_clipping_is_advised_with_the_pin_that_it_leaves_without_effect(
    found: Forecast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How much each gains is no matter here."""
    monkeypatch.setattr("penstock.planner.advice.WORTH_SAYING", 0.0)
    monkeypatch.setattr("penstock.planner.advice.SMALL", 0)
    pinned = replace(found.task, budget=replace(found.task.budget, gradients="disk"), clip_grad_norm=1.0)
    for delay, words in ((None, "no gradient clipping and no budget.gradients, so"), (0.5, "no gradient clipping, so")):
        changes = [one.change for one in advice(replace(pinned, delay=delay), 1, found.choice)]
        assert any(change.startswith(words) for change in changes)


@pytest.mark.parametrize(
    ("forced", "words"),
    [
        ({"speculate": True}, "waiting for the norm instead of speculate: true"),
        ({"speculate": False}, "speculate: steps before the norm is known"),
        ({"delay": 0.5}, "a delay that the planner chooses"),
    ],
)
def test_an_update_mode_that_is_forced_is_held_against_others(
    found: Forecast, monkeypatch: pytest.MonkeyPatch, forced: dict[str, Any], words: str
) -> None:
    """How much each gains is no matter here."""
    monkeypatch.setattr("penstock.planner.advice.WORTH_SAYING", 0.0)
    monkeypatch.setattr("penstock.planner.advice.SMALL", 0)
    budget = replace(found.task.budget, durability="step", state="disk")
    clipped = replace(found.task, budget=budget, clip_grad_norm=1.0, delay=None)
    for settings, said in ((forced, True), ({}, False)):
        changes = [one.change for one in advice(replace(clipped, **settings), 1, found.choice)]
        assert (words in changes) == said


@pytest.mark.parametrize(("most", "advised"), [(2, set()), (3, {"M = 3"}), (4, {"M = 3", "4 micro-batches"})])
def test_no_more_micro_batches_are_advised_than_can_be_planned(
    most: int, advised: set[str], found: Forecast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.planner.advice.estimate", lambda asked, family: 1.0 / asked.request.micro_batches)
    monkeypatch.setattr("penstock.planner.advice.SMALL", 0)
    monkeypatch.setattr("penstock.planner.advice.MOST_MICRO_BATCHES", most)
    changes = [one.change for one in advice(found.task, 2, found.choice)]
    assert {words for words in ("M = 3", "4 micro-batches") if any(c.startswith(words) for c in changes)} == advised


@pytest.mark.usefixtures("one_simulation")
@pytest.mark.parametrize("host", ["0B", "20MiB"])
def test_the_smallest_change_is_found_where_loading_takes_several_times_what_the_program_asks_for(host: str) -> None:
    """Without a disk state starts in host memory, or on a device that is too small for it."""
    model = LLAMA | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 2048}
    gpu = shipped_machine("rtx4090-24g")

    def asked(host: str) -> PlanReport:
        budget = Budget(device="64MiB", host=host)
        cut = {"micro_batches": 2, "micro_batch_size": 1, "sequence_length": 64}
        return plan(model, machine=gpu, budget=budget, schedule="vertical", delay=0.0, **cut)

    with pytest.raises(BudgetError, match=r"The smallest change that makes it fit") as caught:
        asked(host)
    found = re.search(r"more host \((.*?) in all", str(caught.value))
    assert found is not None
    assert asked(found[1]).forecast.memory["train"]["host"] > 0
    with pytest.raises(BudgetError):
        asked(f"{0.97 * float(found[1].split()[0])}MiB")
