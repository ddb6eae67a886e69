"""The messages between the ranks of a pipeline that streams.

A forward's output goes to who has the next stage. With it goes what the model's own code makes for blocks besides, from
rank 0 to each of the stages up to its own next one. A backward's gradient, or the epilogue's, goes to who has the stage
before.

*In turn* a message comes right after the visit that makes it, for who sends and who receives it (``passed_after``).

*Vertically* a rank sends what it has made micro-batch by micro-batch, and receives so: none waits for what comes after
another micro-batch's. What is besides for a rank further on is there before the output of as many micro-batches as
there are stages in between, and it is received in that order. Behind a rank that has two of these stages, though, no
output comes before all micro-batches have come to that rank. So what is besides comes there after all outputs: a
message lies nowhere in between, and who sends it sooner would wait for who waits for those.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.schedule.ir.references import stage_op
from penstock.schedule.lower.route import Message
from penstock.schedule.program import Dealt, Program


class _Made(NamedTuple):
    """Something that a visit makes for another rank. ``what``: A, X or D, of a ``stage``; ``by``, ``to``: ranks."""

    what: str
    stage: int
    by: int
    to: int

    def sent(self, micro_batch: int) -> Message:
        return Message(stage_op("S" + self.what, self.stage, micro_batch), self.to)

    def received(self, micro_batch: int) -> Message:
        return Message(stage_op("R" + self.what, self.stage, micro_batch), self.by)


def passed_after(program: Program, kind: str, stage: int, micro_batch: int) -> Iterator[Message]:
    """The messages of the rank whose ``program`` it is right after a visit of its own or another's."""
    dealt = program.dealt
    assert dealt is not None
    for made in _made(program, dealt, kind, stage):
        if dealt.rank == made.by:
            yield made.sent(micro_batch)
        elif dealt.rank == made.to:
            yield made.received(micro_batch)


def sent_after(
    program: Program, kind: str, stage: int, micro_batches: Sequence[int], *, train: bool = True
) -> Iterator[Message]:
    """The messages that the rank whose ``program`` it is sends after a visit of its own, vertically."""
    if program.dealt is None:
        return
    made = _made(program, program.dealt, kind, stage, train=train)
    later = [one for one in made if not _at_once(program.dealt, stage, one.stage)]
    for m in micro_batches:
        yield from (one.sent(m) for one in made if one not in later)
    for one in later:
        yield from map(one.sent, micro_batches)


def received_before(program: Program, kind: str, stage: int, micro_batches: Sequence[int]) -> Iterator[Message]:
    """The messages that the rank whose ``program`` it is receives before a visit of its own, vertically."""
    dealt = program.dealt
    if dealt is None:
        return
    if kind == "B":
        for one in _made(program, dealt, "B", stage + 1):
            yield from map(one.received, micro_batches)
        return
    if not stage:
        return
    outputs = [one for one in _made(program, dealt, "F", stage - 1) if one.what == "A"]
    besides, ahead = list[_Made](), 0
    if dealt.rank and dealt.besides[stage]:
        besides, ahead = [_Made("X", stage, 0, dealt.rank)], ahead_of_outputs(dealt, stage)
    count = len(micro_batches)
    for i in range(count + ahead):
        yield from (one.received(micro_batches[i]) for one in besides if i < count)
        yield from (one.received(micro_batches[i - ahead]) for one in outputs if i >= ahead)


def ahead_of_outputs(dealt: Dealt, stage: int) -> int:
    """The number of micro-batches by which what rank 0 sends to a stage's rank besides is ahead of the stage's input,
    vertically."""
    between = dealt.of_stages[stage - 1 :: -1].index(0)
    return between if _at_once(dealt, stage - between - 1, stage) else 0


def _at_once(dealt: Dealt, first: int, stage: int) -> bool:
    """True if micro-batches come from one stage to another one after the other: no rank has two on the way."""
    on_the_way = dealt.of_stages[first + 1 : stage + 1]
    return len(set(on_the_way)) == len(on_the_way)


def _made(program: Program, dealt: Dealt, kind: str, stage: int, *, train: bool = True) -> list[_Made]:
    """All that a visit makes for other ranks, in the order in which it is sent."""
    k, of, by = stage, dealt.of_stages, dealt.of_stages[stage]
    if kind == "W":
        return []
    if kind != "F":
        back = train and k > 0 and dealt.crosses(k - 1) and program.stages[k - 1].gradient
        return [_Made("D", k - 1, by, of[k - 1])] if back else []
    others = () if by else dealt.others_after(k)
    made = [_Made("X", other, by, of[other]) for other in others if dealt.besides[other]]
    if dealt.crosses(k):
        made.insert(sum(one.stage == k + 1 for one in made), _Made("A", k, by, of[k + 1]))
    return made
