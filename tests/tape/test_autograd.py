"""What models ask of autograd by themselves: hooks, gradients in a forward, checkpoints, functions, transforms.

Each is honoured, so that gradients are those of a plain loop with the same, or refused with a reason.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from penstock.errors import ModelError
from penstock.tape.groups import group_parameters
from tests.stacks import WIDTH, Change, Layer, Run, Stack, assert_exact, of, one_step, refused, stack, unequal
from tests.tape_reference import Bench, horizontal, vertical

pytestmark = pytest.mark.usefixtures("one_thread")


def nothing(model: Any) -> None:
    pass


def triple(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-1e-3, 1e-3) * 3


# -- hooks that are there before the tape is, of every kind -------------------------------------------------------


def on_parameters(model: Any) -> None:
    model.layers[1].linear.weight.register_hook(triple)
    model.head.weight.register_hook(triple)
    model.embed.weight.register_hook(lambda gradient: gradient * (torch.arange(len(gradient)) > 50).unsqueeze(1))


def scale_gradients(module: nn.Module, into: Any, out: Any) -> Any:
    return tuple(None if g is None else g * 1.5 for g in into)


def scale_output_gradients(module: nn.Module, out: Any) -> Any:
    return tuple(g.clamp(-1e-3, 1e-3) for g in out)


def everywhere(register: Callable[[nn.Module], object]) -> Change:
    """The hooks are on the model, on a block, within another block, and on the head."""

    def change(model: Any) -> None:
        for module in (model, model.layers[0], model.layers[2].linear, model.head):
            register(module)

    return change


def shift(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
    return tuple(x + 0.1 if x.is_floating_point() else x for x in inputs)


def shrink(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 0.9


def weight_norm(model: Any) -> None:
    for layer in (model.layers[1], model):
        parametrizations.weight_norm(layer.linear if layer is not model else model.head)


def spectral_norm(model: Any) -> None:
    parametrizations.spectral_norm(model.layers[1].linear)


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def symmetric(model: Any) -> None:
    for layer in model.layers:
        parametrize.register_parametrization(layer.linear, "weight", Symmetric())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def old_weight_norm(model: Any) -> None:
    torch.nn.utils.weight_norm(model.layers[1].linear)


CHANGES: dict[str, Change] = {
    "hooks on parameters": on_parameters,
    "forward pre-hooks": everywhere(lambda module: module.register_forward_pre_hook(shift)),
    "forward hooks": everywhere(lambda module: module.register_forward_hook(shrink)),
    "backward hooks": everywhere(lambda module: module.register_full_backward_hook(scale_gradients)),
    "backward pre-hooks": everywhere(lambda module: module.register_full_backward_pre_hook(scale_output_gradients)),
    "weight norm": weight_norm,
    "spectral norm": spectral_norm,
    "a parametrization": symmetric,
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_hangs_on_a_model_is_honoured(name: str) -> None:
    assert_exact(stack(), CHANGES[name], (vertical, horizontal))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weight_norm_of_old_is_exact() -> None:
    assert_exact(stack(), old_weight_norm)


# -- hooks and gradients in a forward -----------------------------------------------------------------------------


def hook_outputs(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x)
        x.register_hook(triple)
    return x


def hook_inputs(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = x * 1
        x.register_hook(triple)
        x = layer(x)
    return x


def hook_uses(model: Stack, x: torch.Tensor) -> torch.Tensor:
    """An output that two stages use, with a hook for each use."""
    first = model.layers[0](x)
    a = first * 1
    a.register_hook(triple)
    x = model.layers[2](model.layers[1](a))
    b = first * 1
    b.register_hook(triple)
    return x + b


def func_between(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        derivative = torch.func.vmap(torch.func.vmap(torch.func.grad(lambda z: model.head(z).sin().sum())))
        x = layer(x + derivative(x))
    return x


def hook_skip(model: Stack, x: torch.Tensor) -> torch.Tensor:
    first = model.layers[0](x)
    first.register_hook(triple)
    return model.layers[2](model.layers[1](first)) + first


def retain_skip(model: Stack, x: torch.Tensor) -> torch.Tensor:
    x.retain_grad()
    return model.layers[1](model.layers[0](x)) + x


def hook_behind(model: Stack, x: torch.Tensor) -> torch.Tensor:
    """Behind the blocks, where a weight and a tensor are used that were used before them, too."""
    first = x + model.head.weight[0]
    x = first
    for layer in model.layers:
        x = layer(x)
    y = (x + first).sin()
    y.register_hook(triple)
    return y


def hook_changed(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x)
        x.register_hook(triple)
        x += 1
    return x


class Hooked(Layer):
    """Hooks within a block, where there is a graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        if y.requires_grad:
            y.register_hook(triple)
        return x + y


