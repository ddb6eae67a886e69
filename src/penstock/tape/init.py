"""Fills a model that was built on the meta device with its own initialisation, one param group at a time.

What the model's authors wrote is run, module by module and children first: ``_init_weights`` of the nearest Hugging
Face model above a module, else the module's ``reset_parameters``. While one group is filled, every other parameter is
replaced in its module by a stand-in on the meta device, where an initialiser may do what it likes at no cost.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from penstock.compat.marks import has_adapters, initialiser_of, set_initialised
from penstock.compat.modules import buffers_of, parameters_of, reset_method
from penstock.errors import ModelError
from penstock.tape import rng
from penstock.tape.groups import ParamGroup

Initialiser = Callable[[nn.Module], None]

_ADVICE = "give the module a reset_parameters() that fills it, or build the model on the CPU instead of the meta device"


def initialise(model: nn.Module, group: ParamGroup, seed: int) -> None:
    """Fill one group's parameters, attached to a real fp32 buffer, with the model's own initialisation.

    What is drawn depends on ``seed`` and the group's name alone. The random state is left as it was.

    Raises:
        ModelError: a parameter that no initialiser fills, by name.
    """
    own = {id(s.parameter) for s in group.slices}
    with torch.no_grad(), _random(seed, group.spec.name), _stand_ins(model, own):
        for s in group.slices:
            s.parameter.fill_(float("nan"))
            set_initialised(s.parameter, False)
        for module, initialiser in _initialisers(model):
            if initialiser is not None and any(id(p) in own for p in module.parameters()):
                initialiser(module)
        _reset_modules(model, {id(s.parameter) for s in group.slices if _unfilled(s.parameter)})
    for s in group.slices:
        if _unfilled(s.parameter):
            raise ModelError(f"nothing initialises parameter {s.name!r} of the meta-device model: {_ADVICE}")


def materialise_buffers(model: nn.Module, device: torch.device, seed: int) -> None:
    """Make every buffer (and plain tensor attribute) on the meta device real, with the value that the model gives it.

    Raises:
        ModelError: a buffer that no initialiser fills, by name.
    """
    found = list(_meta_tensors(model))
    if not found:
        return
    owners = _with_ancestors(model, {id(module) for module, *_ in found})
    results = []
    for fill in (0, 1):  # what no initialiser writes is what differs between the two
        for _, _, entries, key, tensor in found:
            entries[key] = torch.full(tensor.shape, fill, dtype=tensor.dtype, device=device)
        with torch.no_grad(), _random(seed, "buffers"), _stand_ins(model, set()):
            for module, initialiser in _initialisers(model):
                if id(module) in owners:
                    (initialiser or _reset)(module)
        results.append([entries[key] for _, _, entries, key, _ in found])
    for (_, name, *_), first, second in zip(found, *results, strict=True):
        if not bool((first.eq(second) | (first.ne(first) & second.ne(second))).all()):  # NaN is a value, too
            raise ModelError(f"nothing computes buffer {name!r} of the meta-device model: {_ADVICE}")


def _with_ancestors(model: nn.Module, wanted: set[int]) -> set[int]:
    """Modules (by identity) and those that they are within, some of which fill the layers in them."""
    return {id(module) for module in model.modules() if any(id(inner) in wanted for inner in module.modules())}


def _unfilled(parameter: nn.Parameter) -> bool:
    return bool(parameter.isnan().any())


def _initialisers(model: nn.Module) -> Iterator[tuple[nn.Module, Initialiser | None]]:
    """Every module, children first, with the ``_init_weights`` of the nearest Hugging Face model above it or None."""
    seen: set[int] = set()

    def visit(module: nn.Module, above: Initialiser | None) -> Iterator[tuple[nn.Module, Initialiser | None]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        above = initialiser_of(module) or above
        for child in module.children():
            yield from visit(child, above)
        yield module, _adapters(model) if has_adapters(module) else above

    return visit(model, None)


def _adapters(model: nn.Module) -> Initialiser:
    """peft's own initialisation of low-rank adapters, which comes after that of the linear layers that they are.

    Raises:
        ModelError: it needs the weights that the adapters are for.
    """
    configs: Any = getattr(model, "peft_config", {})

    def reset(module: Any) -> None:
        for name in (*module.lora_A, *module.lora_embedding_A):
            how = configs[name].init_lora_weights if name in configs else True
            if how is not True and how != "gaussian":
                raise ModelError(
                    f"init_lora_weights={how!r} needs the weights of the model, which is on the meta device: use True "
                    'or "gaussian", or build the model on the CPU'
                )
            module.reset_lora_parameters(name, how)

    return reset


def _reset(module: nn.Module) -> None:
    reset = reset_method(module)
    if reset is not None:
        reset()


def _reset_modules(model: nn.Module, wanted: set[int]) -> None:
    """Fill the ``wanted`` parameters by ``reset_parameters`` of their owners; a tied one by its first owner alone."""
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if not any(id(p) in wanted for p in own):
            continue
        keep = [(p, p.clone()) for p in own if id(p) not in wanted and not p.is_meta]
        _reset(module)
        for parameter, value in keep:
            parameter.copy_(value)
        wanted -= {id(p) for p in own if not _unfilled(p)}


@contextmanager
def _stand_ins(model: nn.Module, but: set[int]) -> Iterator[None]:
    """Inside, every parameter not in ``but`` (by identity) is a stand-in on the meta device."""
    originals: list[tuple[nn.Module, str, nn.Parameter]] = []
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in parameters_of(module).items():
            if parameter is None or id(parameter) in but:
                continue
            if id(parameter) not in made:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                set_initialised(made[id(parameter)], True)
            originals.append((module, name, parameter))
            parameters_of(module)[name] = made[id(parameter)]
    try:
        yield
    finally:
        for module, name, parameter in originals:
            parameters_of(module)[name] = parameter


@contextmanager
def _random(seed: int, name: str) -> Iterator[None]:
    state = rng.RandomState.capture(torch.device("cpu"))
    rng.seed_on_cpu(rng.mix(seed, *name.encode()))
    try:
        yield
    finally:
        state.restore()


def _meta_tensors(model: nn.Module) -> Iterator[tuple[nn.Module, str, dict[str, Any], str, torch.Tensor]]:
    """(owner, full name, dict that it is in, key, tensor) of every buffer and plain tensor attribute on the meta
    device."""
    for path, module in model.named_modules():
        for entries in (buffers_of(module), vars(module)):
            for key, value in entries.items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    yield module, f"{path}.{key}" if path else key, entries, key, value
