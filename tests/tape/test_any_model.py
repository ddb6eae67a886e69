"""Models of any kind (``tests.any_model``) on a tape whose weights and activations leave whenever they may, in float64:
gradients are those of a plain loop in any order of stages, or the model is refused.
"""

import random

import pytest
import torch

from penstock.errors import ModelError
from tests.any_model import Spec, any_spec
from tests.conftest import Campaign
from tests.engine.test_any_model import Untrainable, case_of, goes_undetected, is_fair, refuse_what_torch_cannot
from tests.tape_reference import (
    Bench,
    Order,
    horizontal,
    in_two_parts,
    relative_error,
    vertical,
    with_graphs,
)

pytestmark = pytest.mark.usefixtures("one_thread")

ORDERS: tuple[Order, ...] = (vertical, horizontal, in_two_parts, with_graphs)
CASTS = {"double", "double linear", "mixed double", "mixed bf16", "bf16 linear", "in autocast"}
"""What makes numbers of another dtype out of float64's."""

BY_DATA = {"sometimes reached", "by length", "as one says", "experts"}
"""What reads other weights for another micro-batch: an engine probes each shape, and refuses the rest (``let_go``)."""


def train(spec: Spec, order: Order) -> bool:
    """Compare a model's steps; False: a step's micro-batches pass on to each other what this order would mix up."""
    bench, plain = Bench(case_of(spec), spec.build().double(), moving=True, splits=True), spec.build().double()
    steps = spec.data()
    bench.probe(max((mb for step in steps for mb in step), key=lambda mb: mb["tokens"].numel()))
    if bench.learned.carried is not None and order is not horizontal and len(steps[0]) > 1:
        return False  # which an engine refuses
    for number, micro_batches in enumerate(steps, start=1):
        weights = [1 / len(micro_batches)] * len(micro_batches)
        losses, found = bench.step(micro_batches, weights, order, number)
        each, wanted = bench.plain_step(plain, micro_batches, weights, number)
        if not goes_undetected(spec):
            found, wanted = ({n: g.to_dense() for n, g in some.items() if g.numel()} for some in (found, wanted))
            assert found.keys() == wanted.keys()
            if any(g.any() for g in wanted.values()):
                assert relative_error(found, wanted) <= 1e-9
            torch.testing.assert_close(torch.stack(losses), torch.stack(each), rtol=1e-9, atol=1e-9)
    return True


def test_the_gradients_of_a_model_of_any_kind_are_those_of_a_plain_loop_in_any_order(campaign: Campaign) -> None:
    trained = 0
    for seed in range(campaign.cases(10, 20000)):
        drawn = random.Random(seed)
        spec, order = any_spec(drawn), drawn.choice(ORDERS)
        if spec.rounds() or spec.names() & (CASTS | BY_DATA):
            continue
        try:
            refuse_what_torch_cannot(spec, spec.build().double())
            trained += train(spec, order)
        except Untrainable:
            pass
        except ModelError as error:
            if not is_fair(str(error), spec):
                pytest.fail(f"seed {seed}: {spec}: {error}")
        except Exception as error:
            error.add_note(f"seed {seed}, {order.__name__}: {spec}")
            raise
    assert trained, "no model was trained"
