"""The tape gives the gradients of plain gradient accumulation, whatever the model, the order, and where things live."""

import copy

import pytest
import torch

from tests import models
from tests.accelerator import DEVICE
from tests.models import MODELS
from tests.stacks import assert_same_gradients
from tests.tape_reference import Bench, horizontal, relative_error, vertical

WEIGHTS = [0.2, 0.3, 0.5]


pytestmark = pytest.mark.usefixtures("one_thread")


def group_of(bench: Bench, name: str) -> int:
    return next(g.spec.index for g in bench.groups for s in g.slices if s.name == name)


@pytest.mark.sampled(3, values=False)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_plain_accumulation_and_bits_do_not_depend_on_order_or_place(name: str) -> None:
    """One tape for all of them: what a step leaves behind must not reach the next one, either."""
    case = MODELS[name]
    model = case.model().double()
    plain = copy.deepcopy(model)
    micro_batches = case.micro_batches(3, dtype=torch.float64)
    bench = Bench(case, model, moving=True)
    bench.probe(micro_batches[0])
    wanted_losses, wanted = bench.plain_step(plain, micro_batches, WEIGHTS, step=4)
    losses, gradients = bench.step(micro_batches, WEIGHTS, vertical, step=4)
    torch.testing.assert_close(losses, wanted_losses, rtol=1e-12, atol=0)
    assert relative_error(gradients, wanted) <= 1e-12
    others = [bench.step(micro_batches, WEIGHTS, horizontal, step=4)]
    bench.moving = False
    bench.load_all()
    others += [bench.step(micro_batches, WEIGHTS, order, step=4) for order in (vertical, horizontal)]
    for other_losses, other_gradients in others:
        assert other_losses == losses
        assert_same_gradients(other_gradients, gradients)


@pytest.mark.sampled(3, values=False)
@pytest.mark.parametrize("name", ["llama", "llama_sdpa", "gpt_oss", "bert", "mixtral", "qwen3_moe", "gemma3"])
def test_fp32_bits_of_a_plain_loop(name: str) -> None:
    """Where sums have only one order: a tied weight's two gradients meet once a step here, in a loop once a batch."""
    case = MODELS[name]
    micro_batches = case.micro_batches(3)
    model = case.model()
    plain = copy.deepcopy(model)
    bench = Bench(case, model, moving=True)
    bench.probe(micro_batches[0])
    wanted_losses, wanted = bench.plain_step(plain, micro_batches, WEIGHTS)
    several = [name for name in wanted if sum(group_of(bench, name) in s.gradients for s in bench.stages) > 1]
    for order in (vertical, horizontal):
        losses, gradients = bench.step(micro_batches, WEIGHTS, order)
        assert losses == wanted_losses
        different = [name for name, g in wanted.items() if not torch.equal(gradients[name], g)]
        assert set(different) <= {"bert.embeddings.word_embeddings.weight", "model.embed_tokens.weight"} & set(several)


def test_grouped_experts_are_exact() -> None:
    """The library's default for mixtures of experts, one product over all experts. It has no float64."""
    case = MODELS["mixtral"]
    model = models.mixtral(experts_implementation="grouped_mm").train()
    plain = copy.deepcopy(model)
    micro_batches = case.micro_batches(3)
    bench = Bench(case, model, moving=True)
    bench.probe(micro_batches[0])
    losses, gradients = bench.step(micro_batches, WEIGHTS)
    wanted_losses, wanted = bench.plain_step(plain, micro_batches, WEIGHTS)
    assert losses == wanted_losses
    assert all(torch.equal(gradients[name], g) for name, g in wanted.items())


@pytest.mark.accelerator
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "mixtral", "skips"])
def test_gradients_on_a_gpu_equal_plain_accumulation_there(name: str) -> None:
    case, device = MODELS[name], torch.device(DEVICE)
    model = case.model().double().to(device)
    plain = copy.deepcopy(model)
    micro_batches = [{k: t.to(device) for k, t in mb.items()} for mb in case.micro_batches(3, dtype=torch.float64)]
    bench = Bench(case, model, moving=True)
    bench.probe(micro_batches[0])
    losses, gradients = bench.step(micro_batches, WEIGHTS)
    wanted_losses, wanted = bench.plain_step(plain, micro_batches, WEIGHTS)
    torch.testing.assert_close(losses, wanted_losses, rtol=1e-12, atol=0)
    assert relative_error(gradients, wanted) <= 1e-12
