"""What blocks take and return besides tensors: what can be looked into is trained, what cannot is refused by name."""

import enum
import functools
import importlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from penstock.compat.torch import new_wrapper
from penstock.tape import opaque
from penstock.tape.handed import Calls
from penstock.tape.modes import Modes, TrainingFlags
from tests.stacks import WIDTH, Layer, Own, Run, Stack, assert_exact, refused, stack

pytestmark = pytest.mark.usefixtures("one_thread")


class Plain:
    """A container of no kind that is known."""

    def __init__(self, hidden: Any) -> None:
        self.hidden = hidden


class Slotted:
    __slots__ = ("hidden", "other")

    def __init__(self, hidden: Any) -> None:
        self.hidden = hidden


class Named(NamedTuple):
    hidden: Any


@dataclass(frozen=True, slots=True)
class Record:
    hidden: Any


class MoreThanAList(list[Any]):
    hidden: Any


class Attention(enum.Enum):
    CAUSAL = "causal"


class Awkward:
    """A configuration whose attributes may not be asked for."""

    def __init__(self) -> None:
        self.size = 4

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is ambiguous")


def more_than_a_list(hidden: Any) -> MoreThanAList:
    held = MoreThanAList()
    held.hidden = hidden
    return held


def take(held: Any) -> torch.Tensor:
    """The tensor, out of whatever it is in."""
    if isinstance(held, torch.Tensor):
        return held
    if callable(held):
        return take(held())
    if hasattr(held, "hidden"):
        return take(held.hidden)
    if isinstance(held, Mapping):
        return take(held["hidden"])
    return take(next(iter(held)))


HOLDERS: dict[str, Any] = {
    "Plain": Plain,
    "Slotted": Slotted,
    "SimpleNamespace": lambda x: SimpleNamespace(hidden=x),
    "set": lambda x: {x},
    "deque": lambda x: deque([x]),
    "mappingproxy": lambda x: MappingProxyType({"hidden": x}),
    "Own": lambda x: Own(hidden=x),
    "partial": lambda x: functools.partial(torch.clone, x),
    "function": lambda x: lambda: x,
    "generator": lambda x: (y for y in [x]),
    "MoreThanAList": more_than_a_list,
}
"""Kinds of containers that are refused, by the name of the class that the message has."""
KNOWN: dict[str, Any] = {
    "tuple": lambda x: (x,),
    "dict": lambda x: {"hidden": [x]},
    "named tuple": Named,
    "record": Record,
    "records in records": lambda x: Record(hidden=Named(hidden=x)),
}


def returning(hold: Any) -> type[nn.Module]:
    class Returning(Layer):
        def forward(self, x: torch.Tensor) -> Any:
            return hold(super().forward(x))

    return Returning


def taking(hold: Any) -> type[nn.Module]:
    class Taking(Layer):
        def forward(self, x: Any) -> torch.Tensor:
            return super().forward(take(x))

    return Taking


