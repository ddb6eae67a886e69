"""One forward and one backward in turn: the order of a pipeline whose ranks take one micro-batch after the other.

A *run* is a stretch of stages that one rank has; the epilogue is one of its own. Each rank does the stages of a run for
one micro-batch at a time, their backwards first where it can: then few micro-batches are under way at once, and few of
their activations are kept (1F1B: Narayanan et al., arXiv 2006.09503). Where a rank has several runs, it goes depth
first: as many micro-batches as there are ranks through all of its runs before the next ones (interleaved: arXiv
2104.04473). The loss is rank 0's, so each output of the last block goes back there before its backward: to the order
that is one stage more behind all ranks.

*The order is simulated*, once for all ranks, with blocks that all take as long, and a backward three times as long. A
rank does a forward after each backward, if one can be done, or else the backward that is there; as long as not too many
forwards wait for their backward: as many as runs follow, itself included, and in loops as many as figure 4 of the
second paper has. A loss, which the last rank waits for, comes between two stages of a run. Nothing of this asks for a
multiple of anything: any number of micro-batches will do, and any deal of the blocks.

*In two parts* (zero bubble, H1: Qi et al., arXiv 2401.10241) a backward first makes the gradients of its inputs, which
the rank before waits for, and later those of its weights, for which nobody does. These fill the time in which a rank
can do neither a forward nor a first part. They come before a forward if otherwise more micro-batches would be between
their forward and the last of their backward than the first rank has under way in any case: that is the limit of each. A
first part takes twice as long as a forward, a second one as long, and a loss next to nothing: where it takes more, the
first rank is given fewer blocks for that. Stages that cannot be split have all of their backward in the first part.

*No rank waits for itself*, even if each does one op at a time and a message lies nowhere in between: ranks' walks are
parts of one sequence, in which a message comes right after what it sends, for who sends and who receives it. The first
of that sequence that is not done can always be.

There is always a forward or a backward that can be done: of the first micro-batch whose backward is not done all
forwards are allowed, since no more than (runs - 1) x ranks come between them on any rank, and then its backwards.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Final, NamedTuple

from penstock.schedule.ir.references import visit
from penstock.schedule.lower.messages import passed_after
from penstock.schedule.lower.route import Message, Route, Visit
from penstock.schedule.program import Program

_TIMES: Final[Mapping[str, int]] = {"F": 1, "E": 1, "B": 3, "I": 2, "W": 1}
"""as long as a forward, which a backward begins with"""
_STAGE = 8
"""times as long as the first stage, which only looks up embeddings"""


class Run(NamedTuple):
    """A stretch of stages of one rank."""

    rank: int
    stages: range


class Unit(NamedTuple):
    """The work of a rank between two messages: a run's stages for one micro-batch. ``kind``: F, E or B; or of a
    backward in two parts I, in which stages that cannot be split have all of it, and W."""

    kind: str
    run: int
    micro_batch: int


class Part(NamedTuple):
    """One stage of a unit."""

    unit: Unit
    stage: int


def runs_of(of_stages: Sequence[int]) -> tuple[Run, ...]:
    """The runs of a pipeline, in the order of the forward. ``of_stages``: as of ``Dealt``."""
    found, first, last = list[Run](), 0, len(of_stages) - 1
    for rank, stretch in groupby(of_stages[:last]):
        end = first + len(list(stretch))
        found.append(Run(rank, range(first, end)))
        first = end
    return (*found, Run(of_stages[last], range(last, last + 1)))


@lru_cache(maxsize=32)
def order_of_all(
    of_stages: tuple[int, ...], micro_batches: int, split: frozenset[int] = frozenset()
) -> tuple[Part, ...]:
    """The work of all ranks in a step, in an order in which it could be done by one. ``split``: the stages whose
    backwards are done in two parts."""
    return tuple(_Simulated(runs_of(of_stages), micro_batches, split).parts())


class _Simulated:
    """A step of all ranks, stage by stage in the order of their starts."""

    def __init__(self, runs: tuple[Run, ...], micro_batches: int, split: frozenset[int]) -> None:
        self._runs, self._count, self._ranks = runs, micro_batches, 1 + max(run.rank for run in runs)
        self._split = split
        self._back = ["B" if split.isdisjoint(run.stages) else "I" for run in runs[:-1]] + ["E"]
        """run -> the kind of the unit that makes the gradients of its inputs"""
        self._ends: dict[Unit, int] = {}
        self._free = [0] * self._ranks
        self._of: dict[int, list[int]] = defaultdict(list)
        """rank -> its runs but the epilogue"""
        for n, run in enumerate(runs[:-1]):
            self._of[run.rank].append(n)
        self._forwards = [self._in_rounds(rank) for rank in range(self._ranks)]
        """by rank, the forwards that are to come, the next one last"""
        self._backwards = [0] * len(runs)
        """run -> the micro-batch whose backward is next"""
        self._waiting = [0] * self._ranks
        """by rank, forwards whose backward is to come"""
        self._begun: list[list[Part]] = [[] for _ in range(self._ranks)]
        """by rank, the parts that are to come of a unit that it has begun, the next one last"""
        self._halves: list[deque[Part]] = [deque() for _ in range(self._ranks)]
        """by rank, the second parts that are to come"""
        self._unfinished = [0] * self._ranks
        """by rank, forwards whose backward is to come, or a part of it"""
        self._goes_on_forward = [True] * self._ranks
        """by rank, whether a forward's turn is next, if it can be done at once"""

    def parts(self) -> list[Part]:
        ends = dict[Part, int]()
        count = self._count * (1 + 2 * self._runs[-1].stages[0] + len(self._split))
        while len(ends) < count:
            start, rank, part = min(found for rank in range(self._ranks) if (found := self._next(rank)) is not None)
            self._free[rank] = ends[part] = start + self._seconds(part)
            self._do(rank, part)
        return sorted(ends, key=lambda part: (ends[part], part))

    def _do(self, rank: int, part: Part) -> None:
        unit, begun = part.unit, self._begun[rank]
        if unit.kind == "W":
            self._halves[rank].popleft()
            self._unfinished[rank] -= all(half.unit != unit for half in self._halves[rank])
            return
        if unit.kind != "E":
            self._goes_on_forward[rank] = unit.kind != "F"
        if begun and begun[-1] == part:
            begun.pop()
        else:
            stages = self._runs[unit.run].stages
            begun += [Part(unit, k) for k in (stages[:0:-1] if unit.kind in "FE" else stages[:-1])]
            if unit.kind == "F":
                self._forwards[rank].pop()
                self._waiting[rank] += 1
                self._unfinished[rank] += 1
            else:
                self._backwards[unit.run] += 1
                self._waiting[rank] -= unit.kind != "E"
                self._unfinished[rank] -= unit.kind == "B"
        if not any(other.unit == unit for other in begun):
            self._ends[unit] = self._free[rank]
            if unit.kind == "I":
                later, stages = unit._replace(kind="W"), self._runs[unit.run].stages
                self._halves[rank] += [Part(later, k) for k in reversed(stages) if k in self._split]

    def _in_rounds(self, rank: int) -> list[Unit]:
        forwards = [Unit("F", n, m) for n in self._of[rank] for m in range(self._count)]
        return sorted(forwards, key=lambda unit: (unit.micro_batch // self._ranks, unit[1:]), reverse=True)

    def _next(self, rank: int) -> tuple[int, int, Part] | None:
        """(start, rank, part) of the next work of a rank; None: all of it has to wait for others' that is not done."""
        now, last = self._free[rank], len(self._runs) - 1
        found, forward = list[tuple[int, int, int, Part]](), None
        if self._runs[last].rank == rank and (loss := self._backward(rank, last)) is not None:
            found.append(loss)
        if self._begun[rank]:
            found.append((now, self._count, 0, self._begun[rank][-1]))
        else:
            found += [one for n in self._of[rank] if (one := self._backward(rank, n)) is not None]
            forward = self._forward(rank)
        is_full = forward is not None and self._is_full(rank)
        if forward is not None and not is_full:
            found.append(forward)
        at_once = [one for one in found if one[0] == now]
        if self._goes_on_forward[rank]:
            others = [one for one in at_once if one[3].unit.kind in "FE"]
            found = others or found
            if is_full and forward is not None and forward[0] == now and not others:
                at_once = []
        if self._halves[rank] and not self._begun[rank] and not at_once:
            return now, rank, self._halves[rank][0]
        if not found:
            return None
        start, _, _, part = min(found)
        return start, rank, part

    def _backward(self, rank: int, n: int) -> tuple[int, int, int, Part] | None:
        """(start, round, which one first, part) of a run's next backward, or of the loss; None: as ``_next``."""
        m, last = self._backwards[n], len(self._runs) - 1
        before = Unit("F", n - 1, m) if n == last else Unit(self._back[n + 1], n + 1, m)
        if m == self._count or before not in self._ends:
            return None
        stages = self._runs[n].stages
        part = Part(Unit(self._back[n], n, m), stages[-1])
        return max(self._free[rank], self._ends[before]), m // self._ranks, -n, part

    def _forward(self, rank: int) -> tuple[int, int, int, Part] | None:
        """A rank's next forward, which any backward goes before."""
        if not self._forwards[rank] or self._waiting[rank] >= self._most(rank):
            return None
        unit = self._forwards[rank][-1]
        before = Unit("F", unit.run - 1, unit.micro_batch)
        if unit.run and before not in self._ends:
            return None
        start = max(self._free[rank], self._ends.get(before, 0))
        return start, self._count, 0, Part(unit, self._runs[unit.run].stages[0])

    def _is_full(self, rank: int) -> bool:
        """True if a rank has to finish a backward before its next forward."""
        return bool(self._split) and self._unfinished[rank] >= self._most(0)

    def _most(self, rank: int) -> int:
        """The most forwards of a rank that wait for their backward: with the loss a stage more than ranks."""
        own, behind = len(self._of[rank]), self._ranks - rank
        looped = any(len(runs) > 1 for runs in self._of.values())
        return 1 + (2 * behind + (own - 1) * self._ranks if looped else behind)

    def _seconds(self, part: Part) -> int:
        kind = _kind_of(part, self._split)
        at_once = not part.stage or (kind == "E" and self._split)
        return (1 if at_once else _STAGE) * _TIMES[kind]


def _kind_of(part: Part, split: frozenset[int]) -> str:
    """The kind of the op that does a part."""
    return "B" if part.unit.kind == "I" and part.stage not in split else part.unit.kind


def in_turn_route(program: Program, micro_batches: int, *, split: bool = False) -> Route:
    """The walk of the rank of a pipeline whose ``program`` it is, in training. ``split``: backwards are done in two
    parts where they can be."""
    dealt = program.dealt
    assert dealt is not None
    halved = frozenset(stage.index for stage in program.stages if split and stage.split is not None)
    runs, order = runs_of(dealt.of_stages), order_of_all(dealt.of_stages, micro_batches, halved)
    walk: list[Visit | Message] = []
    for part in order:
        kind, k, m = _kind_of(part, halved), part.stage, part.unit.micro_batch
        if dealt.has(k):
            walk.append(Visit(visit(kind, k, m), (m,)))
        walk += passed_after(program, kind, k, m)
    of_ranks = {dealt.rank}
    if any(dealt.besides[k] for k in range(len(program.stages)) if dealt.has(k)):
        of_ranks.add(0)  # what that sends of a micro-batch is here as soon as it begins with it
    at_once = max(
        _most_under_way(part.unit.micro_batch for part in order if runs[part.unit.run].rank == rank)
        for rank in of_ranks
    )
    return Route(program, walk, train=True, at_once=at_once)


def _most_under_way(micro_batches: Iterable[int]) -> int:
    """The most of them that are between their first and their last place in a sequence."""
    places = list(enumerate(micro_batches))
    firsts, lasts = {m: i for i, m in reversed(places)}, {m: i for i, m in places}
    changes = Counter(firsts.values())
    changes.subtract(i + 1 for i in lasts.values())
    return max(accumulate(changes[i] for i, _ in places), default=0)
