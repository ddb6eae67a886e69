"""The feed-forward parts of a model's blocks, computed some tokens at a time: memory for longer sequences.

A block's backward needs what its forward kept, and of a transformer's block about half of that is of its feed-forward
part: three or four tensors that are several times as wide as the hidden state. Each token goes through it alone, so
that it can be run tile by tile: what it keeps is then its input, and in the backward each tile runs once more, and
backward, before the next one. So it is with norms that go over to fp32, whose backward makes seven such tensors of all
tokens. Everything else about the model is as it was.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.compat.modules import has_backward_hooks
from penstock.errors import ConfigError, ModelError
from penstock.tape import trees
from penstock.tape.blocks import find_blocks
from penstock.tape.likeness import alike, sample

_ATTENTION = ("attn", "attention")
_NAMES = ("mlp", "feed_forward", "feedforward", "ffn", "ff", "densereludense")
"""Names that models give to the feed-forward part of a block, in small letters."""


def tiled_mlps(model: nn.Module, tile: int) -> nn.Module:
    """The same model, whose blocks run their feed-forward parts on ``tile`` tokens of a micro-batch at a time, and so
    its norms that are computed in fp32 step by step (RMSNorm of transformers' models), but for those within attention.

    For parts that take hidden states, [..., tokens, h], as their only tensor, give back one of that shape, and treat
    each token alone, which is tried when they first run. Equal to the whole part but for rounding: its products have
    other shapes, its dropout draws tile by tile, and the gradients of its weights are sums over tiles, in their dtype.
    With tiles as long as a micro-batch it is the whole part. Forward hooks on modules within it see the tiles, and what
    is tried. Changes the modules of ``model``, and may be called again with another ``tile``.

    Raises:
        ConfigError: ``tile`` is less than 1.
        ModelError: no block has such a part, or one has hooks on its gradients, within it or on it, or another
            ``forward`` than its class; and in a forward, if one does not treat each token alone.
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
    tiled = [(part, _Tiled(name, part, tile)) for name, part in (*found, *_norms(model))]
    for part, forward in tiled:
        vars(part)["forward"] = forward
    return model


def blocks_without_tiles(model: nn.Module) -> tuple[str, ...]:
    """The names of the blocks without feed-forward parts in tiles: of a tiled model, mostly those with experts."""
    return tuple(
        block.name
        for block in find_blocks(model)
        if not any(isinstance(vars(p).get("forward"), _Tiled) for _, p in _parts(block.name, block.module))
    )


def _parts(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The feed-forward parts within a block, each with its name in the model."""
    for name, child in module.named_children():
        path = f"{prefix}.{name}"
        if name.lower() in _NAMES and not isinstance(child, nn.ModuleList):
            # A layer alone keeps its input in any case.
            if next(child.children(), None) is not None and not any(_routes(part) for part in child.modules()):
                yield path, child
        else:
            yield from _parts(path, child)


def _norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The norms of a model's own code that make fp32 copies of all tokens of the hidden states. Those of queries and
    keys go with their heads."""
    for name, module in model.named_modules():
        within = any(word in name.rpartition(".")[0].lower() for word in _ATTENTION)
        if not within and "rmsnorm" in type(module).__name__.lower() and not isinstance(module, nn.RMSNorm):
            yield name, module


def _routes(module: nn.Module) -> bool:
    """True for experts and for what chooses between them: what they tell the loss is told of all tokens at once."""
    kind = type(module).__name__.lower()
    return isinstance(module, nn.ModuleList) or _ROUTING.search(kind) is not None


_ROUTING = re.compile(r"expert|router|moe(block|layer)?$")
"""The end of a class's name, or what is in it, in small letters; not the model's: Qwen3MoeMLP has no experts."""


class _Tiled:
    """Stands in for the ``forward`` of a feed-forward part."""

    def __init__(self, name: str, part: nn.Module, tile: int) -> None:
        self._name, self._part, self._tile = name, part, tile
        self._tried = False
        own = vars(part).get("forward")
        if (own is not None and not isinstance(own, _Tiled)) or any(map(has_backward_hooks, part.modules())):
            self._refuse("has hooks on gradients, or a forward that is not its class's, which would see tiles")
        self.whole: Callable[..., Any] = own.whole if isinstance(own, _Tiled) else part.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = trees.tensors((args, kwargs))
        if len(given) != 1 or given[0].dim() < 2:
            self._refuse("takes more tensors than the hidden states, [..., tokens, h], or none")
        (states,) = given
        length = max(1, self._tile * states.shape[-2] // max(1, states[..., 0].numel()))
        if states.shape[-2] <= length:
            return self.whole(*args, **kwargs)

        def of(some: torch.Tensor) -> Any:
            own_args, own_kwargs = trees.replace((args, kwargs), lambda _: some)
            return self.whole(*own_args, **own_kwargs)

        tiles = [one.contiguous() for one in torch.split(states, length, dim=-2)]  # as the whole is, which some rely on
        if not self._tried:
            self._try(of, states[..., :_TRIED, :].contiguous())
        return torch.cat([self._run(of, one) for one in tiles], dim=-2)

    def _run(self, of: Callable[[torch.Tensor], Any], states: torch.Tensor) -> torch.Tensor:
        found = checkpoint(of, states, use_reentrant=False) if torch.is_grad_enabled() else of(states)
        if not isinstance(found, torch.Tensor) or found.shape[:-1] != states.shape[:-1]:
            self._refuse("does not give back one tensor of a row for each token")
        return found

    @torch.no_grad()
    def _try(self, of: Callable[[torch.Tensor], Any], states: torch.Tensor) -> None:
        """Raise an error if a token's result depends on the others. Without dropout, which would draw other masks."""
        training = [part for part in self._part.modules() if part.training]
        try:
            self._part.eval()
            both, last = self._run(of, states), self._run(of, states[..., 1:, :].contiguous())
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
