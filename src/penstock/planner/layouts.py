"""Layouts in which the ranks of several hosts may train a model, and what a step takes in each.

Ranks that share all state do the same at the same time. So of all hosts that are alike one rank is simulated, whose
part of what a host's ranks share is its own (``hardware.sharing``), and whose collectives begin when one rank of each
kind of host has come to them: the seconds are those of the whole world (a test holds them to it). Ranks of a pipeline
do different things, and all of them are simulated (``pipelines``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from penstock.config import Tier, ZeroStage, format_size
from penstock.config.batch import dealt, other_batch
from penstock.config.layout import check_cp
from penstock.config.step import check_strands
from penstock.errors import BudgetError
from penstock.hardware.hosts import Hosts
from penstock.hardware.machine import Machine, Network
from penstock.hardware.sharing import leaving, of_each_rank, room_of_each
from penstock.planner.batches import choose
from penstock.planner.durability import settled
from penstock.planner.question import Question
from penstock.planner.search import Choice, search
from penstock.planner.task import Task
from penstock.schedule.ir.lanes import Lane
from penstock.schedule.ir.ops import Op
from penstock.schedule.ir.worlds import World
from penstock.schedule.lower.seat import Seat, streaming_seat
from penstock.schedule.mesh import is_branch
from penstock.shape.model import stage_times
from penstock.sim.costs import Costs
from penstock.sim.result import Simulation
from penstock.sim.simulate import simulate

_LINKS = ("net", "nic")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A way for so many ranks to train together: they share all state, each copy of it, or are pipelines of ``stages``,
    in which neighbours share what is one rank's. ``cp``: so many neighbours share each sequence."""

    kind: Literal["shared", "copies", "pipeline"]
    ranks: int
    stage: ZeroStage | None = None
    copies: int = 1
    stages: int = 1
    cp: int = 1

    @property
    def beside(self) -> int:
        """The number of pipelines; of ranks, where there are none."""
        return self.ranks // self.stages

    @property
    def each(self) -> int:
        """The number of ranks that share a copy of the state, or a place of a pipeline."""
        return self.ranks // self.copies // self.stages

    @property
    def name(self) -> str:
        """By the axes of its mesh."""
        axes = {"dp_replicate": self.copies, "pp": self.stages, "dp_shard": self.each // self.cp, "cp": self.cp}
        shards = self.kind != "pipeline" and self.cp == 1
        said = " x ".join(f"{axis} {n}" for axis, n in axes.items() if n > 1 or (axis == "dp_shard" and shards))
        return said if self.kind == "pipeline" else f"{said}, stage {self.stage}"

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that ask for it."""
        found: dict[str, Any] = {"pipeline": self.stages} if self.kind == "pipeline" else {"stage": self.stage}
        return found | {key: n for key, n in (("copies", self.copies), ("cp", self.cp)) if n > 1}

    def sharing(self, batch: int, size: int | None, strands: int | None) -> int:
        """The sequences of a step that a rank takes part in, of a ``batch``, in micro-batches of ``size`` if that is
        known, whose gradients are summed in ``strands``.

        Raises:
            ConfigError: so many ranks cannot share its sequences, or strands, or each sequence.
        """
        check_cp(self.cp, self.each)
        if strands is not None:
            check_strands(strands, self.beside)
        groups, who = self.beside // self.cp, "pipelines" if self.kind == "pipeline" else "ranks"
        if self.cp > 1:
            who = f"groups of {self.cp} {who} that share each"
        what, size = ("sequences", 1) if size is None else ("micro-batches", size)
        return size * dealt(batch // size, what, groups, other_batch(groups, size), who)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A model to be trained by the ranks of some hosts. ``task``: of one rank with such a machine as the first host to
    itself; ``batch``: sequences of a step, a multiple of the ``size`` of a micro-batch; None: that is chosen. ``cp``:
    so many ranks share each sequence, whose spans are those of the task's model.

    Raises:
        ConfigError: a profile lacks a rate.
    """

    task: Task
    hosts: Hosts
    batch: int
    size: int | None = None
    cp: int = 1

    def __post_init__(self) -> None:
        assert self.size is None or not self.batch % self.size
        for kind in self.hosts.kinds:
            replace(self.task, machine=kind.machine)  # which refuses one whose profile lacks a rate

    def views(self, copies: int = 1) -> list[Machine]:
        """The machine as each rank sees it, by kind of host. A collective is over when the slowest link is done."""
        hosts = self.hosts
        shared = {"hosts": hosts.count, "copies": copies, "cp": self.cp}
        found = [of_each_rank(kind.machine, hosts.ranks, **shared) for kind in hosts.kinds]
        links = ("across", "network", "of_sequence")
        across, network, of_sequence = (slowest([getattr(one, name) for one in found]) for name in links)
        found = [replace(one, across=across, of_sequence=of_sequence) for one in found]
        if copies > 1:  # within a copy, and its host, nobody waits for others
            return found
        return [replace(one, network=network) for one in found]

    def of_rank(self, machine: Machine, **changes: Any) -> Task:
        """The task of a rank that sees such a machine."""
        task, hosts = self.task, self.hosts
        budget = task.budget.of_rank(0, hosts.ranks, hosts.count)
        room = min(room_of_each(kind.machine.drives, hosts.each) for kind in hosts.kinds)
        shared: dict[str, Any] = {"machine": machine, "budget": budget, "disk_free": room}
        return settled(replace(task, **shared | changes))


@dataclass(frozen=True, kw_only=True)
class OfHost:
    """The memory of a host of one kind, and the bytes that it moves in a step: the most of any that is like it.

    ``device``: bytes on the device of a rank; all other bytes are of all ranks of a host. ``sent``: to other hosts.
    ``lane``, ``work``: the busiest lane of any of its ranks, and the seconds of its ops alone. ``blocks``: of a
    pipeline, those that its ranks have.
    """

    machine: str
    hosts: int
    device: int
    host: int
    disk: int
    read: int
    written: int
    sent: int
    lane: Lane
    work: float
    blocks: int = 0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A layout that fits, and its step. ``seconds``: on average, as some are run twice; ``micro_batches``: of a rank.
    ``deal``: blocks of each rank of a pipeline, where they are not dealt by compute, which would take ``by_compute``
    seconds."""

    layout: Layout
    seconds: float
    tokens: int
    micro_batches: int
    micro_batch_size: int
    hosts: tuple[OfHost, ...]
    deal: tuple[int, ...] = ()
    by_compute: float | None = None
    in_proportion: float | None = None
    """seconds if each rank had a share in proportion to what its host does; None: all hosts are alike"""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def busiest(self) -> OfHost:
        """The host that has the lane with the most work."""
        return max(self.hosts, key=lambda host: host.work)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The settings that ask for it."""
        return {**self.layout.settings, **({"deal": list(self.deal)} if self.deal else {})}


def slowest(links: Sequence[Network | None]) -> Network | None:
    """The slowest of some links."""
    known = [link for link in links if link is not None]
    if not known:
        return None
    least = min(known, key=lambda link: link.bandwidth)
    return replace(least, latency=max(link.latency for link in known))


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The one plan of ranks that share all state, or each copy of it, and what its ops cost on each kind of host."""

    choice: Choice
    size: int
    costs: tuple[Costs, ...]


def planned(asked: Asked, layout: Layout) -> Planned:
    """The plan of a layout, as rank 0 makes it for all: for its own machine, and the slowest of all devices.

    Raises:
        BudgetError: it does not fit.
        ConfigError: the batch cannot be shared by so many ranks, or something else that is asked for cannot be.
    """
    hosts, size, sequences = asked.hosts, asked.size, layout.sharing(asked.batch, asked.size, asked.task.strands)
    views = asked.views(layout.copies)
    slowest_view = min(views, key=lambda view: view.device.flops.get(asked.task.precision, 0.0))
    copy = min((view.device.copy for view in views if view.device.copy is not None), default=None)
    device = replace(views[0].device, flops=slowest_view.device.flops, copy=copy)
    slow = replace(views[0], name=slowest_view.name, device=device)
    shared = {"ranks": hosts.ranks // layout.copies, "copies": layout.copies, "hosts": hosts.count}
    task = asked.of_rank(slow, **shared, stage=layout.stage)
    if size is None:
        choice, split = choose(task, sequences)
        size = split.micro_batch_size
    else:
        choice = search(task.question(size, sequences // size))
    costs = tuple(_costs(task, choice, view, size) for view in views)
    return Planned(choice=choice, size=size, costs=costs)


def shared_by_all(asked: Asked, layout: Layout) -> Outcome:
    """The outcome where ranks share all state, or each copy of it; raises as ``planned``, and ``check_memory``."""
    found = planned(asked, layout)
    choice, kinds = found.choice, len(asked.hosts.kinds)
    world = asked_seat(layout, asked.hosts.count).of_kinds(choice.plan.schedule, kinds)
    simulation = choice.simulation if asked.hosts.alike else simulate(world, found.costs)
    hosts = tuple(_of_host(asked, layout, choice, simulation, kind) for kind in range(kinds))
    check_memory(asked.hosts, hosts)
    return Outcome(
        layout=layout,
        seconds=choice.question.expected(simulation.time, choice.plan),
        tokens=asked.batch * asked.task.sequence_length,
        micro_batches=choice.request.micro_batches,
        micro_batch_size=found.size,
        hosts=hosts,
        in_proportion=None if asked.hosts.alike else _in_proportion(asked, choice, world, found.costs, simulation),
    )


def check_memory(hosts: Hosts, found: Sequence[OfHost]) -> None:
    """``found``: what is taken, by kind of host.

    Raises:
        BudgetError: a host does not have it.
    """
    for kind, one in zip(hosts.kinds, found, strict=True):
        device, host = kind.machine.device, kind.machine.host
        of_device = device.memory if device.kind != "cpu" else device.memory // hosts.each
        taken: Mapping[Tier, tuple[int, int]] = {"device": (one.device, of_device), "host": (one.host, host.memory)}
        for tier, (nbytes, there) in taken.items():
            if nbytes > there:
                raise BudgetError(
                    f"{'a rank' if tier == 'device' else 'a host'} takes {format_size(nbytes)} of {tier} memory, and "
                    f"{kind.name} has {format_size(there)}: lower budget.{tier} to that"
                )


def _costs(task: Task, choice: Choice, view: Machine, size: int) -> Costs:
    """The costs of the chosen schedule on a machine as one of its ranks sees it."""
    times = stage_times(task.profile(size), view, str(task.precision))
    question: Question = replace(choice.question, machine=view, times=times)
    return question.costs_of(choice.request)


def asked_seat(layout: Layout, hosts: int) -> Seat:
    """The seat of each rank of a layout but a pipeline, on so many hosts."""
    assert layout.stage is not None
    return streaming_seat(layout.ranks // layout.copies, layout.stage, layout.copies, hosts)


def _of_host(asked: Asked, layout: Layout, choice: Choice, simulation: Simulation, kind: int) -> OfHost:
    plan, each, hosts = choice.plan, asked.hosts.each, asked.hosts
    moved = plan.schedule.bytes_per_lane()
    lane, work = max(simulation.work(kind).items(), key=lambda item: item[1])
    return OfHost(
        machine=hosts.kinds[kind].name,
        hosts=hosts.kinds[kind].count,
        device=plan.device_bytes,
        host=each * plan.host_bytes,
        disk=each * choice.request.space_bytes(plan.settings),
        read=each * moved.get("read", 0),
        written=each * moved.get("write", 0),
        sent=round(each * sum(_leaves(op, layout, hosts) for op in plan.schedule.ops if op.lane in _LINKS)),
        lane=lane,
        work=work,
    )


def _leaves(op: Op, layout: Layout, hosts: Hosts) -> float:
    """Bytes that leave the host of what a rank sends in a collective."""
    between, copies, seat = op.lane == "nic", layout.copies, asked_seat(layout, hosts.count)
    if seat.hosts.size > 1 and (between or op.group == seat.near.name):
        return op.nbytes * between
    size = copies if between else layout.ranks // copies
    spread = min(copies, hosts.count) if between else max(1, hosts.count // copies)
    if spread == 1:
        return 0.0
    gathered, exchanged = (
        leaving(size, spread, levels=copies == 1 and levels) for levels in (True, is_branch(hosts.each))
    )
    return op.nbytes * {"SG": exchanged, "AR": (exchanged + gathered) / 2}.get(op.id.kind, gathered)


def _in_proportion(asked: Asked, choice: Choice, world: World, costs: Sequence[Costs], even: Simulation) -> float:
    """Seconds of a step if each rank had as much to do, but for collectives, as its host gets done."""
    kinds = asked.hosts.kinds
    paces = [1 / max(s for lane, s in even.work(k).items() if lane not in _LINKS) for k in range(len(kinds))]
    mean = sum(kind.count * pace for kind, pace in zip(kinds, paces, strict=True)) / asked.hosts.count
    scaled = [_scaled(own, pace / mean) for own, pace in zip(costs, paces, strict=True)]
    return choice.question.expected(simulate(world, scaled).time, choice.plan)


def _scaled(costs: Costs, factor: float) -> Costs:
    def seconds(op: Op) -> float:
        return costs.seconds(op) * (1.0 if op.lane in _LINKS else factor)

    return replace(costs, seconds=seconds)
