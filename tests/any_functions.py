"""Functions that may be parts of random models (``tests.any_parts``): each takes hidden states [rows, length, width]
and returns such, in a way of its own.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Function = Callable[[torch.Tensor], torch.Tensor]


def view_in_place(x: torch.Tensor) -> torch.Tensor:
    x.view(-1)[1:].mul_(0.9)
    return x


def part_in_place(x: torch.Tensor) -> torch.Tensor:
    x[:, 0] = x[:, -1].tanh()
    x[..., :1] *= 0.5
    return x


def index_put(x: torch.Tensor) -> torch.Tensor:
    return x.index_put_((torch.tensor([0]), torch.tensor([1])), x[:1, :1].sum() * 0.1)


def without_gradients(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x.clamp_(-1.0, 1.0)
    return x


def hooked(x: torch.Tensor) -> torch.Tensor:
    y = x * 1.5
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 2)
    return y


def retained(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    if y.requires_grad:
        y.retain_grad()
    return y


def force(x: torch.Tensor) -> torch.Tensor:
    """A derivative with respect to something of its own."""
    with torch.enable_grad():
        at = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(at.sin().sum(), at)
    return x + 0.1 * found


def force_of_input(x: torch.Tensor) -> torch.Tensor:
    (found,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
    return x + 0.1 * found


def asks_for_gradient(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_() * 0.5 + x


def some_rows(x: torch.Tensor) -> torch.Tensor:
    """As many of them as the data say."""
    chosen = x.sum(-1) > 0
    return x.masked_scatter(chosen.unsqueeze(-1), x[chosen].tanh())


def seeded(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        noise = torch.rand_like(x)
    return x + 0.1 * noise


def autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ torch.eye(x.shape[-1])).float() + x


def spectrum(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.fft.fft(x, dim=1)
    return (torch.view_as_real(found * found.conj()).sum(-1) + 0.1).sqrt().tanh() + x


def order(x: torch.Tensor) -> torch.Tensor:
    values, places = x.sort(1)
    return x + values.gather(1, places) * 0.1


def saved_elsewhere(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return x.sin() * x


def switched_off(x: torch.Tensor) -> torch.Tensor:
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    y = x.cos()
    torch.set_grad_enabled(before)
    return x * y


def numbers(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + 0.1 * float(x.detach().mean()))


def per_token(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([t.tanh() * (i + 1) / x.shape[1] for i, t in enumerate(x.unbind(1))], dim=1)


def split(x: torch.Tensor) -> torch.Tensor:
    a, b = x.split([1, x.shape[1] - 1], dim=1)
    return torch.cat([a * 2, b - a.mean(1, keepdim=True)], dim=1).tanh()


def chunks_in_place(x: torch.Tensor) -> torch.Tensor:
    for part in (x * 1.0).split(1, dim=1):  # of which torch allows no change in place
        part.sin()
    y = x * 1.0
    y.narrow(1, 0, 1).add_(x[:, -1:])
    return y


class Doubled(torch.autograd.Function):
    """Saves its input, and has a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] * x.cos() * ctx.factor, None


class Keeping(torch.autograd.Function):
    """Keeps a tensor on its context, and returns one without a gradient besides."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.sign = x.sign()
        largest = x.argmax(-1, keepdim=True)
        ctx.mark_non_differentiable(largest)
        return x.abs(), largest

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * ctx.sign


class InPlace(torch.autograd.Function):
    """Changes its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 0.5


class Product(torch.autograd.Function):
    """A linear layer by hand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight.t(), x.flatten(0, 1).t() @ gradients[0].flatten(0, 1)


class RunsAgain(torch.autograd.Function):
    """Runs a module again in its backward, which runs that backward itself, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: Any, _: torch.Tensor) -> torch.Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        y: torch.Tensor = module(x)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.module(x)
        y.backward(gradients[0])
        return x.grad, None, None


def keeping(x: torch.Tensor) -> torch.Tensor:
    size, largest = Keeping.apply(x)
    result: torch.Tensor = size.gather(-1, largest) * 0.1 + x
    return result


def drawn(x: torch.Tensor) -> torch.Tensor:
    return x * (torch.rand(x.shape) > 0.2)


def drawn_by_python(x: torch.Tensor) -> torch.Tensor:
    return x * random.uniform(0.8, 1.2)


def drawn_by_numpy(x: torch.Tensor) -> torch.Tensor:
    return x * float(np.random.random_sample())  # noqa: NPY002  models have this one


def asks_grad_mode(x: torch.Tensor) -> torch.Tensor:
    return x * (0.9 if torch.is_grad_enabled() else 0.8)


def asks_requires_grad(x: torch.Tensor) -> torch.Tensor:
    return x * (0.9 if x.requires_grad else 0.8)


