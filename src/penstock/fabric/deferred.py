"""Computations on a model's output before there is one: recorded, and carried out within the engine's step.

    output = model(**batch)                      a Deferred: the model has not run
    loss = F.cross_entropy(output.logits, y)     a Deferred: a note of what to do with it
    fabric.backward(loss)                        collected
    optimizer.step()                             the engine runs all micro-batches together; each computes its loss
    loss.item()                                  known from now on

The engine wants all micro-batches of a step before it starts, since it takes them through a block together. So a loop
that computes eagerly, one micro-batch after the other, is recorded: attributes, items, calls, arithmetic and functions
of torch. What needs a number at once (``if``, ``float``, printing) is an error until the step has been taken. What
would be lost is one always: a change in place, of a Deferred or by one, and a change of a tensor that was recorded.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import nn

from penstock.compat.torch import tree_iter, tree_map_only, version
from penstock.engine.batch import LABELS
from penstock.errors import ModelError
from penstock.tape import trees

_UNKNOWN: Any = object()
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_UNARY = ("neg", "pos", "abs", "invert")
_LOST = ("backward", "register_hook", "retain_grad", "__setitem__")
"""Methods that do something and return nothing. Whatever ends in an underscore works in place, and is lost, too."""


class Deferred:
    """A value that the engine's next step computes: ``compute(*args, **kwargs)``, where arguments may be Deferred.

    Single numbers keep their value after the step; all else is gone with the micro-batch that it came from.

    Raises:
        ModelError: its value is asked for and there is none.
    """

    __hash__ = object.__hash__
    modes: tuple[bool, ...] = ()
    """Of a call of the model: ``training`` of each of its modules then."""
    moment = (0, 0)
    """Of such a call: the numbers of steps that the engine had taken, and of checkpoints that were loaded."""
    _steps = 0
    """Steps taken so far: values recorded before the last one can be known, later ones cannot."""

    def __init__(self, compute: Callable[..., Any], args: Any = (), kwargs: Mapping[str, Any] | None = None) -> None:
        if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
            raise ModelError("autocast is on while a loss is recorded, and would have no effect: Fabric(precision=...)")
        self._compute = compute
        known = tree_map_only(Deferred, _value_if_known, (args, dict(kwargs or {})))
        self._args, self._kwargs = trees.snapshot(known)  # the loop may take a batch apart
        self._versions = [_version(tensor) for tensor in _tensors(self)]
        self._made = Deferred._steps
        self._grad = torch.is_grad_enabled()
        if self._grad and any(tensor.requires_grad for tensor in _tensors(self)):
            raise ModelError(
                "a tensor that requires a gradient is used beside the model's outputs, and would get none: the model's "
                "own parameters have their values within its forward alone, and of other modules the engine knows "
                "nothing. Compute it in the model's forward, which may return it, or give detach() of what is to have "
                "no gradient"
            )
        self._value = _UNKNOWN
        self._spent = False
        self._parts: dict[tuple[str, str | int, bool], Any] = {}

    # ---- recording

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        given = kwargs or {}
        if _is_lost(name) or given.get("inplace") or given.get("out") is not None:
            _refuse_lost(name)
        return note(function, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # Python's own questions, to which the answer is no
        if _is_lost(name):
            _refuse_lost(name)
        return self._part(getattr, name)

    def __getitem__(self, key: Any) -> Any:
        known = type(key) in (str, int)  # True is another key than 1, and equal to it
        return self._part(operator.getitem, key) if known else note(operator.getitem, (self, key))

    def _part(self, compute: Callable[..., Any], key: str | int) -> Any:
        """An attribute or item, the same one each time: so ``output.loss`` is known once it was part of a loss."""
        place = (compute.__name__, key, torch.is_grad_enabled())
        if place not in self._parts:
            self._parts[place] = note(compute, (self, key))
        return self._parts[place]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return note(_call, (self, *args), kwargs)

    # ---- numbers

    def resolve(self) -> Any:
        """The value, which is known after the step that it was part of."""
        if self._value is _UNKNOWN:
            for node in nodes(self):
                node._compute_now()
        return self._value

    def settle(self, value: Any) -> None:
        """Say what the value is, where no computation does."""
        self._value = value

    def _compute_now(self) -> None:
        """Compute the value where all that it needs is known, and let go of its arguments."""
        if self._value is not _UNKNOWN:
            return
        if self._is_gone:
            self._refuse()
        self._check_unchanged()
        args, kwargs = tree_map_only(Deferred, lambda part: part._value, (self._args, self._kwargs))
        self._value = self._compute(*args, **kwargs)
        self._args, self._kwargs = (), {}

    @property
    def _is_gone(self) -> bool:
        """True if it has no value, and none can be computed from what it is made of."""
        return self._value is _UNKNOWN and (self._spent or self._compute is MODEL)

    def _check_unchanged(self) -> None:
        if any(_version(t) != before for t, before in zip(_tensors(self), self._versions, strict=True)):
            raise ModelError(
                "a tensor was changed in place after it was recorded (in a call of the model, or with its outputs) and "
                "before optimizer.step(), where it is read: give each micro-batch tensors of its own (clone())"
            )

    def _settle(self) -> bool:
        """True if the value is known; computed here if a step was taken since, so that sums do not grow into chains."""
        if self._value is _UNKNOWN and self._made < Deferred._steps and not any(n._is_gone for n in nodes(self)):
            self.resolve()
        return self._value is not _UNKNOWN

    def _refuse(self) -> NoReturn:
        if self._spent:
            raise ModelError(
                "this was computed within optimizer.step() and is gone with its micro-batch: only single numbers that "
                "are part of a loss given to fabric.backward() are kept"
            )
        raise ModelError(
            "this is known after optimizer.step(): the engine runs the model then, on all micro-batches of the step. "
            "Move what needs a number behind it; under torch.no_grad() and model.eval() the model runs at once"
        )

    def item(self) -> Any:
        value = self.resolve()
        return value.item() if isinstance(value, torch.Tensor) else value

    def tolist(self) -> Any:
        value = self.resolve()
        return value.tolist() if isinstance(value, torch.Tensor) else value

    def __float__(self) -> float:
        return float(self.resolve())

    def __int__(self) -> int:
        return int(self.resolve())

    def __index__(self) -> int:
        return operator.index(self.resolve())

    def __bool__(self) -> bool:
        return bool(self.resolve())

    def __len__(self) -> int:
        return len(self.resolve())

    def __iter__(self) -> Iterator[Any]:
        if self._value is _UNKNOWN and not self._spent:
            raise ModelError(
                "the number of parts of this is known after optimizer.step(): take them as output[0], output[1]"
            )
        return iter(self.resolve())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __repr__(self) -> str:
        return "Deferred(not known yet)" if self._value is _UNKNOWN else f"Deferred({self._value!r})"


def MODEL(*args: Any, **kwargs: Any) -> NoReturn:  # noqa: N802 - stands for a value, and is compared with
    """In the place of a call of the model, which ``run`` is given."""
    raise AssertionError("the model's own call is never computed in place")


def note(compute: Callable[..., Any], args: Any, kwargs: Mapping[str, Any] | None = None) -> Any:
    """Record a computation; carry it out at once where all that it needs is known already."""
    given = [d for d in tree_iter((args, dict(kwargs or {}))) if isinstance(d, Deferred)]
    made = Deferred(compute, args, kwargs)
    known = [d._settle() for d in given]
    return made.resolve() if given and all(known) else made


def _value_if_known(part: Deferred) -> Any:
    return part._value if part._settle() else part


def is_spent(root: Deferred) -> bool:
    """True if a recorded computation needs the model's outputs of a step that was taken, which are gone."""
    return any(node._spent for node in nodes(root))


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The tensors that a recorded computation starts from. ``named``: those that the model is called with by name;
    ``unnamed``: its others; ``read``: those that the loop alone reads, beside the outputs; ``of_both``: the ``id`` of
    those that it reads and the model is called with."""

    named: Mapping[str, torch.Tensor]
    unnamed: Sequence[torch.Tensor]
    read: Sequence[torch.Tensor]
    of_both: frozenset[int]


def inputs_of(root: Deferred) -> Inputs:
    """The tensors that a recorded computation starts from, each once."""
    named: dict[str, torch.Tensor] = {}
    calls = calls_of(root)
    given_names = chain.from_iterable(call._kwargs.items() for call in calls)
    for name, value in sorted(given_names, key=lambda item: item[0] in LABELS):  # what is its own label is an input
        if isinstance(value, torch.Tensor) and not any(value is known for known in named.values()):
            named.setdefault(name, value)
    given = trees.tensors([_tensors(call) for call in calls])
    read = trees.tensors([_tensors(node) for node in nodes(root) if node._compute is not MODEL])
    by_name, by_model = ({id(tensor) for tensor in some} for some in (named.values(), given))
    return Inputs(
        named=named,
        unnamed=[tensor for tensor in given if id(tensor) not in by_name],
        read=[tensor for tensor in read if id(tensor) not in by_model],
        of_both=frozenset(id(tensor) for tensor in read) & by_model,
    )


def calls_of(root: Deferred) -> list[Deferred]:
    """The calls of the model in a recorded computation."""
    return [node for node in nodes(root) if node._compute is MODEL]


def values_of(root: Deferred) -> dict[str, bool | int | float | str]:
    """The plain values that the model is called with by name."""
    found = ((name, value) for call in calls_of(root) for name, value in call._kwargs.items())
    return {name: value for name, value in found if isinstance(value, bool | int | float | str)}


def switches_of(root: Deferred) -> list[str]:
    """The switches (True, False, None) that the model is called with, in words."""
    given = (item for call in calls_of(root) for item in chain(enumerate(call._args), call._kwargs.items()))
    return [f"{key}={value}" for key, value in given if value is None or isinstance(value, bool)]


def known_numbers(root: Deferred) -> list[Any]:
    """The numbers among the parts of a computation that was carried out, in order; None: it is none."""
    return [None if node._value is _UNKNOWN else node._value for node in nodes(root)]


def settle_numbers(root: Deferred, numbers: Sequence[Any]) -> None:
    """Let ``known_numbers`` of the same computation in another process be this one's."""
    for node, number in zip(nodes(root), numbers, strict=True):
        node._value = _UNKNOWN if number is None else number


