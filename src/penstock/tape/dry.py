"""A dry run: what a probe would learn about a model, from the model on the meta device. No weights, no activations.

The model is run as the engine would run it (same groups, same tape, parameters in the compute dtype), for a *kind* of
device that need not be there.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import init
from torch.overrides import TorchFunctionMode

from penstock.compat.marks import buffer_dtypes
from penstock.compat.modules import convert_buffers
from penstock.compat.torch import autocast_of_meta
from penstock.errors import ModelError
from penstock.schedule.place import Format
from penstock.schedule.program import GroupSpec, Stage
from penstock.schedule.work import BothWays
from penstock.tape.blocks import find_blocks
from penstock.tape.fused import Fused, Kind
from penstock.tape.groups import group_parameters
from penstock.tape.suspended import LossFn
from penstock.tape.tape import Tape
from penstock.tape.ulysses import Ulysses
from penstock.tape.values import Values

_META = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The result of a dry run; ``work`` of each stage."""

    groups: tuple[GroupSpec, ...]
    stages: tuple[Stage, ...]
    work: tuple[BothWays, ...]


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """The module that ``build`` makes, in training mode, without memory.

    Raises:
        ModelError: it makes a tensor's value part of how it is built, or returns no module.
    """
    try:
        with _META, _Unset():
            model = build()
    except (RuntimeError, NotImplementedError) as error:
        raise ModelError(f"the model cannot be built on the meta device: {_first_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"the callable returned {type(model).__name__}: it must build and return a torch.nn.Module")
    return model.train()


class _Unset(TorchFunctionMode):
    """torch's own initialization is left out: without values, all that it takes is time."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (init.kaiming_uniform_, init.normal_, init.uniform_) and kwargs["tensor"].is_meta:
            return kwargs["tensor"]
        return func(*args, **kwargs)


def dry_run(
    model: nn.Module,
    micro_batch: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    kind: Kind,
    loss_fn: LossFn | None = None,
    form: Format | None = None,
    cp: int = 1,
    splits: bool = False,
) -> DryRun:
    """Probe a model on the meta device. Its parameters are placeholders of ``dtype`` afterwards.

    ``form``: as in ``group_parameters``. ``splits``: as of ``Tape``. ``micro_batch``: tensors on the CPU, whose
    integers and booleans then have values in the run, or on the meta device. ``cp``: ranks that share each sequence, of
    which this one has a span.

    Raises:
        ModelError: the model cannot be run block by block, or needs values that a dry run does not have.
    """
    found = find_blocks(model)
    groups = group_parameters(model, found, form=form)
    for group in groups:
        group.detach(dtype, _META)
    convert_buffers(buffer_dtypes(model, dtype))
    own = loss_fn or (lambda m, mb: m(**mb).loss)
    ulysses = None if cp == 1 else Ulysses(model, cp)
    tape = Tape(model, found, groups, own, seed=0, device=_META, ulysses=ulysses, splits=splits)
    values = Values(kind)
    inputs = values.give(
        {k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in micro_batch.items()}
    )

    def load(g: int) -> None:
        groups[g].attach(torch.empty(groups[g].spec.numel, dtype=dtype, device=_META))

    def unload(g: int) -> None:
        groups[g].detach(dtype, _META)

    try:
        with values, Fused(kind), autocast_of_meta():
            learned = tape.probe(inputs, load, unload, all_copies=True)
    except (RuntimeError, NotImplementedError) as error:
        raise ModelError(f"the model cannot be run on the meta device: {_first_line(error)}") from error
    finally:
        tape.close()
    return DryRun(groups=tuple(g.spec for g in groups), stages=learned.stages, work=learned.work)


def shorten(model: nn.Module) -> tuple[str, ...] | None:
    """Leave only the first, the second and the last of many equal blocks in a model. Returns the names of all.

    None, and the model is left as it is, where blocks differ, are few, or are not all of one ``ModuleList``. Meant for
    models whose forward is a loop over that list, as those of Hugging Face are.
    """
    blocks = find_blocks(model)
    paths = {block.name.rpartition(".")[0] for block in blocks}
    if len(paths) > 1 or len(blocks) <= 3:
        return None
    owner = model.get_submodule(paths.pop())
    if not isinstance(owner, nn.ModuleList) or len(owner) != len(blocks):
        return None
    if len({_signature(block.module) for block in blocks}) > 1:
        return None
    del owner[2:-1]
    return tuple(block.name for block in blocks)


def _signature(block: nn.Module) -> tuple[object, ...]:
    """A key that equal blocks share: their modules' classes and plain settings, and their parameters' shapes."""
    return tuple(
        (
            path,
            type(module),
            tuple((name, p.shape, p.requires_grad) for name, p in module.named_parameters(recurse=False)),
            tuple(
                (key, value)
                for key, value in vars(module).items()
                if isinstance(value, str | int | float | bool | None)
                and not re.search(r"(layer|block)_?(idx|index|id)", key)
            ),
        )
        for path, module in block.named_modules()
    )


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] + ". Learn its sizes from a run instead: one step is enough"
