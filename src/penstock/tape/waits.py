"""Finds where a model's code waits for the device: until that has done all that is queued, nothing more is queued.

The host waits for an op whose result it has to know: a number that Python is handed (``if mask.all():``), a shape that
depends on values (``nonzero``, an index by a mask), or a copy to the host, or from it, unless that is ``non_blocking``.
"""

import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from penstock.compat.torch import COPY_TO
from penstock.tape.watch import Op

_ATEN = torch.ops.aten
_BY_INDEX = frozenset((_ATEN.index, _ATEN.index_put, _ATEN.index_put_))
_COPIES = frozenset((COPY_TO, _ATEN.copy_))
_SHAPED_BY_VALUES = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))
_HOST = frozenset(("cpu", "meta"))
_WATCHING = frozenset(("on_op", "_on_op", "__torch_dispatch__", "__torch_function__", "_of_model"))
_MOST = 4


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A wait of a model's own line of code. ``block``: whose forward it is in; None: of no block."""

    block: str | None
    where: str
    op: str


class Waits:
    """Notes the waits of a model's code while a probe watches it. ``found``: in their order."""

    def __init__(self) -> None:
        self.found: list[Wait] = []

    def on_op(self, block: str | None, op: Op) -> None:
        """An op has run, called from where the caller of this was."""
        if all(operand.tensor.device.type in _HOST for operand in (*op.inputs, *op.results)):
            return
        if not (_waits(op) or (not op.unwaited and _comes_up(op))):
            return
        where = _of_model()
        if where is not None:
            self.found.append(Wait(block=block, where=where, op=str(op.packet)))


def _waits(op: Op) -> bool:
    if op.packet in _BY_INDEX:  # by numbers of rows, the shape is known
        indices = op.inputs[1:] if op.packet is _ATEN.index else op.inputs[1:-1]  # the last are the values
        return any(operand.tensor.dtype in (torch.bool, torch.uint8) for operand in indices)
    return _needs_values(op.func) or any(operand.tensor.device.type == "cpu" for operand in op.results)


def _comes_up(op: Op) -> bool:
    """True of a copy from the host to the device. ``lift_fresh`` of a tensor there is of values of Python's, which were
    copied."""
    if not any(o.tensor.device.type not in _HOST and o.tensor.numel() for o in op.results):
        return False
    if op.packet in _COPIES:
        return op.inputs[-1].tensor.device.type == "cpu"
    return op.packet is _ATEN.lift_fresh


@cache
def _needs_values(func: Any) -> bool:
    return not _SHAPED_BY_VALUES.isdisjoint(func.tags)


def _of_model() -> str | None:
    """The line that has called torch; None if it is the engine's."""
    for frame, line in traceback.walk_stack(None):
        module, function = str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
        room = module.partition(".")[0]
        if room == "penstock" and function not in _WATCHING:
            return None
        if room not in ("penstock", "torch"):
            return f"{module}:{line} ({function})"
    return None


def sentence(waits: Sequence[Wait]) -> str | None:
    """The sentence that tells a user of the waits of one micro-batch's forward; None: there are none."""
    by_line = Counter((wait.where, wait.op) for wait in waits)
    if not by_line:
        return None
    blocks = {key: {w.block for w in waits if (w.where, w.op) == key} for key in by_line}
    said = [
        f"{where} for {op}, {count} {'time' if count == 1 else 'times'} {_in(blocks[where, op])}"
        for (where, op), count in by_line.most_common(_MOST)
    ]
    more = len(by_line) - len(said)
    return (
        f"the model waits for the device {by_line.total()} {'time' if by_line.total() == 1 else 'times'} in the "
        f"forward of a micro-batch, and nothing is queued meanwhile: {'; '.join(said)}"
        + (f"; and {more} more lines" if more else "")
    )


def _in(blocks: set[str | None]) -> str:
    inside = len(blocks - {None})
    of_blocks = f"in {inside} {'block' if inside == 1 else 'blocks'}"
    if None not in blocks:
        return of_blocks
    return f"outside of blocks and {of_blocks}" if inside else "outside of blocks"
