"""Orders in which gradients are added up, by number: two sums have the same number when they give the same bits.

A sum of a thousand micro-batches is a thousand sums deep. As numbers they are compared at once, and nothing recurses.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from penstock.schedule.meaning.values import LEFT
from penstock.schedule.place import strand_ends, strand_sums

_SHOWN = 6
"""Parts of a sum that a message names."""


class Sums:
    """The sums of one proof. Each is the gradient of one stage and micro-batch, or two sums of which the second was
    added to the first."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[bool, int, int], int] = {}
        self._made: list[tuple[bool, int, int]] = []
        """(whether of two sums, and these; or stage and micro-batch), by number"""

    def one(self, stage: int, micro_batch: int) -> int:
        """The gradient that one backward makes."""
        return self._number((False, stage, micro_batch))

    def added(self, total: int, part: int) -> int:
        """``part`` added to ``total``."""
        return self._number((True, total, part))

    def whole(self, stages: Iterable[int], micro_batches: int, strands: int = 1) -> int:
        """The sum that every schedule makes of a group's gradient. ``stages``: that make one, in backward order."""
        total: int | None = None
        for stage in stages:
            sums, first, ends = dict[int, int](), 0, strand_ends(micro_batches, strands)
            for last, pairs in strand_sums(micro_batches, strands).items():
                strand = ends[last]
                sums[strand] = self.one(stage, first)
                for m in range(first + 1, last + 1):
                    sums[strand] = self.added(sums[strand], self.one(stage, m))
                for into, what in pairs:
                    sums[into] = self.added(sums[into], sums.pop(what))
                first = last + 1
            (part,) = sums.values()
            total = part if total is None else self.added(total, part)
        assert total is not None
        return total

    def described(self, total: int, *, nested: bool = False) -> str:
        """A sum as people read it: ``stage 3 of micro-batches 0 to 7 + (stage 2 of micro-batch 0)``. ``nested``: it is
        itself a part of one, and names no sums among its parts."""
        if total == LEFT:
            return "the step before's"
        parts = self._added_to(total)
        if nested and any(self._made[part][0] for part in parts):
            return f"a sum of {len(parts)} parts"
        shown = list(islice(self._in_words(parts), _SHOWN + 1))
        return " + ".join(shown if len(shown) <= _SHOWN else [*shown[:_SHOWN], "..."])

    def _number(self, made: tuple[bool, int, int]) -> int:
        if made not in self._numbers:
            self._numbers[made] = len(self._made)
            self._made.append(made)
        return self._numbers[made]

    def _added_to(self, total: int) -> list[int]:
        """The parts that a sum was added up from, one after the other; each may be a sum itself."""
        parts = []
        while self._made[total][0]:
            _, total, part = self._made[total]
            parts.append(part)
        return [total, *reversed(parts)]

    def _in_words(self, parts: Sequence[int]) -> Iterator[str]:
        """Parts of a sum, with consecutive micro-batches of a stage in one."""
        run: tuple[int, int, int] | None = None  # stage, first and last micro-batch
        for part in parts:
            is_sum, stage, m = self._made[part]
            if run is not None and not is_sum and (run[0], run[2] + 1) == (stage, m):
                run = stage, run[1], m
                continue
            if run is not None:
                yield _run(*run)
            run = None if is_sum else (stage, m, m)
            if is_sum:
                yield f"({self.described(part, nested=True)})"
        if run is not None:
            yield _run(*run)


def _run(stage: int, first: int, last: int) -> str:
    if first == last:
        return f"stage {stage} of micro-batch {first}"
    return f"stage {stage} of micro-batches {first} to {last}"
