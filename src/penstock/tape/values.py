"""A dry run on the meta device that still knows small values: positions, masks, token ids.

Models decide by such values how to go on: whether a mask hides anything, whether sequences are packed. So what follows
from constants and from the micro-batch by integer and boolean arithmetic is computed beside the meta tensors, on the
CPU; activations and weights have no values.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from penstock.compat.torch import TorchDispatchMode, WeakTensorKeyDictionary, storage_key
from penstock.errors import ModelError
from penstock.tape import trees
from penstock.tape.fused import Kind, run_on_meta
from penstock.tape.watch import written_by

_LARGEST = 1 << 26
"""Elements up to which values are kept: a mask of 8,192 x 8,192."""

_NO_VALUES = (
    "the model needs the values of activations to go on ({op}), and a dry run has none: mixtures of experts that loop "
    "over the experts are an example (experts_implementation='grouped_mm' does not). Choose an implementation without "
    "such a decision, or learn the sizes from a run: one step is enough"
)


class Values(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the values of integer and boolean meta tensors for as long as the tensors live."""

    def __init__(self, kind: Kind) -> None:
        """``kind``: the kind of device that the run stands for."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind = kind
        self._constants = _Constants()
        self._values: Any = WeakTensorKeyDictionary()
        self._lost: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """storages of values that were overwritten by something unknown, until they are no more: another one may then
        have the identity"""

    def __enter__(self) -> "Values":
        self._constants.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._constants.__exit__(*raised)  # type: ignore[no-untyped-call]

    def give(self, micro_batch: Mapping[str, Any]) -> dict[str, Any]:
        """The micro-batch on the meta device; values of tensors that have some are kept."""
        return {k: self._meta(v) if isinstance(v, torch.Tensor) else v for k, v in micro_batch.items()}

    def _meta(self, tensor: torch.Tensor) -> torch.Tensor:
        meta = tensor.to("meta")
        if not tensor.is_meta and _is_kept(tensor):
            self._values[meta] = tensor.cpu()
        return meta

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor, None where they are not known."""
        if not tensor.is_meta:
            return tensor
        value: torch.Tensor | None = self._values.get(tensor)
        return None if value is None or storage_key(value) in self._lost else value

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        values = {id(t): self.of(t) for t in trees.tensors((args, kwargs))}
        known = all(value is not None for value in values.values())
        if not known or torch.Tag.nondeterministic_seeded in func.tags:
            if _depends_on_values(func, args):
                raise ModelError(_NO_VALUES.format(op=func))
            for tensor in written_by(func, args, kwargs):
                if (value := values.get(id(tensor))) is not None and tensor.is_meta:
                    self._lose(value)
            return run_on_meta(func, args, kwargs, self._kind)

        def value_of(tensor: torch.Tensor) -> Any:
            return values[id(tensor)]

        value = func(*trees.replace(args, value_of), **_on_cpu(trees.replace(kwargs, value_of)))
        if _depends_on_values(func, args):  # the meta device could not do it
            result = trees.replace(value, lambda t: torch.empty_like(t, device="meta"))
        else:
            result = run_on_meta(func, args, kwargs, self._kind)
        self._note(result, value)
        return result

    def _note(self, result: Any, value: Any) -> None:
        for meta, real in zip(trees.tensors(result), trees.tensors(value), strict=True):
            if meta.is_meta and _is_kept(real):
                self._values[meta] = real

    def _lose(self, value: torch.Tensor) -> None:
        key = storage_key(value)
        self._lost[key] = weakref.ref(value.untyped_storage(), lambda _: self._lost.pop(key, None))


class _Constants(TorchFunctionMode):
    """Tensors of Python's numbers with their values: torch makes those of the meta device without, and no op tells."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _INDEXED:
            args = (args[0], _index(args[1]), *args[2:])
        elif func in _MADE and str(kwargs.get("device")) == "meta" and not trees.tensors(args):
            made = func(*args, **{**kwargs, "device": "cpu"})
            return made.detach().to("meta").requires_grad_(made.requires_grad)
        return func(*args, **kwargs)


_INDEXED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_MADE = (torch.tensor, torch.as_tensor)


def _index(index: Any) -> Any:
    """An index of a tensor, with lists of whole numbers as tensors on the CPU."""
    if isinstance(index, tuple):
        return tuple(_index(part) for part in index)
    numbers = isinstance(index, list | range) and len(index) and all(isinstance(part, int) for part in index)
    return torch.tensor(index) if numbers else index


def _is_kept(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() <= _LARGEST


def _depends_on_values(func: Any, args: tuple[Any, ...]) -> bool:
    """True if an op's result, or its shape, does not follow from shapes."""
    if func is torch.ops.aten.index.Tensor:
        return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs
