"""A step's arithmetic on ranges of param groups: what gradients go through, and the optimizer, parameter by parameter
as their hyper-parameters differ."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.optim import kernels
from penstock.optim.codes import Moment
from penstock.optim.formula import Hyper
from penstock.optim.orthogonal import orthogonalise, ratio
from penstock.ranks.share import WHOLE, Share
from penstock.runtime.context import Update
from penstock.schedule.matrices import Piece
from penstock.tape.groups import ParamGroup, ParamSlice

Half = Literal["all", "first", "second"]
"""Half of a step that takes matrices whole: the first makes the update, the second takes it once it is orthogonal."""
_Span = tuple[int, int, Hyper, int]
"""(first element, end, hyper-parameters, number of the update)"""


class Stepping:
    """Steps ranges of groups with the hyper-parameters that rule them."""

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        runs: Mapping[int, Sequence[tuple[int, int, int]]],
        threads: int,
        grad_dtype: torch.dtype,
        share: Share = WHOLE,
        matrices: Mapping[int, Sequence[tuple[ParamSlice, Sequence[Piece]]]] | None = None,
    ) -> None:
        """``runs``: for each group, (first element, end, index of hyper-parameters) in order of elements.
        ``grad_dtype``: what gradients are rounded to as they are read. ``share``: this rank's of every group.
        ``matrices``: of the groups of matrices, what each parameter consists of."""
        self._matrices = matrices or {}
        self._share = share
        self._groups = groups
        self._runs = runs
        self._threads = threads
        self._grad_dtype = grad_dtype
        self._found: dict[tuple[int, Half], tuple[Update, int, list[_Span]]] = {}
        """by group, what ``_spans`` has found for an update by which so many parameters were touched"""

    def step(
        self,
        update: Update,
        g: int,
        start: int,
        gradient: torch.Tensor,
        weights: torch.Tensor,
        rest: torch.Tensor | None,
        moments: tuple[Moment, ...],
        norms: NDArray[np.float64] | torch.Tensor | None,
        half: Half = "all",
    ) -> None:
        """The optimizer on elements ``[start, start + n)`` of this rank's part of a group, run by run of equal
        hyper-parameters.

        ``update``: of the step whose gradient it is. ``norms``: receives the gradient's partial sums of squares; on an
        accelerator a tensor there. ``half``: of matrices, the first makes ``weights`` [n] bf16 the update, and of the
        second ``gradient`` is that, made orthogonal.
        """
        n, start = weights.numel(), start + self._share.start(self._groups[g].spec)
        spans = [
            (max(first, start) - start, min(end, start + n) - start, hyper, count)
            for first, end, hyper, count in self._spans(update, g, half)
            if max(first, start) < min(end, start + n)
        ]
        whole = sum(b - a for a, b, _, _ in spans) == n
        if not whole:
            self.restore(weights, rest)
        if norms is not None and not (whole and len(spans) == 1):
            if isinstance(norms, torch.Tensor):
                norms.copy_(self.fold_squares(gradient))
            else:
                self.partial_norms(gradient, norms)
            norms = None
        for a, b, hyper, count in spans:
            kernels.step(
                hyper,
                count,
                grad=gradient[a:b],
                weights=weights[a:b],
                rest=None if rest is None else rest[a:b],
                moments=tuple(m[a:b] for m in moments),
                grad_dtype=self._grad_dtype,
                grad_scale=1.0 if half == "second" else update.grad_scale,
                partials=None if isinstance(norms, torch.Tensor) else norms,
                squares=norms if isinstance(norms, torch.Tensor) else None,
                threads=self._threads,
            )

    def orthogonalise(self, update: Update, g: int, flat: torch.Tensor) -> None:
        """Make all updates of a group of matrices orthogonal, in place: [numel] bf16, of all ranks' parts. Those of
        parameters that no micro-batch gave a gradient are nothing, and stay that."""
        for s, pieces in self._matrices[g]:
            if id(s.parameter) in update.touched:
                hyper = update.hypers[self._hyper_at(g, s.offset)]
                orthogonalise(flat[s.offset : s.offset + s.numel].view(s.shape), pieces, hyper.ns_steps)

    def orthogonal_update(
        self,
        update: Update,
        g: int,
        gradient: torch.Tensor,
        moments: tuple[Moment, ...],
        norms: NDArray[np.float64] | torch.Tensor | None,
    ) -> torch.Tensor:
        """The first half of a group's step where all of it is, and what is between the two: the update, [numel]."""
        made = torch.empty(gradient.numel(), dtype=torch.bfloat16, device=gradient.device)
        self.step(update, g, 0, gradient, made, None, moments, norms, half="first")
        self.orthogonalise(update, g, made)
        return made

    def add(self, into: torch.Tensor, what: torch.Tensor) -> None:
        """Add a gradient to another one, both [n] and fp32."""
        kernels.add(into, what, self._threads)

    def restore(self, weights: torch.Tensor, rest: torch.Tensor | None) -> None:
        """Give weights [n] that are not stepped, and were not read, the value of their master copy [n], where ``rest``
        is all of that: what is not stepped keeps its value."""
        if rest is not None and rest.dtype == torch.float32:
            kernels.cast(weights, rest, self._threads)

    def partial_norms(self, gradient: torch.Tensor, partials: NDArray[np.float64]) -> None:
        """Sums of squares of a gradient in host memory, one for each ``ALIGN`` elements."""
        kernels.partial_norms(gradient, partials, self._threads, grad_dtype=self._grad_dtype)

    def fold_squares(self, gradient: torch.Tensor) -> torch.Tensor:
        """Sums of squares of a gradient on the device, one for each ``ALIGN`` elements; they stay there."""
        return kernels.fold_squares(gradient, self._grad_dtype)

    def _hyper_at(self, g: int, element: int) -> int:
        """The index of the hyper-parameters that rule an element of a group."""
        return next(hyper for first, end, hyper in self._runs[g] if first <= element < end)

    def _spans(self, update: Update, g: int, half: Half) -> list[_Span]:
        """The elements of a group that a step changes, and how it changes them.

        A parameter that no micro-batch gave a gradient stays as it is, moments and weight decay included, and counts
        one update less from then on: torch's optimizers pass over a parameter without a gradient.
        """
        known, touched = self._found.get((g, half)), len(update.touched)
        if known is None or known[0] is not update or known[1] != touched:  # a group has many chunks
            find = self._find_matrices if half == "second" else self._find_runs
            known = self._found[g, half] = (update, touched, list(find(update, g)))
        return known[2]

    def _find_runs(self, update: Update, g: int) -> Iterator[_Span]:
        """Runs of equal hyper-parameters, cut where parameters are passed over."""
        slices, hypers = [s for s in self._groups[g].slices if s.trainable], update.hypers
        if all(id(s.parameter) in update.touched and s.name not in update.missed for s in slices):
            yield from ((first, end, hypers[hyper], update.count) for first, end, hyper in self._runs[g])
            return
        for s, stop in zip(slices, self._ends(g), strict=True):
            if id(s.parameter) in update.touched:
                for first, end, hyper in self._runs[g]:
                    if first < stop and s.offset < end:
                        count = update.count - update.missed.get(s.name, 0)
                        yield max(first, s.offset), min(end, stop), hypers[hyper], count

    def _find_matrices(self, update: Update, g: int) -> Iterator[_Span]:
        """The matrices of a group, each with its own rate; those that a parameter is cut into, where they differ."""
        for (s, pieces), stop in zip(self._matrices[g], self._ends(g), strict=True):
            if id(s.parameter) not in update.touched:
                continue
            hyper, ends = update.hypers[self._hyper_at(g, s.offset)], [*self._starts(s, pieces)[1:], stop]
            for piece, first, end in zip(pieces, self._starts(s, pieces), ends, strict=True):
                yield first, end, hyper.second_half(ratio(piece, hyper.adjust)), update.count

    @staticmethod
    def _starts(s: ParamSlice, pieces: Sequence[Piece]) -> list[int]:
        """The first elements of the pieces of a parameter: several are rows of one matrix."""
        return [s.offset + piece.start * s.shape[-1] for piece in pieces]

    def _ends(self, g: int) -> list[int]:
        """The end of each trained parameter of a group, with its padding."""
        group = self._groups[g]
        return [*[s.offset for s in group.slices if s.trainable][1:], group.spec.trainable]
