"""Arguments of block calls, as a probe saw them: all that another rank of a pipeline has to know to make the same call.

Of each call the *input* is the one tensor that the stage before puts out for it alone. Everything else that it is
handed is either a tensor without a gradient that was there before the first block, or a plain value. Of these all ranks
have what the micro-batch itself holds, as it was given (lengths of packed documents); other tensors (masks, position
embeddings) are sent once, and other values are known from the probe. All else is refused, by name.
"""

import enum
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from penstock.compat.torch import storage_key, version
from penstock.tape import trees
from penstock.tape.likeness import fingerprint
from penstock.tape.modes import Modes

_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size, enum.Enum)
_VALUES = (bool, int, float, str)
"""Types of a micro-batch's plain values: ranks compare them before a step."""
_MORE = "leave out a router's loss: output_router_logits=False, or attentions: output_attentions=False"
_WRITTEN = (-1, 0)
"""A mark that no tensor has."""
_ADVICE = "a pipeline cannot send that. Train with ranks that share all state (without a pipeline)"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The kind of a tensor: what it takes to make one like it around the same numbers."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Kind":
        return cls(
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()) if trees.has_storage(tensor) else (),
            dtype=tensor.dtype,
            requires_grad=tensor.requires_grad,
        )

    @property
    def span(self) -> int:
        """Elements of memory from the first one to the last."""
        return trees.span(self.shape, self.stride)

    @property
    def nbytes(self) -> int:
        return self.span * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A tensor that calls share. ``origin``: its place in the micro-batch, which all ranks have; None: the model's own
    code has made it."""

    kind: Kind
    origin: trees.Place | None


@dataclass(frozen=True, kw_only=True)
class Handed:
    """One call of a block.

    | field | meaning |
    |---|---|
    | ``inputs`` | its (args, kwargs), with tensors on the meta device in the place of its own, and of ``names`` |
    | ``places`` | of those by identity: 0 for the input, and 1 + n for the n-th tensor that calls share |
    | ``names`` | of those by identity: the entry of the micro-batch that the argument, a plain value, is |
    | ``of_input`` | the place of the input |
    | ``output`` | what it returns, in the same way |
    | ``modes`` | torch's switches as it is called |
    | ``why`` | the reason that another rank cannot make it; empty: there is none |
    | ``why_direct`` | the reason that its input is not just what the call before has put out; empty: there is none |
    | ``shares`` | of the tensors that calls share, the numbers of those that it is handed and are sent |
    """

    block: str
    of_input: trees.Place
    inputs: Any
    places: dict[int, int]
    names: dict[int, str]
    output: Any
    modes: Modes
    input: Kind | None
    result: Kind | None
    why: str
    why_direct: str
    shares: tuple[int, ...]


@dataclass(kw_only=True)
class Calls:
    """All calls of one micro-batch. ``shared``: the tensors that they share, in order of first sight."""

    calls: dict[int, Handed] = field(default_factory=dict)
    shared: list[Shared] = field(default_factory=list)
    _keys: dict[Any, int] = field(default_factory=dict)
    _alive: dict[int, "weakref.ref[torch.UntypedStorage]"] = field(default_factory=dict)
    _marks: list[tuple[int, int]] = field(default_factory=list)
    _given: dict[Any, trees.Place] = field(default_factory=dict)
    """the place of each of the micro-batch's tensors that nothing has written to, by its key"""
    _values: dict[str, Any] = field(default_factory=dict)

    def given(self, micro_batch: Mapping[str, Any]) -> None:
        """Note what the forward is given, and all ranks have."""
        self._given = {_key(tensor): place for place, tensor in trees.places(micro_batch).items()}
        self._values = values_of(micro_batch)

    def wrote(self, storage: int) -> None:
        """Note that memory is written to, also where no version says so (``x.data``): what it holds is no longer what
        all ranks have, nor what earlier calls were handed."""
        self._given = {key: place for key, place in self._given.items() if key[0] != storage}
        for key in list(self._keys):
            if key[0] == storage:
                self._marks[self._keys[key]] = _WRITTEN

    def see(
        self,
        segment: int,
        block: str,
        inputs: Any,
        modes: Modes,
        *,
        before: torch.Tensor | None,
        born: Mapping[int, int],
    ) -> None:
        """Note a call that is about to be made. ``before``: what the call before has put out, if that was one tensor;
        ``born``: by identity of a tensor, the segment that has made it, and -1 where that was before the forward."""
        found = trees.places(inputs)
        fresh = [(p, t) for p, t in found.items() if t.is_floating_point() and born[id(t)] >= max(segment - 2, 0)]
        of_input, own = next((pair for pair in fresh if pair[1].requires_grad), fresh[0] if fresh else ((), None))
        why = "" if own is not None else "it is handed no tensor that the code before it has made"
        places: dict[int, int] = {}
        made: dict[int, torch.Tensor] = {}
        shares: list[int] = []
        for place, tensor in found.items():
            meta = made[id(tensor)] = torch.empty(0, device="meta", dtype=tensor.dtype)
            if tensor is own:
                places[id(meta)] = 0
                continue
            name = _name(place)
            if tensor.requires_grad:
                why = why or f"its argument {name} needs a gradient, and is not what the call before has put out"
            elif tensor.layout != torch.strided or tensor.is_nested:
                why = why or f"its argument {name} is a sparse or nested tensor"
            elif own is not None and tensor.device != own.device:
                why = why or f"its argument {name} is on {tensor.device}, and its input on {own.device}"
            elif born[id(tensor)] > 0:
                why = why or f"its argument {name} is computed between blocks"
            number = self._number(tensor)
            if _mark(tensor) != self._marks[number]:
                why = why or f"its argument {name} was written to in place since an earlier block was handed it"
            if self.shared[number].origin is None:
                shares.append(number)
            places[id(meta)] = 1 + number
        why = why or _strange(inputs)
        args, kwargs = inputs
        stand_ins = {n: torch.empty(0, device="meta") for n, value in kwargs.items() if self._is_given(n, value)}
        shown = trees.replace((args, kwargs | stand_ins), lambda tensor: made.get(id(tensor), tensor))
        direct = "" if own is not None and own is before else "the model's code computes with it before"
        self.calls[segment] = Handed(
            block=block,
            of_input=of_input,
            inputs=shown,
            places=places,
            names={id(meta): name for name, meta in stand_ins.items()},
            output=None,
            modes=modes,
            input=None if own is None else Kind.of(own),
            result=None,
            why=why,
            why_direct=direct,
            shares=tuple(shares),
        )

    def returned(self, segment: int, output: Any, made: Sequence[torch.Tensor]) -> None:
        """Note what a call has returned, whose outputs ``made`` are."""
        call = self.calls[segment]
        if len(made) != 1 or [id(t) for t in trees.tensors(output)] != [id(made[0])]:
            more = f"it returns {len(made)} tensors, and one is sent ({_MORE})"
            why = more if len(made) > 1 else "it returns nothing that it has computed, or what it was handed besides"
            self.calls[segment] = replace(call, why=call.why or why)
            return
        empty = torch.empty(0, device="meta", dtype=made[0].dtype)
        shown = trees.replace(output, lambda tensor: empty)
        self.calls[segment] = replace(call, output=shown, result=Kind.of(made[0]), why=call.why or _strange(output))

    def _number(self, tensor: torch.Tensor) -> int:
        key = _key(tensor)
        if key not in self._keys:
            self._follow(tensor)
            self._keys[key] = len(self.shared)
            self.shared.append(Shared(kind=Kind.of(tensor), origin=self._given.get(key)))
            self._marks.append(_mark(tensor))
        return self._keys[key]

    def _follow(self, tensor: torch.Tensor) -> None:
        """Forget the keys of a tensor's memory when that is no more: another tensor may be put there."""
        if not trees.has_storage(tensor):
            return  # it is refused
        memory = storage_key(tensor)

        def freed(_: object) -> None:
            self._alive.pop(memory, None)
            for key in list(self._keys):
                if key[0] == memory:
                    del self._keys[key]

        self._alive.setdefault(memory, weakref.ref(tensor.untyped_storage(), freed))

    def _is_given(self, name: str, value: Any) -> bool:
        """True if an argument is the micro-batch's entry of that name, a plain value."""
        return type(value) in _VALUES and name in self._values and _equal(value, self._values[name])


