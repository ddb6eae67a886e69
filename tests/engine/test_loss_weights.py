"""What a micro-batch's loss counts can be given, for losses that know the whole step: then it is used as it is."""

from typing import Any

import pytest
import torch

import penstock
from penstock.engine import batch
from penstock.errors import ModelError
from tests.models import PLAIN
from tests.training import budget, items, state_of, steps_of, wrap

CASE = PLAIN


def test_the_shares_of_labels_given_as_weights_are_the_same_step() -> None:
    (micro_batches,) = steps_of(CASE, 1)
    with wrap(CASE, budget(None), plan=None) as engine:
        counts = [items(engine.model, mb) for mb in micro_batches]
        weights = [count / sum(counts) for count in counts]
        assert sum(weights) == pytest.approx(1.0)
        assert len(set(weights)) > 1
        expected = (engine.evaluate(micro_batches), engine.step(micro_batches).loss, state_of(engine))
    with wrap(CASE, budget(None), plan=None) as engine:
        loss = engine.evaluate(micro_batches, loss_weights=weights)
        found = (loss, engine.step(micro_batches, loss_weights=weights).loss, state_of(engine))
        assert found[:2] == expected[:2]
        assert all(torch.equal(found[2][name], expected[2][name]) for name in expected[2])


def test_weights_scale_loss_and_gradient() -> None:
    (micro_batches,) = steps_of(CASE, 1)
    norms, losses = [], []
    for scale in (1.0, 2.0):
        with wrap(CASE, budget(None), plan=None, clip_grad_norm=None) as engine:
            stats = engine.step(micro_batches, loss_weights=[scale] * len(micro_batches))
        norms.append(stats.grad_norm)
        losses.append(stats.loss)
    assert losses[1] == pytest.approx(2 * losses[0])
    assert norms[1] == pytest.approx(2 * norms[0])


@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0, float("nan")], [1.0] * 4])
def test_weights_that_are_not_one_number_for_each_are_refused(weights: list[float]) -> None:
    (micro_batches,) = steps_of(CASE, 1)
    with wrap(CASE, budget(None), plan=None) as engine:
        for use in (engine.step, engine.evaluate):
            with pytest.raises(
                penstock.ModelError, match=r"loss_weights=.* for 3 micro-batches: give a number for each"
            ):
                use(micro_batches, loss_weights=weights)


@pytest.mark.parametrize(
    "weights",
    [[1.0], [1e300, 1.0], [float("nan"), 1.0], ["1", "2"], [None, 1.0], "12", {0: 1.0, 1: 1.0}, 1.0, [1j, 1.0]],
)
def test_weights_that_are_no_numbers_that_fp32_has_room_for_are_refused(weights: Any) -> None:
    micro_batches = CASE.micro_batches(2)
    given = batch.given_weights(micro_batches, [torch.ones(()), -1])
    assert given == [1.0, -1.0]
    with pytest.raises(ModelError, match=r"loss_weights=.* for 2 micro-batches: give a number for"):
        batch.given_weights(micro_batches, weights)
