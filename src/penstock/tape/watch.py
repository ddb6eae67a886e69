"""Sees every op of a probe: the weights that it reads, the memory that lives at each moment, and its work."""

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from penstock.compat import torch as private
from penstock.compat.torch import packet_of, schema_of, storage_key
from penstock.schedule.work import Work
from penstock.tape import trees
from penstock.tape.places import Way

_ATEN = torch.ops.aten


def _grouped(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    """A product in groups of ``a``'s rows, of ``b``'s columns, or of what is summed over, which they cover."""
    groups = a.shape[0] if a.dim() == 3 and b.dim() == 2 else 1
    return 2 * a.numel() // groups * b.shape[-1]


def _product(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    """A product of matrices, or of as many pairs of them."""
    return 2 * a.numel() * b.shape[-1]


def _added(_: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *__: Any, **___: Any) -> int:
    """A product that is added to a tensor."""
    return 2 * a.numel() * b.shape[-1]


FLOP: Mapping[Any, Callable[..., int]] = {
    **private.flop_registry,
    # as torch counts them, whose formulas go through trees of arguments, some twice
    **dict.fromkeys((_ATEN.mm, _ATEN.bmm), _product),
    **dict.fromkeys((_ATEN.addmm, _ATEN.baddbmm), _added),
    private.GROUPED_MM: _grouped,
    # torch counts attention on every other device; the arguments are the same
    private.FLASH_CPU: private.flop_registry[private.FLASH],
    private.FLASH_CPU_BACKWARD: private.flop_registry[private.FLASH_BACKWARD],
}
"""The FLOP of an op, from its arguments: none of what is no product, those of the whole square of causal attention."""

CHANGES = (
    "{} changes {} in its forward{}: its recomputation would change it again, and the change would not be kept. Make "
    "it a buffer, let the optimizer change it, or, where weights are clipped, set so wide a bound that it changes none"
)


def put_back(weights: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> bool:
    """Let parameters hold what they held ``before``: (parameter, before). True: one held something else."""
    changed = [(p, before) for p, before in weights if not (p.is_meta or torch.equal(p, before))]
    with torch.no_grad():
        for parameter, before in changed:
            parameter.copy_(before)
    return bool(changed)


class Birth:
    """A storage that an op made: its bytes, the segment that made it, and what has happened to it since.

    ``depends``: its numbers follow from the micro-batch, or from weights that train. ``of``: the storages from before
    the forward, but for weights, that they follow from; ``copies``: those that they are merely copied from.
    ``returned``: a block returned it. ``kept``: the places where the model's own code keeps it. ``writer``: the block
    that has written to it without being handed it.
    """

    __slots__ = ("copies", "depends", "kept", "nbytes", "of", "returned", "saved", "segment", "touched", "writer")

    def __init__(self, nbytes: int, segment: int) -> None:
        self.nbytes = nbytes
        self.segment = segment
        self.touched: set[int] = set()
        self.saved: set[int] = set()
        self.depends = False
        self.of: frozenset[int] = frozenset()
        self.copies: frozenset[int] = frozenset()
        self.returned = False
        self.kept: Way = ()
        self.writer: str | None = None


Packets = frozenset[int]
"""Ops by identity, which lasts as long as torch is there: their hash is a function in Python, and takes longer than
most looks at a tensor."""


def packets(*ops: Any) -> Packets:
    return frozenset(map(id, ops))


class Operand(NamedTuple):
    """A tensor of an op that is one piece of memory: with its storage (``storage_key``), which takes longer to ask for
    than to look up, and the birth of that, if an op of the probe has made it."""

    tensor: torch.Tensor
    storage: int
    birth: Birth | None


_operand = partial(tuple.__new__, Operand)
"""``Operand``, of a tuple of its fields: in half of the time, for each op has several."""


class Op(NamedTuple):
    """An op that has run. ``packet``: of all its overloads; ``generator``: the one that it was given.

    ``inputs``: the distinct tensors among its arguments; ``written``: those of them that it has changed; ``made``: the
    ``results`` that are no views of what it was given; ``unwaited``: it is a copy that nobody is to wait for
    (``non_blocking``).
    """

    func: Any
    packet: Any
    generator: torch.Generator | None
    inputs: list[Operand]
    written: list[Operand]
    results: list[Operand]
    made: list[Operand]
    unwaited: bool


_op = partial(tuple.__new__, Op)


_VIEWS = frozenset(getattr(torch.Tensor, name).__get__ for name in ("T", "H", "mT", "mH", "data"))
"""Looks at an attribute that is a view, with whose numbers code goes on."""


class Ahead(TorchFunctionMode):
    """Calls ``load`` before a function of torch that is handed a parameter. What it does then may depend on the strides
    of a weight, and a placeholder has others.
    """

    def __init__(self, parameters: Mapping[int, int], load: Callable[[int], None]) -> None:
        super().__init__()
        self._parameters = parameters
        self._load = load

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # A look at its shape or dtype needs no numbers.
        if getattr(func, "__name__", None) != "__get__" or func in _VIEWS:
            for value in (*args, *kwargs.values()) if kwargs else args:
                if type(value) in (list, tuple):
                    self._bring(value)
                elif (group := self._parameters.get(id(value))) is not None:
                    self._load(group)
        return func(*args, **(kwargs or {}))

    def _bring(self, values: Iterable[Any]) -> None:
        """Load those parameters that are among the items of a list."""
        for value in values:
            if (group := self._parameters.get(id(value))) is not None:
                self._load(group)


class Watch(private.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every op below autograd: follows live bytes, and calls ``on_weight`` before an op that reads a parameter,
    ``on_write`` before one that writes to a tensor, and ``on_op`` behind each.
    """

    def __init__(
        self,
        parameters: Mapping[int, int],
        on_weight: Callable[[int], None],
        on_write: Callable[[Operand], None] | None = None,
        on_op: Callable[[Op], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self.segment = 0
        self.flops = 0
        self.traffic = 0
        self.ops = 0
        self.products: list[int] = []
        """The matrix products and their like so far, by identities of their packets."""
        self.births: dict[int, Birth] = {}
        """births of the storages that are there, by ``storage_key``"""
        self._parameters = parameters  # identity of a parameter -> its group
        self._on_weight = on_weight
        self._on_write = on_write
        self._on_op = on_op
        self._alive: dict[int, weakref.ref[Any]] = {}

    def hold(self, nbytes: int) -> None:
        """Count bytes that no op of the model has made, or (negative) has freed."""
        self.live += nbytes
        if self.live > self.peak:
            self.peak = self.live

    @property
    def work(self) -> Work:
        """All that was computed so far."""
        return Work(flops=self.flops, traffic=self.traffic, ops=self.ops)

    def has_left(self, segment: int, returned: Collection[int]) -> bool:
        """True if bytes that a segment made are there, besides those it has ``returned``, by the identity of births."""
        return any(b.segment == segment and b.nbytes and id(b) not in returned for b in self.births.values())

    def birth(self, tensor: torch.Tensor) -> Birth | None:
        return self.births.get(storage_key(tensor)) if trees.has_storage(tensor) else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with private.without_functions():  # of ops, and looks of our own, ``Ahead`` and others need not hear
            known = _KNOWN.get(id(func)) or _known(func)
            packet = known.packet
            inputs = self._before(_tensors((*args, *kwargs.values()) if kwargs else args))
            # set_ points elsewhere: peft does so, with the same place, around what it adds to experts.
            written = self._operands(written_by(func, args, kwargs)) if known.writes and not known.sets else []
            if self._on_write is not None:
                for operand in written:
                    self._on_write(operand)
            result = func(*args, **kwargs)
            self.ops += 1
            if known.formula is not None:
                self.flops += known.formula(*args, **kwargs, out_val=result)
                self.products.append(id(packet))
            if known.sets:
                inputs = self._operands(operand.tensor for operand in inputs)  # they lie elsewhere now
            results, made = self._results(inputs, result)
            if self._on_op is not None:
                unwaited = kwargs.get("non_blocking", packet is _ATEN.copy_ and len(args) > 2 and args[2])
                changed = [*written, *self._operands(_updated(args))] if known.is_norm else written
                generator = kwargs.get("generator")
                self._on_op(_op((func, packet, generator, inputs, changed, results, made, bool(unwaited))))
            if known.formula is None and (written or made):
                self.traffic += known.moved(inputs, written or made)
        return result

    def _before(self, given: list[torch.Tensor]) -> list[Operand]:
        """The tensors that an op is about to read."""
        inputs = []
        for tensor in given:
            group = self._parameters.get(id(tensor))
            if group is not None:
                self._on_weight(group)  # which moves it
            key = storage_key(tensor)
            birth = self.births.get(key)
            if birth is not None:
                birth.touched.add(self.segment)
            inputs.append(_operand((tensor, key, birth)))
        return inputs

    def _results(self, inputs: list[Operand], result: Any) -> tuple[list[Operand], list[Operand]]:
        """The tensors that an op has returned, each of which is followed from here on; and those of them that are no
        views of what it was given."""
        old = {storage for _, storage, _ in inputs}
        results, made = [], []
        for tensor in _tensors((result,)):
            key = storage_key(tensor)
            birth, is_new = self.births.get(key), key not in old
            if is_new and birth is None:
                birth = self.follow(key, tensor.untyped_storage())
            results.append(operand := _operand((tensor, key, birth)))
            if is_new:
                made.append(operand)
        return results, made

    def _operands(self, tensors: Iterable[torch.Tensor]) -> list[Operand]:
        births = self.births
        return [_operand((tensor, key := storage_key(tensor), births.get(key))) for tensor in tensors]

    def follow(self, key: int, storage: torch.UntypedStorage) -> Birth:
        nbytes = storage.nbytes()

        def freed(_: object) -> None:
            self.live -= nbytes
            self.births.pop(key, None)
            self._alive.pop(key, None)

        birth = self.births[key] = Birth(nbytes, self.segment)
        self._alive[key] = weakref.ref(storage, freed)
        self.hold(nbytes)
        return birth


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """The distinct tensors among an op's arguments or results that are one piece of memory; lists of them are flat."""
    found: dict[int, torch.Tensor] = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            if trees.has_storage(value):
                found[id(value)] = value
        elif isinstance(value, list | tuple):
            found.update((id(t), t) for t in value if isinstance(t, torch.Tensor) and trees.has_storage(t))
    return [*found.values()]


_PICKING = packets(_ATEN.embedding, _ATEN.gather, _ATEN.index, _ATEN.index_select, _ATEN.nll_loss_forward)
"""Ops that read as much of what they pick from as they return."""
_PUTTING = packets(_ATEN.index_add_, _ATEN.index_copy_, _ATEN.index_put_, _ATEN.scatter_, _ATEN.scatter_add_)
"""Ops that read and write as much of what they change as there is to put there."""
_FILLING = packets(
    *(_ATEN.zero_, _ATEN.fill_, _ATEN.bernoulli_, _ATEN.uniform_, _ATEN.normal_, _ATEN.random_, _ATEN.exponential_),
    *(_ATEN.zeros_like, _ATEN.ones_like, _ATEN.full_like, _ATEN.rand_like, _ATEN.randn_like),
    *(_ATEN.new_zeros, _ATEN.new_ones, _ATEN.new_full, _ATEN.nll_loss_backward),
)
"""Ops that read next to nothing of the tensors that they are given."""
_MAKING = packets(_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided)
"""Ops that return memory as it is."""


def _moved(packet: Any) -> Callable[[list[Operand], list[Operand]], int]:
    """A function that says how many bytes of memory an op which is no product moves, from its arguments and from what
    it has made, or changed: all of these, but for ops that look at a part of them."""
    if id(packet) in _MAKING:
        return lambda inputs, made: 0
    if id(packet) in _PICKING:
        return lambda inputs, made: 2 * _sum(made)
    if id(packet) in _FILLING:
        return lambda inputs, made: _sum(made)
    if id(packet) in _PUTTING:
        return lambda inputs, made: 3 * max((_nbytes(o.tensor) for o in _others(inputs, made)), default=0)
    if packet is _ATEN.copy_:
        return lambda inputs, made: _sum(made) + _sum(_others(inputs, made))
    return lambda inputs, made: _sum(made) + _sum(inputs)


def _others(inputs: list[Operand], made: list[Operand]) -> list[Operand]:
    changed = {id(operand.tensor) for operand in made}
    return [operand for operand in inputs if id(operand.tensor) not in changed]


def _sum(operands: list[Operand]) -> int:
    total = 0
    for tensor, _, _ in operands:
        total += _nbytes(tensor)
    return total


def _nbytes(tensor: torch.Tensor) -> int:
    """Bytes of memory that a tensor's elements are in: of an expanded one fewer than it has elements. A single number
    is nothing."""
    apart = tensor.numel()
    if not (apart and tensor.is_contiguous()):
        apart = prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return 0 if apart == 1 else apart * tensor.element_size()


def written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an op changes, and that are one piece of memory."""
    places = _places_written(func)
    if not places:
        return []
    return _tensors([args[place] if place < len(args) else kwargs.get(name) for place, name in places])


_NORMS = packets(_ATEN.native_batch_norm, _ATEN.cudnn_batch_norm, _ATEN.miopen_batch_norm)
"""Ops that change running statistics, and do not say so."""


def _updated(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The running statistics that one of these changes: its fourth and fifth argument, if the sixth says that it
    trains."""
    return _tensors(args[3:5]) if args[5] else []


@cache
def _places_written(func: Any) -> tuple[tuple[int, str], ...]:
    """Place and name of the arguments that an op changes."""
    schema = schema_of(func)
    if schema is None or not schema.is_mutable:
        return ()
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


class _Known:
    """An op, as it is whatever it is handed. ``formula``: of ``FLOP``; ``moved``: as of ``_moved``; ``writes``: it
    changes arguments; ``sets``: these are other memory afterwards; ``is_norm``: of ``_NORMS``."""

    __slots__ = ("formula", "func", "is_norm", "moved", "packet", "sets", "writes")

    def __init__(self, func: Any) -> None:
        self.func = func  # as long as this is there, no other op has its identity
        self.packet = packet_of(func)
        self.formula = FLOP.get(self.packet)
        self.moved = _moved(self.packet)
        self.writes = bool(_places_written(func))
        self.sets = self.packet is _ATEN.set_
        self.is_norm = id(self.packet) in _NORMS


_KNOWN: dict[int, _Known] = {}
"""By the identity of an op, as of ``Packets``."""


def _known(func: Any) -> _Known:
    _KNOWN[id(func)] = known = _Known(func)
    return known
