"""``tiled_loss``: a Hugging Face language model's own loss, without its logits.

The model runs its own forward. For the time of the call its head returns, instead of logits, a stand-in that knows the
hidden states: of the right shape, dtype and device, and without memory. What models do between head and loss is noted
on it: casts, scales, caps (any function of each logit alone), other shapes, a choice of rows. Where it comes to
``cross_entropy``, in the model's own loss function with all its arguments, the loss is computed by ``tiles``. Whatever
else is done with it is an error that says what: no model is trained on another loss than its own.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn import functional

from penstock.compat.modules import has_backward_hooks
from penstock.compat.torch import new_wrapper, without_subclasses
from penstock.errors import ConfigError, ModelError
from penstock.loss import DEFAULT_TILE
from penstock.loss.tiles import Elementwise, Entropy, linear_cross_entropy

Loss = Callable[[nn.Module, Mapping[str, Any]], torch.Tensor]
_WHOLE_LOGITS = "set loss_tile to null (in Python: leave out tiled_loss, or the loss_tile of EngineArguments)"
"""Advice where a loss cannot be computed in tiles"""


def tiled_loss(tile: int = DEFAULT_TILE) -> Loss:
    """A ``loss_fn`` for ``penstock.wrap``: ``model(**micro_batch).loss``, with the logits of ``tile`` tokens at a time.

    Equal to the model's own loss, and its gradients, but for rounding. For models of Hugging Face whose head is one
    ``nn.Linear`` (``get_output_embeddings()``) and whose loss is a cross-entropy over it, with or without a router's
    loss, label smoothing, soft caps or scales. The model's output has no logits that could be read.

    Raises:
        ConfigError: ``tile`` is less than 1.
        ModelError: in the call: the model has another head, or does something else with its logits; says what.
    """
    if tile < 1:
        raise ConfigError(f"loss_tile={tile}: must be at least 1 token, or null (None) for whole logits")

    def loss_fn(model: nn.Module, micro_batch: Mapping[str, Any]) -> torch.Tensor:
        with in_tiles(model, tile):
            loss = getattr(model(**micro_batch), "loss", None)
        if not isinstance(loss, torch.Tensor) or isinstance(loss, Logits):
            raise ConfigError("the model returned no loss: give micro-batches with 'labels'")
        return loss

    return loss_fn


@contextmanager
def in_tiles(model: nn.Module, tile: int) -> Iterator[None]:
    """For the time of a call of the model, and of what computes its loss: logits of ``tile`` tokens at a time.

    Raises:
        ModelError: as ``tiled_loss``'s.
    """
    head = plain_head(model, tile)
    attributes = vars(head)
    stand_in = attributes.get("forward")
    if not isinstance(stand_in, Head):
        if stand_in is not None:
            raise ModelError(
                f"loss_tile={tile}: the head's forward has been replaced (by {type(stand_in).__name__}), so it may not "
                f"be a plain product: {_WHOLE_LOGITS}"
            )
        stand_in = attributes["forward"] = Head(head)
    stand_in.calls += 1
    token = _TILE.set(tile)
    try:
        yield
    finally:
        _TILE.reset(token)
        stand_in.calls -= 1
        if stand_in.calls == 0:
            del attributes["forward"]


def plain_head(model: nn.Module, tile: int) -> nn.Linear:
    """The head of a model whose loss can be computed in tiles.

    Raises:
        ModelError: it has none, or another one than a plain ``nn.Linear``.
    """
    find: Any = getattr(model, "get_output_embeddings", None)
    head = None if find is None else find()
    if type(head) is nn.Linear and not has_backward_hooks(head):
        return head
    kind = type(head)
    if head is None:
        what = "no head over a vocabulary"
    elif kind is nn.Linear:
        what = "hooks on the gradient of its head's logits"
    else:
        what = f"a {kind.__module__}.{kind.__name__} as its head, not a plain torch.nn.Linear"
    raise ModelError(
        f"loss_tile={tile}: {type(model).__name__} has {what}, so its loss cannot be computed in tiles: {_WHOLE_LOGITS}"
    )


# -- the head, for the time of a call -----------------------------------------------------------------------------

_TILE: ContextVar[int | None] = ContextVar("penstock_loss_tile", default=None)
"""Set inside a call, and in that call alone: each micro-batch's forward has a context of its own."""