def run_returning(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = take(layer(x))
    return x


def run_taking(hold: Any) -> Run:
    def run(model: Stack, x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = layer(hold(x))
        return x

    return run


@pytest.mark.parametrize("name", KNOWN)
def test_what_can_be_looked_into_is_trained(name: str) -> None:
    assert_exact(stack(returning(KNOWN[name]), run_returning))
    assert_exact(stack(taking(KNOWN[name]), run_taking(KNOWN[name])))


@pytest.mark.parametrize("name", HOLDERS)
def test_what_cannot_is_refused_by_name(name: str) -> None:
    message = refused(stack(returning(HOLDERS[name]), run_returning))
    assert "returns (or leaves in its arguments) a tensor inside of a " in message
    assert name in message
    message = refused(stack(taking(HOLDERS[name]), run_taking(HOLDERS[name])))
    assert "is handed a tensor with a gradient inside of a " in message
    assert name in message


class Leaves(Layer):
    """Leaves its output in an object that it is handed."""

    def forward(self, x: torch.Tensor, state: Plain) -> torch.Tensor:
        state.hidden = super().forward(x)
        return x * 2


def run_leaving(model: Stack, x: torch.Tensor) -> torch.Tensor:
    state = Plain(None)
    for layer in model.layers:
        x = layer(x, state)
    return x + state.hidden


def test_what_a_block_leaves_in_an_argument_is_refused() -> None:
    assert "(or leaves in its arguments) a tensor inside of a" in refused(stack(Leaves, run_leaving))


class TakesAnything(Layer):
    def forward(self, x: torch.Tensor, *anything: Any, **more: Any) -> Any:
        return super().forward(x), anything


def run_anything(model: Stack, x: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(x.shape[1])
    loop: list[Any] = [Plain(positions)]
    loop.append(loop)
    anything = (None, Awkward(), Attention.CAUSAL, torch.float32, x.device, torch.relu, model.head, len, Stack, loop)
    for layer in model.layers:
        x, _ = layer(x, *anything, mask=Plain(positions > 2), call=functools.partial(torch.add, positions))
    return x


def test_objects_without_gradients_are_handed_on() -> None:
    importlib.import_module("transformers.cache_utils")  # from then on caches are looked for in what blocks are handed
    assert_exact(stack(TakesAnything, run_anything))


class Shifted(Layer):
    def forward(self, x: torch.Tensor, of_object: Plain, shift: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + of_object.hidden + shift


def run_shifted(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x, Plain(SHIFTS[0]), SHIFTS[1])
    return x


with torch.inference_mode():
    SHIFTS = (torch.full((WIDTH,), 0.25), torch.ones(WIDTH))


def test_tensors_that_were_made_in_inference_mode_are_handed_on() -> None:
    assert_exact(stack(Shifted, run_shifted))


class Frozen(nn.Module):
    """Has nothing that trains, so that what it returns has no gradient to lose."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> Plain:
        return Plain(self.linear(x))


def run_frozen(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = x + layer(x.detach()).hidden
    with torch.no_grad():
        return x


def test_where_no_gradient_is_wanted_nothing_is_refused() -> None:
    assert_exact(stack(Frozen, run_frozen))


def test_a_search_ends() -> None:
    deep: Any = torch.ones(1)
    for _ in range(50_000):
        deep = Plain(deep)
    assert not opaque.hidden(deep)
    while isinstance(deep, Plain):  # or it would be freed by recursion
        deep = deep.hidden


# -- by other ways than arguments and results ---------------------------------------------------------------------

HELD: dict[str, Any] = {}


class ReadsModel(Layer):
    """Reads what the model's forward has left on it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def set_attributes(model: Stack, x: torch.Tensor) -> torch.Tensor:
    scale = 1 + x.mean(-1, keepdim=True)
    for layer in model.layers:
        layer.scale = scale
        x = layer(x)
    return x


def set_masks(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        layer.scale = (x.detach() > 0).to(x.dtype)
        x = layer(x)
    return x


class ToGlobal(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        HELD.setdefault("penalties", []).append(y.square().mean())
        return y


def read_global(model: Stack, x: torch.Tensor) -> torch.Tensor:
    HELD.clear()
    for layer in model.layers:
        x = layer(x)
    return x + sum(HELD["penalties"])


def read_hooked(model: Stack, x: torch.Tensor) -> torch.Tensor:
    """Activations that hooks take out of blocks, as for distillation."""
    taken: list[torch.Tensor] = []
    hooks = [layer.linear.register_forward_hook(lambda *args: taken.append(args[2])) for layer in model.layers]
    for layer in model.layers:
        x = layer(x)
    for hook in hooks:
        hook.remove()
    return x + taken[0]


class FromBelow(Layer):
    """Leaves something for the next block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = HELD.get("hidden")
        HELD["hidden"] = super().forward(x)
        return x if before is None else x + before


def run_from_below(model: Stack, x: torch.Tensor) -> torch.Tensor:
    HELD.clear()
    for layer in model.layers:
        x = layer(x)
    return x + model.layers[0].linear.weight.sum()


class Penalised(Layer):
    """A penalty on weights, which does not depend on the micro-batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        HELD.setdefault("penalties", []).append(self.linear.weight.t().square().mean())
        return super().forward(x)


class Counts(Layer):
    """A buffer with what it has seen of the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.copy_(x.detach().mean((0, 1)))
        return super().forward(x)


def read_counts(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x)
    return x + model.layers[0].seen


class Writes(Layer):
    """Writes to a tensor that the model's own code has made for it, and holds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "sum" in HELD:
            HELD.pop("sum").add_(self.linear(x).mean())
        return super().forward(x)


def read_written(model: Stack, x: torch.Tensor) -> torch.Tensor:
    total = HELD["sum"] = x.new_zeros(())
    for layer in model.layers:
        x = layer(x)
    return x + total


def weight_norm(model: Any) -> None:
    """Weight normalisation of old: hooks in front of a block make its weight, outside of it."""
    model.layers[1] = nn.Linear(WIDTH, WIDTH)
    torch.nn.utils.weight_norm(model.layers[1])


def keep(model: Any) -> None:
    pass


SMUGGLED: dict[str, tuple[type[nn.Module], Run | None, Any, str]] = {
    "an attribute with a gradient": (ReadsModel, set_attributes, keep, "'layers.0' reads a tensor of shape (2, 12, 1)"),
    "an attribute of the micro-batch": (ReadsModel, set_masks, keep, "'layers.0' reads a tensor of shape (2, 12, 8)"),
    "a global": (ToGlobal, read_global, keep, "that block 'layers.0' made, not returned"),
    "a hook within a block": (Layer, read_hooked, keep, "that block 'layers.0' made, not returned"),
    "from block to block": (FromBelow, run_from_below, keep, "block 'layers.1' reads a tensor of shape (2, 12, 8)"),
    "a penalty on weights": (Penalised, read_global, keep, "that block 'layers.0' made, not returned"),
    "a buffer": (Counts, read_counts, keep, "reads a tensor of shape (8,) that block 'layers.0' has written to before"),
    "a tensor of the model's own": (
        Writes,
        read_written,
        keep,
        "shape () that block 'layers.0' has written to",
    ),
    "a weight made in front of a block": (Layer, None, weight_norm, "'layers.1' reads a tensor of shape (8, 8)"),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", SMUGGLED)
def test_what_is_smuggled_is_refused(name: str) -> None:
    layer, run, change, message = SMUGGLED[name]
    assert message in refused(stack(layer, run), change)


class Cached(Layer):
    """Positions in a cache that all blocks share: the same for every micro-batch that is as long."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if length not in HELD:
            HELD[length] = torch.arange(length, dtype=x.dtype).cos().unsqueeze(-1) + torch.zeros_like(x[0, 0])
        return super().forward(x) * HELD[length]


def run_cached(model: Stack, x: torch.Tensor) -> torch.Tensor:
    HELD.clear()
    for layer in model.layers:
        x = layer(x)
    return x + HELD[x.shape[1]]


class Wraps(torch.Tensor):
    """Has no memory of its own, but another tensor, which ops are handed in its place. So has what they make of it
    alone."""

    within: torch.Tensor

    @classmethod
    def around(cls, tensor: torch.Tensor) -> "Wraps":
        made: Wraps = new_wrapper(cls, tensor, tensor.device)
        made.within = tensor
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*(a.within if isinstance(a, cls) else a for a in args), **(kwargs or {}))
        return cls.around(found) if all(isinstance(a, cls) for a in args if isinstance(a, torch.Tensor)) else found


class TakesFirst(Layer):
    def forward(self, x: torch.Tensor, many: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + many[:WIDTH]


def run_wrapped(model: Stack, x: torch.Tensor) -> torch.Tensor:
    shift = Wraps.around(torch.full((WIDTH,), 0.25, dtype=x.dtype))
    for layer in model.layers:
        x = layer(x, shift)
    return x


def run_expanded(model: Stack, x: torch.Tensor) -> torch.Tensor:
    many = torch.full((1,), 0.25, dtype=x.dtype).expand(1 << 45)
    for layer in model.layers:
        x = layer(x, many)
    return x


def run_column(model: Stack, x: torch.Tensor) -> torch.Tensor:
    column = torch.arange(8, dtype=x.dtype).view(2, 4)[:1, 1]  # of one number, whose stride is 4
    for layer in model.layers:
        x = layer(x, column)
    return x


@pytest.mark.parametrize("run", [run_wrapped, run_expanded, run_column])
def test_tensors_whose_memory_is_not_as_large_as_they_are_are_handed_on(run: Run) -> None:
    assert_exact(stack(TakesFirst, run))


class TakesSparse(Layer):
    def forward(self, x: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + (graph @ x[0]).unsqueeze(0)


def run_sparse(model: Stack, x: torch.Tensor) -> torch.Tensor:
    graph = torch.eye(x.shape[1], dtype=x.dtype).to_sparse()
    for layer in model.layers:
        x = layer(x, graph)
    return x


def run_compressed(model: Stack, x: torch.Tensor) -> torch.Tensor:
    graph = torch.eye(x.shape[1], dtype=x.dtype).to_sparse_csr()
    for layer in model.layers:
        x = layer(x, graph)
    return x


def run_nested(model: Stack, x: torch.Tensor) -> torch.Tensor:
    nested = torch.nested.as_nested_tensor(list(x), layout=torch.jagged)
    for layer in model.layers:
        nested = layer(nested)
    return nested.to_padded_tensor(0.0)


def test_sparse_tensors_are_handed_on_and_nested_ones_are_refused() -> None:
    assert_exact(stack(TakesSparse, run_sparse))
    assert_exact(stack(TakesSparse, run_compressed))
    assert "is handed a nested tensor: pad it" in refused(stack(Layer, run_nested))


def test_what_no_micro_batch_changes_may_be_shared() -> None:
    assert_exact(stack(Cached, run_cached))
    assert_exact(stack(Counts))


def test_a_tensor_in_the_place_of_one_that_is_gone_is_another_one() -> None:
    """Memory that is free is soon that of another tensor, which other ranks have to be sent as well."""
    calls, modes, own = Calls(), Modes.capture(("cpu",), TrainingFlags([])), torch.ones(2)
    for number in range(20):
        other = torch.tensor([float(number)])
        calls.see(number, "a", ((own, other), {}), modes, before=own, born={id(own): number, id(other): -1})
        del other
    assert [calls.calls[number].shares for number in range(20)] == [(number,) for number in range(20)]