@dataclass(frozen=True, kw_only=True)
class HandedOn:
    """The arguments of each stage's call, None of the model's own code, and the tensors that calls share, of one shape
    of micro-batch."""

    calls: tuple[Handed | None, ...]
    shared: tuple[Shared, ...]


def values_of(micro_batch: Mapping[str, Any]) -> dict[str, Any]:
    """The plain values of a micro-batch, by name."""
    return {name: value for name, value in micro_batch.items() if type(value) in _VALUES}


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """The tensors of one micro-batch that calls share, as far as they are there, by number, each as it was then: sent
    to others, it may not be written to in place."""

    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    """the plain values of the micro-batch"""
    _marks: dict[int, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def given(cls, micro_batch: Mapping[str, Any], shared: Sequence[Shared], numbers: Iterable[int]) -> "Sharing":
        """The tensors, of these ``numbers``, that the micro-batch itself holds, before its forward begins."""
        found, places = cls(values=values_of(micro_batch)), trees.places(micro_batch)
        for number in numbers:
            origin = shared[number].origin
            if origin is not None:
                found.add(number, places[origin])
        return found

    def add(self, number: int, tensor: torch.Tensor) -> None:
        """One that is there from now on."""
        self._marks[number] = _mark(tensor)
        self.tensors[number] = tensor.detach()  # in the same memory, also if the tensor is put elsewhere (``x.data =``)

    def is_as_it_was(self, number: int) -> bool:
        """True if one that is there was not written to since."""
        return _mark(self.tensors[number]) == self._marks[number]

    def written(self) -> list[int]:
        """The numbers of those that were written to."""
        return [number for number in list(self.tensors) if not self.is_as_it_was(number)]


def refusal(call: Handed, *, direct: bool) -> str:
    """The reason that a call cannot be made by another rank; empty: it can. ``direct``: the call before is another
    rank's as well, or its own."""
    why = call.why or (direct and call.why_direct)
    return f"block {call.block!r}: {why}: {_ADVICE}" if why else ""


def fill(call: Handed, own: torch.Tensor, shared: Sharing) -> Any:
    """(args, kwargs) of a call around its input and what calls share."""

    def at(meta: torch.Tensor) -> Any:
        if id(meta) in call.names:
            return shared.values[call.names[id(meta)]]
        place = call.places[id(meta)]
        return shared.tensors[place - 1] if place else own

    return trees.replace(call.inputs, at)


def difference(call: Handed, inputs: Any, modes: Modes, shared: Sharing) -> str:
    """The first difference from what the probe saw; empty: none. ``shared`` is filled with what calls share."""
    if modes != call.modes:
        return "it is called in other modes of torch (autocast, gradients)"
    return next(_differences(call, call.inputs, inputs, (), shared), "")


def _differences(call: Handed, known: Any, value: Any, place: trees.Place, shared: Sharing) -> Iterator[str]:
    if id(known) in call.names:
        entry = shared.values[call.names[id(known)]]
        if not _equal(value, entry):
            yield f"its argument {_name(place)} is {value!r}, and that of the micro-batch is {entry!r}"
    elif isinstance(known, torch.Tensor) or isinstance(value, torch.Tensor):
        number = call.places[id(known)] if isinstance(known, torch.Tensor) else -1
        if number < 0 or not isinstance(value, torch.Tensor):
            yield f"its argument {_name(place)} is a tensor for one micro-batch and none for another"
        elif number and (value.dtype != known.dtype or value.requires_grad):
            grad = " that needs a gradient" if value.requires_grad else ""
            yield f"its argument {_name(place)} is a tensor of {value.dtype}{grad}, and was one of {known.dtype}"
        elif number and number - 1 not in shared.tensors:
            shared.add(number - 1, value)
        elif number and not _same(shared.tensors[number - 1], value):
            yield f"its argument {_name(place)} is another tensor than the one that an earlier block was handed"
        elif number and not shared.is_as_it_was(number - 1):
            yield f"its argument {_name(place)} was written to in place since an earlier block was handed it"
    elif type(known) is not type(value):
        yield f"its argument {_name(place)} is of another type"
    elif trees.is_container(known):
        a, b = dict(trees.entries(known)), dict(trees.entries(value))
        if list(a) != list(b):
            yield f"its argument {_name(place)} has more, fewer or other entries"
            return
        for key in a:
            yield from _differences(call, a[key], b[key], (*place, key), shared)
    elif known is not value and known != value:
        yield f"its argument {_name(place)} is {value!r}, and was {known!r}"


def _key(tensor: torch.Tensor) -> Any:
    """A key that tensors of the same memory have alike."""
    memory = storage_key(tensor) if trees.has_storage(tensor) else id(tensor)
    return memory, tensor.storage_offset(), Kind.of(tensor)


def _mark(tensor: torch.Tensor) -> tuple[int, int]:
    """A mark that is another one once a tensor is written to: its version, and on a processor, where numpy may have its
    memory and counts nothing, a hash of its bytes."""
    return version(tensor), fingerprint(tensor) if tensor.device.type == "cpu" else 0


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors are the same memory."""
    return one.data_ptr() == other.data_ptr() and Kind.of(one) == Kind.of(other)


def _strange(value: Any, place: trees.Place = ()) -> str:
    """The first argument that is neither a tensor nor a plain value; empty: there is none."""
    if isinstance(value, (torch.Tensor, *_PLAIN)):
        return ""
    if not trees.is_container(value):
        return f"its argument {_name(place)} is an object of class {type(value).__name__}"
    return next((why for key, item in trees.entries(value) if (why := _strange(item, (*place, key)))), "")


def _name(place: trees.Place) -> str:
    """The name of an argument: places begin with 0 for positional ones, and 1 for those with a name."""
    kind, *rest = place or (0,)
    return repr(".".join(map(str, rest))) if kind == 1 else f"number {'.'.join(map(str, rest)) or '?'}"