class Head:
    """Stands in for a head's ``forward`` while calls are under way, of which there may be several at once."""

    def __init__(self, head: nn.Linear) -> None:
        self._head = head
        self._forward = head.forward
        self.calls = 0

    def __call__(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 -- it may be given by torch's name for it
        tile, hidden = _TILE.get(), input
        if tile is None:
            return self._forward(hidden)
        weight: torch.Tensor = self._head.weight
        bias: Any = self._head.bias  # None where there is none, whatever torch's annotation says
        where = hidden.device.type
        if torch.amp.is_autocast_available(where) and torch.is_autocast_enabled(where):
            dtype = torch.get_autocast_dtype(where)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        return Logits(_Source(hidden=hidden, weight=weight, bias=bias, tile=tile))


# -- logits that are not there ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Source:
    """The parts that logits would be made of: ``hidden`` [..., h], ``weight`` [V, h], and what is done to each logit
    after.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    tile: int
    after: tuple[Elementwise, ...] = ()

    @property
    def on_meta(self) -> torch.Tensor:
        """A tensor of the logits' shape and dtype that is one element to whoever measures memory."""
        logit = torch.empty((), dtype=self.weight.dtype, device="meta")
        for function in self.after:
            logit = function(logit)
        return logit.expand(*self.hidden.shape[:-1], self.weight.shape[0])


class Logits(torch.Tensor):
    """The stand-in: a tensor without memory that notes what is done to it."""

    source: _Source

    @staticmethod
    def __new__(cls, source: _Source) -> "Logits":
        meta = source.on_meta
        self: Logits = new_wrapper(cls, meta, source.hidden.device)
        self.source = source
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Logits(shape={tuple(self.shape)}, dtype={self.dtype}, not computed)"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        if _is_metadata(func):
            with without_subclasses():
                return func(*args, **kwargs)
        name = str(getattr(func, "__name__", func))
        logits = next((a for a in args if isinstance(a, Logits)), None)
        if logits is None:  # it is given by name, or in a list
            _refuse(None, f"calls {name} on its logits")
        if name in _ELEMENTWISE and all(_is_plain(a) for a in (*args, *kwargs.values()) if a is not logits):
            return _then(logits, func, args, kwargs)
        if name == "contiguous":
            return logits
        if name in _RESHAPE and logits is args[0]:
            return _reshaped(logits, func, args, kwargs)
        if name == "__getitem__" and logits is args[0]:
            return _rows(logits, args[1])
        return _refuse(logits, f"calls {name} on its logits")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        _refuse(None, f"calls {func} on its logits")


_METADATA = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "__len__", "element_size", "is_floating_point", "is_complex"}
)
_PROPERTIES = frozenset({"shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_cpu", "is_meta"})
_ELEMENTWISE = frozenset(
    {
        *("float", "double", "half", "bfloat16", "to"),
        *("mul", "multiply", "__mul__", "__rmul__", "div", "divide", "true_divide", "__div__", "__truediv__"),
        *("add", "__add__", "__radd__", "sub", "__sub__", "neg", "__neg__", "tanh"),
    }
)
"""Functions of each logit alone. None works in place: another name of the same logits would not see it."""
_RESHAPE = frozenset({"view", "reshape", "flatten", "unsqueeze", "squeeze"})


def _is_metadata(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in _PROPERTIES
    return name in _METADATA


def _is_plain(value: Any) -> bool:
    """A number, or what says where and as what to put a tensor: nothing that learns, nothing of the logits' shape."""
    return isinstance(value, int | float | str | torch.dtype | torch.device | None)


def _then(logits: Logits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Logits:
    """Note a function of each logit. Of a cast only the dtype counts: the loss is computed where the head is."""
    args = tuple(a for a in args if not isinstance(a, torch.device | str))
    kwargs = {k: v for k, v in kwargs.items() if k != "device"}
    place = next(i for i, a in enumerate(args) if a is logits)

    def function(tensor: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = func(*args[:place], tensor, *args[place + 1 :], **kwargs)
        return result

    if func is torch.Tensor.to and len(args) == 1 and not kwargs:
        return logits
    return Logits(replace(logits.source, after=(*logits.source.after, function)))


def _reshaped(logits: Logits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Logits:
    source = logits.source
    made = func(source.on_meta, *args[1:], **kwargs)
    shape = made.shape
    if not shape or shape[-1] != source.weight.shape[0] or made.dtype != logits.dtype:
        _refuse(logits, f"gives its logits the shape {list(shape)} of {made.dtype}")
    hidden = source.hidden.reshape(*shape[:-1], source.hidden.shape[-1])
    return Logits(replace(source, hidden=hidden))


def _rows(logits: Logits, index: Any) -> Logits:
    """Some of the rows: every index but one into the vocabulary."""
    entries = index if isinstance(index, tuple) else (index,)
    taken = sum(_dimensions(entry) for entry in entries)
    reaches_vocabulary = any(entry is Ellipsis for entry in entries) or taken == logits.dim()
    if reaches_vocabulary and not (isinstance(entries[-1], slice) and entries[-1] == slice(None)):
        _refuse(logits, f"takes a part of its vocabulary, [{index}]")
    source = logits.source
    return Logits(replace(source, hidden=source.hidden[index]))


def _dimensions(entry: Any) -> int:
    if entry is None or entry is Ellipsis:
        return 0
    if isinstance(entry, torch.Tensor) and entry.dtype in (torch.bool, torch.uint8):
        return entry.dim()
    return 1


def _cross_entropy(
    logits: Any,
    labels: Any,
    weight: torch.Tensor | None = None,
    size_average: object = None,
    ignore_index: int = -100,
    reduce: object = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """``torch.nn.functional.cross_entropy`` of logits that are not there."""
    if not isinstance(logits, Logits) or isinstance(labels, Logits):
        _refuse(labels, "uses its logits as labels")
    if weight is not None or size_average is not None or reduce is not None or reduction not in ("mean", "sum"):
        _refuse(logits, f"asks for a cross-entropy with class weights or reduction={reduction!r}")
    if logits.dim() != 2 or labels.shape != logits.shape[:1] or labels.is_floating_point():
        _refuse(logits, f"asks for a cross-entropy of {list(logits.shape)} with labels of shape {list(labels.shape)}")
    source, labels = logits.source, labels.long()  # of uint8, too, where -100 would be 156
    entropy = Entropy(tile=source.tile, after=source.after, ignore_index=ignore_index, smoothing=float(label_smoothing))
    where = source.hidden.device.type
    casts = torch.amp.is_autocast_available(where)
    wide = casts and torch.is_autocast_enabled(where)  # torch then computes it, and gives it, in fp32
    with torch.autocast(where, enabled=False) if casts else nullcontext():
        total = linear_cross_entropy(source.hidden, source.weight, source.bias, labels, entropy)
    if reduction == "mean":
        total = total / (labels != ignore_index).sum()
    return total if wide else total.to(logits.dtype)


def _refuse(logits: Any, what: str) -> NoReturn:
    tile = logits.source.tile if isinstance(logits, Logits) else _TILE.get()
    raise ModelError(f"loss_tile={tile}: the model {what}, which cannot be done without all of them: {_WHOLE_LOGITS}")
