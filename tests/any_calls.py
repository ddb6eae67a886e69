"""How a block of a random model is called and what it returns: ``CALLS[name]`` is what happens inside of it, around its
parts, and what the model's own code does outside.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn


@dataclass(kw_only=True)
class Flow:
    """What a forward has at hand besides its hidden states: tensors that blocks may be handed."""

    extra: torch.Tensor
    """[1, length, width], of a parameter of the model"""
    mask: torch.Tensor
    """bool [rows, length]"""
    total: torch.Tensor
    """a loss that blocks add to, without a dimension"""
    trail: list[Any] = field(default_factory=list)
    shared: dict[str, Any] = field(default_factory=dict)


@dataclass
class Record:
    hidden: torch.Tensor
    note: Any = None


class Bag:
    """An object of a class that nobody knows."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


Inner = Callable[[torch.Tensor], torch.Tensor]
Inside = Callable[..., Any]
Outside = Callable[[nn.Module, torch.Tensor, Flow], torch.Tensor]


def named(inner: Inner, *, hidden: torch.Tensor, mask: torch.Tensor, extra: Any = None, scale: int = 1) -> Any:
    return inner(hidden + (0 if extra is None else extra)).masked_fill(~mask.unsqueeze(-1), 0.0) * scale


def by_trail(inner: Inner, x: torch.Tensor, trail: list[Any]) -> torch.Tensor:
    y = inner(x + sum(t.mean() for t, _ in trail))
    trail.append((y * 0.5, len(trail)))
    return y


def by_shared(inner: Inner, x: torch.Tensor, shared: dict[str, Any]) -> None:
    shared["hidden"] = inner(x) + shared.get("sum", 0) * 0.1
    shared["sum"] = shared["hidden"].mean(-1, keepdim=True)


def out_of_shared(layer: nn.Module, x: torch.Tensor, flow: Flow) -> torch.Tensor:
    assert layer(x, flow.shared) is None
    found: torch.Tensor = flow.shared["hidden"]
    return found


def tuples(layer: nn.Module, x: torch.Tensor, flow: Flow) -> torch.Tensor:
    (y, flow.extra), none = layer((x, (flow.extra, None)))
    assert none is None
    return y


def totals(layer: nn.Module, x: torch.Tensor, flow: Flow) -> torch.Tensor:
    y, flow.total = layer(x, flow.total)
    return y


def places(layer: nn.Module, x: torch.Tensor, flow: Flow) -> torch.Tensor:
    y, flow.shared["place"] = layer(x, flow.shared.get("place"))
    return y


def by_place(inner: Inner, x: torch.Tensor, place: torch.Tensor | None) -> Any:
    y = inner(x if place is None else x + x.gather(1, place[:, None, None].expand(-1, 1, x.shape[-1])))
    return y, y.detach().sum(-1).argmax(-1)


def same_and_new(layer: nn.Module, x: torch.Tensor, flow: Flow) -> torch.Tensor:
    same, y = layer(x)
    return same * 0.5 + y


def by_masks(inner: Inner, x: torch.Tensor, masks: dict[str, Any]) -> torch.Tensor:
    return inner(x * masks["all"][0].unsqueeze(-1)) + masks["more"].hidden


def halves(layer: nn.Module, x: torch.Tensor, flow: Flow) -> torch.Tensor:
    a, b = layer(x)
    return torch.cat([a * 0.9, b + a.mean()], dim=1)


def written_halves(layer: nn.Module, x: torch.Tensor, flow: Flow) -> torch.Tensor:
    a, b = layer(x)
    a = a * 0.9
    a += b.mean()
    return torch.cat([a, b], dim=1)


def cut_in_two(inner: Inner, x: torch.Tensor) -> Any:
    return inner(x).split([1, x.shape[1] - 1], dim=1)


def leave(layer: Any, x: torch.Tensor, flow: Flow) -> torch.Tensor:
    """What the block left on itself."""
    y: torch.Tensor = layer(x)
    layer.left = y.square().mean()
    flow.total = flow.total + layer.left
    return y


