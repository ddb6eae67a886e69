"""Random models: blocks of random parts, held, called and changed in random ways.

A ``Spec`` is all of a model in words, so that one can be printed, made again and shrunk: ``Spec(...).build()``. Names
are those of the tables in ``tests.any_parts`` (with ``any_functions``), ``any_calls`` and ``any_ways``.
"""

import dataclasses
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tests.any_calls import CALLS, Flow, Inside, Record
from tests.any_parts import PARTS
from tests.any_ways import AROUND, CHANGES, HOLDERS, LOSSES, WAYS, WRAPPED

WORDS = 11


class Block(nn.Module):
    """Parts, one after the other. ``inside``: how it is called and returns."""

    def __init__(self, parts: tuple[str, ...], width: int, inside: "Inside") -> None:
        super().__init__()
        self.inside = inside
        self.parts = tuple(f"p{i}" for i in range(len(parts)))
        for own, name in zip(self.parts, parts, strict=True):
            self.add_module(own, PARTS[name](width))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.parts:
            x = getattr(self, name)(x)
        return x

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inside(self.inner, *args, **kwargs)


class AnyModel(nn.Module):
    def __init__(self, spec: "Spec") -> None:
        super().__init__()
        self.spec, self.width = spec, spec.width
        inside, _ = CALLS[spec.call]
        self.embed = nn.Embedding(WORDS, spec.width)
        self.positions = nn.Parameter(torch.rand(9, spec.width))
        self.bias = nn.Parameter(torch.rand(spec.width))
        self.register_buffer("running", torch.zeros(spec.width))
        blocks = [Block(parts, spec.width, inside) for parts in spec.blocks]
        HOLDERS[spec.holder](self, list(blocks))
        self.places = [where for where, _ in spec.between]
        for i, (_, name) in enumerate(spec.between):
            self.add_module(f"between{i}", PARTS[name](spec.width))
        self.head = nn.Linear(spec.width, WORDS)
        for change in spec.changes:
            CHANGES[change](self)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(m for m in self.modules() if isinstance(m, Block))

    def at(self, where: int, x: torch.Tensor) -> torch.Tensor:
        for i, place in enumerate(self.places):
            if place == where:
                x = getattr(self, f"between{i}")(x)
        return x

    def call(self, i: int, x: torch.Tensor, flow: Flow) -> torch.Tensor:
        spec = self.spec
        with AROUND[spec.around](self, i):
            x = WRAPPED[spec.wrapped](CALLS[spec.call][1])(self.blocks[i], x, flow)
        return self.at(i, x)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embed(tokens)
        extra = self.positions[: tokens.shape[1]][None] + self.bias
        total = torch.zeros((), dtype=x.dtype)
        flow = Flow(extra=extra, mask=tokens != 0, total=total, shared={"module": Record(self.bias)})
        x = WAYS[self.spec.way](self, self.at(-1, x + extra), flow)
        x = self.at(99, x.tanh()) * self.bias
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())
        self.loss = loss + 0.1 * flow.total
        return LOSSES[self.spec.loss](self.loss)


