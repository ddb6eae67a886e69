"""The attention of a model's blocks, computed some heads at a time: memory for longer sequences.

Between the projections of its input and that of its output, attention keeps queries, keys and values of every token, in
several forms, for the backward. Each query head goes its own way there, with the key/value head that it shares with
others. So it can be run some heads at a time, by the part's own code with projections that are cut: what it keeps is
then its input and the heads' results, and in the backward each piece runs once more, and backward, before the next one.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from penstock.compat.marks import has_adapters
from penstock.compat.modules import has_backward_hooks
from penstock.compat.peft import is_plain
from penstock.errors import ConfigError, ModelError, is_out_of_memory
from penstock.tape import trees
from penstock.tape.blocks import find_blocks
from penstock.tape.likeness import alike, sample

_IN = ("q_proj", "k_proj", "v_proj")
_OUT = ("o_proj", "out_proj", "dense")
_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")
"""The names of a cache of keys and values: transformers' since 5.24, its old one, and those of models of others."""
_GROUPS = "num_key_value_groups"
"""The number of query heads that share a key/value head, of a part; transformers' attention functions read it."""


def split_attention(model: nn.Module, heads: int) -> nn.Module:
    """The same model, whose blocks compute their attention for ``heads`` query heads at a time.

    For parts that have linear projections of their own for queries, keys and values (``q_proj``, ``k_proj``,
    ``v_proj``), and one of the heads' results that comes last. What is in between must not let heads depend on each
    other, which is tried when it first runs. ``heads`` is a multiple of the query heads that share a key/value head, or
    divides their number: then keys and values are computed for each piece. Equal to the whole part but for rounding:
    its products have other shapes, and its dropout draws piece by piece. With as many heads as there are it is the
    whole part. Attention weights are not given back, and forward hooks on modules within the part see pieces, and what
    is tried. Changes the modules of ``model``, and may be called again with another number.

    Raises:
        ConfigError: ``heads`` is less than 1, or cuts those that share a key/value head unevenly.
        ModelError: no block has such a part, or one has hooks on its gradients, within it or on it, or another
            ``forward`` than its class; and in a forward, if its heads depend on each other.
    """
    if heads < 1:
        raise ConfigError(f"attention_heads={heads}: must be at least 1 head, or null (None) for all at a time")
    found = [(name, part) for block in find_blocks(model) for name, part in _parts(block.name, block.module)]
    if not found:
        raise ModelError(
            f"attention_heads={heads}: no block of {type(model).__name__} has attention with projections of its own "
            f"for queries, keys, values ({', '.join(_IN)}) and the heads' results ({', '.join(_OUT)}), so none can be "
            "computed some heads at a time: set attention_heads to null (in Python: leave split_attention out)"
        )
    splits = [(part, _Split(name, part, heads)) for name, part in found]
    for part, split in splits:
        vars(part)["forward"] = split
    return model


def most_heads(model: nn.Module) -> int:
    """The most query heads that a part has of those whose attention is computed some heads at a time; 0: there are
    none."""
    splits = (vars(module).get("forward") for module in model.modules())
    return max((split.count for split in splits if isinstance(split, _Split)), default=0)


