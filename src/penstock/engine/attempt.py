"""A step, and what follows if it turns out that it should have been another one.

A step that speculates changes nothing that counts: what it writes to disk lies beside the state that the last commit
names. Once its norm is known it is

    within the limit    what it has written counts from now on
    over the limit      dropped, and run again with the factor known: the same random numbers, so the same gradients
    infinite or NaN     dropped; it is run again without changing anything, to tell which gradient it was

What is not on disk waits for the norm, and is left alone in the first two runs of the last two cases. The weights of a
group in memory are new already, though: they are cast again from the master copy that counts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.engine import batch
from penstock.engine.runner import Runner, Totals
from penstock.runtime.context import NonFinite, StepContext
from penstock.state.stats import StepStats


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """``context``: of the run that counts. ``dropped``: what the run besides it has moved, and how long, if any."""

    context: StepContext
    losses: Sequence[float]
    dropped: Totals | None = None
    non_finite: NonFinite | None = None

    def numbers(
        self,
        micro_batches: Sequence[Mapping[str, Any]],
        weights: Sequence[float],
        *,
        clip: float | None,
        seconds: float,
    ) -> StepStats:
        """What the step reports before it counts; its commit keeps it. ``weights``: of the micro-batches' losses."""
        context = self.context
        assert context.norm is not None
        skipped = not math.isfinite(context.norm)
        return StepStats(
            step=context.step,
            loss=math.fsum(w * loss for w, loss in zip(weights, self.losses, strict=True)),
            grad_norm=context.norm,
            tokens=sum(batch.tokens(mb) for mb in micro_batches),
            seconds=seconds,
            lr=float(context.hypers[0].lr) if context.hypers else 0.0,
            clipped=clip is not None and not skipped and context.norm > clip,
            skipped=skipped,
            repeats=int(self.dropped is not None),
            non_finite=None if self.non_finite is None else str(self.non_finite),
            loss_scale=context.loss_scale,
        )


def take_step(
    runner: Runner,
    context: StepContext,
    micro_batches: Sequence[Mapping[str, Any]],
    loss_weights: Sequence[float],
    undo: Callable[[], None] | None,
) -> Outcome:
    """Run a step until it is what one that had waited for its norm would have been.

    ``undo``: makes everything that is not on disk what it was before; None: that is not possible, because state in
    memory was changed without a norm to wait for. Whether a norm that is no number may count is the caller's to say.

    Raises:
        BaseException: what the first failing op raised.
    """
    losses = runner.run(context, micro_batches, loss_weights)
    assert context.norm is not None
    if not context.complete:  # what the step before had left to do was all in memory
        assert context.commit is not None
        context.commit()
        context.complete = True
    if context.failure is not None:
        failure, context.failure = context.failure, None
        try:
            raise failure
        finally:
            del failure  # its traceback holds this frame, which would hold it and the micro-batches
    if undo is None:
        return Outcome(context=context, losses=losses)
    if not math.isfinite(context.norm):
        dropped = runner.totals()
        undo()
        search = _again(context, search=True)
        runner.run(search, micro_batches, loss_weights)
        return Outcome(context=context, losses=losses, dropped=dropped, non_finite=search.found)
    grad_scale = context.clip_factor() / context.loss_scale
    if not runner.speculates or context.clip_factor() == 1.0:
        context.grad_scale = grad_scale  # for the chunks that the next step steps
        return Outcome(context=context, losses=losses)
    dropped = runner.totals()
    undo()
    again = _again(context, known=True, grad_scale=grad_scale)
    losses = runner.run(again, micro_batches, loss_weights)
    return Outcome(context=again, losses=losses, dropped=dropped)


def _again(context: StepContext, **changes: Any) -> StepContext:
    """The same step anew. What the step before had left to do is done."""
    fresh: dict[str, Any] = {"previous": None, "touched": set(), "partials": {}}
    return replace(context, norm=None, skip=False, repeat=False, **fresh | changes)