def loss_of(model: Any, micro_batch: Mapping[str, Any]) -> torch.Tensor:
    model.features = []
    found = model(micro_batch["tokens"])
    match found:
        case None:
            found = model.loss
        case Record():
            found = found.hidden
        case dict():
            found = found["loss"]
        case tuple():
            found = found[0]
    more = [y.square().mean() * 0.1 for y in model.features]
    model.features = []
    loss: torch.Tensor = found + sum(more)
    return loss


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A model and its data. ``between``: parts of the model's own code, -1 before the blocks, 99 behind them, and
    else behind the block of that number; ``lengths``: of the micro-batches of each step."""

    width: int = 3
    blocks: tuple[tuple[str, ...], ...] = (("linear",), ("linear",))
    holder: str = "list"
    call: str = "plain"
    way: str = "in order"
    around: str = "nothing"
    wrapped: str = "nothing"
    between: tuple[tuple[int, str], ...] = ()
    changes: tuple[str, ...] = ()
    loss: str = "tensor"
    lengths: tuple[tuple[int, ...], ...] = ((4, 3), (4, 3))

    def __str__(self) -> str:
        """What differs from the plainest model."""
        plainest = Spec()
        said = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return f"Spec({', '.join(f'{k}={v!r}' for k, v in said.items() if v != getattr(plainest, k))})"

    def build(self) -> AnyModel:
        torch.manual_seed(0)
        return AnyModel(self)

    def data(self) -> list[list[dict[str, torch.Tensor]]]:
        """The micro-batches of each step."""
        drawn = torch.Generator().manual_seed(1)
        return [[{"tokens": torch.randint(WORDS, (2, n), generator=drawn)} for n in step] for step in self.lengths]

    def names(self) -> set[str]:
        """All that is in it, by name."""
        parts = {name for block in self.blocks for name in block} | {name for _, name in self.between}
        return parts | {*self.changes, self.holder, self.call, self.way, self.around, self.wrapped, self.loss}

    def rounds(self) -> bool:
        """True if it rounds so roughly that the order of sums shows."""
        return bool(self.names() & {"bf16", "bf16 between", "autocast", "autocast for one", "in autocast"})

    def simpler(self) -> Iterator["Spec"]:
        """Models with one peculiarity less."""
        plainest = Spec()
        for one in dataclasses.fields(self):
            value, usual = getattr(self, one.name), getattr(plainest, one.name)
            if value != usual:
                yield replace(self, **{one.name: usual})
                if one.name in ("between", "changes", "lengths", "blocks") and len(value) > 1:
                    yield from (replace(self, **{one.name: (*value[:i], *value[i + 1 :])}) for i in range(len(value)))
        for b, parts in enumerate(self.blocks):
            for i in range(len(parts)):
                fewer = (*parts[:i], *parts[i + 1 :])
                yield replace(self, blocks=(*self.blocks[:b], fewer, *self.blocks[b + 1 :]))
        if len(self.lengths) > 1 and len(self.lengths[0]) > 1:
            yield replace(self, lengths=tuple(step[:-1] for step in self.lengths))


REFUSED = {
    *("own class of parameter", "lookup, bounded", "a derivative of the input", "own generator", "a list", "a count"),
    *("asks for the grad mode", "asks for requires_grad", "asks for a leaf", "relu_", "masked_fill_", "index_put_"),
    *(
        "data in place",
        "turned in place",
        "view in place",
        "part in place",
        "in place, of the input",
        "detach_",
        "add_",
        "clamp_ without gradients",
    ),
    *("attributes", "generator", "bag", "attribute", "halves, written", "input written after"),
    *("inference_mode", "save_on_cpu", "checkpoint", "reentrant checkpoint", "vmap", "layer drop", "by length"),
}
"""What mostly cannot be trained, or not by torch, either: it is drawn less often."""


def any_spec(drawn: random.Random) -> Spec:
    """A model; of each kind of peculiarity it mostly has the usual one, or there would be few that can be trained."""

    def one_of(table: Mapping[str, Any]) -> str:
        return drawn.choices([*table], [1 if name in REFUSED else 8 for name in table])[0]

    def mostly(usual: str, table: Mapping[str, Any], chance: float) -> str:
        return one_of(table) if drawn.random() < chance else usual

    def parts(most: int) -> tuple[str, ...]:
        return tuple(one_of(PARTS) for _ in range(drawn.randint(0, most)))

    count = drawn.choice((2, 2, 3, 4))
    first = (*parts(1), "linear", *parts(2))
    alike = drawn.random() < 0.6
    micro_batches = drawn.choice((1, 2, 2, 3, 4))
    return Spec(
        width=drawn.choice((1, 2, 3, 8, 70)),
        blocks=tuple(first if alike else (*parts(1), "linear", *parts(2)) for _ in range(count)),
        holder=mostly("list", HOLDERS, 0.4),
        call=mostly("plain", CALLS, 0.6),
        way=mostly("in order", WAYS, 0.5),
        around=mostly("nothing", AROUND, 0.15),
        wrapped=mostly("nothing", WRAPPED, 0.05),
        between=tuple((drawn.choice((-1, 0, 1, 99)), one_of(PARTS)) for _ in range(drawn.choice((0, 0, 1, 2)))),
        changes=tuple(drawn.sample(list(CHANGES), drawn.choice((0, 0, 1, 2)))),
        loss=mostly("tensor", LOSSES, 0.3),
        lengths=tuple(
            tuple(drawn.choice((2, 3, 4, 5)) for _ in range(micro_batches)) for _ in range(drawn.choice((1, 2, 3)))
        ),
    )
