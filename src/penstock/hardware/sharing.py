"""A machine as each of several ranks sees it, which train on it together: what they share is cut evenly.

All ranks do the same at the same time: they have equal parts of everything, the same schedule, and meet in each
collective. So where one rank's lane is busy, that lane is busy on all of them, and of what lanes of one kind share each
rank has an equal part. What a rank sees is therefore a machine of its own that is slower:

| | of R ranks, of t threads each, on a machine of C cores, each has |
|---|---|
| host memory | 1 / R of it |
| optimizer steps on the host | 1 / R of all cores' rate, or t / C if that is less |
| copies in memory | one thread's rate, or 1 / R of what the machine copies at once if that is less |
| compute on the processors | its own t threads, where R t <= C, else C / (R t) of their speed |
| a GPU, and its link | its own |
| a drive | what is left of it where n ranks have their folders on it: 1 / n |
| collectives | as they were measured between as many processes (``Between``), or as the profile says of a ``Network`` |
| collectives of several hosts | what leaves a host (``ranks.levels``) at 1 / n of the profile's ``nic`` with n ranks on
each, on a lane of its own (``Machine.across``); the rest as between ranks of one |
| what attention sends where neighbours share each sequence | collectives of those, of the hosts that they are on |
| collectives of several copies of the state | those of one copy as above, of the hosts that it is on; those between
copies at 1 / n of the ``nic``, as far as they are on several hosts |

Ranks of several hosts share what is their own host's with those on it alone; all hosts are taken to be alike.

A lane that slows another one does so as on the whole machine, where each of them is as busy: ``Machine.contention``,
and ``Network.contention`` of the links, which was measured while hosts sent both ways. What a host's link slows, any
lane does that goes over it; of a pipeline ``send``, for both ways: ranks receive about as much.

A lower bound of a step is what it is for one rank, the busiest lane's work at these rates. That ranks get out of step,
and change places on the cores, is not counted.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from penstock.errors import ConfigError
from penstock.hardware.drives import part_of, spread, stripe_weights, striped_room, together
from penstock.hardware.machine import Collectives, Device, Drive, Host, Machine, Network, at_pace
from penstock.hardware.profiles import file_system
from penstock.schedule.ir.lanes import Lane
from penstock.schedule.mesh import is_branch


def knows_ranks(machine: Machine, ranks: int, hosts: int = 1, copies: int = 1) -> bool:
    """True if a profile tells what ``ranks`` send each other, as many of them on each of so many ``hosts``."""
    return why_unknown(machine, ranks, hosts, copies) is None


def why_unknown(machine: Machine, ranks: int, hosts: int = 1, copies: int = 1) -> str | None:
    """The reason that nothing can be predicted of so many ranks with a profile; None: there is none."""
    if ranks > hosts and machine.network is None and not machine.between:
        return (
            f"the profile of {machine.name} does not tell how fast ranks send to each other: measure the machine anew "
            "with penstock doctor, or add a network (bandwidth, latency) to its profile"
        )
    if hosts > 1 and machine.nic is None:
        return (
            f"the profile of {machine.name} does not tell how fast hosts send to each other: measure that with "
            "penstock doctor, started by torchrun on each of them, or add a nic (bandwidth, latency), a host's link to "
            "the others, to it"
        )
    if copies % hosts and hosts % copies:
        return f"of {copies} copies of the state on {hosts} hosts some are on a part of a host: that is not predicted"
    return None


def of_each_rank(
    machine: Machine, ranks: int, threads: int | None = None, hosts: int = 1, copies: int = 1, cp: int = 1
) -> Machine:
    """The machine as the slowest of ``ranks`` sees it; of one, as it is. ``threads``: of each; None: the cores are
    shared out. ``hosts``: such machines, with as many of the ranks on each. ``copies``: of the state that they have.
    ``cp``: so many neighbours share each sequence.

    Raises:
        ConfigError: the profile does not tell what collectives take.
    """
    if ranks == 1:
        return machine
    if (why := why_unknown(machine, ranks, hosts, copies)) is not None:
        raise ConfigError(why)
    each = ranks // hosts
    shared = machine if each == 1 else _of_host(machine, each, threads)
    if copies == 1:
        network, across = _on_levels(machine, each, hosts) if hosts > 1 and each > 1 else (None, None)
        network = network or _collectives(machine, each, ranks, hosts)
        leave: tuple[Lane, ...] = ("net",) if across is None else ("nic",) if is_branch(each) else ("net", "nic")
    else:
        network = _collectives(machine, each, ranks // copies, max(1, hosts // copies))
        across = _collectives(machine, each, copies, min(copies, hosts))
        leave = ("net", "nic") if hosts > copies else ("nic",)
    return replace(
        shared,
        network=network,
        across=across,
        of_sequence=None if cp == 1 else _of_neighbours(machine, ranks, hosts, cp),
        between=(),
        contention=_contention(machine, each, hosts, leave),
    )


def _contention(machine: Machine, each: int, hosts: int, leave: Sequence[Lane]) -> dict[str, float]:
    """Slow-downs of lanes for one of ``each`` ranks on so many hosts. ``leave``: the lanes that go over a host's
    link."""
    found = {**machine.contention, **(within_host(machine, each).contention if each > 1 else {})}
    if hosts == 1:
        return found
    assert machine.nic is not None
    found = {pair: value for pair, value in found.items() if set(leave).isdisjoint(pair.split("+"))}
    for pair, value in machine.nic.contention.items():
        slow, _, busy = pair.partition("+")
        for lane in leave:
            if busy == "nic":
                found[f"{slow}+{lane}"] = value
            else:
                found[f"{lane}+{busy}"] = value
    return found


def _of_host(machine: Machine, ranks: int, threads: int | None) -> Machine:
    """The machine as the slowest of its ``ranks`` sees it, but for what they send each other and what slows what."""
    cores = machine.host.cores
    threads = max(1, cores // ranks) if threads is None else threads
    part = min(1 / ranks, threads / cores)
    device = machine.device
    link = _reached(machine, ranks, max(device.h2d, device.d2h)) if device.kind == "cpu" else 1.0
    return replace(
        machine,
        host=_host(machine.host, ranks, part),
        device=_device(machine, ranks, part, link),
        drives=_slowest([drives_of(machine.drives, rank, ranks) for rank in range(ranks)]),
        crossing=machine.crossing and machine.crossing.at(down=link, steps=part),
    )


def leaving(size: int, hosts: int, *, levels: bool) -> float:
    """The share of what a rank sends in a collective that leaves its host, ``size`` ranks on so many hosts. ``levels``:
    it goes on two levels (``ranks.levels``); else each part goes to whoever is to have it."""
    return (hosts - 1 if levels else size - size // hosts) / (size - 1)


def _collectives(machine: Machine, on_host: int, size: int, hosts: int) -> Network:
    """The links of ranks in a collective on one level, ``size`` of them on so many ``hosts``, while all ``on_host``
    ranks of each do the same."""
    if size == 1:
        return Network(bandwidth=float("inf"), latency=0.0)
    within = within_host(machine, on_host) if on_host > 1 else None
    if hosts == 1:
        assert within is not None
        return Network(bandwidth=within.bandwidth, latency=within.latency)
    assert machine.nic is not None
    latency = machine.nic.latency + (0.0 if within is None or size == hosts else within.latency)
    pace = _pace(within, machine.nic, on_host, leaving(size, hosts, levels=False))
    return Network(bandwidth=pace, latency=latency)


def _of_neighbours(machine: Machine, ranks: int, hosts: int, size: int) -> Network:
    """``_collectives`` of each ``size`` neighbours among ``ranks``, which all do the same at the same time."""
    return _collectives(machine, ranks // hosts, size, _spread(ranks, hosts, size))


def _spread(ranks: int, hosts: int, size: int) -> int:
    """The hosts that each ``size`` neighbours among ``ranks`` are on, at most."""
    each = ranks // hosts
    return max(len({rank // each for rank in range(first, first + size)}) for first in range(0, ranks, size))


def _on_levels(machine: Machine, each: int, hosts: int) -> tuple[Network, Network]:
    """The links of ``each`` ranks on each of several hosts, whose collectives have two levels: within a host, and of
    one of its ranks to those of others."""
    within, nic, size = within_host(machine, each), machine.nic, each * hosts
    assert nic is not None
    paces = {levels: _pace(within, nic, each, leaving(size, hosts, levels=levels)) for levels in (True, False)}
    network = Collectives(
        bandwidth=within.bandwidth,
        latency=within.latency,
        exchange=within.bandwidth if is_branch(each) else paces[False],
        of_all=2 / (1 / paces[True] + 1 / paces[is_branch(each)]),
        latency_of_all=within.latency + nic.latency,
    )
    return network, Network(bandwidth=nic.bandwidth / each, latency=nic.latency)


def _pace(within: Network | None, nic: Network, on_host: int, share: float) -> float:
    """Bytes/s of which a ``share`` leaves the host, over a link that all of its ranks use at once."""
    inside = 0.0 if within is None else (1 - share) / within.bandwidth
    return 1 / (share * on_host / nic.bandwidth + inside)


def of_pipeline(
    machine: Machine, ranks: int, threads: int | None = None, hosts: int = 1, beside: int = 1, cp: int = 1
) -> Machine:
    """The machine as each rank of a pipeline sees it: as ``of_each_rank``, but what is sent from one host to another
    goes from one rank to one, and has the link between hosts to itself. Of so many pipelines ``beside`` each other, in
    which neighbours share what is one rank's: their collectives are between those (``link_of_messages`` for the
    rest). ``cp``: so many of these share each sequence.
    """
    seen = of_each_rank(machine, ranks, threads, hosts, cp=cp)
    leave: tuple[Lane, ...] = ("send", "net") if beside == 1 or _spread(ranks, hosts, beside) > 1 else ("send",)
    seen = replace(seen, contention=_contention(machine, ranks // hosts, hosts, leave))
    if beside > 1:
        return replace(seen, network=_of_neighbours(machine, ranks, hosts, beside), across=None)
    return seen if hosts == 1 else replace(seen, network=machine.nic)


def link_of_messages(machine: Machine, ranks: int, hosts: int, beside: int) -> Network | None:
    """The link over which a rank of one of several pipelines ``beside`` each other sends to the next one, while the
    other ranks of its host do the same; None: the one that ``of_pipeline`` gives."""
    if beside == 1:
        return None
    each = ranks // hosts
    if hosts == 1:
        return within_host(machine, ranks)
    assert machine.nic is not None
    return replace(machine.nic, bandwidth=machine.nic.bandwidth / min(each, beside))


def drives_of(drives: Sequence[Drive], rank: int, ranks: int) -> tuple[Drive, ...]:
    """A rank's share of the drives, as ``Budget.of_rank`` deals their directories out."""
    if not drives or len(drives) >= ranks:
        return tuple(drives[rank::ranks])
    return (part_of(drives[rank % len(drives)], len(range(rank % len(drives), ranks, len(drives)))),)


