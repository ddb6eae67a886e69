"""What blocks take and return besides tensors: what can be looked into is trained, what cannot is refused by name."""

import enum
import functools
from collections import deque
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from tests.stacks import WIDTH, Layer, Run, Stack, assert_exact, refused, stack
from torch import nn

from penstock.tape import opaque

pytestmark = pytest.mark.usefixtures("one_thread")


class Plain:
    """Of no kind that is known."""

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
    if isinstance(held, (dict, MappingProxyType)):
        return take(held["hidden"])
    return take(next(iter(held)))


HOLDERS: dict[str, Any] = {
    "Plain": Plain,
    "Slotted": Slotted,
    "SimpleNamespace": lambda x: SimpleNamespace(hidden=x),
    "set": lambda x: {x},
    "deque": lambda x: deque([x]),
    "mappingproxy": lambda x: MappingProxyType({"hidden": x}),
    "partial": lambda x: functools.partial(torch.clone, x),
    "function": lambda x: lambda: x,
    "generator": lambda x: (y for y in [x]),
    "MoreThanAList": more_than_a_list,
}
"""By the name of the class that the message has."""
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
    assert_exact(stack(TakesAnything, run_anything))


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
