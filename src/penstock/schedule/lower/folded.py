"""Orders of pipelines that are folded: rank r of p holds stages r and 2p - 1 - r, so the loss is where the input is.

Visits are those of ``orders``. "Down" is a rank's first stage, "up" its second one.
"""

from collections import deque
from itertools import count

from penstock.schedule.ir.references import VisitId, visit
from penstock.schedule.lower.stages import Stages


class _Rank:
    """Counts, so that an order is written as what is done next of which stage; micro-batches go in order. Those beyond
    the step's ``micro_batches`` are counted, and not written down.
    """

    def __init__(self, stages: Stages, rank: int, micro_batches: int) -> None:
        self.down = stages.stage(rank, 0)
        self.up = stages.stage(rank, 1)
        self.visits: list[VisitId] = []
        self._micro_batches = micro_batches
        self._clock = count()
        self._waiting: dict[int, deque[tuple[int, int]]] = {self.down: deque(), self.up: deque()}
        """stage -> (since when, micro-batch) whose gradient of the weights is still to do"""
        self._next = {(kind, stage): 0 for kind in "FB" for stage in (self.down, self.up)}

    def _count(self, kind: str, stage: int) -> int:
        m = self._next[kind, stage]
        self._next[kind, stage] = m + 1
        return m

    def forward(self, stage: int) -> None:
        m = self._count("F", stage)
        if m < self._micro_batches:
            self.visits.append(visit("F", stage, m))

    def backward(self, stage: int, *, split: bool = False) -> None:
        """Split: only the gradient of the input, the rest waits for ``weights``."""
        m = self._count("B", stage)
        if m < self._micro_batches:
            self.visits.append(visit("I" if split else "B", stage, m))
        if split:
            self._waiting[stage].append((next(self._clock), m))

    def weights(self, stage: int | None = None) -> None:
        """The gradient of the weights that has waited longest, or the longest of a stage."""
        if stage is None:
            stage = min((s for s, waiting in self._waiting.items() if waiting), key=lambda s: self._waiting[s][0])
        _, m = self._waiting[stage].popleft()
        if m < self._micro_batches:
            self.visits.append(visit("W", stage, m))

    def remaining_weights(self, stage: int) -> None:
        """All of a stage's gradients of the weights that still wait."""
        while self._waiting[stage]:
            self.weights(stage)


def zero_bubble_v(stages: Stages, rank: int, micro_batches: int) -> list[VisitId]:
    """ZB-V (Qi et al., arXiv 2401.10241, section 6): nothing is idle but while the pipeline fills, if forward, input
    gradient and weight gradient take equally long, with the memory of 1F1B's first rank (2p halves) on every rank.
    """
    p = stages.ranks
    full = max(micro_batches, 2 * p - 1)  # a shorter step is a longer one without its last micro-batches
    r = _Rank(stages, rank, micro_batches)
    for _ in range(2 * (p - rank) - 1):
        r.forward(r.down)
    for _ in range(rank):
        r.forward(r.up)
        r.forward(r.down)
    for _ in range(p - rank):
        r.forward(r.up)
        r.backward(r.up, split=True)
        r.weights()
    for k in range(p, full):  # p forwards up are done, and p - 1 - rank more down
        if k + p - 1 - rank < full:
            r.forward(r.down)
        r.backward(r.down, split=True)
        r.weights()
        r.forward(r.up)
        r.backward(r.up, split=True)
        r.weights()
    for _ in range(rank):
        r.backward(r.down, split=True)
        r.backward(r.up, split=True)
    for _ in range(p - rank):
        r.backward(r.down, split=True)
        r.weights(r.down)
    for stage in (r.up, r.down):
        r.remaining_weights(stage)
    return r.visits


def dualpipe_v(stages: Stages, rank: int, micro_batches: int) -> list[VisitId]:
    """DualPipe-V (DeepSeek, github.com/deepseek-ai/DualPipe): DualPipe (arXiv 2412.19437) cut in half, so that the two
    directions are a fold. ``micro_batches`` is at least 2p. A forward beside a backward of the other stage, which there
    overlap as one, are here one after the other.
    """
    behind = stages.ranks - 1 - rank
    r = _Rank(stages, rank, micro_batches)
    for _ in range(2 * behind):  # 1: fill the way down
        r.forward(r.down)
    for _ in range(rank + 1):  # 2: and the way up
        r.forward(r.down)
        r.forward(r.up)
    for _ in range(behind):  # 3: the first gradients pass; those of the weights fill the gaps
        r.backward(r.up, split=True)
        r.weights()
        r.forward(r.up)
    for _ in range(micro_batches - 2 * stages.ranks + rank + 1):  # 4: forward and backward side by side
        r.forward(r.down)
        r.backward(r.up)
        r.forward(r.up)
        r.backward(r.down)
    for _ in range(behind):  # 5: the last forwards
        r.backward(r.up)
        r.forward(r.up)
        r.backward(r.down)
    half = rank + 1  # 6: from the middle of these 2 x (rank + 1) backwards on, gradients of weights wait
    for k in range(2 * half):
        r.backward(r.down if k % 2 else r.up, split=k >= half)
    for _ in range(behind):  # 7: they fill the gaps while the way down empties
        r.weights()
        r.backward(r.down, split=True)
    for _ in range(half):  # 8
        r.weights()
    return r.visits
