"""A world: the schedules of all ranks of one step, and the process groups of their collectives. Plain data.

Text form: a header, the groups, then one schedule for each rank. Ranks that do the same share one.

    world fsdp ranks 4
    group all 0-3
    rank 0-3
    schedule fsdp micro-batches 4 chunk 0
    ...
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from penstock.errors import ScheduleError
from penstock.schedule.op import Schedule, parse_number, parse_schedule


@dataclass(frozen=True, kw_only=True, repr=False)
class World:
    """``ranks[r]`` is rank r's schedule (the same object for ranks that do the same); ``groups``: name -> ranks.

    A collective op waits for the ops of the same id on all ranks of its group. A ``send`` op of activation or gradient
    x to peer q meets the ``recv`` op of x from this rank on q: the recv starts when the send is done.
    """

    name: str
    ranks: tuple[Schedule, ...]
    groups: Mapping[str, tuple[int, ...]]

    @staticmethod
    def of(schedule: Schedule) -> "World":
        """A world of one rank."""
        return World(name=schedule.name, ranks=(schedule,), groups={})

    def __repr__(self) -> str:
        """``str`` is the text form, which may be long."""
        return f"<World {self.name}: {len(self.ranks)} ranks, {sum(len(s.ops) for s in self.ranks)} ops>"

    def __str__(self) -> str:
        if len(self.ranks) == 1 and not self.groups:
            return str(self.ranks[0])
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield f"world {self.name} ranks {len(self.ranks)}"
        for name, members in self.groups.items():
            yield f"group {name} {format_ranks(members)}"
        together: dict[int, list[int]] = {}
        for rank, schedule in enumerate(self.ranks):
            together.setdefault(id(schedule), []).append(rank)
        for ranks in together.values():
            yield f"rank {format_ranks(ranks)}"
            yield str(self.ranks[ranks[0]]).rstrip("\n")


def format_ranks(ranks: Iterable[int]) -> str:
    """``0-3,8``: runs of consecutive ranks, in the order given."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def parse_ranks(text: str) -> tuple[int, ...]:
    """The inverse of ``format_ranks``; raises ScheduleError."""
    ranks: list[int] = []
    for run in text.split(","):
        match = _RUN.fullmatch(run)
        if match is None:
            raise ScheduleError(f"{text!r} is not a list of ranks: write 0-3,8")
        first, last = parse_number(match[1]), parse_number(match[2] or match[1])
        if last >= MOST_RANKS:
            raise ScheduleError(f"{text!r}: ranks go up to {MOST_RANKS - 1:,}")
        ranks += range(first, last + 1)
        if len(ranks) > MOST_RANKS:
            break  # one of them is there twice
    if not ranks or len(set(ranks)) != len(ranks):
        raise ScheduleError(f"{text!r} names no rank, or one of them twice")
    return tuple(ranks)


MOST_RANKS = 1_000_000
"""A text that names more is a mistake, found before it fills the memory."""

_RUN = re.compile(r"(\d+)(?:-(\d+))?")
_WORLD = re.compile(r"world (\S+) ranks (\d+)")
_GROUP = re.compile(r"group (\S+) (\S+)")


def parse_world(text: str) -> World:
    """The inverse of ``str(world)``; takes the text of a single schedule, too.

    Raises:
        ScheduleError: names the line.
    """
    lines = text.splitlines()
    said = [i for i, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")]
    if not said or not lines[said[0]].lstrip().startswith("world "):
        return World.of(parse_schedule(text))
    header = _WORLD.fullmatch(lines[said[0]].strip())
    if header is None:
        raise ScheduleError(f"line {said[0] + 1}: the first line must be 'world NAME ranks P'")
    try:
        count = parse_number(header[2])
    except ScheduleError as error:
        raise ScheduleError(f"line {said[0] + 1}: {error}") from None
    groups: dict[str, tuple[int, ...]] = {}
    sections: list[tuple[tuple[int, ...], int]] = []
    for i in said[1:]:
        line = lines[i].strip()
        try:
            if line.startswith("group "):
                match = _GROUP.fullmatch(line)
                if match is None or sections or match[1] in groups:
                    raise ScheduleError(f"{line!r}: write 'group NAME RANKS' once for each group, before the ranks")
                groups[match[1]] = parse_ranks(match[2])
            elif line.startswith("rank "):
                sections.append((parse_ranks(line.removeprefix("rank ").strip()), i + 1))
            elif not sections:
                raise ScheduleError(f"{line!r}: write 'group NAME RANKS' or 'rank RANKS' here")
        except ScheduleError as error:
            raise ScheduleError(f"line {i + 1}: {error}") from None
    if not sections:
        raise ScheduleError(f"line {said[-1] + 1}: the world has no rank: write 'rank RANKS', then their schedule")
    ranks: dict[int, Schedule] = {}
    ends = [start - 1 for _, start in sections[1:]] + [len(lines)]
    for (members, start), end in zip(sections, ends, strict=True):
        schedule = parse_schedule("\n".join(lines[start:end]), first_line=start + 1)
        for rank in members:
            if rank in ranks:
                raise ScheduleError(f"line {start}: rank {rank} has a schedule already")
            ranks[rank] = schedule
    if len(ranks) != count or max(ranks) != count - 1:
        there = format_ranks(sorted(ranks))
        raise ScheduleError(f"line {said[0] + 1}: the world has {count} ranks, but the schedules are those of {there}")
    return World(name=header[1], ranks=tuple(ranks[r] for r in range(len(ranks))), groups=groups)
