"""Parts of random models: each takes hidden states [rows, length, width] and returns such, in a way of its own.

A part may stand in a block, or in the model's own code before, between and behind blocks; ``PARTS[name](width)`` makes
one. Here are those with parameters, buffers or a memory; ``tests.any_functions`` has the others.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from tests.any_functions import FUNCTIONS, Product, RunsAgain


class Of(nn.Module):
    """A function as a part."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return FUNCTIONS[self.name](x)


class Linear(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear: nn.Module = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class OnlyLinear(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y


class Dropped(Linear):
    inplace = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(super().forward(x), 0.2, self.training, self.inplace)


class DroppedInPlace(Dropped):
    inplace = True


class Switching(Dropped):
    """Is evaluated where it stands, and trains on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.eval()
        y = super().forward(x)
        self.train()
        return y + 0.1 * super().forward(x)


class Frozen(Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.requires_grad_(requires_grad=False)


class HalfFrozen(Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.linear.weight.requires_grad_(requires_grad=False)


class Unreached(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class SometimesReached(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.shape[1] % 2 else x


class Twice(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


class WithoutGradients(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = super().forward(x)
        return x + y


class Checkpointed(Dropped):
    use_reentrant = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(super().forward, x, use_reentrant=self.use_reentrant)
        return y


class CheckpointedOtherwise(Checkpointed):
    use_reentrant = False


class Parametrized(Linear):
    how: Callable[..., nn.Module] = staticmethod(parametrizations.weight_norm)

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.linear = type(self).how(self.linear)


class Orthogonal(Parametrized):
    how = staticmethod(parametrizations.orthogonal)


class Spectral(Parametrized):
    how = staticmethod(parametrizations.spectral_norm)


class OldSpectral(Parametrized):
    how = staticmethod(nn.utils.spectral_norm)


class Cached(Parametrized):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            return super().forward(super().forward(x))


class Weights(nn.Module):
    """Parameters of odd shapes: without a dimension, without elements, not contiguous, in a list."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.empty(0, width))
        self.turned = nn.Parameter(torch.rand(width, width).t())
        self.cut = nn.Parameter(torch.rand(2, width, 3)[..., 1])
        self.many = nn.ParameterList([nn.Parameter(torch.rand(width)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x @ self.turned).tanh() * self.scale + self.empty.sum(0) + self.cut.sum(0)
        return x + torch.tanh(y * self.many[0] + self.many[-1])


class WeightViews(nn.Module):
    """Reads its weight by views, and keeps one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2, width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.weight.unbind(0)
        self.kept = a.t()
        return x + torch.tanh(x @ self.kept + x @ b.detach())


class Moments(nn.Module):
    """Batch norm, in any kind."""

    def __init__(self, width: int, **settings: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, **settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(x.flatten(0, 1)).view_as(x)
        return y


class Buffered(nn.Module):
    """A mean of what it has seen: written in place, put in another's place, or counted."""

    def __init__(self, width: int, *, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=how != "count")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = x.detach().mean((0, 1))
        if self.how == "replaced":
            self.mean = 0.9 * self.mean + 0.1 * seen
        elif self.how == "written":
            self.mean.lerp_(seen, 0.1)
        elif self.how == "at times" and x.shape[1] % 2:
            self.mean.add_(seen)
        self.calls += 1
        return x - self.mean / (1 + self.calls)


class Begun(nn.Module):
    """A buffer that the first forward makes, or a table in an attribute."""

    table: torch.Tensor | None

    def __init__(self, width: int, *, buffer: bool) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("table", None, persistent=False)
        else:
            self.table = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None or len(self.table) < x.shape[1]:
            self.table = torch.arange(x.shape[1]).cos()
        return x + self.table[: x.shape[1], None]


class Remembers(nn.Module):
    """Something that outlives the forward, and is no buffer."""

    def __init__(self, width: int, *, how: str) -> None:
        super().__init__()
        self.how = how
        self.calls = 0
        self.seen: list[torch.Tensor] = []
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.how == "generator":
            return x + 0.1 * torch.rand(x.shape, generator=self.generator)
        if self.how == "list":
            self.seen.append(x.detach().mean((0, 1)))
            return x + torch.stack(self.seen).mean(0)
        return x * (1 + 0.01 * self.calls)


class Table(nn.Module):
    """Looks up what it adds."""

    def __init__(self, width: int, **settings: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(width, width, **settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.table(x.detach().abs().argmax(-1))
        return x + y.tanh()


class Routed(nn.Module):
    """Two experts, each for the tokens that chose it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 2)
        self.experts = nn.ModuleList(Linear(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            at = (chosen == i).nonzero(as_tuple=True)
            if len(at[0]):
                y = y.index_put(at, expert(x[at]) * weight[at].unsqueeze(-1))
        return y


class Hooks(Linear):
    """Hooks of modules, and of a parameter."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.linear.register_forward_pre_hook(lambda m, args, kwargs: ((args[0] * 0.9,), kwargs), with_kwargs=True)
        self.linear.register_forward_hook(lambda m, args, output: output * 1.1)
        self.linear.register_full_backward_hook(lambda m, inward, outward: tuple(g * 0.5 for g in inward))
        self.linear.weight.register_hook(lambda grad: grad * 2)


class Functional(Linear):
    """Its linear layer with other weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = {name: p * 0.9 for name, p in self.linear.named_parameters()}
        y: torch.Tensor = torch.func.functional_call(self.linear, weights, (x,))
        return x + y.tanh()


class Derivative(Linear):
    """Gradients by torch.func, or by autograd with a graph."""

    by_torch_func = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def energy(t: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.linear(t)
            return y.sin().sum()

        if self.by_torch_func:
            return x + 0.1 * torch.func.grad(energy)(x)
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            (found,) = torch.autograd.grad(energy(at), at, create_graph=True)
        return x + 0.1 * found


class TorchDerivative(Derivative):
    by_torch_func = True


class Mapped(Linear):
    """Its linear layer for each row by itself, by torch.func, which clips its weights to a bound that is far off."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def one(row: torch.Tensor) -> torch.Tensor:
            self.linear.bias.data.clamp_(-100.0, 100.0)
            y: torch.Tensor = self.linear(row)
            return y.tanh()

        return x + torch.vmap(one)(x)


class ByHand(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Product.apply(x, self.linear.weight)
        return x + y.tanh()


class Reversible(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = RunsAgain.apply(x, self.linear, torch.zeros((), requires_grad=True))
        return x + y.tanh()


class Adapted(Linear):
    """A frozen layer with an adapter of low rank."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(width, 1, bias=False), nn.Linear(1, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x) + self.up(functional.dropout(self.down(x), 0.1, self.training))
        return x + y.tanh()


class Registers(nn.Module):
    """A buffer that the first forward registers."""

    def __init__(self, width: int) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.full((), 0.9), persistent=False)
        return x * self.scale


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.unit = nn.GRU(width, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.unit(x)[0]
        return x + y


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.unit = nn.TransformerEncoderLayer(width, 1, 2 * width, dropout=0.1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.unit(x)
        return y


class Mixed(nn.Module):
    """A parameter of another dtype."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).float()


class Typed(nn.Module):
    """A linear layer in another dtype, into which and out of which the numbers are cast."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x.to(self.linear.weight.dtype))
        return x + y.to(x.dtype).tanh()


class Special(nn.Parameter):
    """A parameter of a class of its own."""


class WithSpecial(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = Special(torch.rand(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


PARTS: dict[str, Callable[[int], nn.Module]] = {
    **{name: (lambda width, name=name: Of(name)) for name in FUNCTIONS},
    "linear": Linear,
    "only linear": OnlyLinear,
    "dropout": Dropped,
    "dropout in place": DroppedInPlace,
    "eval and train": Switching,
    "frozen": Frozen,
    "half frozen": HalfFrozen,
    "unreached": Unreached,
    "sometimes reached": SometimesReached,
    "linear twice": Twice,
    "no_grad": WithoutGradients,
    "dropout in a reentrant checkpoint": Checkpointed,
    "dropout in a checkpoint": CheckpointedOtherwise,
    "weight_norm": Parametrized,
    "orthogonal": Orthogonal,
    "spectral_norm": Spectral,
    "spectral_norm of old": OldSpectral,
    "cached parametrization": Cached,
    "odd weights": Weights,
    "views of weights": WeightViews,
    "layer norm": nn.LayerNorm,
    "batch norm": Moments,
    "batch norm, cumulative": partial(Moments, momentum=None),
    "batch norm, without statistics": partial(Moments, track_running_stats=False),
    "buffer replaced": partial(Buffered, how="replaced"),
    "buffer written": partial(Buffered, how="written"),
    "buffer at times": partial(Buffered, how="at times"),
    "buffer of a count": partial(Buffered, how="count"),
    "buffer that begins": partial(Begun, buffer=True),
    "table": partial(Begun, buffer=False),
    "a count": partial(Remembers, how="count"),
    "a list": partial(Remembers, how="list"),
    "own generator": partial(Remembers, how="generator"),
    "lookup": Table,
    "lookup, sparse": partial(Table, sparse=True),
    "lookup, padded": partial(Table, padding_idx=0),
    "lookup, bounded": partial(Table, max_norm=0.5),
    "experts": Routed,
    "hooks": Hooks,
    "functional_call": Functional,
    "derivative of weights": Derivative,
    "derivative of weights by torch.func": TorchDerivative,
    "vmap of weights": Mapped,
    "by hand": ByHand,
    "runs again": Reversible,
    "adapter": Adapted,
    "registers a buffer": Registers,
    "GRU": Recurrent,
    "attention": Attention,
    "mixed bf16": partial(Mixed, dtype=torch.bfloat16),
    "mixed double": partial(Mixed, dtype=torch.float64),
    "bf16 linear": partial(Typed, dtype=torch.bfloat16),
    "double linear": partial(Typed, dtype=torch.float64),
    "own class of parameter": WithSpecial,
}
