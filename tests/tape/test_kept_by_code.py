"""Tensors that a model keeps with functions, classes and modules of its own code, and reads again behind blocks."""

import collections
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from tests.stacks import Layer, assert_exact, stack
from tests.tape_reference import horizontal, vertical, with_graphs

pytestmark = pytest.mark.usefixtures("one_thread")

Run = Callable[[Any, torch.Tensor], torch.Tensor]

state: Any = types.ModuleType("state_of_a_model")
sys.modules[state.__name__] = state
local = threading.local()
stacked: list[torch.Tensor] = []


def through(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


class Settings:
    """Attributes of the class itself, of which no instance is made."""

    kept: ClassVar[Any] = None
    stack: ClassVar[list[torch.Tensor]] = []

    @classmethod
    def push(cls, x: torch.Tensor) -> None:
        cls.stack.append(x)

    @classmethod
    def pop(cls) -> torch.Tensor:
        return cls.stack.pop()


class Entered:
    """A context manager that says which of it was entered last."""

    last: ClassVar[Any] = None

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __enter__(self) -> None:
        self.before, Entered.last = Entered.last, self

    def __exit__(self, *_: object) -> None:
        Entered.last = self.before


class Single:
    """The one object of its class."""

    one: ClassVar[Any] = None

    @classmethod
    def get(cls) -> Any:
        cls.one = cls.one or cls()
        return cls.one


def set_settings(x: torch.Tensor) -> None:
    Settings.kept = x


def push(x: torch.Tensor) -> None:
    stacked.append(x)


def pop() -> torch.Tensor:
    return stacked.pop()


def of_a_class(model: Any, x: torch.Tensor) -> torch.Tensor:
    Settings.kept = x.sin()
    return through(model, x) + Settings.kept


def of_a_class_by_a_function(model: Any, x: torch.Tensor) -> torch.Tensor:
    set_settings(x.sin())
    return through(model, x) + Settings.kept


def of_a_class_in_a_list(model: Any, x: torch.Tensor) -> torch.Tensor:
    Settings.push(x.sin())
    return through(model, x) + Settings.pop()


def of_the_models_class(model: Any, x: torch.Tensor) -> torch.Tensor:
    type(model).kept = x.sin()
    y = through(model, x) + model.kept
    del type(model).kept
    return y


def of_one_object(model: Any, x: torch.Tensor) -> torch.Tensor:
    Single.get().kept = x.sin()
    return through(model, x) + Single.get().kept


def of_what_was_entered(model: Any, x: torch.Tensor) -> torch.Tensor:
    with Entered(x.sin()):
        x = through(model, x)
        return x + Entered.last.x


def of_a_thread(model: Any, x: torch.Tensor) -> torch.Tensor:
    local.kept = x.sin()
    return through(model, x) + local.kept


def of_a_module(model: Any, x: torch.Tensor) -> torch.Tensor:
    state.kept = x.sin()
    return through(model, x) + state.kept


def of_a_function(model: Any, x: torch.Tensor) -> torch.Tensor:
    function: Any = set_settings
    function.kept = x.sin()
    return through(model, x) + function.kept


def of_a_default(model: Any, x: torch.Tensor, kept: dict[str, torch.Tensor] = {}) -> torch.Tensor:  # noqa: B006
    kept["x"] = x.sin()
    return through(model, x) + kept["x"]


def of_another_function(model: Any, x: torch.Tensor) -> torch.Tensor:
    push(x.sin())
    return through(model, x) + pop()


KEPT: tuple[Run, ...] = (
    *(of_a_class, of_a_class_by_a_function, of_a_class_in_a_list, of_the_models_class, of_one_object),
    *(of_what_was_entered, of_a_thread, of_a_module, of_a_function, of_a_default, of_another_function),
)


@pytest.mark.parametrize("run", KEPT, ids=lambda run: run.__name__)
def test_what_code_of_a_models_own_keeps_is_each_micro_batchs(run: Run) -> None:
    assert_exact(stack(run=run), orders=(vertical, horizontal, with_graphs))


class Made(collections.namedtuple("Made", "hidden twice")):
    def __new__(cls, hidden: torch.Tensor) -> "Made":
        made = super().__new__(cls, hidden, hidden * 2)
        made.factor = 0.5
        return made

    factor: float


class MadeLayer(Layer):
    def forward(self, made: Made) -> Made:  # type: ignore[override]
        return Made(super().forward(made.hidden + made.twice) * made.factor)


def test_tuples_of_a_class_of_ones_own_keep_what_it_is_made_of() -> None:
    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        found = through(model, Made(x))  # type: ignore[arg-type]
        return found.hidden + found.twice  # type: ignore[attr-defined,no-any-return]

    assert_exact(stack(MadeLayer, run), orders=(vertical, horizontal, with_graphs))