def check_unchanged(root: Deferred) -> None:
    """Check that the tensors that a recorded computation starts from are as they were when it was recorded.

    Raises:
        ModelError: one was changed in place, and what it held is gone.
    """
    for node in nodes(root):
        node._check_unchanged()


def run(root: Deferred, model: nn.Module, there: "There", *, widens: bool) -> Any:
    """Carry out what was recorded, on the device, with what is ``there`` in the place of the tensors that it starts
    from. ``widens``: what the model puts out in 16 bits is handed to the loop's own code in fp32.

    Single numbers on the way are kept; the latest run's count.
    """
    done: dict[int, Any] = {}
    outputs: set[int] = set()
    """the ``id`` of each part that the model has put out, or that is a container in that"""

    def value_of(part: Any, *, is_call: bool, takes_part: bool) -> Any:
        moved = there.for_model if is_call else there.for_loop
        if isinstance(part, Deferred):
            value = done[id(part)]
            if is_call:
                return in_dtype(value, there.dtype)
            return in_dtype(value, torch.get_default_dtype()) if id(part) in outputs and not takes_part else value
        return trees.replace(part, lambda tensor: moved.get(id(tensor), tensor)) if trees.tensors(part) else part

    for node in nodes(root):
        is_call = node._compute is MODEL
        takes_part = node._compute in _PARTS and isinstance(node._args[0], Deferred) and id(node._args[0]) in outputs
        given = partial(value_of, is_call=is_call, takes_part=takes_part)
        args, kwargs = tree_map_only(object, given, (node._args, node._kwargs))
        with torch.set_grad_enabled(node._grad and torch.is_grad_enabled()):
            value = (model if is_call else node._compute)(*args, **kwargs)
            if widens and (is_call or takes_part):
                if isinstance(value, torch.Tensor):
                    value = in_dtype(value, torch.get_default_dtype())
                else:
                    outputs.add(id(node))
        done[id(node)] = value
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            node._value = value.detach().clone()
        elif isinstance(value, bool | int | float):
            node._value = value
    return done[id(root)]


