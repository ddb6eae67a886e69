"""``penstock plan --hosts``: the layouts of the ranks of several hosts beside each other, and which is the fastest."""

import json
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.launch import MOST_RANKS
from penstock.cli.task import check_names, task_of
from penstock.cli.words import columns
from penstock.config import format_size, parse_size
from penstock.config.quantities import parse_delay, parse_rate
from penstock.config.sizes import three_digits
from penstock.config.step import IN_TURN
from penstock.errors import ConfigError
from penstock.hardware.drives import with_room
from penstock.hardware.hosts import Hosts, hosts_named
from penstock.hardware.machine import Machine, Network
from penstock.hardware.profiles import check_device, machine_named, on_directories
from penstock.hardware.sharing import why_unknown
from penstock.planner.arguments import check_drives
from penstock.planner.ask import measured, task_for
from penstock.planner.comparison import Comparison, compared
from penstock.planner.layouts import Asked, Outcome
from penstock.planner.task import own_budget
from penstock.report.sentence import LANE_NAMES, format_long_time, listed

if TYPE_CHECKING:
    from penstock.cli.plan import Arguments, FileArguments, ModelArguments

_LATENCY = "10us"


def check_hosts(arguments: "Arguments") -> None:
    """Raises ConfigError: an option has no effect without ``--hosts``, or does not go with it; or the network is
    none."""
    if arguments.hosts is None:
        for key in ("network", "latency"):
            if getattr(arguments, key) is not None:
                raise ConfigError(f"{key} is that between hosts, and has no effect without --hosts")
        return
    for key, default in (("ranks", 1), ("longest", False), ("tokens", None), ("epoch_tokens", None), ("tbw", None)):
        if getattr(arguments, key, default) != default:
            raise ConfigError(f"{key} does not go with --hosts: leave one of the two out")
    if arguments.network is None and arguments.latency is not None:
        raise ConfigError("latency is that of --network, and has no effect without it")
    _network(arguments)


def compare(arguments: "Arguments") -> int:
    """Plan all layouts, and print. Returns the exit code: 1 where none fits.

    Raises:
        ConfigError: the hosts, the model or the settings are not usable.
    """
    from penstock.cli.plan import ModelArguments

    asked = _of_model(arguments) if isinstance(arguments, ModelArguments) else _of_config(arguments)
    found = compared(asked)
    if arguments.json:
        print(json.dumps(found.json, indent=2))
    else:
        print("\n".join(describe(found, assumed=arguments.network is not None and arguments.latency is None)))
    return 0 if found.outcomes else 1


def _network(arguments: "Arguments") -> Network | None:
    if arguments.network is None:
        return None
    bandwidth = parse_rate("network", arguments.network)
    return Network(bandwidth=bandwidth, latency=parse_delay("latency", arguments.latency or _LATENCY))


def _hosts(arguments: "Arguments", paths: tuple[Path, ...]) -> Hosts:
    """The hosts that are named, with the drives that a budget has directories for and the bytes that may be used."""
    asked: list[Machine] = []

    def machine() -> Machine:
        if not asked:
            asked.append(measured(paths) if arguments.machine is None else machine_named(arguments.machine))
        return asked[0]

    assert arguments.hosts is not None
    hosts = hosts_named(arguments.hosts, machine, _network(arguments))
    if arguments.machine is not None and not asked:
        raise ConfigError(f"machine={arguments.machine!r} has no effect, as --hosts names the machine of each host")
    if hosts.ranks == 1:
        raise ConfigError(
            f"hosts={arguments.hosts!r} is one rank: leave --hosts out, and give its machine as --machine"
        )
    if hosts.each > MOST_RANKS:
        raise ConfigError(f"hosts={arguments.hosts!r}: at most {MOST_RANKS} ranks can be on one machine")
    if len({kind.machine.device.kind for kind in hosts.kinds}) > 1:
        raise ConfigError(f"hosts={arguments.hosts!r}: some compute on GPUs and some do not, and ranks do the same")
    if hosts.count == 1 and arguments.network is not None:
        raise ConfigError(f"network is that between hosts, and hosts={arguments.hosts!r} is one: leave it out")
    for kind in hosts.kinds:
        if hosts.count > 1 and kind.machine.nic is None:
            raise ConfigError(
                f"hosts={arguments.hosts!r}: the profile of {kind.name} does not tell how fast hosts send to each "
                "other: give --network, as 100Gbit/s"
            )
        if (why := why_unknown(kind.machine, hosts.ranks, hosts.count)) is not None:
            raise ConfigError(why)
    count = len(paths) or min(len(kind.machine.drives) for kind in hosts.kinds)

    def with_drives(machine: Machine) -> Machine:
        machine = on_directories(machine, paths) if paths else replace(machine, drives=machine.drives[:count])
        if arguments.disk_free is None:
            return machine
        return replace(machine, drives=with_room(machine.drives, parse_size(arguments.disk_free)))

    kinds = tuple(replace(kind, machine=with_drives(kind.machine)) for kind in hosts.kinds)
    return replace(hosts, kinds=kinds)


def _of_model(arguments: "ModelArguments") -> Asked:
    if arguments.batch is None and arguments.split is None:
        raise ConfigError(
            "hosts: layouts are compared for one batch. Give --batch N, the sequences of a step of all ranks"
        )
    hosts = _hosts(arguments, ())
    machine = hosts.kinds[0].machine
    budgets = [own_budget(kind.machine, device=arguments.device, host=arguments.host) for kind in hosts.kinds]
    least = min(budgets, key=lambda budget: budget.device_bytes)
    budget = replace(least, host=min(budgets, key=lambda budget: budget.host_bytes).host, disk=budgets[0].disk)
    check_drives(arguments.disk_free, None, budget)
    task = task_for(arguments.model, machine, replace(budget, durability=arguments.durability), arguments)
    size, count = arguments.split or (None, 0)
    return Asked(task=task, hosts=hosts, batch=arguments.batch or (size or 1) * count, size=size)


