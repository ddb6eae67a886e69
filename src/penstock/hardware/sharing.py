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
| collectives of several hosts | what leaves a host (``ranks.levels``) at 1 / n of the profile's ``Network`` with n
ranks on each, the rest as measured between processes |

Ranks of several hosts share what is their own host's with those on it alone; all hosts are taken to be alike.

A lane that slows another one does so as on the whole machine, where each of them is as busy: ``Machine.contention``.

A lower bound of a step is what it is for one rank, the busiest lane's work at these rates. That ranks get out of step,
and change places on the cores, is not counted.
"""

from collections.abc import Sequence
from dataclasses import replace

from penstock.errors import ConfigError
from penstock.hardware.drives import together
from penstock.hardware.machine import Between, Device, Drive, Host, Machine, Network

_LINK = ("grad_bf16", "grad_fp32", "weights_bf16", "weights_fp32")
_STEPS = ("step", "step_grad_bf16", "step_grad_rounded", "step_no_copy")


def knows_ranks(machine: Machine, hosts: int = 1) -> bool:
    """True if a profile tells what collectives take; of several ``hosts``, what they send each other."""
    return machine.network is not None or (hosts == 1 and bool(machine.between))


def why_unknown(machine: Machine, hosts: int = 1) -> str:
    """The reason that nothing can be predicted with a profile that does not know ranks."""
    if hosts == 1:
        return (
            f"the profile of {machine.name} does not tell how fast ranks send to each other, which penstock doctor "
            "measures"
        )
    return (
        f"the profile of {machine.name} does not tell how fast hosts send to each other: add a network (bandwidth, "
        "latency) to it"
    )


def of_each_rank(machine: Machine, ranks: int, threads: int | None = None, hosts: int = 1) -> Machine:
    """The machine as the slowest of ``ranks`` sees it; of one, as it is. ``threads``: of each; None: the cores are
    shared out. ``hosts``: such machines, with as many of the ranks on each.

    Raises:
        ConfigError: the profile does not tell what collectives take.
    """
    if ranks == 1:
        return machine
    if hosts > 1:
        return _of_each_host(machine, ranks, hosts, threads)
    if not knows_ranks(machine):
        raise ConfigError(
            f"the profile of {machine.name} does not tell how fast ranks send to each other: measure the machine anew "
            "with penstock doctor, or add a network (bandwidth, latency) to its profile"
        )
    cores = machine.host.cores
    threads = max(1, cores // ranks) if threads is None else threads
    part = min(1 / ranks, threads / cores)
    device = machine.device
    link = _reached(machine, ranks, max(device.h2d, device.d2h)) if device.kind == "cpu" else 1.0
    crossing = machine.crossing
    if crossing is not None:
        factors = dict.fromkeys(_LINK, link) | dict.fromkeys(_STEPS, part)
        crossing = replace(crossing, **{name: getattr(crossing, name) * by for name, by in factors.items()})
    found = _between(machine, ranks)
    return replace(
        machine,
        host=_host(machine.host, ranks, part),
        device=_device(machine, ranks, part, link),
        drives=_slowest([drives_of(machine.drives, rank, ranks) for rank in range(ranks)]),
        crossing=crossing,
        network=Network(bandwidth=found.bandwidth, latency=found.latency),
        between=(),
        contention={**machine.contention, **(found.contention if isinstance(found, Between) else {})},
    )


def _of_each_host(machine: Machine, ranks: int, hosts: int, threads: int | None) -> Machine:
    """The machine as the slowest of the ranks of several hosts sees it. Of what a rank of R sends in a collective on
    two levels, (H - 1) / (R - 1) leaves its host."""
    network, each = machine.network, ranks // hosts
    if network is None:
        raise ConfigError(why_unknown(machine, hosts))
    leaving = (hosts - 1) / (ranks - 1)
    seconds, latency = leaving * each / network.bandwidth, network.latency
    if each > 1 and machine.between:
        within = _between(machine, each)
        seconds, latency = seconds + (1 - leaving) / within.bandwidth, latency + within.latency
    shared = machine if each == 1 else of_each_rank(machine, each, threads)
    return replace(shared, network=Network(bandwidth=1 / seconds, latency=latency), between=())


def of_pipeline(machine: Machine, ranks: int, threads: int | None = None, hosts: int = 1) -> Machine:
    """The machine as each rank of a pipeline sees it: as ``of_each_rank``, but what is sent from one host to another
    goes from one rank to one, and has the link between hosts to itself."""
    seen = of_each_rank(machine, ranks, threads, hosts)
    if hosts == 1:
        return seen
    assert machine.network is not None
    return replace(seen, network=machine.network)


def crowding(machine: Machine, ranks: int, threads: int) -> float:
    """Factor by which a rank computes slower beside the others, with ``threads`` each, than one that was measured
    alone."""
    if machine.device.kind != "cpu":
        return 1.0
    return max(1.0, ranks * threads / machine.host.cores)


def drives_of(drives: Sequence[Drive], rank: int, ranks: int) -> tuple[Drive, ...]:
    """A rank's share of the drives, as ``Budget.of_rank`` deals their directories out."""
    if not drives or len(drives) >= ranks:
        return tuple(drives[rank::ranks])
    drive, users = drives[rank % len(drives)], len(range(rank % len(drives), ranks, len(drives)))
    rates, left = ("read", "write", "read_both", "write_both"), drive.sustained
    less = {name: getattr(drive, name) / users for name in rates}
    if left is not None:
        left = replace(left, **{name: getattr(left, name) / users for name in rates[1:]})
    tbw = None if drive.tbw is None else drive.tbw / users
    return (replace(drive, free=drive.free // users, tbw=tbw, sustained=left, **less),)


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
        host,
        cores=max(1, host.cores // ranks),
        memory=host.memory // ranks,
        lockable=host.lockable // ranks,
        copy=host.copy / ranks,
        optimizer={name: rate * part for name, rate in host.optimizer.items()},
    )


def _device(machine: Machine, ranks: int, part: float, link: float) -> Device:
    device = machine.device
    if device.kind != "cpu":
        return device
    both = _reached(machine, 2 * ranks, max(device.h2d_both, device.d2h_both))
    return replace(
        device,
        memory=device.memory // ranks,
        flops={name: rate * part for name, rate in device.flops.items()},
        h2d=device.h2d * link,
        d2h=device.d2h * link,
        h2d_both=device.h2d_both * both,
        d2h_both=device.d2h_both * both,
        optimizer={name: rate * part for name, rate in device.optimizer.items()},
    )


def _between(machine: Machine, ranks: int) -> Network:
    """The network between so many ranks, from the measurement with the nearest number: with more ranks, each has less
    bandwidth and more latency in proportion."""
    if not machine.between:
        assert machine.network is not None
        return machine.network
    near = min(machine.between, key=lambda found: (abs(found.ranks - ranks), found.ranks))
    more = ranks / near.ranks
    return replace(near, ranks=ranks, bandwidth=near.bandwidth / more, latency=near.latency * more)