def _parts(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The attention parts within a block, each with its name in the model."""
    for name, child in module.named_children():
        names = {n for n, _ in child.named_children()}
        if names.issuperset(_IN) and not names.isdisjoint(_OUT):
            yield f"{prefix}.{name}", child
        else:
            yield from _parts(f"{prefix}.{name}", child)


class _Split:
    """Stands in for the ``forward`` of an attention part."""

    def __init__(self, name: str, part: nn.Module, heads: int) -> None:
        self._name, self._part, self._heads = name, part, heads
        self._tried = False
        own = vars(part).get("forward")
        if (own is not None and not isinstance(own, _Split)) or any(map(has_backward_hooks, part.modules())):
            self._refuse("has hooks on gradients, or a forward that is not its class's, which would see pieces")
        self.whole: Callable[..., Any] = own.whole if isinstance(own, _Split) else part.forward
        size, groups = getattr(part, "head_dim", None), getattr(part, _GROUPS, None)
        if not isinstance(size, int) or not isinstance(groups, int):
            self._refuse(f"does not say how large its heads are (head_dim) and how many share a key ({_GROUPS})")
        self._out = next(n for n in _OUT if n in dict(part.named_children()))
        self._keys, self._groups = _outputs(part.get_submodule("k_proj")) // size, groups
        if heads < self.count and heads % groups and groups % heads:
            raise ConfigError(
                f"attention_heads={heads}: in {name!r} {groups} query heads share a key/value head: give a multiple or "
                "a divisor of that"
            )
        self._cuts(heads)
        beside = (
            n for n, p in part.named_parameters() if n.split(".")[0] not in (*_IN, self._out) and p.numel() > size
        )
        for name in (*(n for n, _ in part.named_parameters(recurse=False)), *beside):
            self._refuse(f"has {name}, which is of several heads")

    @property
    def count(self) -> int:
        """All query heads."""
        return self._keys * self._groups

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cached = any(kwargs.get(name) is not None for name in _CACHES)
        if self._heads >= self.count or (cached and not torch.is_grad_enabled()):  # a cache: something is generated
            return self.whole(*args, **kwargs)
        if cached:
            self._refuse("is given a cache of keys and values, which would hold a piece: config.use_cache = False, or")
        if not args:
            args = (kwargs.pop("hidden_states"),)
        if not self._tried:
            self._try(args, kwargs)
        found = torch.cat(list(self._pieces(self._heads, args, kwargs)), dim=-1)
        return self._part.get_submodule(self._out)(found), None

    @torch.no_grad()
    def _try(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise an error if heads depend on others that are computed with them, or on how many these are, or if more
        than the result leaves the part. Without dropout, which would draw other masks."""
        training = [part for part in self._part.modules() if part.training]
        given = trees.places((args, kwargs))
        try:
            self._part.eval()
            pieces = self._pieces(self._heads, args, kwargs)
            apart = torch.cat([next(pieces), next(pieces)], dim=-1)
            more = 2 * self._heads if self._heads % self._groups == 0 else self._groups
            together = next(self._pieces(more, args, kwargs))
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self._refuse(f"does not take some of its heads alone ({' '.join(str(error).split())[:200]})")
        finally:
            for part in training:
                part.training = True
        handed = trees.places((args, kwargs))
        if given.keys() != handed.keys() or any(handed[place] is not tensor for place, tensor in given.items()):
            self._refuse("leaves tensors for other layers in what it is handed, as keys and values, of a piece")
        # A softmax makes as many times more of its scores' rounding as these are large; another head is more than that.
        if not alike(sample(together[..., : apart.shape[-1]]), apart, within=torch.finfo(apart.dtype).eps ** 0.5):
            self._refuse("has heads that depend on each other")
        self._tried = not apart.is_meta  # where there are no numbers, nothing was compared

    def _pieces(self, heads: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
        """The results of so many heads at a time, [..., tokens, their width]."""
        states, *others = args
        groups = min(heads, self._groups)
        uses = self._groups // groups  # pieces of queries for each of keys and values
        cuts = self._cuts(heads)
        places = [(name, path) for name, cut in cuts.items() for path in cut]
        for index in range(-(-self.count // heads)):

            def run(states: torch.Tensor, *pieces: torch.Tensor) -> torch.Tensor:
                projections: dict[str, dict[str, torch.Tensor]] = {name: {} for name in _IN}
                for (name, path), piece in zip(places, pieces, strict=True):
                    projections[name][path] = piece
                with self._cut(projections, groups) as end:
                    return self._checked(self.whole(states, *others, **kwargs), states, end)

            own = [cuts[name][path][index if name == _IN[0] else index // uses] for name, path in places]
            again = torch.is_grad_enabled()
            yield checkpoint(run, states, *own, use_reentrant=False) if again else run(states, *own)

    def _checked(self, found: Any, states: torch.Tensor, end: "_End") -> torch.Tensor:
        result = found[0] if isinstance(found, tuple) else found
        if end.given is None or result is not end.given or result.shape[:-1] != states.shape[:-1]:
            self._refuse(f"does more than to give back first what {self._out} makes of the heads' results")
        return end.given

    def _cuts(self, heads: int) -> dict[str, dict[str, tuple[torch.Tensor, ...]]]:
        """The parameters that make the outputs of each projection, in pieces."""
        found = {}
        for name in _IN:
            some, count = (heads, self.count) if name == _IN[0] else (max(1, heads // self._groups), self._keys)
            module = self._part.get_submodule(name)
            rows = _outputs(module)
            if not rows or not count or rows % count:
                self._refuse(f"has no linear {name} with as many outputs for each head")
            found[name] = {path: torch.split(p, some * (rows // count)) for path, p in _rows(module).items()}
        return found

    @contextmanager
    def _cut(self, projections: Mapping[str, Mapping[str, torch.Tensor]], groups: int) -> Iterator["_End"]:
        """The part with projections that are pieces, and with none at its end."""
        own, end = vars(self._part), _End()
        shadows: dict[str, Any] = {n: _Cut(self._part.get_submodule(n), p) for n, p in projections.items()}
        own |= {**shadows, self._out: end, _GROUPS: groups}
        try:
            yield end
        finally:
            own[_GROUPS] = self._groups
            for name in (*_IN, self._out):
                del own[name]

    def _refuse(self, why: str) -> NoReturn:
        raise ModelError(
            f"attention_heads={self._heads}: {self._name!r} {why}, so it cannot be computed some heads at a time: set "
            "attention_heads to null (in Python: leave split_attention out)"
        )


class _Cut:
    """A projection to a piece of its outputs."""

    def __init__(self, whole: nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
        self._whole, self._parameters = whole, dict(parameters)

    def __call__(self, states: torch.Tensor) -> Any:
        return functional_call(self._whole, self._parameters, (states,))


class _End:
    """Stands in for the projection of the heads' results, and gives them back as they are."""

    def __init__(self) -> None:
        self.given: torch.Tensor | None = None

    def __call__(self, results: torch.Tensor) -> torch.Tensor:
        self.given = results
        return results


def _outputs(module: nn.Module) -> int:
    """Outputs of a projection; 0 of one that is not linear."""
    weight = _rows(module).get("weight", _rows(module).get("base_layer.weight"))
    return 0 if weight is None else weight.shape[0]


def _rows(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of a projection that have a row for each output, by their names in it; empty: it is not linear."""
    if type(module) is nn.Linear:
        return dict(module.named_parameters())
    if type(getattr(module, "base_layer", None)) is not nn.Linear or not (has_adapters(module) and is_plain(module)):
        return {}
    adapters = [name for name, _ in module.named_parameters() if not name.startswith(("base_layer.", "lora_A."))]
    if any(not name.startswith("lora_B.") for name in adapters):  # such as the lengths of DoRA's rows
        return {}
    return {n: p for n, p in module.named_parameters() if n.startswith(("base_layer.", "lora_B."))}
