"""A block's recomputation that leaves out its last product of matrices, where nothing reads what that gives.

A backward needs of a recomputed block what its graph has saved. In most blocks the last product is the projection out
of an MLP, to whose result the residual is added: the product's node saves its factors, and nobody saves the result. So
it is not computed, which is a quarter of the recomputation of a Llama's block, and gradients have the bits that they
have with it. (``torch.utils.checkpoint`` stops early for the same reason.)

The probe finds the product: the only one of a submodule that is called once, behind which come only ops that read
numbers to hand them on (``_HANDING_ON``), and of all that these make nothing is left when the call is over. Each
recomputation is looked at again, as code may do other things in another micro-batch or step. What stands in the
product's place (``Absent``), and for what follows from it, lets no other op read it, and is gone when the block has
returned. In the graph all nodes that were made behind the product's hand gradients on, and save nothing of what they
are given (``_SAVING_NOTHING``). Where it is not like that the block is computed once more, as a whole, and nothing is
left out of its recomputations any more.
"""

import math
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node

from penstock.compat import torch as private
from penstock.compat.modules import are_all_hooked, calls_seen, forward_hooks
from penstock.compat.torch import (
    TorchDispatchMode,
    next_number,
    no_functions,
    number_of,
    packet_of,
    tree_iter,
)
from penstock.tape.watch import Birth, Op, Watch, packets, written_by

_ATEN = torch.ops.aten
_PRODUCTS = packets(_ATEN.mm, _ATEN.addmm)
_HANDING_ON = packets(
    *private.HANDING_ON,
    *(_ATEN.view, _ATEN.alias, _ATEN.detach, _ATEN.clone, _ATEN.t, _ATEN.transpose, _ATEN.permute),
    *(_ATEN.squeeze, _ATEN.unsqueeze, _ATEN.slice, _ATEN.select),
    *(_ATEN.add, _ATEN.add_, _ATEN.sub, _ATEN.native_dropout),
)
"""Ops whose results have numbers that follow from what they are given, and on which nothing else depends."""
_SAVING_NOTHING = frozenset(
    f"{name}Backward{overload}"
    for name in (
        *("View", "UnsafeView", "ReshapeAlias", "Alias", "Clone", "ToCopy", "T", "Transpose", "Permute", "Squeeze"),
        *("Unsqueeze", "Slice", "Select", "Add", "Sub", "NativeDropout"),
    )
    for overload in range(2)
)
"""Nodes that save no numbers of what their op was given; a dropout saves its mask."""
_OF_PRODUCTS = frozenset(("MmBackward0", "AddmmBackward0"))


@dataclass(eq=False, kw_only=True)
class LastProduct:
    """The product of matrices that a block's recomputation can do without. ``modules``: the block's submodules that are
    under way when it is computed, the one whose own it is last. ``flops``: of it. ``needed``: it was found out that it
    cannot be left out after all."""

    modules: tuple[nn.Module, ...]
    flops: int
    needed: bool = field(default=False)

    def can_be_left_out(self) -> bool:
        """False where it was seen to be needed, or hooks of modules might look at its result now."""
        return not (self.needed or are_all_hooked() or any(map(forward_hooks, self.modules)))

    @contextmanager
    def left_out(self) -> Iterator["LeftOut"]:
        """Inside, the block may be recomputed without it. The graph that comes of it is to be looked at, by
        ``LeftOut.was_unread``."""
        module, mode = self.modules[-1], LeftOut()
        own = vars(module).get("forward")
        forward = module.forward

        def without(*args: Any, **kwargs: Any) -> Any:
            with mode:
                return forward(*args, **kwargs)

        vars(module)["forward"] = without
        try:
            yield mode
        finally:
            if own is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = own
            mode.end = next_number()


def last_of_all(found: Sequence[LastProduct | None]) -> LastProduct | None:
    """The product that calls can do without in whatever micro-batch, each of which has ``found`` one."""
    first = found[0]
    return first if all(one and first and one.modules == first.modules for one in found) else None


