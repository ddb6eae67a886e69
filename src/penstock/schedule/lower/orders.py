"""The order in which a rank of a pipeline does its work: GPipe, 1F1B, looped and interleaved, zero bubble H1.

An order is a list of visits of one micro-batch each, of kind ``F``, ``B`` (backward), or, where it is split, ``I``
(gradient of the input) and ``W`` (gradient of the weights).
"""

from collections.abc import Callable, Iterator

from penstock.schedule.ir.references import VisitId, visit
from penstock.schedule.lower.stages import Stages

Order = Callable[[Stages, int, int], list[VisitId]]
"""A rank's visits in order, from the stages, the rank and the number of micro-batches."""


def looped_bfs(stages: Stages, rank: int, micro_batches: int) -> list[VisitId]:
    """Breadth first: a stage does all micro-batches before the rank's next one starts (Lamy-Poirier, arXiv
    2211.05953). With one stage to a rank it is GPipe: all forwards, then all backwards (Huang et al., arXiv
    1811.06965).
    """
    mine = stages.of(rank)
    forwards = [visit("F", s, m) for s in mine for m in range(micro_batches)]
    return forwards + [visit("B", s, m) for s in reversed(mine) for m in range(micro_batches)]


def interleaved(stages: Stages, rank: int, micro_batches: int) -> list[VisitId]:
    """Depth first: ``ranks`` micro-batches at a time go through all of a rank's stages; after a warm-up that reaches
    the last stage, one forward and one backward in turn (Narayanan et al., arXiv 2104.04473, figure 4). With several
    stages to a rank ``micro_batches`` is a multiple of ``ranks``.

    With one it is 1F1B: as many forwards as there are ranks behind this one, then one forward and one backward in turn,
    so that at most ``ranks - rank`` micro-batches are in flight (Narayanan et al., arXiv 2006.09503).
    """
    p, mine = stages.ranks, stages.of(rank)
    rounds = [range(start, min(start + p, micro_batches)) for start in range(0, micro_batches, p)]
    forwards = [visit("F", s, m) for together in rounds for s in mine for m in together]
    backwards = [visit("B", s, m) for together in rounds for s in reversed(mine) for m in together]
    behind = p - 1 - rank
    return list(_in_turn(forwards + backwards, behind if len(mine) == 1 else 2 * behind + (len(mine) - 1) * p))


def _in_turn(halves: list[VisitId], warm_up: int) -> Iterator[VisitId]:
    """``halves`` are all forwards, then all backwards; gives ``warm_up`` forwards, then one of each in turn."""
    half = len(halves) // 2
    ahead = min(warm_up, half)
    yield from halves[:ahead]
    for k in range(half):
        if ahead + k < half:
            yield halves[ahead + k]
        yield halves[half + k]


def zero_bubble_h1(stages: Stages, rank: int, micro_batches: int) -> list[VisitId]:
    """1F1B with the backward split; rank r lets r gradients of weights wait, which later fill what were bubbles (ZB-H1
    of Qi et al., arXiv 2401.10241). At most ``ranks`` micro-batches are in flight, from the forward to ``W``.
    """
    visits: list[VisitId] = []
    for stay in interleaved(stages, rank, micro_batches):
        m = stay.micro_batch
        if stay.kind == "F":
            visits.append(stay)
        else:
            visits.append(visit("I", rank, m))
            if m >= rank:
                visits.append(visit("W", rank, m - rank))
    return visits + [visit("W", rank, m) for m in range(max(0, micro_batches - rank), micro_batches)]