def room_of_each(drives: Sequence[Drive], ranks: int) -> int:
    """Bytes that each of so many ranks on a host may have on disk: of the one whose drives have the least room."""
    dealt = [drives_of(drives, rank, ranks) for rank in range(ranks)]
    return min(striped_room([drive.free for drive in own], own) for own in dealt)


def too_full(drives: Sequence[Drive], needs: Sequence[int]) -> tuple[int, int] | None:
    """The bytes that would be on a file system and those that are free there, of the first that has too few for ranks
    of one host which need so many each; None: all have enough."""
    ranks, load = len(needs), dict.fromkeys(range(len(drives)), 0)
    for rank, need in enumerate(needs if drives else ()):
        places = list(range(rank, len(drives), ranks)) or [rank % len(drives)]
        own = [drives[i] for i in places]
        weights = max((stripe_weights(own), (1,) * len(own)), key=lambda shares: spread([d.free for d in own], shares))
        for i, weight in zip(places, weights, strict=True):
            load[i] += need * weight // sum(weights)
    systems: dict[object, list[int]] = {}
    for i, drive in enumerate(drives):  # directories on one file system have equal parts of it, and may use all of it
        systems.setdefault(file_system(Path(drive.path)) if drive.directories > 1 else f"drive {i}", []).append(i)
    sizes = ((sum(load[i] for i in there), sum(drives[i].free for i in there)) for there in systems.values())
    return next(((need, free) for need, free in sizes if need > free), None)