class HookedAnyway(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        y.register_hook(triple)
        return x + y


class HooksInput(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.register_hook(triple)
        return super().forward(x)


class HooksParameter(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight.register_hook(triple)
        return super().forward(x)


class Force(Layer):
    """A block that is a derivative itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.linear(at).sin().sum(), at, create_graph=True)
        return x + force


class ForceAnyway(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (force,) = torch.autograd.grad(self.linear(x).sin().sum(), x, create_graph=True)
        return x + force


class Checkpointed(Layer):
    """Recomputes a part of itself by hand."""

    use_reentrant = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def part(y: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(torch.tanh(self.linear(y)), 0.2)

        y: torch.Tensor = checkpoint(part, x, use_reentrant=self.use_reentrant)
        return x + self.linear(y)


class CheckpointedOtherwise(Checkpointed):
    use_reentrant = False


def checkpointed_head(use_reentrant: bool) -> Run:
    def run(model: Stack, x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = layer(x)
        y: torch.Tensor = checkpoint(
            lambda z: torch.tanh(model.head(z)) @ model.head.weight, x, use_reentrant=use_reentrant
        )
        return y

    return run


def checkpointed_between(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(checkpoint(lambda z: torch.tanh(model.head(z)) @ model.head.weight, x, use_reentrant=True))
    return x


def checkpointed_skip(model: Stack, x: torch.Tensor) -> torch.Tensor:
    first = x
    for layer in model.layers:
        x = layer(x)
    y: torch.Tensor = checkpoint(lambda z: (z + first).tanh(), x, use_reentrant=True)
    return y + checkpoint(torch.sin, first, use_reentrant=True)


def checkpointed_first(model: Stack, x: torch.Tensor) -> torch.Tensor:
    """What was checkpointed before the blocks is used again behind them, as is a weight below it."""
    first: torch.Tensor = checkpoint(torch.tanh, x + model.head.weight[0], use_reentrant=True)
    x = first
    for layer in model.layers:
        x = layer(x)
    return x + first


def penalty_of_last(model: Stack, x: torch.Tensor) -> torch.Tensor:
    """A gradient penalty with respect to what the last block returned."""
    for layer in model.layers:
        x = layer(x)
    (gradient,) = torch.autograd.grad(model.head(x).logsumexp(-1).sum(), x, create_graph=True)
    return x + gradient.square().sum(-1, keepdim=True)


def penalty_between(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        y = x * 1
        (gradient,) = torch.autograd.grad(model.head(y).logsumexp(-1).sum(), y, create_graph=True)
        x = layer(x + gradient)
    return x


def penalty_through(model: Stack, x: torch.Tensor) -> torch.Tensor:
    first = x
    for layer in model.layers:
        x = layer(x)
    gradients = torch.autograd.grad((x + first).square().sum(), first, create_graph=True, allow_unused=True)
    return x + gradients[0]


def penalty_of_weight(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x)
    (gradient,) = torch.autograd.grad(x.sum(), model.layers[0].linear.weight, allow_unused=True)
    return x if gradient is None else x + gradient.sum()


def backward_within(model: Stack, x: torch.Tensor) -> torch.Tensor:
    x = model.layers[0](x)
    x.sum().backward(retain_graph=True)
    return model.layers[1](x)


def backward_of_torch(model: Stack, x: torch.Tensor) -> torch.Tensor:
    x = model.layers[0](x)
    torch.autograd.backward([model.head(x.detach()).sum()])
    return model.layers[1](x)


def vmap(model: Stack, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(model.layers[0])(x)


def func_grad(model: Stack, x: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda z: model.layers[0](z).sum())(x)


class Transformed(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        derivative = torch.func.vmap(torch.func.vmap(torch.func.grad(lambda z: self.linear(z).sin().sum())))
        return x + derivative(x)


def functional_call(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        changed = {name: p * 1.1 for name, p in layer.named_parameters()}
        x = torch.func.functional_call(layer, changed, (x,))
    return x


def functional_call_same(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = torch.func.functional_call(layer, dict(layer.named_parameters()), (x,))
    return x


def checkpointed_blocks(use_reentrant: bool) -> Run:
    def run(model: Stack, x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=use_reentrant)
        return x

    return run


def checkpointed_block(model: Stack, x: torch.Tensor) -> torch.Tensor:
    x = model.layers[0](x)
    y: torch.Tensor = checkpoint(model.layers[1], x, use_reentrant=True)
    return y


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * x.cos() * 2


class WithOwn(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Own.apply(super().forward(x))


def run_own(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = Own.apply(layer(Own.apply(x)))
    return x


class Tagged(torch.Tensor):
    """A subclass whose results are of the subclass, too."""


def run_tagged(model: Stack, x: torch.Tensor) -> torch.Tensor:
    x = x.as_subclass(Tagged)
    for layer in model.layers:
        x = layer(x)
        assert type(x) is Tagged
    return x


HONOURED: dict[str, tuple[type[nn.Module], Run | None]] = {
    "hooks on outputs of blocks": (Layer, hook_outputs),
    "hooks on inputs of blocks": (Layer, hook_inputs),
    "hooks on each use of an output": (Layer, hook_uses),
    "hooks on outputs that are changed in place": (Layer, hook_changed),
    "hooks behind what several stages use": (Layer, hook_behind),
    "hooks within a block": (Hooked, None),
    "a derivative within a block": (Force, None),
    "a reentrant checkpoint within a block": (Checkpointed, None),
    "a checkpoint within a block": (CheckpointedOtherwise, None),
    "a reentrant checkpoint around the head": (Layer, checkpointed_head(use_reentrant=True)),
    "a checkpoint around the head": (Layer, checkpointed_head(use_reentrant=False)),
    "reentrant checkpoints between blocks": (Layer, checkpointed_between),
    "a reentrant checkpoint of what several stages use": (Layer, checkpointed_first),
    "a penalty on the last block's output": (Layer, penalty_of_last),
    "penalties between blocks": (Layer, penalty_between),
    "torch.func within a block": (Transformed, None),
    "functional_call with the block's own": (Layer, functional_call_same),
    "functions with a backward of their own": (WithOwn, run_own),
    "a subclass of tensors": (Layer, run_tagged),
}


@pytest.mark.parametrize("name", HONOURED)
def test_what_a_forward_asks_of_autograd_is_honoured(name: str) -> None:
    assert_exact(stack(*HONOURED[name]), orders=(vertical, horizontal))


class ForceOfHead(Layer):
    """Reads within a transform a weight that is not its own, so that the probe brings it there."""

    head: list[nn.Module]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def energy(z: torch.Tensor) -> torch.Tensor:
            return self.head[0](z).sin().sum()

        return super().forward(x + torch.func.grad(energy)(x))


def lend_head(model: Any) -> None:
    for layer in model.layers:
        layer.head = [model.head]


def test_a_block_may_hang_hooks_on_its_results_in_an_evaluation_with_gradients() -> None:
    def run(model: Stack, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            for layer in model.layers:
                x = layer(x)
        return x

    case = stack(Hooked, run)
    assert_exact(case)
    bench = Bench(case, case.model())
    micro_batches = unequal(case)
    bench.probe(micro_batches[0], train=False)
    bench.load_all()
    assert len(bench.evaluate(micro_batches)) == 3


def test_weights_may_be_brought_within_a_transform() -> None:
    assert_exact(stack(ForceOfHead), lend_head)


REFUSED: dict[str, tuple[type[nn.Module], Run | None, str]] = {
    "a hook on what two stages use": (Layer, hook_skip, "register_hook was called on a tensor that is used in several"),
    "retain_grad on what two stages use": (Layer, retain_skip, "retain_grad was called on a tensor that is used in"),
    "a hook on a block's input within it": (HooksInput, None, "calls register_hook on one of its inputs"),
    "a hook where there is no graph": (HookedAnyway, None, "asks for a graph in its forward"),
    "a hook on a parameter in a forward": (HooksParameter, None, "calls register_hook on a parameter in its forward"),
    "a derivative where there is no graph": (ForceAnyway, None, "asks for a graph in its forward"),
    "a reentrant checkpoint of what is older": (Layer, checkpointed_skip, "pass use_reentrant=False"),
    "a penalty through blocks": (Layer, penalty_through, "takes a gradient in its forward (torch.autograd.grad)"),
    "a gradient of a block's weight": (Layer, penalty_of_weight, "takes a gradient in its forward"),
    "backward of a tensor": (Layer, backward_within, "calls backward() in its forward"),
    "backward": (Layer, backward_of_torch, "calls backward() in its forward"),
    "vmap": (Layer, vmap, "a transform of torch.func"),
    "grad of torch.func": (Layer, func_grad, "a transform of torch.func"),
    "functional_call with other weights": (Layer, functional_call, "changes parameter"),
    "grad of torch.func between blocks": (Layer, func_between, "uses a transform of torch.func where its weights"),
    "a reentrant checkpoint around blocks": (Layer, checkpointed_blocks(use_reentrant=True), "called around a block"),
    "a reentrant checkpoint around one block": (Layer, checkpointed_block, "called again in the backward"),
    "a checkpoint around blocks": (Layer, checkpointed_blocks(use_reentrant=False), "inside of saved_tensors_hooks"),
}


@pytest.mark.filterwarnings("ignore:.*None of the inputs have requires_grad")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused(name: str) -> None:
    layer, run, message = REFUSED[name]
    assert message in refused(stack(layer, run))


def test_a_gradient_that_is_retained_is_there() -> None:
    kept: list[torch.Tensor] = []

    def run(model: Stack, x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = layer(x)
            x.retain_grad()
            kept.append(x)
        return x

    assert_exact(stack(Layer, run))
    ours, plain = kept[:9], kept[9:]  # what the probe has kept is gone again
    assert len(plain) == 9
    in_order = [ours[3 * mb + layer] for mb in range(3) for layer in range(3)]
    for a, b in zip(sorted(map(gradient_sum, in_order)), sorted(map(gradient_sum, plain)), strict=True):
        assert a == pytest.approx(b, rel=1e-9)


def gradient_sum(x: torch.Tensor) -> float:
    assert x.grad is not None
    return float(x.grad.abs().sum())


# -- hooks and changes that are not there from the beginning ------------------------------------------------------


def tied(model: Any) -> None:
    model.embed.weight.register_hook(triple)


class Tied(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def test_a_hook_on_a_tied_weight_is_refused() -> None:
    assert "is used in several places, from which its gradient comes in parts" in refused(of(Tied), tied)
    one_step(of(Tied))


def accumulating(model: Any) -> None:
    model.layers[0].linear.weight.register_post_accumulate_grad_hook(lambda p: p.grad.zero_())


def test_hooks_on_accumulated_gradients_are_refused() -> None:
    message = refused(stack(), accumulating)
    assert "'layers.0.linear.weight' has a hook of register_post_accumulate_grad_hook" in message


def test_a_hook_on_a_parameter_of_the_meta_device_is_refused() -> None:
    def change(model: Any) -> None:
        model.to("meta").layers[0].linear.weight.register_hook(triple)

    assert "is on the meta device, which it leaves without hooks" in refused(stack(), change)


def later(change: Callable[[Any], object]) -> str:
    """The message when a change comes after a first step."""
    case = stack()
    model = case.model()
    bench = Bench(case, model)
    bench.probe(unequal(case)[0])
    bench.load_all()
    bench.step(unequal(case), [1.0] * 3)
    change(model)
    with pytest.raises(ModelError) as caught:
        bench.step(unequal(case), [1.0] * 3)
    return str(caught.value)


def unfreeze(model: Any) -> None:
    model.layers[1].linear.weight.requires_grad_(requires_grad=False)


def add_parameter(model: Any) -> None:
    model.layers[1].gate = nn.Parameter(torch.ones(WIDTH))


def replace_parameter(model: Any) -> None:
    model.layers[1].linear.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))


def drop_parameter(model: Any) -> None:
    model.layers[1].linear.bias = None


def replace_forward(model: Any) -> None:
    model.layers[1].forward = lambda x: x


def write_to_parameter(model: Any) -> None:
    with torch.no_grad():
        model.head.bias.mul_(0.5)


LATER: dict[str, tuple[Callable[[Any], object], str]] = {
    "written to": (write_to_parameter, "'head.bias' was written to in place between steps"),
    "frozen": (unfreeze, "'layers.1.linear.weight' is frozen, and was trainable when the model was wrapped"),
    "added": (add_parameter, "'layers.1.gate' was added"),
    "replaced": (replace_parameter, "'layers.1.linear.weight' was added, or put in another's place"),
    "taken out": (drop_parameter, "'layers.1.linear.bias' was taken out"),
    "hooked": (accumulating, "register_post_accumulate_grad_hook"),
    "forward": (replace_forward, "the forward of block 'layers.1' was replaced after wrap()"),
}


@pytest.mark.parametrize("name", LATER)
def test_what_changes_behind_the_engines_back_is_refused(name: str) -> None:
    change, message = LATER[name]
    assert message in later(change)


def test_a_hook_that_comes_later_is_honoured() -> None:
    case = stack()
    model = case.model().double()
    bench = Bench(case, model)
    bench.probe(unequal(case)[0])
    bench.load_all()
    _, before = bench.step(unequal(case), [1.0] * 3)
    hooks = [p.register_hook(lambda g: g * 2) for p in model.parameters()]
    _, doubled = bench.step(unequal(case), [1.0] * 3)
    assert all(torch.equal(doubled[name], 2 * g) for name, g in before.items())
    for hook in hooks:
        hook.remove()
    _, after = bench.step(unequal(case), [1.0] * 3)
    assert all(torch.equal(after[name], g) for name, g in before.items())


def test_parameters_that_leave_the_meta_device_count_their_own_changes_in_place() -> None:
    """As in a plain model: what a forward sets in one of them is no change of another that a graph has saved."""
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    (group,) = group_parameters(model, [])
    group.attach(torch.ones(group.spec.numel))
    saved = model.weight.square().sum()
    with torch.no_grad():
        model.bias.set_(model.bias.detach())
    saved.backward()
    assert model.weight.grad is not None
