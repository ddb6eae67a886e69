"""The arrays that each group has, by the format of the state: names, elements, dtypes, and how they are cut on disk.

    weights   compute dtype, trainable and frozen part     "weights.{g}"
    rest      what the master copy has besides them, trainable part: in bf16 its lower half, int16,
              in fp16 all of it, fp32; in fp32 there is none        "low.{g}", "master.{g}"
    moments   fp32, bf16, or codes of 8 bits, trainable part, one array each         "moment{i}.{g}"
    scales    of codes, int16, one for each 32 of them, padded to whole pages        "scale{i}.{g}"

A group that is not trained has weights alone.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from penstock.optim import kernels
from penstock.optim.codes import FORMS
from penstock.schedule.place import FP32, GRAIN, PAGE, SCALED, Format, grain
from penstock.schedule.program import GroupSpec, round_up
from penstock.state.memory import BOUNCE, HostSlab
from penstock.store.layout import Grid, Region


@dataclass(frozen=True, kw_only=True)
class Part:
    """One array of a group: ``numel`` elements of ``dtype``, the first ``trainable`` of them with optimizer state.

    ``per``: elements of the group that each of them is for; scales are padded beyond the group's end.
    """

    name: str
    group: int
    numel: int
    trainable: int
    dtype: torch.dtype
    per: int = 1

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def spans(self) -> tuple[range, ...]:
        """The elements of the trainable and the frozen part, in steps of what has one checksum on disk."""
        cut = ((0, self.trainable), (self.trainable, self.numel))
        unit = GRAIN // self.per if self.per > 1 else None
        return tuple(range(start, stop, unit or grain(stop - start)) for start, stop in cut if start < stop)

    def own(self, start: int, numel: int) -> slice:
        """The array's own elements for ``[start, start + numel)`` of its group's, which are chunks; with padding."""
        if self.per == 1:
            return slice(start, start + numel)
        return slice(start // self.per, round_up((start + numel) // self.per, PAGE // self.dtype.itemsize))

    @property
    def grid(self) -> Grid:
        """The sizes of ``spans`` in bytes, by which the array's extent is cut."""
        size = self.dtype.itemsize
        return tuple(Region(nbytes=(s.stop - s.start) * size, block=s.step * size) for s in self.spans)


def parts_of(group: GroupSpec, form: Format, dtype: torch.dtype) -> tuple[Part, ...]:
    """A group's arrays, weights first; none of a group without elements, which another rank has."""
    if not group.numel:
        return ()
    g = group.index
    parts = [Part(name=f"weights.{g}", group=g, numel=group.numel, trainable=group.trainable, dtype=dtype)]
    if group.trainable:
        kept = [(name, _REST[form.rest_bytes], 1) for name in rest_of(g, form)]
        moments = zip(moments_of(group, form), FORMS[form.form_of(group)], strict=False)
        kept += [(name, kind, 1) for name, kind in moments]
        kept += [(name, torch.int16, SCALED) for name in scales_of(group, form)]
        for (name, kind, per), nbytes in zip(kept, form.array_sizes(group), strict=True):
            n = nbytes // kind.itemsize
            parts.append(Part(name=name, group=g, numel=n, trainable=n, dtype=kind, per=per))
    return tuple(parts)


_REST: Mapping[int, torch.dtype] = {2: torch.int16, FP32: torch.float32}


def rest_of(g: int, form: Format) -> tuple[str, ...]:
    """The array, if any, that has what a trained group's weights lack of its master copy."""
    return () if not form.rest_bytes else (f"master.{g}" if form.rest_bytes == FP32 else f"low.{g}",)


def moments_of(group: GroupSpec, form: Format) -> tuple[str, ...]:
    """The arrays of a trained group's moments."""
    return tuple(f"moment{i}.{group.index}" for i in range(form.moments_of(group)))


def scales_of(group: GroupSpec, form: Format) -> tuple[str, ...]:
    """The arrays of the scales of its moments, where these are in 8 bits."""
    return (
        tuple(f"scale{i}.{group.index}" for i in range(form.moments_of(group))) if form.form_of(group) == "int8" else ()
    )


def values_of(g: int, form: Format, *, trainable: bool) -> tuple[str, ...]:
    """The arrays that have a group's parameters together, as exactly as they are known: the master copy of what is
    trained; ``fetch`` takes them."""
    weights = (f"weights.{g}",)
    if not trainable:
        return weights
    return (*(weights if form.steps_weights else ()), *rest_of(g, form))


Read = Callable[[str, int, torch.Tensor], None]
"""Reads elements of an array: its name, the first of them, where they go."""


def fetch(parts: Sequence[Part], read: Read, offset: int, flat: torch.Tensor) -> None:
    """Fill ``flat``, 1-D, with an array's elements for those of its group from ``offset`` on, all trainable or all
    frozen, in any dtype that has them; or of weights and their lower half together, in fp32. Reads all that has a
    checksum with some of it."""
    if not flat.numel():
        return
    offset //= parts[0].per
    end, step = offset + flat.numel(), BOUNCE // FP32
    span = next(s for s in parts[0].spans if s.start <= offset < s.stop)
    start = span.start + (offset - span.start) // span.step * span.step
    stop = min(span.start + round_up(end - span.start, span.step), span.stop)
    with ExitStack() as stack:
        bounces = [stack.enter_context(HostSlab(step * part.dtype.itemsize)) for part in parts]
        for first in range(start, stop, step):
            numel = min(step, stop - first)
            a, b = max(first, offset), min(first + numel, end)
            read_now = []
            for part, bounce in zip(parts, bounces, strict=True):
                piece = bounce.bytes[: numel * part.dtype.itemsize].view(part.dtype)
                read(part.name, first, piece)
                read_now.append(piece[a - first : b - first])
            into = flat[a - offset : b - offset]
            if len(read_now) == 1:
                into.copy_(read_now[0])
            else:
                kernels.join(into, read_now[0], read_now[1])
