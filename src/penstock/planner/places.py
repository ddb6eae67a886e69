"""The ranks of a pipeline for whoever plans them: those that are alike are asked, lowered and costed once.

Of 1,024 ranks four or five differ. *Like* another is a rank whose stages are: it has the settings of that one's plan.
Its *twin* does the same, op by op, in as many seconds: one schedule and its figures are of all twins
(``schedule.alike``), and another one's own plan is made when somebody asks for it.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

from penstock.hardware.machine import Machine, Network
from penstock.planner.plan import Plan
from penstock.planner.request import Request
from penstock.schedule.alike import channels_in, channels_of, likeness, neighbours, own_stages, passing
from penstock.schedule.ir.worlds import Channel, World
from penstock.schedule.lower.seat import pipeline_world
from penstock.schedule.place import Placement, Settings
from penstock.schedule.program import Program
from penstock.shape.model import StageTimes


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The request of one rank. ``keep``: where its weights and state are already, if that is not to be changed."""

    request: Request
    keep: Placement | None = None


@dataclass(frozen=True, kw_only=True)
class Views:
    """Ranks as a prediction has them. By a rank's number, ``machine``: as it sees it; ``times``: of all stages; and
    ``link``: over which messages go from it to another, None: the network."""

    machine: Callable[[int], Machine]
    times: Callable[[int], StageTimes]
    link: Callable[[int, int], Network] | None = None


class Plans(Sequence[Plan]):
    """The plans of all ranks, by rank. ``twin``: as of ``Places``; ``settings``, ``make``: the settings of a rank's
    plan, and the plan, which is made when it is asked for."""

    def __init__(
        self,
        programs: Sequence[Program],
        twin: Sequence[int],
        settings: Callable[[int], Settings],
        make: Callable[[int], Plan],
    ) -> None:
        self.twin = twin
        self.firsts = sorted(set(twin))
        self.settings = settings
        self._programs, self._make = programs, make
        self._made: dict[int, Plan] = {}

    @staticmethod
    def of(plans: Sequence[Plan]) -> "Plans":
        """Plans that all are there already."""
        programs = [plan.program for plan in plans]
        return Plans(programs, range(len(plans)), lambda rank: plans[rank].settings, lambda rank: plans[rank])

    @overload
    def __getitem__(self, rank: int) -> Plan: ...

    @overload
    def __getitem__(self, rank: slice) -> list[Plan]: ...

    def __getitem__(self, rank: int | slice) -> Plan | list[Plan]:
        if isinstance(rank, slice):
            return [self[each] for each in range(len(self))[rank]]
        number = range(len(self))[rank]
        if number not in self._made:
            self._made[number] = self._make(number)
        return self._made[number]

    def __len__(self) -> int:
        return len(self.twin)

    def figures(self, rank: int) -> Plan:
        """A plan with the figures of a rank's own: bytes, ops, and whatever else has no name of a stage or group."""
        return self[self.twin[rank]]

    @property
    def ops(self) -> int:
        """Ops of all ranks."""
        return sum(len(self.figures(rank).schedule.ops) for rank in range(len(self)))

    @cached_property
    def _channels(self) -> dict[int, dict[Channel, int]]:
        """By the first of each twins, the channels of its messages, with the bytes that it sends in each."""
        return {first: channels_in(self[first].schedule) for first in self.firsts}

    def _own(self, rank: int) -> dict[Channel, Channel]:
        """The channels of a rank, each by what it is for the first of its twins."""
        first = self.twin[rank]
        return channels_of(self._programs[rank], self._programs[first], self._channels[first])

    def sent(self, rank: int) -> dict[int, int]:
        """Bytes of a step's messages from a rank, by the rank that they go to."""
        found = Counter[int]()
        own = self._own(rank) if self.twin[rank] != rank else None
        for channel, nbytes in self._channels[self.twin[rank]].items():
            found[(channel if own is None else own[channel]).peer] += nbytes
        return found

    @cached_property
    def world(self) -> World:
        """The world of all ranks, for the simulator: twins have one schedule."""
        channels = {rank: self._own(rank) for rank, first in enumerate(self.twin) if rank != first}
        return replace(pipeline_world([self[first].schedule for first in self.twin]), channels=channels)


