"""Tiny models for one peculiarity each: three layers between an embedding and a head, in float64 against a plain loop.

A *change* is made to the model before the tape has it, and to the copy that the plain loop trains.
"""

import copy
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import ModelError
from tests.models import MODELS, VOCABULARY, Case, MicroBatch, draw_tokens
from tests.tape_reference import Bench, Gradients, Order, relative_error, vertical

WIDTH = 8
WEIGHTS = (0.2, 0.3, 0.5)
LENGTHS = (12, 8, 10)

Run = Callable[[Any, torch.Tensor], Any]
Change = Callable[[Any], object]


class Own(MutableMapping[str, Any]):
    """A cache of no kind that is known; ``copy.copy`` of it has the same entries, not entries of its own."""

    def __init__(self, **entries: Any) -> None:
        self.entries = entries

    def __getitem__(self, key: str) -> Any:
        return self.entries[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.entries[key] = value

    def __delitem__(self, key: str) -> None:
        del self.entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Stack(nn.Module):
    """Three layers between an embedding and a head. ``run`` is what the model's forward does with the layers."""

    def __init__(self, layer: type[nn.Module] = Layer, run: Run | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.run = run

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if self.run is not None:
            x = self.run(self, x)
        else:
            for layer in self.layers:
                x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def tokens_only(generator: torch.Generator, rows: int, length: int) -> MicroBatch:
    return {"tokens": draw_tokens(generator, rows, length)}


def stack(layer: type[nn.Module] = Layer, run: Run | None = None) -> Case:
    return of(lambda: Stack(layer, run))


def of(build: Callable[[], nn.Module]) -> Case:
    """A case of any model that takes tokens and returns a loss."""
    return Case(build=build, micro_batch=tokens_only, blocks=3, loss_fn=lambda model, mb: model(**mb))


def unequal(case: Case, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[MicroBatch]:
    return [case.micro_batches(1, seed=seed + m, length=length)[0] for m, length in enumerate(lengths)]


def beside_vertical(
    case: Case, order: Order, *, splits: bool = False, stays: bool = False
) -> tuple[Bench, Gradients, Gradients]:
    """The gradients of a vertical step, and of one in another order, whose losses are the same; weights leave between
    any two stages. ``stays``: where they stay, the other order has the same bits, too. ``splits``: as of ``Bench``."""
    bench = Bench(case, case.model(), moving=True, splits=splits)
    micro_batches = case.micro_batches(3) if case in MODELS.values() else unequal(case)
    bench.probe(micro_batches[0])
    (losses, usual), (others, found) = (bench.step(micro_batches, WEIGHTS, each) for each in (vertical, order))
    assert losses == others
    if stays:
        bench.moving = False
        bench.load_all()
        others, staying = bench.step(micro_batches, WEIGHTS, order)
        assert losses == others
        assert_same_gradients(staying, usual)
    return bench, usual, found


def assert_same_gradients(found: Gradients, wanted: Gradients) -> None:
    """To the last bit, and none of what a weight that has left reads as."""
    assert found.keys() == wanted.keys()
    assert not [name for name, gradient in wanted.items() if not torch.equal(gradient, found[name])]
    assert not any(gradient.isnan().any() for gradient in found.values())


def assert_exact(
    case: Case, change: Change = lambda model: None, orders: Sequence[Order] = (vertical,)
) -> tuple[Gradients, Bench]:
    """The gradients of a step in each of the ``orders``, one after the other, with everything moving, are those of a
    plain loop, for the same parameters. Micro-batches are unequal. Those of the first step, and the bench."""
    model = case.model().double()
    plain = copy.deepcopy(model)
    for one in (model, plain):
        torch.manual_seed(1)  # what a change draws is the same for both
        change(one)
    bench = Bench(case, model, moving=True)
    bench.probe(unequal(case)[0])
    first: Gradients = {}
    for step, order in enumerate(orders):
        micro_batches = unequal(case, seed=10 * step)
        found = bench.step(micro_batches, WEIGHTS, order, step)[1]
        _, wanted = bench.plain_step(plain, micro_batches, WEIGHTS, step)
        assert relative_error(found, wanted) <= 1e-12, f"{order.__name__}, as step {step}"
        first = first or found
    return first, bench


def refused(case: Case, change: Change = lambda model: None) -> str:
    """The message of the ModelError with which a model is refused, in its first step at the latest."""
    with pytest.raises(ModelError) as caught:
        one_step(case, change)
    return str(caught.value)


def one_step(case: Case, change: Change = lambda model: None) -> None:
    model = case.model()
    change(model)
    bench = Bench(case, model)
    bench.probe(case.micro_batches(1)[0])
    bench.load_all()
    bench.step(case.micro_batches(2), [1.0, 1.0])
