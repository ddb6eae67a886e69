"""The feed-forward parts of a model's blocks, computed some tokens at a time: memory for longer sequences.

A block's backward needs what its forward kept, and of a transformer's block about half of that is of its feed-forward
part: three or four tensors that are several times as wide as the hidden state. Each token goes through it alone, so
that it can be run tile by tile: what it keeps is then its input, and in the backward each tile runs once more, and
backward, before the next one. Everything else about the model is as it was.
"""

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.compat.torch import has_backward_hooks
from penstock.errors import ConfigError, ModelError
from penstock.tape.blocks import find_blocks
from penstock.tape.likeness import alike, sample

_NAMES = ("mlp", "feed_forward", "feedforward", "ffn", "ff", "densereludense")
"""Names that models give to the feed-forward part of a block, in small letters."""


def tiled_mlps(model: nn.Module, tile: int) -> nn.Module:
    """The same model, whose blocks run their feed-forward parts on ``tile`` tokens of a micro-batch at a time.

    For parts that take hidden states, [..., tokens, h], as their only tensor, give back one of that shape, and treat
    each token alone, which is tried when they first run. Equal to the whole part but for rounding: its products have
    other shapes, its dropout draws tile by tile, and the gradients of its weights are sums over tiles, in their dtype.
    With tiles as long as a micro-batch it is the whole part. Changes the modules of ``model``, and may be called again
    with another ``tile``.

    Raises:
        ConfigError: ``tile`` is less than 1.
        ModelError: no block has such a part, or one's has hooks or another ``forward`` than its class; and in a
            forward, if one does not treat each token alone.
    """
    if tile < 1:
        raise ConfigError(f"mlp_tile={tile}: must be at least 1 token, or null (None) for whole feed-forward parts")
    found = [(name, part) for block in find_blocks(model) for name, part in _parts(block.name, block.module)]
    if not found:
        raise ModelError(
            f"mlp_tile={tile}: no block of {type(model).__name__} has a feed-forward part of its own ("
            f"{', '.join(_NAMES)}) without experts, so none can be run in tiles: set mlp_tile to null (in Python: "
            "leave tiled_mlps out)"
        )
    for name, part in found:
        own = vars(part).get("forward")
        if (own is not None and not isinstance(own, _Tiled)) or has_backward_hooks(part):
            raise ModelError(
                f"mlp_tile={tile}: {name!r} has hooks, or a forward that is not its class's, which would see tiles: "
                "set mlp_tile to null (in Python: leave tiled_mlps out)"
            )
    for name, part in found:
        forward = own.whole if isinstance(own := vars(part).get("forward"), _Tiled) else part.forward
        vars(part)["forward"] = _Tiled(name, part, forward, tile)
    return model


def _parts(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The feed-forward parts within a block, each with its name in the model."""
    for name, child in module.named_children():
        path = f"{prefix}.{name}"
        if name.lower() in _NAMES and not isinstance(child, nn.ModuleList):
            if not any(_routes(part) for part in child.modules()):
                yield path, child
        else:
            yield from _parts(path, child)


def _routes(module: nn.Module) -> bool:
    """True for experts and for what chooses between them: what they tell the loss is told of all tokens at once."""
    kind = type(module).__name__.lower()
    return isinstance(module, nn.ModuleList) or any(word in kind for word in ("expert", "router", "moe"))


class _Tiled:
    """Stands in for the ``forward`` of a feed-forward part."""

    def __init__(self, name: str, part: nn.Module, whole: Callable[..., Any], tile: int) -> None:
        self.whole = whole
        self._part = part
        self._name = name
        self._tile = tile
        self._tried = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if len(args) != 1 or len(given) != 1 or given[0].dim() < 2:
            self._refuse("takes more than the hidden states, [..., tokens, h]")
        (states,) = given
        length = max(1, self._tile * states.shape[-2] // max(1, states[..., 0].numel()))
        if states.shape[-2] <= length:
            return self.whole(states, **kwargs)
        tiles = [one.contiguous() for one in torch.split(states, length, dim=-2)]  # as the whole is, which some rely on
        if not self._tried:
            self._try(states[..., :_TRIED, :].contiguous(), kwargs)
        made = [self._run(one, kwargs) for one in tiles]
        return torch.cat(made, dim=-2)

    def _run(self, states: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        if not torch.is_grad_enabled():
            found = self.whole(states, **kwargs)
        else:
            found = checkpoint(self.whole, states, use_reentrant=False, **kwargs)
        if not isinstance(found, torch.Tensor) or found.shape[:-1] != states.shape[:-1]:
            self._refuse("does not give back one tensor of a row for each token")
        return found

    @torch.no_grad()
    def _try(self, states: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """Raise an error if a token's result depends on the others. Without dropout, which would draw other masks."""
        training = [part for part in self._part.modules() if part.training]
        try:
            self._part.eval()
            both, last = self._run(states, kwargs), self._run(states[..., 1:, :].contiguous(), kwargs)
        finally:
            for part in training:
                part.training = True
        if not alike(sample(both[..., 1:, :]), last):
            self._refuse("does not treat each token alone")
        self._tried = not states.is_meta  # where there are no numbers, nothing was compared

    def _refuse(self, why: str) -> NoReturn:
        raise ModelError(
            f"mlp_tile={self._tile}: {self._name!r} {why}, so it cannot be run in tiles: set mlp_tile to null (in "
            "Python: leave tiled_mlps out)"
        )


_TRIED = 8
"""Tokens, two at least, that are run once with their first one and once without it."""