def _of_config(arguments: "FileArguments") -> Asked:
    config = arguments.to_plan()
    if isinstance(config.schedule, Path):
        raise ConfigError(
            f"schedule={str(config.schedule)!r} is a schedule of your own, which is one rank's: give --schedule "
            "vertical or horizontal"
        )
    if config.schedule in IN_TURN:
        raise ConfigError(
            f"schedule={config.schedule!r}: penstock plan --hosts compares vertical pipelines: give --schedule "
            "vertical, or leave --hosts out for what a step of this one takes"
        )
    check_drives(arguments.disk_free, None, config.budget)
    hosts = _hosts(arguments, config.budget.disk_paths)
    machine = hosts.kinds[0].machine
    if config.device is not None:
        check_device(machine, config.device)
    check_names(config, machine.device.kind)
    task = task_of(replace(config, copies=1), machine)
    return Asked(task=task, hosts=hosts, batch=config.sequences_per_step, size=config.micro_batch_size, cp=config.cp)


# ---- for people


def describe(found: Comparison, *, assumed: bool) -> Iterator[str]:
    """The lines of a report. ``assumed``: nobody has said how long a message takes."""
    asked, hosts = found.asked, found.asked.hosts
    task = asked.task
    yield (
        f"{task.shape.name}, {task.precision}, {task.optimizer}: {asked.batch:,} sequences of "
        f"{task.sequence_length:,} tokens a step"
    )
    shared = f", {asked.cp} of which share each sequence" if asked.cp > 1 else ""
    yield f"on {hosts.words}, {hosts.each} rank{'s' * (hosts.each > 1)} on each{shared}"
    nic = hosts.kinds[0].machine.nic
    if hosts.count > 1 and nic is not None:
        said = ", assumed: --latency says it" if assumed else ""
        rate = three_digits(nic.bandwidth / 1e9)
        yield f"{rate} GB/s between hosts, {three_digits(nic.latency * 1e6)} us a message{said}"
    yield ""
    if found.outcomes:
        yield from _table(found)
    if found.refused:
        yield ""
        yield "not possible:"
        for one in found.refused:
            yield from textwrap.wrap(
                f"{one.layout.name}: {one.why}", columns(), initial_indent="  ", subsequent_indent="    "
            )
    yield ""
    yield from _last_words(found)


def _table(found: Comparison) -> Iterator[str]:
    """The seconds of a step in each layout, and below that the memory and bytes that it takes."""
    several = len(found.asked.hosts.kinds) > 1
    names = [one.layout.name for one in found.outcomes]
    kinds = [f"  {kind.name}" for kind in found.asked.hosts.kinds if several]
    wide = max(map(len, [*names, *kinds])) + 2
    yield f"{'layout':<{wide}}{'a step':>10}{'tokens/s':>10}  the lane with the most work of a rank"
    for name, one in zip(names, found.outcomes, strict=True):
        lane = f"{LANE_NAMES[one.busiest.lane]}, {one.busiest.work / one.seconds:.0%} of the step"
        on = f", on {one.busiest.machine}" if several else ""
        yield f"{name:<{wide}}{format_long_time(one.seconds):>10}{three_digits(one.tokens_per_second):>10}  {lane}{on}"
    yield ""
    yield f"{'':<{wide}}{'a rank':>10}  each host, and its bytes of a step"
    heads = ("device", "host", "disk", "read", "written", "sent")
    yield f"{'layout':<{wide}}" + "".join(f"{head:>10}" for head in heads)
    for name, one in zip(names, found.outcomes, strict=True):
        if several:
            yield name
        for host in one.hosts:
            sizes = (host.device, host.host, host.disk, host.read, host.written, host.sent)
            first = f"  {host.machine}" if several else name
            yield f"{first:<{wide}}" + "".join(f"{format_size(size) if size else '-':>10}" for size in sizes)


def _last_words(found: Comparison) -> Iterator[str]:
    one = found.fastest
    if one is None:
        fits = all(one.fits for one in found.refused)
        more = "" if fits else " Those without room have it with more hosts, drives or memory, or a smaller batch."
        yield f"No layout is possible, for the reasons above.{more}"
        return
    settings = ", ".join(f"{key}: {value}" for key, value in one.settings.items())
    each = "" if one.layout.kind == "pipeline" else "on each rank "
    yield (
        f"fastest     {one.layout.name}, {each}{one.micro_batches} micro-batch{'es' * (one.micro_batches > 1)} of "
        f"{one.micro_batch_size}. Settings: {settings}"
    )
    for other in found.outcomes:
        yield from _adapted(other)


def _adapted(one: Outcome) -> Iterator[str]:
    """Lines on ranks that do not have as much each: the blocks of each, and what equal shares cost."""
    if one.deal and one.by_compute is not None:
        yield (
            f"deal        {one.layout.name}: {listed(one.deal)} blocks, by what one takes of each rank's lanes; dealt "
            f"by compute alone a step takes {format_long_time(one.by_compute)}"
        )
    if one.in_proportion is not None and one.in_proportion < 0.98 * one.seconds:
        yield (
            f"shares      {one.layout.name}: all ranks have as much to do, and wait for the slowest. Shares in "
            f"proportion would take {format_long_time(one.in_proportion)}, and are not there (docs/ranks.md)"
        )