def leaves_inside(inner: Any, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = inner(x)
    inner.__self__.left = y.square().mean()
    return y


def read_left(layer: Any, x: torch.Tensor, flow: Flow) -> torch.Tensor:
    y: torch.Tensor = layer(x)
    flow.total = flow.total + layer.left
    return y


def plain(layer: nn.Module, x: torch.Tensor, flow: Flow) -> torch.Tensor:
    y: torch.Tensor = layer(x)
    return y


class Named(NamedTuple):
    hidden: torch.Tensor
    number: int


class Tagged(torch.Tensor):
    """A subclass whose results are of it, too."""


def by_all(inner: Inner, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
    return inner(x + torch.stack([s.mean((1, 2)) for s in seen]).mean(0)[:, None, None] if seen else x)


def all_seen(layer: nn.Module, x: torch.Tensor, flow: Flow) -> torch.Tensor:
    flow.trail.append(x)
    y: torch.Tensor = layer(x, flow.trail)
    return y


def own_weight(inner: Any, x: torch.Tensor) -> Any:
    weights = list(inner.__self__.parameters())
    y = inner(x)
    return y, weights[0] if weights else None, [w.flatten()[:2] for w in weights]


def with_weights(layer: nn.Module, x: torch.Tensor, flow: Flow) -> torch.Tensor:
    y, weight, parts = layer(x)
    return y + sum(p.sum() for p in parts) * 0.1 + (0 if weight is None else weight.mean())


def popped(inner: Inner, d: dict[str, Any]) -> None:
    d["out"] = inner(d.pop("in"))
    d.pop("old", None)


def pops(layer: nn.Module, x: torch.Tensor, flow: Flow) -> torch.Tensor:
    own = {"in": x, "old": x * 2}
    layer(own)
    return own["out"]


def complex_numbers(layer: nn.Module, x: torch.Tensor, flow: Flow) -> torch.Tensor:
    y = layer(torch.complex(x, x * 0.5))
    return torch.view_as_real(y).sum(-1)


def thrown_away(layer: nn.Module, x: torch.Tensor, flow: Flow) -> torch.Tensor:
    """Of two results the second alone is used, of the last call the first."""
    return layer(x)[1]


def sparse(layer: nn.Module, x: torch.Tensor, flow: Flow) -> torch.Tensor:
    y: torch.Tensor = layer(x).to_dense()
    return y


def tagged(layer: nn.Module, x: torch.Tensor, flow: Flow) -> torch.Tensor:
    y: torch.Tensor = layer(x.as_subclass(Tagged))
    return y.as_subclass(torch.Tensor)


CALLS: dict[str, tuple[Inside, Outside]] = {
    "plain": (lambda inner, x: inner(x), plain),
    "named": (named, lambda layer, x, flow: layer(hidden=x, mask=flow.mask, scale=2)),
    "extra": (named, lambda layer, x, flow: layer(hidden=x, mask=flow.mask, extra=flow.extra)),
    "tuples": (lambda inner, both: ((inner(both[0] + both[1][0]), both[1][0] * 0.9), None), tuples),
    "extra through": (lambda inner, both: ((inner(both[0] + both[1][0]), both[1][0]), None), tuples),
    "totals": (lambda inner, x, total: ((y := inner(x)) + total, total + y.square().mean()), totals),
    "trail": (by_trail, lambda layer, x, flow: layer(x, flow.trail)),
    "shared": (by_shared, out_of_shared),
    "record": (lambda inner, r: Record(inner(r.hidden)), lambda layer, x, flow: layer(Record(x, flow)).hidden),
    "dict": (lambda inner, d: {"y": [inner(d["x"])]}, lambda layer, x, flow: layer({"x": x, 3: None})["y"][0]),
    "places": (by_place, places),
    "same and new": (lambda inner, x: (x, inner(x)), same_and_new),
    "masks": (
        by_masks,
        lambda layer, x, flow: layer(x, {"all": [flow.mask], "more": flow.shared["module"]}),
    ),
    "halves": (cut_in_two, halves),
    "halves, written": (cut_in_two, written_halves),
    "turned": (lambda inner, x: inner(x).transpose(1, 2), lambda layer, x, flow: layer(x).transpose(1, 2)),
    "rows": (lambda inner, x: inner(x).unbind(0), lambda layer, x, flow: torch.stack(layer(x))),
    "float": (lambda inner, x, by: inner(x) * by, lambda layer, x, flow: layer(x, 1 / (1 + x.shape[1]))),
    "bag": (lambda inner, bag: Bag(inner(bag.hidden)), lambda layer, x, flow: layer(Bag(x)).hidden),
    "generator": (lambda inner, x: (t for t in [inner(x)]), lambda layer, x, flow: next(layer(x))),
    "attribute of the model": (lambda inner, x: inner(x), leave),
    "attribute": (leaves_inside, read_left),
    "written after": (lambda inner, x: inner(x), lambda layer, x, flow: layer(x).mul_(0.9).add_(flow.extra)),
    "skip written after": (lambda inner, x: inner(x), lambda layer, x, flow: layer(x).add_(x)),
    "input written after": (lambda inner, x: inner(x), lambda layer, x, flow: (layer(x), x.mul_(0.5))[0]),
    "all seen": (by_all, all_seen),
    "a weight in": (lambda inner, x, w: inner(x * w), lambda layer, x, flow: layer(x, flow.shared["module"].hidden)),
    "weights out": (own_weight, with_weights),
    "popped": (popped, pops),
    "complex": (lambda inner, z: torch.complex(inner(z.real), z.imag.sin()), complex_numbers),
    "bf16 between": (lambda inner, x: inner(x.float()).bfloat16(), lambda layer, x, flow: layer(x.bfloat16()).float()),
    "second of two": (lambda inner, x: (x.sin(), inner(x)), thrown_away),
    "sparse": (lambda inner, x: inner(x).to_sparse(), sparse),
    "tagged": (lambda inner, x: inner(x), tagged),
    "named tuple": (
        lambda inner, n: Named(inner(n.hidden) * n.number, 2),
        lambda layer, x, flow: layer(Named(x, 1)).hidden,
    ),
    "the same twice": (lambda inner, x, y: inner(x + 0.5 * y), lambda layer, x, flow: layer(x, x)),
    "empty": (lambda inner, x: ((y := inner(x)), y[:, :0]), lambda layer, x, flow: torch.cat(layer(x), 1)),
    "a new leaf": (lambda inner, x: inner(x), lambda layer, x, flow: layer(x.detach().requires_grad_()) + x),
}
