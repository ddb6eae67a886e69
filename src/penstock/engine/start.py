"""Getting a model into its groups' homes, group by group: from its own parameters, from a source of weights such as a
folder's files, or by its own initialisation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import xxhash
from torch import nn

from penstock.compat.modules import buffers_of, convert_buffers, persistent_buffers
from penstock.config.optimizer import OptimizerSpec, Orthogonal
from penstock.errors import ModelError
from penstock.optim import kernels
from penstock.ranks.share import WHOLE, Share
from penstock.schedule.place import FP32
from penstock.schedule.program import GroupSpec
from penstock.state.arrays import StateArrays
from penstock.state.buffers import Buffers
from penstock.state.layout import rest_of
from penstock.state.memory import HostSlab
from penstock.state.splits import SPLITS
from penstock.tape.groups import ParamGroup
from penstock.tape.init import initialise, materialise_buffers
from penstock.tape.refusals import overlaps_itself


class WeightSource(Protocol):
    """The source of the values of a model on the meta device. Names are those of ``named_parameters`` and
    ``named_buffers``; whoever makes a source refuses a model that it does not fit.
    """

    def __contains__(self, name: str) -> bool:
        """True if it has the values of a parameter or persistent buffer; the model initialises the others itself."""
        ...

    def fill(self, name: str, out: torch.Tensor) -> None:
        """Fill ``out``: contiguous, on the CPU, of the parameter's shape in fp32, or the buffer's shape and dtype."""
        ...


_WAITING = "_penstock_weights_wait"


@dataclass(frozen=True, kw_only=True)
class _Waiting:
    where: str
    parameters: tuple[nn.Parameter, ...]


def expect_weights(model: nn.Module, weights: WeightSource, where: str) -> None:
    """A model without values has them waiting: whoever wraps it must hand them on, or say that he wants others.

    ``where``: what to hand on, in words.
    """
    known = tuple(parameter for name, parameter in model.named_parameters() if name in weights)
    vars(model)[_WAITING] = _Waiting(where=where, parameters=known)


def _waiting(model: nn.Module) -> list[_Waiting]:
    return [vars(module)[_WAITING] for module in model.modules() if _WAITING in vars(module)]


def waiting_weights(model: nn.Module) -> str | None:
    """The words with which ``expect_weights`` was called for a model, or for a part of it; None: it was not."""
    return next((waiting.where for waiting in _waiting(model)), None)


def not_given(model: nn.Module, weights: WeightSource) -> str | None:
    """The name of a parameter whose values wait and that ``weights`` does not know by this name, as it would if other
    modules had not been put around it; or of the first parameter, if it knows none at all. None: there is none.
    """
    named = list(model.named_parameters())
    expected = {id(parameter) for waiting in _waiting(model) for parameter in waiting.parameters}
    missed = [(name, parameter) for name, parameter in named if name not in weights]
    lost = missed if len(missed) == len(named) else [each for each in missed if id(each[1]) in expected]
    return lost[0][0] if lost else None


def built_on_meta(model: nn.Module) -> bool:
    """True if the model's parameters are on the meta device and have to be initialised.

    Raises:
        ModelError: some are and some are not: which values are meant is not clear.
    """
    meta = [name for name, p in model.named_parameters() if p.is_meta]
    if meta and len(meta) < sum(1 for _ in model.parameters()):
        raise ModelError(
            f"some parameters are on the meta device ({meta[0]!r} is one) and some have values, as torch.Tensor(...) "
            "makes them wherever a model is built: load them all, or give all of them away, model.to('meta')"
        )
    return bool(meta)


def fill(
    model: nn.Module,
    groups: Sequence[ParamGroup],
    arrays: StateArrays,
    *,
    from_meta: bool,
    seed: int,
    weights: WeightSource | None = None,
    share: Share = WHOLE,
    digest: bool = False,
) -> str:
    """Write this rank's ``share`` of every group's weights (and master copy) to its home. At most one group is in
    memory besides the model. Returns a ``digest`` of all of them, if that is asked for.

    Afterwards no parameter owns memory. Moments are zero.
    """
    values = xxhash.xxh3_64()
    for group in groups:
        if not share.holds(group.spec.index):
            group.detach(arrays.dtype, arrays.device)
            continue
        slab = HostSlab(group.spec.numel * FP32)
        flat = slab.bytes[: group.spec.numel * FP32].view(torch.float32)
        if from_meta:
            with torch.device("cpu"):  # whatever torch's default device is
                _fill_from_meta(model, group, flat, seed, weights)
        else:
            for s in group.slices:
                flat[s.offset : s.offset + s.numel].view(s.shape).copy_(s.parameter.detach())
        group.detach(arrays.dtype, arrays.device)
        values.update(flat.numpy().data if digest else b"")
        _write_group(share.part(group.spec), share.own(group.spec, flat), arrays)
        del flat
        slab.close()
    return values.hexdigest()


def _fill_from_meta(
    model: nn.Module, group: ParamGroup, flat: torch.Tensor, seed: int, weights: WeightSource | None
) -> None:
    """Fill ``flat`` [numel], fp32, with the values of a group of a model on the meta device."""
    given = [s for s in group.slices if weights is not None and s.name in weights]
    if len(given) < len(group.slices):
        group.attach(flat)
        initialise(model, group, seed)
    for s in given:
        assert weights is not None
        weights.fill(s.name, flat[s.offset : s.offset + s.numel].view(s.shape))


def _write_group(group: GroupSpec, flat: torch.Tensor, arrays: StateArrays) -> None:
    g, form = group.index, arrays.form
    weights, rest = f"weights.{g}", rest_of(g, form) if group.trainable else ()
    for name in (weights, *rest):
        arrays.begin(name)
    with arrays.bounce() as memory:
        bounce, beside = memory.view(2, -1)
        for start, piece in arrays.pieces(weights, bounce):
            values = flat[start : start + piece.numel()]
            piece.copy_(values)
            for name in rest if start < group.trainable else ():
                dtype = arrays.parts[name].dtype
                kept = beside[: piece.numel() * dtype.itemsize].view(dtype)
                if dtype == torch.float32:
                    kept.copy_(values)
                else:
                    kernels.split(piece, kept, values)
                arrays.write(name, start, kept)
            arrays.write(weights, start, piece)
    for name in (weights, *rest):
        arrays.flip(name)
    for name in arrays.parts_of_state(g):
        if name not in rest:
            arrays.zero(name)


def make_buffers(
    model: nn.Module, device: torch.device, seed: int, weights: WeightSource | None, *, resumed: bool
) -> None:
    """Give every buffer of a model on the meta device its memory and its value. One that was made elsewhere keeps the
    value that it was made with only where ``weights`` have none.

    ``resumed``: a store goes on, and the persistent ones will be read from it.

    Raises:
        ModelError: a buffer that neither ``weights`` nor an initialiser fills, by name.
    """
    given: list[tuple[str, torch.Tensor]] = []
    for prefix, module in model.named_modules():
        for key, buffer in persistent_buffers(module).items():
            name = f"{prefix}.{key}" if prefix else key
            if (buffer.is_meta and resumed) or (weights is not None and name in weights):
                buffers_of(module)[key] = real = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
                given.append((name, real))
    with torch.device("cpu"):
        materialise_buffers(model, device, seed)
        if weights is not None and not resumed:
            for name, buffer in given:  # last: an initialiser that makes one buffer of a module may write to the others
                weights.fill(name, buffer)


def buffers_to(model: nn.Module, device: torch.device, dtypes: Mapping[tuple[nn.Module, str], torch.dtype]) -> None:
    """Move a model's buffers to the device; they are small and stay there. One whose elements lie in the same memory,
    where they could not be put back, gets memory for each. ``dtypes``: as of ``Buffers``."""
    convert_buffers(dtypes)
    for module in model.modules():
        for name, buffer in buffers_of(module).items():
            if buffer is not None:
                apart = buffer.contiguous() if overlaps_itself(buffer) else buffer
                buffers_of(module)[name] = apart.to(device)


def describe_model(
    groups: Sequence[ParamGroup],
    buffers: Buffers,
    precision: str,
    optimizer: OptimizerSpec,
    strands: int = 1,
) -> dict[str, Any]:
    """The description of the model and optimizer that a store or snapshot is for: where two are equal, one's state fits
    the other. The rank whose part it is, of several, is added to it (``store.parts.of_rank``)."""
    made: dict[str, Any] = {
        "precision": precision,
        "optimizer": [type(optimizer).__name__, *optimizer.moment_names],
        "groups": [
            {
                "name": group.spec.name,
                "trainable": group.spec.trainable,
                "frozen": group.spec.frozen,
                **({"compact": True} if group.spec.compact else {}),
                **({"whole": True} if group.spec.whole else {}),
                "parameters": [[s.name, list(s.shape), s.offset, s.trainable] for s in group.slices],
            }
            for group in groups
        ],
        "buffers": buffers.describe(),
    }
    if optimizer.whole is not None:
        made[SPLITS] = _splits(groups, optimizer.whole)
    if optimizer.is_compact:
        made["moments"] = optimizer.moments
    if strands > 1:
        made["strands"] = strands
    return made


def _splits(groups: Sequence[ParamGroup], rule: Orthogonal) -> dict[str, Any]:
    """By the names of matrices that are several: the dimension that is cut, and into how many parts, or their sizes."""
    found = {s.name: rule.split_of(s.name) for g in groups if g.spec.whole for s in g.slices if s.trainable}
    return {
        name: [split.dim, split.parts if isinstance(split.parts, int) else list(split.parts)]
        for name, split in found.items()
        if split is not None
    }
