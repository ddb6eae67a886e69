"""Private names of torch's modules: what they keep, and the hooks on them.

Each function says what the name stands for, and (*Without*) what Penstock could not do if torch took it away.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    _global_forward_hooks,
    _global_forward_pre_hooks,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters by attribute, to be read and put in place without ``__setattr__``.

    Without: initialisers could not be run on one param group alone, as setting the attribute runs a class's own code.
    """
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's own buffers by attribute, to be read and put in place without ``__setattr__``.

    Without: a recomputation could not be given the buffers that the call had.
    """
    return module._buffers


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's own buffers that are in its ``state_dict``.

    Without: what follows from the configuration (rotary frequencies) would be kept and moved as state.
    """
    skipped = module._non_persistent_buffers_set
    return {key: buffer for key, buffer in module._buffers.items() if buffer is not None and key not in skipped}


def convert_buffers(dtypes: Mapping[tuple[nn.Module, str], torch.dtype]) -> None:
    """Give buffers, by module and name in it, these dtypes."""
    for (module, name), dtype in dtypes.items():
        buffer = buffers_of(module)[name]
        assert buffer is not None, "it had a dtype"
        buffers_of(module)[name] = buffer.to(dtype)


@contextmanager
def watched_attributes(
    read: Callable[[nn.Module, str], None], written: Callable[[nn.Module, str], None]
) -> Iterator[None]:
    """Inside, these are told of each attribute of a module, by name, that is about to be read, and assigned or deleted.

    Functions are put in the place of ``Module.__setattr__`` and others. Without: what a forward keeps on a module of
    one micro-batch for later code would be another one's.
    """
    assign, delete = nn.Module.__setattr__, nn.Module.__delattr__

    def noted_read(module: nn.Module, name: str) -> Any:
        read(module, name)
        return object.__getattribute__(module, name)

    def noted(module: nn.Module, name: str, value: Any) -> None:
        written(module, name)
        assign(module, name, value)

    def noted_delete(module: nn.Module, name: str) -> None:
        written(module, name)
        delete(module, name)

    nn.Module.__setattr__, nn.Module.__delattr__ = noted, noted_delete  # type: ignore[assignment, method-assign]
    nn.Module.__getattribute__ = noted_read  # type: ignore[assignment]
    try:
        yield
    finally:
        del nn.Module.__getattribute__  # it is object's again
        nn.Module.__setattr__, nn.Module.__delattr__ = assign, delete  # type: ignore[method-assign]


def forward_hooks(module: nn.Module) -> tuple[Callable[..., Any], ...]:
    """The hooks of a module's own forward.

    Without: what they keep of one micro-batch for later code would be another one's.
    """
    return (*module._forward_pre_hooks.values(), *module._forward_hooks.values())


def hooks_of(module: nn.Module) -> list[tuple[int, int, Callable[..., Any]]]:
    """All hooks on a module that its calls run: the number of their kind, that which torch gives them (each once in a
    process), and the hook.

    Without: a model that was given a hook between two steps would be run by what was found out without it.
    """
    own = vars(module)
    pre, post = own["_forward_pre_hooks"], own["_forward_hooks"]
    if not (pre or post or own["_backward_pre_hooks"] or own["_backward_hooks"]):  # as most modules
        return []
    kinds = (pre, post, own["_backward_pre_hooks"], own["_backward_hooks"])
    return [(kind, number, hook) for kind, hooks in enumerate(kinds) for number, hook in hooks.items()]


def parts_of(module: nn.Module) -> Iterable[nn.Module | None]:
    """The modules that a module has in its attributes, as they are.

    Without: to go through a model's modules, as each step does, would take three times as long (``modules()``).
    """
    return module._modules.values()


@contextmanager
def calls_seen(entered: Callable[[nn.Module], None], left: Callable[[nn.Module], None]) -> Iterator[None]:
    """Inside, these are told of each module whose forward begins, and ends.

    Without: nobody could tell in which module an op runs.
    """
    with ExitStack() as hooks:
        hooks.callback(register_module_forward_pre_hook(lambda module, _: entered(module)).remove)
        hooks.callback(register_module_forward_hook(lambda module, *_: left(module), always_call=True).remove)
        yield


def are_all_hooked() -> bool:
    """True if hooks see every forward of every module (``register_module_forward_pre_hook``), as torch's own counters
    of FLOP have them.

    Without: a block would be blamed for what such a hook does in its forward.
    """
    return bool(_global_forward_pre_hooks or _global_forward_hooks)


def entries_of(module: nn.Module) -> Mapping[str, nn.Module | None]:
    """The modules that a module holds, in order; a list may hold one module twice, or None, which ``named_children``
    leaves out.

    Without: a block that stands in a list twice would be found once.
    """
    return module._modules


def has_backward_hooks(module: nn.Module) -> bool:
    """True if somebody looks at a module's gradients (``register_full_backward_hook`` and the like).

    Without: a hook on a head whose logits are never made would not be called, and nobody would say so.
    """
    return bool(module._backward_hooks or module._backward_pre_hooks)


def is_compiled(module: nn.Module) -> bool:
    """True if ``module.compile()`` was called, which leaves the module's class as it is.

    Without: its calls would go past the boundary of the tape, into code that was compiled with it.
    """
    return getattr(module, "_compiled_call_impl", None) is not None


def reset_method(module: nn.Module) -> Callable[[], object] | None:
    """``reset_parameters``, under either of the names that torch's own modules have it by.

    Without: ``MultiheadAttention`` and the transformer layers of torch could not be made on the meta device.
    """
    found: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return found if callable(found) else None


def drop_weak_references(module: nn.Module) -> None:
    """Let a recurrent layer have functions that return its weights in the place of the weak references by which it
    looks whether others were put where they are (as ``torch.func.functional_call`` does).

    Without: its weights could not leave the meta device, as torch swaps no tensor that has such a reference.
    """
    if isinstance(module, nn.RNNBase):
        weights: Any = module._flat_weights
        references: Any = [None if weight is None else partial(_itself, weight) for weight in weights]
        module._flat_weight_refs = references


def _itself(weight: torch.Tensor) -> torch.Tensor:
    return weight
