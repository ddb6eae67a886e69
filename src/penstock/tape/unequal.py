"""Errors of torch about unequal dtypes, in words that name the module and say what to do."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import nn

from penstock.errors import ModelError

_OF_DTYPES = re.compile(r"\b(d|scalar |data )types?\b|\btype \(|BFloat16|\bHalf\b")
_OF_WHOLE_NUMBERS = re.compile(r"\b(Long|Int|Byte|Bool|long|int|bool)\b")
"""Errors about ids and masks, which are wrong in any precision."""
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@contextmanager
def unequal_dtypes_told(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, an error of torch about dtypes is one about a model that computes in ``dtype``, where that is not fp32.

    Raises:
        ModelError: a module has tensors in another dtype beside its weights, or calls what there is none of in this.
    """
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        if dtype not in _NAMES or not _OF_DTYPES.search(said) or _OF_WHOLE_NUMBERS.search(said):
            raise
        name = _NAMES[dtype]
        raise ModelError(
            f"{_place(model, error.__traceback__)} does not compute in {name}, as all weights do here, also those "
            f"that a library keeps in fp32: {' '.join(said.split())[:300]}. Give precision='fp32'; or cast what "
            "meets them (a buffer or a constant in fp32, labels in the loss) to their dtype"
        ) from error


def _place(model: nn.Module, traceback: TracebackType | None) -> str:
    """The innermost of the model's modules whose code an error came through, in words."""
    names = {id(module): name for name, module in model.named_modules()}
    innermost: nn.Module | None = None
    while traceback is not None:
        found = traceback.tb_frame.f_locals.get("self")
        if isinstance(found, nn.Module) and id(found) in names:
            innermost = found
        traceback = traceback.tb_next
    if innermost is None:
        return "the loss function"
    name, kind = names[id(innermost)], type(innermost).__name__
    return f"module {name!r} ({kind})" if name else f"the model ({kind})"
