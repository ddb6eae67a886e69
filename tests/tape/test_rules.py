"""What the tape does with models and inputs that are unusual, and what it refuses."""

import contextvars
import copy
import dataclasses
import random
from collections import UserDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from penstock.errors import ModelError
from tests.models import MODELS, Case, llama
from tests.stacks import WIDTH, Layer, Run, Stack, assert_exact, refused, stack
from tests.tape_reference import Bench, horizontal, relative_error, vertical, with_graphs

pytestmark = pytest.mark.usefixtures("one_thread")


# -- how blocks are called ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    note: str


class RecordLayer(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        return Output(hidden=super().forward(x), note="kept")


class MappingLayer(Layer):
    """Writes into a mapping and appends to a list that it is handed."""

    def forward(self, x: torch.Tensor, *, shared: Any, trail: list[Any]) -> torch.Tensor:
        y = super().forward(x)
        shared["sum"] = y.sum(-1, keepdim=True) + shared.get("sum", 0)
        trail.append((y * 0.5, "half"))
        return y


TRAIL: contextvars.ContextVar[dict[str, list[torch.Tensor]] | None] = contextvars.ContextVar("trail", default=None)


class ContextLayer(Layer):
    """Leaves a tensor in a container that a context variable holds, as output capturing does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        trail = TRAIL.get()
        assert trail is not None
        trail["hidden"].append(y.square())
        return y


def run_records(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        output = layer(x)
        assert output.note == "kept"
        x = output.hidden
    return x


def run_mappings(model: Stack, x: torch.Tensor) -> torch.Tensor:
    shared: UserDict[str, torch.Tensor] = UserDict()
    trail: list[Any] = []
    for layer in model.layers:
        x = layer(x, shared=shared, trail=trail)
    return x + shared["sum"] + sum(t for t, _ in trail)


def run_context(model: Stack, x: torch.Tensor) -> torch.Tensor:
    trail: dict[str, list[torch.Tensor]] = {"hidden": []}
    token = TRAIL.set(trail)
    for layer in model.layers:
        x = layer(x)
    TRAIL.reset(token)
    return x + sum(trail["hidden"])


def run_with_code_between(model: Stack, x: torch.Tensor) -> torch.Tensor:
    first = x
    for layer in model.layers:
        x = layer((x.exp() + first).tanh()) * 1.5
    return x * first


def run_with_weights_between(model: Stack, x: torch.Tensor) -> torch.Tensor:
    """Products with a weight's transpose: autograd saves a view of the weight, which leaves before the backward."""
    for layer in model.layers:
        x = layer(torch.tanh(nn.functional.linear(x, model.head.weight)) @ model.head.weight)
    return x


def run_shared(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in (*model.layers, *reversed(model.layers)):
        x = layer(x)
    return x


@pytest.mark.parametrize(
    ("layer", "run"),
    [
        (RecordLayer, run_records),
        (MappingLayer, run_mappings),
        (ContextLayer, run_context),
        (Layer, run_with_code_between),
        (Layer, run_with_weights_between),
        (Layer, run_shared),
    ],
)
def test_any_way_to_call_blocks_is_exact(layer: type[nn.Module], run: Callable[[Any, torch.Tensor], Any]) -> None:
    assert_exact(stack(layer, run))


def test_blocks_can_be_named() -> None:
    case = MODELS["skips"]
    model = case.model().double()
    plain = copy.deepcopy(model)
    bench = Bench(case, model, moving=True, blocks=[model.down[1], model.up[0]])
    assert [b.name for b in bench.blocks] == ["down.1", "up.0"]
    micro_batches = case.micro_batches(2)
    bench.probe(micro_batches[0])
    _, found = bench.step(micro_batches, [0.5, 0.5])
    _, wanted = bench.plain_step(plain, micro_batches, [0.5, 0.5])
    assert relative_error(found, wanted) <= 1e-12


# -- frozen parameters ------------------------------------------------------------------------------------------------


def freeze_below(model: nn.Module) -> None:
    for module in (model.embed, model.layers[0], model.layers[1]):
        module.requires_grad_(requires_grad=False)


def freeze_all_but_biases(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(requires_grad=name.endswith("bias"))


def test_frozen_blocks_are_not_recomputed() -> None:
    _, bench = assert_exact(stack(), freeze_below)
    assert [s.backward_reads == s.gradients == () for s in bench.stages[:3]] == [True] * 3
    assert bench.stages[2].gradient == 0
    calls = []
    bench.blocks[0].module.linear.register_forward_hook(lambda *_: calls.append(0))
    bench.blocks[2].module.linear.register_forward_hook(lambda *_: calls.append(2))
    bench.step(stack().micro_batches(2), [0.5, 0.5])
    assert sorted(calls) == [0, 0, 2, 2, 2, 2]


class Asking(Layer):
    """Does something else where gradients are computed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if torch.is_grad_enabled() else 1)


def test_a_frozen_block_may_ask_for_the_grad_mode() -> None:
    def freeze_all(model: Any) -> None:
        model.requires_grad_(requires_grad=False)
        model.head.requires_grad_(requires_grad=True)

    assert_exact(stack(Asking), freeze_all)


def test_trainable_parameters_above_frozen_ones() -> None:
    _, bench = assert_exact(stack(), freeze_all_but_biases)
    assert bench.stages[0].gradients == ()
    assert all(s.gradients for s in bench.stages[1:])


class Adapted(Layer):
    """Uses an adapter that all blocks share and none has as a module of its own."""

    adapter: list[nn.Module]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.tanh(self.adapter[0](x))


def adapt_frozen(model: Any) -> None:
    freeze_below(model)
    model.layers[2].requires_grad_(requires_grad=False)
    model.adapter = nn.Linear(WIDTH, WIDTH, dtype=torch.double)
    for layer in model.layers:
        layer.adapter = [model.adapter]


def test_frozen_blocks_train_a_parameter_that_is_not_their_own() -> None:
    found, _ = assert_exact(stack(Adapted), adapt_frozen, (vertical, horizontal, with_graphs))
    assert {"adapter.weight", "adapter.bias"} <= found.keys()


# -- state that a forward changes -----------------------------------------------------------------------------------


class Clipping(Layer):
    """Clips its weights where they lie, as Gemma 3n does, to a bound that they do not reach."""

    bound = 120.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight.data.clamp_(-self.bound, self.bound)
        return super().forward(x)


def test_a_parameter_may_be_written_what_it_holds() -> None:
    assert_exact(stack(Clipping))


def test_a_parameter_that_is_written_what_it_held_is_watched_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    case = stack(Clipping)
    bench = Bench(case, case.model(), moving=True)
    micro_batches = case.micro_batches(2)
    bench.probe(micro_batches[0])
    bench.step(micro_batches, [0.5, 0.5])
    monkeypatch.setattr(Clipping, "bound", 1e-3)
    with pytest.raises(
        ModelError, match=r"block 'layers.0' changes a parameter in its forward, which it has left as it was until now"
    ):
        bench.step(micro_batches, [0.5, 0.5])


def stepped(bench: Bench, micro_batch: Any) -> None:
    bench.step([micro_batch], [1.0])


def evaluated(bench: Bench, micro_batch: Any) -> None:
    bench.evaluate([micro_batch])


def probed(bench: Bench, micro_batch: Any) -> None:
    bench.probe(micro_batch)


class BreaksOff(Clipping):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x)
        if self.bound < 1:
            raise ModelError("block changes a parameter, and breaks off")
        return x


@pytest.mark.parametrize("layer", [Clipping, BreaksOff])
@pytest.mark.parametrize("ready", [probed, lambda bench, mb: bench.probe(mb, train=False)], ids=["train", "evaluate"])
@pytest.mark.parametrize("use", [stepped, evaluated, probed])
def test_weights_that_a_block_has_changed_are_put_back_when_it_is_refused(
    layer: type[Clipping], ready: Any, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time: nothing is left of one try that would let a later one pass."""
    case = stack(layer)
    bench = Bench(case, case.model())
    (micro_batch,) = case.micro_batches(1)
    ready(bench, micro_batch)
    if use is not probed:
        bench.load_all()
    before = [flat.clone() for flat in bench.flats]
    monkeypatch.setattr(Clipping, "bound", 1e-3)
    for _ in range(5):
        with pytest.raises(ModelError, match="changes a parameter"):
            use(bench, micro_batch)
        bench.tape.finish()
        assert all(map(torch.equal, bench.flats, before))


class ClippingLast(Layer):
    """Writes to its weights when most of its memory is free again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = super().forward(x)
        self.linear.weight.data.clamp_(-120.0, 120.0)
        return result


def test_the_memory_of_a_block_is_that_with_its_weights_copied_from_its_start() -> None:
    """Buffers are copied as a run does it, which knows that they are written to; wherever in the block that is."""

    def peaks(layer: type[nn.Module]) -> list[int]:
        case = stack(layer)
        bench = Bench(case, case.model())
        return [stage.forward_peak for stage in bench.probe(case.micro_batches(1)[0]) if stage.kind == "call"]

    assert peaks(ClippingLast) == peaks(Clipping) == [peak + WIDTH * WIDTH * 4 for peak in peaks(Layer)]


@pytest.mark.parametrize("order", [vertical, horizontal])
def test_batch_norm_counts_each_micro_batch_once(order: Any) -> None:
    case = MODELS["skips"]
    model = case.model().double()
    plain = copy.deepcopy(model)
    micro_batches = case.micro_batches(3)
    bench = Bench(case, model)
    bench.probe(micro_batches[0])
    bench.load_all()
    bench.step(micro_batches, [1.0] * 3, order)
    bench.plain_step(plain, micro_batches, [1.0] * 3)
    wanted = dict(plain.named_buffers())
    assert int(wanted["down.0.norm.num_batches_tracked"]) == 3
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, wanted[name], rtol=1e-12, atol=0)


class Table(nn.Module):
    """A table of positions that grows with the sequences, and its length in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.grow(9)

    def grow(self, length: int) -> None:
        self.length = length
        self.register_buffer("table", torch.arange(length).cos()[:, None], persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > self.length:
            self.grow(x.shape[1])
        return x * self.table[: x.shape[1]]


class TableLayer(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.positions = Table()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.positions(super().forward(x))


class MeanOfFirst(Layer):
    """Scales by a mean of the first input, which a flag says is there."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None, persistent=False)
        self.is_ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_ready:
            self.mean, self.is_ready = x.detach().mean(), True
        return super().forward(x) * (1 + self.mean)


class Counting(Layer):
    """Counts its calls, in a buffer and beside it."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.number = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.number += 1
        return super().forward(x) * (1 + self.number / self.calls / (1 + self.number))


def run_counting(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    x = x / model.calls
    for layer in model.layers:
        x = layer(x)
    return x


def run_with_new_buffer(model: Any, x: torch.Tensor) -> torch.Tensor:
    if "scale" not in dict(model.named_buffers()):
        model.register_buffer("scale", x.detach().abs().mean(), persistent=False)
    for layer in model.layers:
        x = layer(x)
    return x * model.scale


def run_table(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = model.positions(x)
    for layer in model.layers:
        x = layer(x)
    return x


def begin(model: Any) -> None:
    model.calls = 0
    if getattr(model, "run", None) is run_table:
        model.positions = Table()


def dynamic_llama() -> Case:
    """Rotary frequencies that grow with sequences of more than nine tokens, and are the old ones for shorter ones."""
    rope = {"rope_type": "dynamic", "rope_theta": 10.0, "factor": 4.0}
    return replace(MODELS["llama"], build=partial(llama, rope_parameters=rope, max_position_embeddings=9))


@pytest.mark.parametrize(
    "case",
    [
        stack(TableLayer),
        stack(Layer, run_table),
        stack(MeanOfFirst),
        stack(Counting),
        stack(Layer, run_counting),
        stack(Layer, run_with_new_buffer),
        dynamic_llama(),
    ],
    ids=["table of a block", "table", "flag of a block", "counts of a block", "count", "new buffer", "dynamic rope"],
)
def test_attributes_that_change_with_buffers_or_in_the_models_own_code_are_those_of_a_plain_loop(case: Case) -> None:
    assert_exact(case, begin, (vertical, horizontal, with_graphs))


def state_beside() -> Any:
    """The states of the global generators besides torch's."""
    return random.getstate(), np.random.get_state()  # noqa: NPY002  models have this one


def drawn_beside(*shape: int) -> torch.Tensor:
    """Numbers of numpy's global generator."""
    return torch.from_numpy(np.random.random_sample(shape))  # noqa: NPY002  models have this one


def test_random_state_is_put_back() -> None:
    case = MODELS["gpt2"]
    bench = Bench(case, case.model())
    bench.probe(case.micro_batches(1)[0])
    bench.load_all()
    torch.manual_seed(11)
    state, others = torch.get_rng_state(), state_beside()
    bench.step(case.micro_batches(2), [1.0, 1.0])
    assert torch.equal(torch.get_rng_state(), state)
    np.testing.assert_equal(state_beside(), others)


class DrawsBeside(Layer):
    """Drops by the generators of numpy and Python."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * (drawn_beside(*x.shape) > 0.2)) * random.uniform(0.9, 1.1)


def mask_beside(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x) * (drawn_beside(*x.shape[:2], 1) > 0.2) * random.uniform(0.9, 1.1)
    return x


@pytest.mark.parametrize(("layer", "run"), [(DrawsBeside, None), (Layer, mask_beside)])
def test_numbers_of_numpy_and_python_depend_on_their_place_alone(layer: type[nn.Module], run: Run | None) -> None:
    assert_exact(stack(layer, run), orders=(vertical, horizontal, with_graphs))


def test_steps_draw_different_dropout() -> None:
    case = MODELS["gpt2"]
    bench = Bench(case, case.model())
    micro_batches = case.micro_batches(1) * 2
    bench.probe(micro_batches[0])
    bench.load_all()
    first, _ = bench.step(micro_batches, [1.0, 1.0], step=0)
    again, _ = bench.step(micro_batches, [1.0, 1.0], step=0)
    later, _ = bench.step(micro_batches, [1.0, 1.0], step=1)
    assert first == again
    assert len({float(loss) for loss in (*first, *later)}) == 4


def test_autocast_inside_the_model_is_exact() -> None:
    def loss_fn(model: nn.Module, micro_batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = model(**micro_batch).loss
        return loss

    case = dataclasses.replace(MODELS["llama"], loss_fn=loss_fn)
    model = case.model()
    plain = copy.deepcopy(model)
    micro_batches = case.micro_batches(2)
    bench = Bench(case, model, moving=True)
    bench.probe(micro_batches[0])
    losses, found = bench.step(micro_batches, [0.5, 0.5])
    assert not torch.is_autocast_enabled("cpu")
    wanted_losses, wanted = bench.plain_step(plain, micro_batches, [0.5, 0.5])
    assert losses == wanted_losses
    assert all(torch.equal(found[name], g) for name, g in wanted.items())


# -- evaluation, and no tape at all ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "mixtral", "t5", "skips"])
def test_evaluation_is_a_plain_forward(name: str) -> None:
    case = MODELS[name]
    model = case.model().eval()
    micro_batches = case.micro_batches(3)
    with torch.no_grad():
        wanted = [case.loss_fn(model, mb) for mb in micro_batches]
    bench = Bench(case, model, moving=True)
    bench.probe(micro_batches[0], train=False)
    assert bench.evaluate(micro_batches) == wanted


def test_outside_a_step_the_model_is_its_own() -> None:
    case = MODELS["llama"]
    model = case.model()
    micro_batch = case.micro_batches(1)[0]
    plain = copy.deepcopy(model)
    case.loss_fn(plain, micro_batch).backward()
    bench = Bench(case, model)
    bench.load_all()
    for closed in (False, True):
        if closed:
            bench.tape.close()
        model.zero_grad()
        case.loss_fn(model, micro_batch).backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert not any("forward" in vars(b.module) for b in bench.blocks)


def test_a_copy_of_the_model_runs_its_own_blocks() -> None:
    case = MODELS["llama"]
    bench = Bench(case, case.model())
    bench.load_all()
    other = copy.deepcopy(bench.tape.model)
    micro_batch = case.micro_batches(1)[0]
    wanted = case.loss_fn(other, micro_batch)
    for parameter in bench.tape.model.parameters():
        parameter.data.zero_()
    assert torch.equal(case.loss_fn(other, micro_batch), wanted)


# -- errors ---------------------------------------------------------------------------------------------------------


def test_an_error_leaves_what_was_saved_to_those_who_still_bring_it_back() -> None:
    """Until all have come to rest: another error would hide the one that they end by."""
    case = stack(Layer)
    model = case.model()
    bench = Bench(case, model)
    (micro_batch,) = case.micro_batches(1)
    bench.probe(micro_batch)
    bench.load_all()

    def fail(*_: object) -> None:
        raise OSError("the block's own error")

    model.layers[1].linear.register_forward_pre_hook(fail)
    bench.tape.begin(0, [micro_batch], [1.0], stages=bench.stages)
    bench.tape.forward(0, 0)
    bench.tape.forward(1, 0)
    with pytest.raises(OSError, match="the block's own error"):
        bench.tape.forward(2, 0)
    assert bench.tape.saved_activations.references()
    bench.tape.abort()
    assert not bench.tape.saved_activations.references()


def test_an_error_closes_the_siblings_and_leaves_the_tape_usable() -> None:
    left: list[int] = []

    def run(model: Stack, x: torch.Tensor) -> torch.Tensor:
        try:
            with torch.enable_grad():
                for layer in model.layers:
                    x = layer(x)
        finally:
            left.append(1)
        return x

    case = stack(Layer, run)
    model = case.model().double()
    bench = Bench(case, model)
    micro_batches = case.micro_batches(3)
    bench.probe(micro_batches[0])
    bench.load_all()
    _, wanted = bench.step(micro_batches, [1.0] * 3)
    left.clear()
    state = torch.get_rng_state()

    def fail(*_: object) -> None:
        if len(calls) == 4:
            raise OSError("the block's own error")
        calls.append(1)

    calls: list[int] = []
    hook = model.layers[1].linear.register_forward_pre_hook(fail)
    with pytest.raises(OSError, match="the block's own error"):
        bench.step(micro_batches, [1.0] * 3)  # in a recomputation: all forwards have ended
    calls.clear()
    calls += [1, 1, 1]
    left.clear()
    with torch.no_grad():  # the forwards leave their own grad modes when they are closed, not the caller's
        with pytest.raises(OSError, match="the block's own error"):
            bench.step(micro_batches, [1.0] * 3)  # in the second micro-batch's forward: all are suspended
        assert not torch.is_grad_enabled()
    assert len(left) == 3
    hook.remove()
    assert torch.equal(torch.get_rng_state(), state)
    _, found = bench.step(micro_batches, [1.0] * 3)
    assert all(torch.equal(found[name], g) for name, g in wanted.items())


def run_raising_on_its_way_out(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.count += 1
    done = False
    try:
        for layer in model.layers:
            x = layer(x)
        done = True
    finally:
        if not done:
            raise OSError("the clean-up's own error")
    return x


def test_a_forward_that_raises_when_it_is_closed_leaves_all_as_it_was() -> None:
    case = stack(Layer, run_raising_on_its_way_out)
    model: Any = case.model()
    model.register_buffer("count", torch.zeros(()))
    bench, micro_batch = Bench(case, model), case.micro_batches(1)[0]
    of_others = bench.tape.on_gradient = lambda *_: None

    def fail(group: int) -> None:
        if group == bench.groups[-1].spec.index:
            raise MemoryError("no room")
        bench.load(group)

    with pytest.raises(OSError, match="the clean-up's own error"):
        bench.tape.probe(micro_batch, fail, bench.unload, all_copies=False)
    assert model.count == 0
    assert not bench.attached
    assert bench.tape.on_gradient is of_others
    bench.probe(micro_batch)
    bench.load_all()
    bench.tape.begin(0, [micro_batch], [1.0], stages=bench.stages)
    bench.tape.forward(0, 0)
    with pytest.raises(OSError, match="the clean-up's own error"):
        bench.tape.close()
    assert all("forward" not in vars(layer) for layer in model.layers)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the library is renaming the method
def test_gradient_checkpointing_is_refused() -> None:
    message = refused(MODELS["llama"], lambda model: model.gradient_checkpointing_enable())
    assert "gradient_checkpointing_disable()" in message


def test_a_micro_batch_that_skips_a_block_is_refused() -> None:
    visits: list[int] = []

    def run(model: Stack, x: torch.Tensor) -> torch.Tensor:
        visits.append(1)
        second = len(visits) == 2  # what the probe has put there is gone again
        for i, layer in enumerate(model.layers):
            if not (second and i == 1):
                x = layer(x)
        return x

    message = refused(stack(Layer, run))
    assert (
        "micro-batch 1 calls block 'layers.2' where the one that the plan was made from calls block 'layers.1'"
        in message
    )


def test_a_micro_batch_that_calls_a_block_again_is_refused() -> None:
    visits: list[int] = []

    def run(model: Stack, x: torch.Tensor) -> torch.Tensor:
        visits.append(1)
        second = len(visits) == 2
        for layer in model.layers:
            x = layer(x)
        return model.layers[0](x) if second else x

    assert "micro-batch 1 calls block 'layers.0' where the one that the plan was made from ended" in refused(
        stack(Layer, run)
    )


class InPlaceLayer(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2.0) + torch.tanh(self.linear(x))


class PassingLayer(Layer):
    """Changes what it is handed and hands that on, so that it puts out nothing of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(torch.tanh(self.linear(x.detach().clone())))


class WritingLayer(Layer):
    """Writes to a tensor in an object that it is handed."""

    def forward(self, x: torch.Tensor, noted: Any) -> torch.Tensor:
        noted.mean.copy_(x.mean())
        return super().forward(x)


def run_noting(model: Stack, x: torch.Tensor) -> torch.Tensor:
    noted = SimpleNamespace(mean=x.new_zeros(()))
    for layer in model.layers:
        x = layer(x, noted) + noted.mean
    return x


class StashLayer(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.penalty = x.square().mean()
        return super().forward(x)


class RandomLayer(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return (y, y + 1) if torch.is_grad_enabled() else (y,)


def run_in_place_after(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        y = layer(x)
        x.detach().mul_(2.0)
        x = y
    return x


def run_detaching_after(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        y = layer(x)
        x.detach_()
        x = y
    return x


def run_stash(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x)
    return x + sum(layer.penalty for layer in model.layers)


def run_first(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x)[0]
    return x


@pytest.mark.parametrize(
    ("layer", "run", "message"),
    [
        (InPlaceLayer, None, "block 'layers.0' changes one of its inputs in place"),
        (PassingLayer, None, "block 'layers.0' changes one of its inputs in place"),
        (WritingLayer, run_noting, "block 'layers.0' changes one of its inputs in place"),
        (Layer, run_in_place_after, "was changed in place after the block had run"),
        (Layer, run_detaching_after, "was detached in place after the block had run"),
        (StashLayer, run_stash, "attribute 'penalty' of 'layers.0'"),
        (RandomLayer, run_first, "made 1 tensors in the forward and 2 when it was recomputed"),
        (Layer, lambda model, x: x, "calls none of its blocks"),
    ],
)
def test_what_cannot_be_recomputed_is_refused(layer: type[nn.Module], run: Any, message: str) -> None:
    assert message in refused(stack(layer, run))


def test_a_loss_that_is_none_is_refused() -> None:
    case = dataclasses.replace(MODELS["llama"], loss_fn=lambda model, mb: model(**mb).logits)
    assert "one element, but loss_fn returned a tensor of shape (2, 12, 96)" in refused(case)
    frozen = refused(MODELS["llama"], lambda model: model.requires_grad_(requires_grad=False))
    assert "does not depend on any parameter that is trained" in frozen


def test_an_error_in_the_probe_unloads_everything() -> None:
    case = stack(InPlaceLayer)
    bench = Bench(case, case.model(), moving=True)
    with pytest.raises(ModelError):
        bench.probe(case.micro_batches(1)[0])
    assert not bench.attached