def asks_leaf(x: torch.Tensor) -> torch.Tensor:
    return x * (0.9 if x.is_leaf else 0.8)


def without_its_graph(x: torch.Tensor) -> torch.Tensor:
    return x + x.data.sin()


def hessian(x: torch.Tensor) -> torch.Tensor:
    found: Any = torch.autograd.functional.vjp(torch.sin, x, torch.ones_like(x), create_graph=torch.is_grad_enabled())
    result: torch.Tensor = x + 0.1 * found[1]
    return result


def in_a_thread(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.set_multithreading_enabled(False):
        return x.exp().clamp(max=2.0)


def turned_in_place(x: torch.Tensor) -> torch.Tensor:
    return x.transpose_(0, 1).sin().transpose(0, 1)


def unsqueezed_in_place(x: torch.Tensor) -> torch.Tensor:
    return (x * 0.9).unsqueeze_(0).squeeze_(0)


def data_in_place(x: torch.Tensor) -> torch.Tensor:
    x.data.mul_(0.9)
    return x * 1.0


def hooked_node(x: torch.Tensor) -> torch.Tensor:
    y = x.tanh()
    if y.grad_fn is not None:
        y.grad_fn.register_hook(lambda inward, outward: tuple(None if g is None else g * 2 for g in inward))
    return y


def hooked_together(x: torch.Tensor) -> torch.Tensor:
    a, b = x.sin(), x.cos()
    if a.requires_grad:
        torch.autograd.graph.register_multi_grad_hook((a, b), lambda gradients: None)
    return a * b


def assigned(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1]
    y[:, 0].copy_(x[:, -1])
    return y


FUNCTIONS: dict[str, Function] = {
    "turned in place": turned_in_place,
    "unsqueezed in place": unsqueezed_in_place,
    "data in place": data_in_place,
    "hook of a node": hooked_node,
    "hook of several": hooked_together,
    "assigned": assigned,
    "asks for the grad mode": asks_grad_mode,
    "asks for requires_grad": asks_requires_grad,
    "asks for a leaf": asks_leaf,
    "data": without_its_graph,
    "functional.vjp": hessian,
    "single-threaded": in_a_thread,
    "nothing": lambda x: x,
    "a view": lambda x: x.view(x.shape),
    "tanh": torch.tanh,
    "add_": lambda x: x.add_(0.1),
    "mul_": lambda x: x.mul_(0.9),
    "relu_": lambda x: functional.relu(x, inplace=True),
    "masked_fill_": lambda x: x.masked_fill_(x > 1.0, 0.5),
    "index_put_": index_put,
    "view in place": view_in_place,
    "part in place": part_in_place,
    "narrow in place": chunks_in_place,
    "clamp_ without gradients": without_gradients,
    "in place, of its own": lambda x: InPlace.apply(x * 2.0),
    "in place, of the input": lambda x: InPlace.apply(x),
    "out of order": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda x: x + x.mean(1, keepdim=True).expand_as(x),
    "only expanded": lambda x: x.mean(1, keepdim=True).expand_as(x),
    "detached": lambda x: x.detach(),
    "half detached": lambda x: x + x.detach().sin(),
    "detach_": lambda x: x.detach_(),
    "asks for a gradient": asks_for_gradient,
    "a hook": hooked,
    "retain_grad": retained,
    "a derivative": force,
    "a derivative of the input": force_of_input,
    "some rows": some_rows,
    "seeded": seeded,
    "autocast": autocast,
    "double": lambda x: x.double().tanh().float(),
    "bf16": lambda x: x.bfloat16().float(),
    "spectrum": spectrum,
    "cumsum": lambda x: torch.cumsum(x, 1).tanh(),
    "einsum": lambda x: torch.einsum("blw,bmw->blw", x, x).tanh(),
    "order": order,
    "hooks of saved tensors": saved_elsewhere,
    "gradients switched off": switched_off,
    "numbers": numbers,
    "token by token": per_token,
    "split": split,
    "no tokens": lambda x: x + x[:, :0].sum(1, keepdim=True),
    "own backward": lambda x: Doubled.apply(x, 2.0),
    "own context": keeping,
    "vmap": lambda x: torch.vmap(lambda t: t.sin())(x),
    "func.grad": lambda x: x + 0.1 * torch.func.vmap(torch.func.grad(lambda t: t.cos().sum()))(x),
    "jvp": lambda x: torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1],
    "checkpoint": lambda x: checkpoint(torch.sin, x, use_reentrant=False),
    "reentrant checkpoint": lambda x: checkpoint(torch.sin, x, use_reentrant=True),
    "torch.rand": drawn,
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.8)),
    "random": drawn_by_python,
    "numpy": drawn_by_numpy,
}