class LeftOut(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes no products of matrices. ``numbers``: those of their nodes; ``end``: of the node that was made next
    after all; ``is_read``: something has asked for numbers that follow from them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers: list[int] = []
        self.end = 0
        self.is_read = False
        self._absent: list[weakref.ref[Absent]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _ATEN.mm.default or (func is _ATEN.addmm.default and not kwargs):
            rows, columns = args[-2], args[-1]
            if _is_plain(rows) and _is_plain(columns):
                self.numbers.append(next_number() - 1)  # a node has its number before its op runs
                return self.absent(rows.new_full((rows.shape[0], columns.shape[1]), math.nan))
        if Absent in types:
            return Absent.__torch_dispatch__(func, types, args, kwargs)  # which torch would come to by a detour
        return func(*args, **(kwargs or {}))

    def absent(self, memory: torch.Tensor) -> "Absent":
        absent = Absent(memory, self)
        self._absent.append(weakref.ref(absent))
        self.is_read |= memory.numel() == 1  # a number is read by torch.tensor([...]), and no op is called
        return absent

    def was_unread(self, edges: Sequence[GradientEdge | None]) -> bool:
        """True if no gradient depends on what was left out, and nobody has it. ``edges``: of what the block has
        returned, which nobody has any more."""
        if not self.numbers:
            return True
        (number, *more) = self.numbers
        kept = any(absent() is not None for absent in self._absent)
        return not (more or self.is_read or kept) and is_unread(number, self.end, edges)


class AbsentError(Exception):
    """Something asks for numbers that were not computed."""


class Absent(torch.Tensor):
    """In the place of numbers that were not computed, for ops of ``_HANDING_ON``, which give others. ``memory``: its
    own, without the class: NaN."""

    __torch_function__ = no_functions  # type: ignore[assignment]
    memory: torch.Tensor
    left_out: LeftOut

    @staticmethod
    def __new__(cls, memory: torch.Tensor, left_out: LeftOut) -> "Absent":
        self = memory.as_subclass(cls)
        self.memory, self.left_out = memory, left_out
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = [value for value in args if isinstance(value, Absent)]
        written = written_by(func, args, kwargs)
        if (
            id(packet_of(func)) not in _HANDING_ON
            or any(isinstance(value, Absent) for value in kwargs.values())
            or not all(isinstance(tensor, Absent) for tensor in written)
        ):
            for value in tree_iter((args, kwargs)):
                if isinstance(value, Absent):
                    value.left_out.is_read = True
            raise AbsentError(str(func))
        result = func(*(value.memory if isinstance(value, Absent) else value for value in args), **kwargs)
        if written:
            return written[0]
        if isinstance(result, tuple):  # of a dropout, with its mask
            return found[0].left_out.absent(result[0]), *result[1:]
        return found[0].left_out.absent(result)

    def _look_in(self, *_: Any, **__: Any) -> Any:
        """Stands for methods that look at memory, or copy it, or fail, without an op."""
        self.left_out.is_read = True
        raise AbsentError("its memory")

    numpy = tolist = data_ptr = untyped_storage = apply_ = map_ = _look_in
    __array__ = __dlpack__ = __reduce_ex__ = as_subclass = _look_in


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter)


def is_unread(number: int, end: int, edges: Sequence[GradientEdge | None]) -> bool:
    """True if the node of a product with this ``number`` has a result of which no later node has saved anything, of all
    that were made before number ``end``. ``edges``: of what a block returns."""
    stack = [edge.node for edge in edges if edge is not None]
    behind, product = set[Node](), None
    while stack:
        node = stack.pop()
        its = number_of(node)
        if its < number or node in behind:
            continue
        if its == number:
            product = node
            continue
        if its >= end and hasattr(node, "variable"):  # of a leaf, which has the largest number there is
            continue
        if its >= end or node.name() not in _SAVING_NOTHING:
            return False
        behind.add(node)
        stack += (below for below, _ in node.next_functions if below is not None)
    return product is not None and product.name() in _OF_PRODUCTS and len(behind) == end - number - 1


class Search:
    """In a probe: looks for the last product of a call while it is recomputed."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._stack: list[nn.Module] = []
        self._calls: Counter[int] = Counter()
        self._products: Counter[int] = Counter()
        """by the identity of a module, those that are computed in it"""
        self._last: tuple[int, tuple[nn.Module, ...], int] | None = None
        """the number of the latest product's node, the modules under way, and its FLOP"""
        self._made: dict[int, Birth] = {}
        """storages of its result, and of what follows from it"""
        self._end = 0
        self._counted = 0
        self._is_on = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the call is recomputed."""
        self._counted, self._is_on = self._watch.flops, True
        with calls_seen(self._enter, self._leave):
            yield
        self._end, self._is_on = next_number(), False

    def _enter(self, module: nn.Module) -> None:
        self._stack.append(module)
        self._calls[id(module)] += 1

    def _leave(self, _: nn.Module) -> None:
        self._stack.pop()

    def on_op(self, op: Op) -> None:
        """An op has run, of the recomputation or behind it."""
        if not self._is_on:
            return
        before, self._counted = self._counted, self._watch.flops
        if id(op.packet) in _PRODUCTS and self._stack:
            self._products.update({id(module) for module in self._stack})
            self._last = next_number() - 1, tuple(self._stack), self._counted - before
            self._made.clear()
        elif id(op.packet) not in _HANDING_ON or any(o.storage not in self._made for o in op.written):
            self._last = None
        elif all(o.storage not in self._made for o in op.inputs):
            return
        self._made |= {o.storage: o.birth for o in op.results if o.birth is not None}

    def found(self, edges: Sequence[GradientEdge | None]) -> LastProduct | None:
        """The product that the call can be recomputed without. ``edges``: of what it has returned."""
        if self._last is None:
            return None
        number, modules, flops = self._last
        once = self._calls[id(modules[-1])] == 1 == self._products[id(modules[-1])]
        if not once or not is_unread(number, self._end, edges):
            return None
        return LastProduct(modules=modules, flops=flops)

    def has_left(self) -> bool:
        """True if anything that follows from the product is there still, of a call whose backward has run."""
        return any(self._watch.births.get(key) is birth for key, birth in self._made.items())