class Places:
    """All ranks of a pipeline. ``like[rank]``: the first rank whose stages, and machine where there are ``views``, are
    like its own. ``twin[rank]``: the first one that does the same in the same time, where both are planned alike.
    ``kinds``, ``firsts``: ranks that are the first of those that are like each other, and of twins."""

    def __init__(self, asked: Sequence[Asked], views: Views | None = None) -> None:
        self.asked = asked
        seen: list[Machine | Network] = []
        self.like = _firsts(_likeness(rank, one, views, seen) for rank, one in enumerate(asked))
        kinds = zip(asked, self.like, strict=True)
        self.twin = _firsts(_steps(rank, one, like, views, seen) for rank, (one, like) in enumerate(kinds))
        self.kinds, self.firsts = sorted(set(self.like)), sorted(set(self.twin))

    def plans(
        self, requests: Mapping[int, Request], settings: Mapping[int, Settings], made: Mapping[int, Plan] | None = None
    ) -> Plans:
        """The plans of all ranks by what each kind of them has: the request and the settings of its first rank.
        ``made``: of these plans, those that are there."""
        there = made or {}

        def own(rank: int) -> Settings:
            kind = self.like[rank]
            return _moved(settings[kind], self.asked[kind].request.program, self.asked[rank].request.program)

        def make(rank: int) -> Plan:
            if rank in there:
                return there[rank]
            asked = self.asked[rank].request
            request = replace(requests[self.like[rank]], program=asked.program, budget=asked.budget)
            return request.plan(own(rank))

        return Plans([one.request.program for one in self.asked], self.twin, own, make)


def _firsts(keys: Iterable[Hashable]) -> tuple[int, ...]:
    """For each of some keys the position of the first that equals it."""
    first: dict[Hashable, int] = {}
    return tuple([first.setdefault(key, n) for n, key in enumerate(keys)])


def _number(one: Machine | Network, seen: list[Machine | Network]) -> int:
    """The number of a machine or link among those that were ``seen`` so far: none can be hashed, and few differ."""
    seen += [] if one in seen else [one]
    return seen.index(one)


def _likeness(rank: int, one: Asked, views: Views | None, seen: list[Machine | Network]) -> Hashable:
    request = one.request
    if one.keep is not None or request.program.dealt is None:
        return rank
    machine = None if views is None else _number(views.machine(rank), seen)
    asks = bool(request.budget.disk_paths), request.micro_batches, request.inputs, machine
    # in turn, ranks with stages that are alike have other numbers of micro-batches under way
    return likeness(request.program), asks, rank if request.takes_turns else None


def _steps(rank: int, one: Asked, like: int, views: Views | None, seen: list[Machine | Network]) -> Hashable:
    """A key of what a rank does, and in which time, besides what it has in common with those that it is ``like``."""
    program = one.request.program
    if one.keep is not None or program.dealt is None or one.request.takes_turns:
        return rank
    seconds: Hashable = None
    if views is not None:
        times, link = views.times(rank), views.link
        links = () if link is None else tuple([_number(link(rank, peer), seen) for peer in neighbours(program.dealt)])
        seconds = tuple([times.of(stage.index) for stage in own_stages(program)]), links
    return like, passing(program), seconds


def _moved(settings: Settings, like: Program, program: Program) -> Settings:
    """The settings of another rank's plan for a rank whose stages are like its own."""
    if like is program:
        return settings
    weights, state = list(settings.place.weights), list(settings.place.state)
    theirs = [g.index for g in like.groups if g.numel]
    own = [g.index for g in program.groups if g.numel]
    for before, now in zip(theirs, own, strict=True):
        weights[now], state[now] = settings.place.weights[before], settings.place.state[before]
    return replace(settings, place=replace(settings.place, weights=tuple(weights), state=tuple(state)))
