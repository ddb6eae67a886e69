"""A step's arithmetic on ranges of param groups: what gradients go through, and the optimizer, parameter by parameter
as their hyper-parameters differ."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.optim import kernels
from penstock.optim.codes import Moment
from penstock.ranks.share import WHOLE, Share
from penstock.runtime.context import Update
from penstock.tape.groups import ParamGroup


class Stepping:
    """Steps ranges of groups with the hyper-parameters that rule them."""

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        runs: Mapping[int, Sequence[tuple[int, int, int]]],
        threads: int,
        grad_dtype: torch.dtype,
        share: Share = WHOLE,
    ) -> None:
        """``runs``: for each group, (first element, end, index of hyper-parameters) in order of elements.
        ``grad_dtype``: what gradients are rounded to as they are read. ``share``: this rank's of every group."""
        self._share = share
        self._groups = groups
        self._runs = runs
        self._threads = threads
        self._grad_dtype = grad_dtype
        self._found: dict[int, tuple[Update, int, list[tuple[int, int, int, int]]]] = {}
        """by group, what ``_runs_now`` has found for an update by which so many parameters were touched"""

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
    ) -> None:
        """The optimizer on elements ``[start, start + n)`` of this rank's part of a group, run by run of equal
        hyper-parameters.

        ``update``: of the step whose gradient it is. ``norms``: receives the gradient's partial sums of squares; on an
        accelerator a tensor there.
        """
        n, start = weights.numel(), start + self._share.start(self._groups[g].spec)
        spans = [
            (max(first, start) - start, min(end, start + n) - start, hyper, count)
            for first, end, hyper, count in self._runs_now(update, g)
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
                update.hypers[hyper],
                count,
                grad=gradient[a:b],
                weights=weights[a:b],
                rest=None if rest is None else rest[a:b],
                moments=tuple(m[a:b] for m in moments),
                grad_dtype=self._grad_dtype,
                grad_scale=update.grad_scale,
                partials=None if isinstance(norms, torch.Tensor) else norms,
                squares=norms if isinstance(norms, torch.Tensor) else None,
                threads=self._threads,
            )

    def add(self, into: torch.Tensor, what: torch.Tensor) -> None:
        """Add a gradient to another one, both [n] and fp32."""
        kernels.add(into, what, self._threads)

    def restore(self, weights: torch.Tensor, rest: torch.Tensor | None) -> None:
        """What is not stepped keeps its value: weights [n] that were not read become what their master copy [n] says,
        where ``rest`` is all of that."""
        if rest is not None and rest.dtype == torch.float32:
            kernels.cast(weights, rest, self._threads)

    def partial_norms(self, gradient: torch.Tensor, partials: NDArray[np.float64]) -> None:
        """Sums of squares of a gradient in host memory, one for each ``ALIGN`` elements."""
        kernels.partial_norms(gradient, partials, self._threads, grad_dtype=self._grad_dtype)

    def fold_squares(self, gradient: torch.Tensor) -> torch.Tensor:
        """The same of one on the device; they stay there."""
        return kernels.fold_squares(gradient, self._grad_dtype)

    def _runs_now(self, update: Update, g: int) -> list[tuple[int, int, int, int]]:
        """The group's runs in a step: (first element, end, index of hyper-parameters, number of the update).

        A parameter that no micro-batch gave a gradient stays as it is, moments and weight decay included, and counts
        one update less from then on: torch's optimizers pass over a parameter without a gradient.
        """
        known, touched = self._found.get(g), len(update.touched)
        if known is None or known[0] is not update or known[1] != touched:  # a group has many chunks
            known = self._found[g] = (update, touched, self._find_runs(update, g))
        return known[2]

    def _find_runs(self, update: Update, g: int) -> list[tuple[int, int, int, int]]:
        slices = [s for s in self._groups[g].slices if s.trainable]
        if all(id(s.parameter) in update.touched and s.name not in update.missed for s in slices):
            return [(first, end, hyper, update.count) for first, end, hyper in self._runs[g]]
        ends = [s.offset for s in slices[1:]] + [self._groups[g].spec.trainable]  # with padding
        return [
            (max(first, s.offset), min(end, stop), hyper, update.count - update.missed.get(s.name, 0))
            for s, stop in zip(slices, ends, strict=True)
            if id(s.parameter) in update.touched
            for first, end, hyper in self._runs[g]
            if first < stop and s.offset < end
        ]
