"""Keeps a model whose weights the engine holds from being used as if it had them: its placeholders read as NaN."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain
from typing import Any, NoReturn
from weakref import WeakSet

from torch import nn

from penstock.compat.gradients import look_at_uses
from penstock.errors import ConfigError, ModelError

_GUARD = "_penstock_guard"
_ANYONE = (
    "run it with engine.evaluate(micro_batches), read its values with engine.master_parameters(), or write a folder "
    "(penstock.hf.export) and load that"
)
_GUARDED: WeakSet[nn.Module] = WeakSet()
"""The models, and not their parameters: torch lets no tensor leave the meta device that a weak reference is to."""


class _Guard:
    """Refuses uses of a model, in one object for all of its modules. It is neither copied nor pickled, so no model is
    either that has it: a copy would have the placeholders, and nobody who fills them.
    """

    def __init__(self) -> None:
        self.instead = _ANYONE
        self.names_only = False
        self.at_work = False
        self.within: list[nn.Module] = []
        """modules with parameters within blocks. They have hooks while the engine is not at work: compiled blocks, and
        code that looks for hooks, find none"""
        self.remove: list[Callable[[], None]] = []
        """functions that take the hooks of ``within`` away"""

    def refuse(self, *_: Any) -> NoReturn:
        raise ModelError(f"the model's weights are the engine's, and it has none of its own: {self.instead}")

    def check_forward(self, *_: Any) -> None:
        if not self.at_work:
            self.refuse()

    def set_at_work(self, at_work: bool) -> None:
        self.at_work = at_work
        while self.remove:
            self.remove[-1]()
            self.remove.pop()
        if not at_work:
            for module in self.within:
                self.remove.append(module.register_forward_pre_hook(self.check_forward).remove)

    def check_state(self, *_: Any) -> None:
        if not self.names_only:
            self.refuse()

    def __deepcopy__(self, _: Any) -> NoReturn:
        self.refuse()

    def __reduce_ex__(self, _: Any) -> NoReturn:
        self.refuse()


def guard(model: nn.Module, instead: str | None = None, *, blocks: Collection[nn.Module] = ()) -> None:
    """From now on the model's forward outside of the engine, that of its parts, and its ``state_dict`` are errors that
    say ``instead``. Parts of ``blocks`` without parameters may be called. To clip gradients of its parameters is an
    error, too, and to step an optimizer of torch's own that has one: gradients are never there outside of a step.

    For all who get hold of the model: callbacks, code behind the training, and those who have closed the engine. Called
    again, it only changes what is said.
    """
    found = vars(model).get(_GUARD)
    known = found if isinstance(found, _Guard) else _Guard()
    known.instead = instead or known.instead
    if known is found:
        return
    within = {id(module) for block in blocks for module in block.modules() if module is not block}
    for module in model.modules():
        if id(module) not in within:
            module.register_forward_pre_hook(known.check_forward)
        elif next(module.parameters(), None) is not None:
            known.within.append(module)
    known.set_at_work(False)
    _look_at_uses()
    _GUARDED.add(model)
    for module in model.modules():
        module.register_state_dict_pre_hook(known.check_state)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(known.refuse)  # type: ignore[no-untyped-call]
        vars(module)[_GUARD] = known


def is_guard(hook: Callable[..., Any]) -> bool:
    """True of a hook of a guard's own."""
    return isinstance(getattr(hook, "__self__", None), _Guard)


def set_at_work(model: nn.Module, at_work: bool) -> None:
    """Say if the engine is running a guarded model now, and has brought its weights."""
    known = vars(model).get(_GUARD)
    if isinstance(known, _Guard):
        known.set_at_work(at_work)


@contextmanager
def names_of_state(model: nn.Module) -> Iterator[None]:
    """Within, ``state_dict`` of a guarded model may be asked for its names; its values are placeholders."""
    known = vars(model).get(_GUARD)
    if known is None:
        yield
        return
    known.names_only = True
    try:
        yield
    finally:
        known.names_only = False


def check_unguarded(model: nn.Module) -> None:
    """Raises:
    ModelError: an engine has taken the values of the model, or of a part of it.
    """
    for name, module in model.named_modules():
        if _GUARD in vars(module):
            which = f"{name!r}, a part of this model, was" if name else "this model was"
            raise ModelError(
                f"{which} wrapped before: its weights are that engine's, and it has none of its own. Use that engine, "
                "or build the model anew (a store goes on from its last step with any model of the same kind)"
            )


@cache
def _look_at_uses() -> None:
    """Once in a process: what a loop calls is torch's, and nobody hands it to ``wrap``."""
    look_at_uses(_check_clipping, _check_step)


def _are_guarded(parameters: Iterable[Any]) -> bool:
    """True if one of the parameters is of a guarded model."""
    theirs = {id(parameter) for model in _GUARDED for parameter in model.parameters()}
    return bool(theirs) and not theirs.isdisjoint(map(id, parameters))


def _check_clipping(parameters: Iterable[Any]) -> None:
    if _are_guarded(parameters):
        raise ConfigError(
            "gradients of this model cannot be clipped by this call: they are the engine's, and there are none between "
            "steps. engine.step clips by their norm itself where clip_grad_norm says so (penstock.wrap, "
            "PenstockStrategy; max_grad_norm of TrainingArguments), and returns it as grad_norm. Leave this call out"
        )


def _check_step(optimizer: Any) -> None:
    if getattr(optimizer, "is_engines", False):
        return
    if _are_guarded(chain.from_iterable(group["params"] for group in optimizer.param_groups)):
        raise ConfigError(
            f"step() of this {type(optimizer).__name__} would change nothing: the engine has its parameters, and the "
            "gradients, and takes the whole step itself. Call engine.step(micro_batches), or, under Fabric, that of "
            "the one that fabric.setup() has returned"
        )
