"""Tensors whose data are elsewhere for a part of a step: who reads one is told so.

A probe has seen for one micro-batch which weights a stage reads, and which outputs of blocks only the next stage does.
A forward that asks a tensor for its values (``if flags.item():``) may read something else for another micro-batch. What
has left holds NaN then, which a comparison or a cast to another dtype hides. So while it is away its class is one whose
functions raise, but for those that look at no value. That costs nothing where nobody reads it.
"""

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import nn

from penstock.compat.torch import VIEW_QUESTION, Placeholder, without_subclasses
from penstock.errors import ModelError

_LOOKS: Final = frozenset(
    (
        *("__get__", "__set__", "__delete__", "__hash__", "__len__", VIEW_QUESTION, "data_ptr", "dim", "element_size"),
        *("get_device", "is_complex", "is_conj", "is_contiguous", "is_floating_point", "is_inference", "is_neg"),
        *("is_shared", "is_signed", "ndimension", "nelement", "numel", "register_hook", "requires_grad_"),
        *("register_post_accumulate_grad_hook", "result_type", "size", "storage_offset", "stride", "untyped_storage"),
    )
)
"""Functions that look at no value of a tensor. Getting, setting and deleting are those of an attribute."""
_VIEWS: Final = tuple(getattr(torch.Tensor, name).__get__ for name in ("H", "T", "data", "imag", "mH", "mT", "real"))
"""Attributes that are tensors with its values."""
_LIKE: Final = frozenset(("expand_as", "reshape_as", "to", "type_as", "view_as"))
"""Functions that look at no value of their second argument."""


_WHAT: Final = "_penstock_what"
"""The name of an attribute that a tensor has while it is away: what ``let_go`` was told of it."""


class LetGoError(ModelError):
    """Somebody reads ``what``, which has been let go of."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is read while it is elsewhere: a step is under way")
        self.what = what


class _Away:
    """The class of a tensor while it is away."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _only_looks(func, args):
            with without_subclasses():
                return func(*args, **(kwargs or {}))
        what, of = next((vars(found)[_WHAT] for found in _among((args, kwargs or {}))), ("a tensor", ()))
        raise LetGoError(what.format(*of))


def _only_looks(func: Any, args: tuple[Any, ...]) -> bool:
    """True if a function of a tensor that is away looks at no value of it."""
    name = getattr(func, "__name__", None)
    if name in _LIKE:
        return not isinstance(args[0], _Away)
    return (name in _LOOKS and func not in _VIEWS) or (name == "type" and len(args) == 1)


class _Tensor(_Away, torch.Tensor):
    pass


class _Parameter(_Away, nn.Parameter):
    pass


_AWAY: Final[dict[type, type]] = {torch.Tensor: _Tensor, nn.Parameter: _Parameter}
_BACK: Final = {away: kind for kind, away in _AWAY.items()}


def let_go(tensor: torch.Tensor, what: str, *of: object) -> None:
    """From now on to read a tensor is an error that names it: ``what``, formatted with ``of`` once it is needed. One of
    a class of somebody's own stays as it is: it may be one without values of its own."""
    away = _AWAY.get(type(tensor))
    if away is not None:
        vars(tensor)[_WHAT] = what, of
        tensor.__class__ = away


def take_back(tensor: torch.Tensor) -> None:
    """A tensor can be read again."""
    back = _BACK.get(type(tensor))
    if back is not None:
        tensor.__class__ = back
        del vars(tensor)[_WHAT]


def is_elsewhere(tensor: torch.Tensor) -> bool:
    """True if it is an error to read a tensor now: it was let go of, or another rank of a pipeline has it."""
    return isinstance(tensor, _Away | Placeholder)


def _among(value: Any) -> Iterable[_Away]:
    """The tensors that are away among a function's arguments, which may be in lists."""
    if isinstance(value, _Away):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _among(item)
    elif isinstance(value, dict):
        yield from _among([*value.values()])