@dataclass(frozen=True, kw_only=True)
class There:
    """Copies of tensors on the device, by the ``id`` of what they are copies of: as the model, which computes in
    ``dtype``, is called with them, and as the loop's own code reads them."""

    dtype: torch.dtype
    for_model: Mapping[int, torch.Tensor]
    for_loop: Mapping[int, torch.Tensor]


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """A value whose floating-point tensors are in ``dtype``."""
    return trees.replace(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def spend(root: Deferred) -> None:
    """The step is over: let go of the micro-batch, and of everything that was on the way but numbers."""
    for node in nodes(root):
        node._spent = True
        node._args, node._kwargs = (), {}
    Deferred._steps += 1


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


_PARTS = (getattr, operator.getitem, _call)
"""Computations that take an attribute or an item, or call one."""


def _tensors(node: Deferred) -> list[torch.Tensor]:
    """The tensors among the arguments, also those in containers that torch does not know of, as tokenizers make."""
    return trees.tensors(list(tree_iter((node._args, node._kwargs))))


def _version(tensor: torch.Tensor) -> int:
    """The number of changes in place; 0 for tensors made in inference mode, which do not count them."""
    return 0 if tensor.is_inference() else version(tensor)


def _is_lost(name: str) -> bool:
    return name in _LOST or (name.endswith("_") and not name.endswith("__"))


def _refuse_lost(name: str) -> NoReturn:
    raise ModelError(
        f"{name} would have no effect, as nothing is computed before optimizer.step(): use what returns a new value "
        "(loss = loss / 2, not loss.div_(2); total = total + loss, not total += loss of a tensor), and "
        "fabric.backward(loss) for gradients"
    )


def nodes(root: Deferred) -> list[Deferred]:
    """The parts of a computation, each before those that need it; without recursion, for chains may be long."""
    order: list[Deferred] = []
    seen: set[int] = set()
    stack: list[tuple[Deferred, bool]] = [(root, False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            parts = [d for d in tree_iter((node._args, node._kwargs)) if isinstance(d, Deferred)]
            stack.extend((part, False) for part in reversed(parts))
    return order


def _operator(name: str, *, reflected: bool = False) -> Callable[..., Any]:
    """The method for an operator of Python's, which is recorded."""
    compute = getattr(operator, name)
    return lambda *operands: note(compute, operands[::-1] if reflected else operands)


for _name in (*_ARITHMETIC, *_COMPARISONS, *_UNARY):
    setattr(Deferred, f"__{_name}__", _operator(_name))
for _name in _ARITHMETIC:
    setattr(Deferred, f"__r{_name}__", _operator(_name, reflected=True))
