"""A recomputation without a block's last product gives the gradients of one with it, to the bit; and only where nothing
reads what the product gives it is left out."""

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from penstock.tape.early_stop import LastProduct, LeftOut
from tests.models import MODELS, Case
from tests.stacks import WEIGHTS, WIDTH, Layer, assert_same_gradients, stack, unequal
from tests.tape.test_split import Products
from tests.tape_reference import Bench, Gradients, Order, in_two_parts, vertical

pytestmark = pytest.mark.usefixtures("one_thread")

Step = Callable[["Tailed", torch.Tensor, torch.Tensor], torch.Tensor]
"""What is done with the result of a block's last product, given the block's input besides."""


class Tailed(Layer):
    """A block of two products; ``tail`` is what comes behind the last one."""

    tail: tuple[Step, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.last, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(torch.tanh(self.linear(x)))
        for step in self.tail:
            y = step(self, x, y)
        return y


def _kept(block: Tailed, _: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    block.output = y.detach()  # type: ignore[assignment]
    return y


def _noted(block: Tailed, _: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    block.seen.append(float(y.detach().norm()))
    return y


def _gated(_: Tailed, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y if bool(y.detach().sum() > 1e3) else y + x


HANDING_ON: dict[str, Step] = {
    "a residual is added": lambda _, x, y: x + y,
    "it is added to a residual": lambda _, x, y: y + x,
    "something is taken off": lambda _, x, y: x - y,
    "in place": lambda _, x, y: y.clone().add_(x),
    "another shape": lambda _, x, y: y.reshape(-1, WIDTH).view(x.shape),
    "other strides": lambda _, x, y: y.transpose(0, 1).contiguous().transpose(0, 1),
    "one dimension more": lambda _, x, y: y.unsqueeze(0).squeeze(0),
    "a copy": lambda _, x, y: y.clone(),
    "a part": lambda _, x, y: y[:, :] + y[0],
    "another dtype": lambda _, x, y: y.to(torch.float32).to(y.dtype),
}
READING: dict[str, Step] = {
    "a function of it": lambda _, x, y: torch.sin(y),  # which saves nothing that another step may write to
    "a norm": lambda b, x, y: b.norm(y),
    "a weight": lambda b, x, y: y * b.scale,
    "a product": lambda b, x, y: b.linear(y),
    "the same product once more": lambda b, x, y: b.last(y),
    "a number without a gradient": lambda _, x, y: x + y.detach().tanh() + y,
    "the host": _gated,
    "a hook of its own": _noted,
    "somebody later": _kept,
    "dropout": lambda _, x, y: functional.dropout(y, 0.3),
    "something else in place": lambda _, x, y: y.clone().mul_(0.5),
}


def tailed(*tail: Step) -> Case:
    return stack(type("Tail", (Tailed,), {"tail": tail}))


def found(bench: Bench) -> list[LastProduct]:
    """What can be left out, of each block of which something can."""
    return [last for facts in bench.tape.facts if (last := facts.last) is not None]


def both_ways(bench: Bench, case: Case, order: Order = vertical) -> tuple[int, Gradients]:
    """How many products fewer a step has than with all of them, and its gradients, which are the same."""
    micro_batches = case.micro_batches(3) if case in MODELS.values() else unequal(case)
    counts, steps = [], []
    for needed in (False, True):
        for last in found(bench):
            last.needed = needed
        with Products() as products:
            steps.append(bench.step(micro_batches, WEIGHTS, order))
        counts.append(products.count)
    assert steps[0][0] == steps[1][0]
    assert_same_gradients(steps[0][1], steps[1][1])
    return counts[1] - counts[0], steps[0][1]


def probed(case: Case, **given: Any) -> Bench:
    bench = Bench(case, case.model(), moving=True, **given)
    bench.probe(case.micro_batches(1)[0])
    return bench


@pytest.mark.parametrize("steps", HANDING_ON.values(), ids=HANDING_ON)
def test_what_is_handed_on_is_not_computed_again(steps: Step) -> None:
    bench = probed(case := tailed(steps))
    assert len(found(bench)) == 3
    assert both_ways(bench, case)[0] == 3 * 3


@pytest.mark.parametrize("steps", READING.values(), ids=READING)
def test_what_is_read_is_computed_again(steps: Step) -> None:
    bench = probed(case := tailed(steps, HANDING_ON["a residual is added"]))
    assert not found(bench)
    assert both_ways(bench, case)[0] == 0


class Told(Tailed):
    told = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.told)


def test_a_block_that_is_told_something_by_its_model_is_not_computed_to_its_end() -> None:
    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            layer.told = 1 + float(x.detach().mean())
            x = layer(x)
        return x

    bench = probed(case := stack(Told, run))
    assert len(found(bench)) == 3
    assert both_ways(bench, case)[0] == 3 * 3


@given(st.data())
@settings(max_examples=12)
def test_whatever_comes_behind_a_product_has_the_same_gradients(data: st.DataObject) -> None:
    steps = data.draw(st.lists(st.sampled_from([*HANDING_ON.values(), *READING.values()]), min_size=1, max_size=4))
    bench = probed(case := tailed(*steps))
    fewer, _ = both_ways(bench, case, data.draw(st.sampled_from([vertical, in_two_parts])))
    assert bool(fewer) == (not set(steps) & set(READING.values()))


@pytest.mark.sampled(2, values=False)
@pytest.mark.parametrize("name", MODELS)
def test_each_model_has_the_same_gradients(name: str) -> None:
    both_ways(probed(case := MODELS[name]), case)


def test_a_llama_computes_its_way_out_of_the_mlp_once() -> None:
    bench = probed(case := MODELS["llama"])
    modules = {type(module).__name__ for last in found(bench) for module in last.modules}
    assert "LlamaMLP" in modules
    blocks = sum(stage.kind == "call" for stage in bench.stages)
    assert both_ways(bench, case)[0] == 3 * blocks


def test_a_backward_in_two_parts_leaves_it_out_as_well() -> None:
    bench = probed(case := tailed(HANDING_ON["a residual is added"]), splits=True)
    assert all(stage.split for stage in bench.stages if stage.kind == "call")
    assert both_ways(bench, case, in_two_parts)[0] == 3 * 3


def _only_some(_: Tailed, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + (y if x.shape[1] == 12 else torch.tanh(y))


def test_what_one_micro_batch_reads_and_the_probed_one_does_not_is_computed_again_from_then_on() -> None:
    bench = probed(case := tailed(_only_some))
    assert len(found(bench)) == 3
    _, gradients = bench.step(unequal(case), WEIGHTS)
    assert [last.needed for last in found(bench)] == [True] * 3
    _, wanted = bench.step(unequal(case), WEIGHTS)
    assert_same_gradients(gradients, wanted)


def _picked(_: Tailed, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y + x.select(1, int(y.detach()[0, :, 0].argmax())).unsqueeze(1)


def _looked_at_by_its_hook(block: Tailed, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if y.requires_grad:
        y.register_hook(lambda gradient: block.seen.append(float((gradient * y.detach()).sum())))
    return x + y


def _copied(block: Tailed, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    block.seen += y.detach().clone().numpy().ravel().tolist()
    return x + y


def _with_errors_in_passing(block: Tailed, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with suppress(Exception):
        return x + y * (2 if float(y.detach().sum()) < 1e9 else 1)
    return x + y


def _among_others_in_passing(_: Tailed, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with suppress(Exception):
        return x + torch.stack([x, y]).sum(0)
    return x + y


def _written_over_in_passing(_: Tailed, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with suppress(Exception):
        torch.add(y.detach(), 1.0, out=y.detach())
    return x + y


LATER: dict[str, Step] = {
    "kept": _kept,
    "noted": _noted,
    "the host": lambda b, x, y: x + _gated(b, x, y),
    "a choice of what is added": _picked,
    "a hook of its gradient": _looked_at_by_its_hook,
    "another library": _copied,
    "errors in passing": _with_errors_in_passing,
    "errors in passing, among others": _among_others_in_passing,
    "errors in passing, written over": _written_over_in_passing,
}


@pytest.mark.parametrize("step", LATER.values(), ids=LATER)
def test_what_is_read_or_kept_from_some_step_on_is_computed_again_from_then_on(step: Step) -> None:
    on = False
    bench = probed(case := tailed(lambda b, x, y: step(b, x, y) if on else x + y))
    bench.step(unequal(case), WEIGHTS)
    assert [last.needed for last in found(bench)] == [False] * 3
    on = True
    _, gradients = bench.step(unequal(case), WEIGHTS)
    assert [last.needed for last in found(bench)] == [True] * 3
    blocks = [block.module for block in bench.blocks]
    seen = torch.tensor([number for block in blocks for number in cast(Tailed, block).seen])
    outputs = [output for block in blocks if (output := getattr(block, "output", None)) is not None]
    assert not any(bool(t.isnan().any()) for t in [seen, *outputs])
    _, wanted = bench.step(unequal(case), WEIGHTS)
    assert_same_gradients(gradients, wanted)


class Own(torch.Tensor):
    """Results of functions of torch are of its class."""


WITHOUT_AN_OP: dict[str, Callable[[torch.Tensor], object]] = {
    "numpy": lambda y: y.numpy(),
    "an array": lambda y: np.asarray(y),
    "dlpack": lambda y: np.from_dlpack(y),
    "a list": lambda y: y.tolist(),
    "its address": lambda y: y.data_ptr(),
    "its storage": lambda y: y.untyped_storage(),
    "a copy": copy.copy,
    "a function of Python": lambda y: y.apply_(abs),
    "two of them": lambda y: y.map_(y, max),
    "a class of somebody's": lambda y: torch.ones(1).as_subclass(Own) + y,
    "a number": lambda y: torch.tensor([y[0, 0], 1.0]),
    "a row of one": lambda y: torch.tensor([y[0, :1]]),
}


@pytest.mark.parametrize("look", WITHOUT_AN_OP.values(), ids=WITHOUT_AN_OP)
def test_what_is_read_without_an_op_is_noticed_whatever_becomes_of_the_error(
    look: Callable[[torch.Tensor], object],
) -> None:
    left_out = LeftOut()
    with left_out:
        y = torch.ones(3, WIDTH) @ torch.ones(WIDTH, WIDTH)
    part = (y + 1.0)[1:]
    assert not left_out.is_read
    with suppress(Exception):
        look(part)
    assert left_out.is_read


def test_an_error_in_a_recomputation_comes_as_it_is_and_leaves_the_module_as_it_was() -> None:
    on = False

    def failing(_: Tailed, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if on and y.requires_grad:
            raise ValueError("of the block")
        return x + y

    bench = probed(case := tailed(failing))
    on = True
    with pytest.raises(ValueError, match="of the block"):
        bench.step(unequal(case), WEIGHTS)
    assert not any("forward" in vars(module) for block in bench.blocks for module in block.module.children())


class Functional(Tailed):
    """A block whose last product is its own, behind one of a module's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.linear(torch.tanh(self.linear(x)), self.last.weight)


def test_a_product_beside_those_of_inner_modules_is_computed_again() -> None:
    bench = probed(case := stack(Functional))
    assert not found(bench)
    assert both_ways(bench, case)[0] == 0


def test_hooks_of_modules_see_what_the_product_gives() -> None:
    bench = probed(case := tailed(HANDING_ON["a residual is added"]))
    seen: list[torch.Tensor] = []
    block = bench.blocks[1].module
    assert isinstance(block, Tailed)
    block.last.register_forward_hook(lambda _, given, result: seen.append(result.detach().clone()))
    assert both_ways(bench, case)[0] == 2 * 3
    assert len(seen) == 2 * 2 * 3  # forwards and recomputations of three micro-batches in both steps
    assert not any(result.isnan().any() for result in seen)


def test_a_forward_that_somebody_has_put_in_place_stays_there() -> None:
    case = tailed(HANDING_ON["a residual is added"])
    model = case.model()
    last = model.layers[0].last
    own = partial(type(last).forward, last)
    last.forward = own
    bench = Bench(case, model, moving=True)
    bench.probe(case.micro_batches(1)[0])
    assert both_ways(bench, case)[0] == 3 * 3
    assert vars(last)["forward"] is own
    assert "forward" not in vars(model.layers[1].last)