def _slowest(dealt: Sequence[tuple[Drive, ...]]) -> tuple[Drive, ...]:
    """The drives of the rank that takes the longest to read and write as much; none where a rank has none."""
    if not all(dealt):
        return ()
    paces = [together(own) for own in dealt]
    return dealt[max(range(len(dealt)), key=lambda rank: 1 / paces[rank].read + 1 / paces[rank].write)]


def _reached(machine: Machine, copiers: int, alone: float) -> float:
    """The share of ``alone`` that each of so many threads reaches, which all copy in host memory."""
    device = machine.device
    at_once = max(machine.host.copy, device.h2d_both + device.d2h_both)
    return min(1.0, at_once / (copiers * alone))


def _host(host: Host, ranks: int, part: float) -> Host:
    return replace(
        at_pace(host, optimizer=part),
        cores=max(1, host.cores // ranks),
        memory=host.memory // ranks,
        lockable=host.lockable // ranks,
        copy=host.copy / ranks,
    )


def _device(machine: Machine, ranks: int, part: float, link: float) -> Device:
    device = machine.device
    if device.kind != "cpu":
        return device
    both = _reached(machine, 2 * ranks, max(device.h2d_both, device.d2h_both))
    return replace(
        at_pace(device, flops=part, optimizer=part, h2d=link, d2h=link, h2d_both=both, d2h_both=both),
        memory=device.memory // ranks,
        copy=None if device.copy is None else device.copy / ranks,
    )


def within_host(machine: Machine, ranks: int) -> Network:
    """The network between so many ranks of one machine, from the measurement with the nearest number: with more ranks,
    each has less bandwidth and more latency in proportion."""
    if not machine.between:
        assert machine.network is not None
        return machine.network
    near = min(machine.between, key=lambda found: (abs(found.ranks - ranks), found.ranks))
    more = ranks / near.ranks
    return replace(near, ranks=ranks, bandwidth=near.bandwidth / more, latency=near.latency * more)
