"""``penstock doctor``: measures this machine, stores the profile where plans find it, and says what is wrong."""

import os
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from penstock.cli.launch import MOST_RANKS, how_to_start, in_words, launched
from penstock.cli.showing.display import Display, choose_display, fail
from penstock.cli.words import Words, columns
from penstock.config import format_size
from penstock.config.layout import LayoutConfig
from penstock.config.sizes import three_digits
from penstock.errors import ConfigError
from penstock.hardware.crossing import faster_casts
from penstock.hardware.drives import used_rates
from penstock.hardware.machine import Crossing, Device, Drive, Host, Machine, Network
from penstock.hardware.profiles import check_can_be_saved, save_profile, with_known_links

if TYPE_CHECKING:  # torch takes seconds to import
    from penstock.ranks.group import Ranks


@dataclass(frozen=True, kw_only=True)
class Arguments(Words):
    """penstock doctor: measure this machine for plans, store what was found, and say what is wrong with it

      penstock doctor [--path DIR ...] [options]
      torchrun --nnodes HOSTS ... -m penstock doctor [--path DIR ...]    on each of several hosts: their link, too

    | option | meaning |
    |---|---|
    | ``path`` DIR | a directory to measure, one per drive; the current one if none is given |
    | ``quick`` | in a quarter of the time, and less exactly |
    | ``ranks`` N | measure what N processes send each other, where several train one model on the processors; without
    it 2, and as many more as there are cores; none with ``quick`` |
    | ``sustained`` | write each drive until the rate settles, and keep that rate beside the first one: up to 256 GiB or
    half of what is free, for up to five minutes; plans for state on disk take it |
    | ``json`` | print the profile, and nothing else, on standard output |
    """

    command: ClassVar[str] = "penstock doctor"
    takes: ClassVar[str] = "no words but options (--path DIR, once for each drive)"

    path: tuple[Path, ...] = ()
    quick: bool = False
    sustained: bool = False
    ranks: tuple[int, ...] = ()
    json: bool = False

    def __post_init__(self) -> None:
        if self.quick and self.sustained:
            raise ConfigError("--quick measures for a short time and --sustained for a long one: give one of them")
        if wrong := [count for count in self.ranks if not 2 <= count <= MOST_RANKS]:
            raise ConfigError(f"--ranks {wrong[0]}: must be from 2 to {MOST_RANKS}, the processes on this machine")

    @property
    def paths(self) -> tuple[Path, ...]:
        """Directories to measure."""
        return tuple(Path(os.path.expanduser(path)) for path in self.path) or (Path(),)


def run(arguments: Arguments) -> int:
    """Measure, store, print; returns the exit code. Of several hosts each does, and all of them their link.

    Raises:
        ConfigError: a directory cannot be measured, or the profile cannot be stored.
        StoreError: a disk failed.
        RankError: another host has failed.
    """
    begun = time.perf_counter()
    display = choose_display(sys.stderr if arguments.json else sys.stdout)
    with launched(None, LayoutConfig()) as hosts:
        measured = _measured(arguments, hosts, display)
    machine = with_known_links(measured)
    if kept := [name for name in _links(machine) if name not in _links(measured)]:
        display.say(f"Not measured now, and kept as it was known before: what {', '.join(kept)} send each other.")
    if arguments.json:
        print(machine.to_json(), end="")
    else:
        print(describe(machine))
    stored = save_profile(machine)
    if not arguments.json:
        print(f"\nStored as {stored}, where plans find it. Took {time.perf_counter() - begun:.0f} s.")
    return 0


def _measured(arguments: Arguments, hosts: "Ranks", display: Display) -> Machine:
    """The profile of this host, with its link to the others if there are any."""
    from penstock.doctor import examine  # torch takes seconds to import
    from penstock.engine.device import resolve_device

    if hosts.size != hosts.hosts:
        raise hosts.of_all(
            ConfigError(
                f"{in_words(hosts.size, hosts.hosts)}: each measures all of its host. Start one on each "
                f"({how_to_start(hosts.hosts, hosts.hosts)} doctor)"
            )
        )
    effort = examine.QUICK if arguments.quick else examine.SUSTAINED if arguments.sustained else examine.THOROUGH
    where = resolve_device(None)

    def announced() -> list[str]:
        examine.check_paths(arguments.paths)
        if arguments.ranks and where.type != "cpu":
            raise ConfigError(
                f"--ranks: what ranks on several {where.type} devices send each other cannot be measured yet"
            )
        return examine.announced(arguments.paths, effort)

    for text in hosts.jointly("what is to be measured", announced):
        display.say(text)
    try:
        check_can_be_saved()
    except ConfigError as error:  # a minute before it comes to that
        fail(f"warning: {error}, or wait for what is measured to be printed alone")
    counts = arguments.ranks or (() if arguments.quick else examine.numbers_of_ranks(where))
    machine = hosts.jointly(
        "measurement", partial(examine.examine, arguments.paths, effort, where, display.working, counts)
    )
    return machine if hosts.size == 1 else replace(machine, nic=examine.link(hosts, where, effort, display.working))


def describe(machine: Machine) -> str:
    """A profile for people: what was measured, and what is wrong."""
    parts = [
        [machine.name, *_host(machine.host), *_device(machine.device), *_lanes(machine)],
        [*_optimizer(machine)],
        [*_crossing(machine.crossing)] if machine.crossing is not None else [],
        [*_drives(machine.drives)] if machine.drives else [],
        [*_contention(machine)] if machine.contention else [],
        [*_between(machine)] if _links(machine) else [],
        [*_wrong(machine.warnings)],
    ]
    return "\n" + "\n\n".join("\n".join(part) for part in parts if part)


def _wrong(warnings: Sequence[str]) -> Iterator[str]:
    yield "What is wrong" if warnings else "Nothing that would slow training down was found."
    form = textwrap.TextWrapper(columns(), initial_indent="  - ", subsequent_indent="    ")
    form.break_long_words = form.break_on_hyphens = False
    for text in warnings:
        yield from form.wrap(text)


def _row(label: str, text: str) -> str:
    return f"  {label:<22}{text}"


def _host(host: Host) -> Iterator[str]:
    locked = "all of it" if host.lockable >= host.memory else format_size(host.lockable)
    nodes = f", on {host.nodes} NUMA nodes" if host.nodes > 1 else ""
    yield _row("cores", f"{host.cores}{nodes}")
    yield _row("memory", f"{format_size(host.memory)}; may be page-locked: {locked}")


def _device(device: Device) -> Iterator[str]:
    memory = "no GPU: the processor computes, in host memory"
    if device.kind == "cuda":
        memory = format_size(device.memory) + ("" if device.room is None else f", {format_size(device.room)} free")
        memory += "" if device.node is None else f", on NUMA node {device.node}"
    yield _row("device", f"{device.name}; {memory}")
    products = "   ".join(f"{dtype} {three_digits(rate / 1e12)}" for dtype, rate in device.flops.items())
    yield _row("matrix products", f"{products}   TFLOP/s")


def _lanes(machine: Machine) -> Iterator[str]:
    device = machine.device
    yield _row(
        "host and device",
        f"to {_gb(device.h2d)}, from {_gb(device.d2h)}, at once {_gb(device.h2d_both)} + {_gb(device.d2h_both)} GB/s",
    )
    of_device = f", in the device's {_gb(device.copy)}" if device.kind == "cuda" and device.copy is not None else ""
    yield _row("copies in memory", f"{_gb(machine.host.copy)}{of_device} GB/s")
    overhead, interpreter = machine.overhead * 1e6, machine.interpreter * 1e6
    yield _row("an op costs besides", f"{overhead:.0f} µs to another lane, of Python {interpreter:.0f} µs")
    yield _row("an op of a model", f"{machine.dispatch * 1e6:.1f} µs of the host, however little it computes")


def _optimizer(machine: Machine) -> Iterator[str]:
    named = [name.split(".", 2) for name in machine.host.optimizer]
    precisions = list(dict.fromkeys(precision for _, precision, *_ in named))
    kinds = list(dict.fromkeys((kind, *form) for kind, _, *form in named))
    places = {"host": machine.host.optimizer}
    if machine.device.kind == "cuda":
        places["device"] = machine.device.optimizer
    heads = [precision if place == "host" else f"{precision} on GPU" for place in places for precision in precisions]
    yield f"  {'million parameters/s':<22}" + "".join(f"{head:>13}" for head in heads)
    for kind, *form in kinds:
        names = [".".join((kind, precision, *form)) for precision in precisions]
        numbers = [rates.get(name, 0.0) for rates in places.values() for name in names]
        moments = "".join(f", {word} moments" for word in form)
        yield _row(f"  {kind}{moments}", "".join(f"{number / 1e6:>13,.0f}" for number in numbers))


def _crossing(crossing: Crossing) -> Iterator[str]:
    """Rates of gradients between device and optimizer in bf16 precision, by who casts them."""
    rows = {
        "gradients, cast by the device": (crossing.grad_bf16, crossing.step_grad_bf16),
        "gradients, cast by the optimizer": (crossing.grad_fp32, crossing.step_grad_rounded),
    }
    yield f"  {'million parameters/s':<36}{'link and cast':>15}{'AdamW on host':>15}"
    for name, numbers in rows.items():
        yield f"    {name:<34}" + "".join(f"{number / 1e6:>15,.0f}" for number in numbers)
    yield f"    {faster_casts(crossing)}"


def _drives(drives: Sequence[Drive]) -> Iterator[str]:
    width = max(22, *(len(drive.path) + 4 for drive in drives))
    yield f"  {'GB/s':<{width}}{'read':>8}{'write':>8}{'both at once':>16}{'free':>12}  kind"
    for drive in drives:
        both = f"{_gb(drive.read_both)} + {_gb(drive.write_both)}"
        node = "" if drive.node is None else f", NUMA node {drive.node}"
        yield (
            f"    {drive.path:<{width - 2}}{_gb(drive.read):>8}{_gb(drive.write):>8}{both:>16}"
            f"{format_size(drive.free):>12}  {drive.kind}{node}"
        )
        if (left := drive.sustained) is not None:
            both = f"{_gb(left.read_both)} + {_gb(left.write_both)}"
            after = f"after {format_size(left.after)}"
            yield f"    {'  ' + after:<{width - 2}}{'':>8}{_gb(left.write):>8}{both:>16}"
    if any(drive.kind not in ("tmpfs", "network") for drive in drives):
        yield "    " + used_rates(drives)


def _contention(machine: Machine) -> Iterator[str]:
    """A table of how many times as long a lane's work takes while another lane is busy all the time."""
    slower = {tuple(pair.split("+")): 1 + value for pair, value in machine.contention.items()}
    lanes = [lane for lane in ("compute", "cpu", "h2d", "d2h", "read", "write") if any(lane in p for p in slower)]
    yield f"  {'takes longer beside':<22}" + "".join(f"{lane:>9}" for lane in lanes)
    for lane in lanes:
        cells = [f"{slower[lane, other]:.2f}x" if (lane, other) in slower else "" for other in lanes]
        yield _row(f"  {lane}", "".join(f"{cell:>9}" for cell in cells)).rstrip()


def _between(machine: Machine) -> Iterator[str]:
    """Rates of collectives between ranks, and between hosts, and how much these and the other lanes slow each other."""
    lanes = ("compute", "cpu", "h2d", "d2h") if machine.device.kind == "cpu" else ()  # of a GPU nobody has looked
    yield f"  {'between':<22}{'GB/s each':>11}{'collective':>12}" + "   takes longer beside" * bool(lanes)
    for name, link in _links(machine).items():
        lane = "nic" if link is machine.nic else "net"
        beside = (f"{other} {1 + link.contention.get(f'{lane}+{other}', 0.0):.2f}x" for other in lanes)
        rates = f"{_gb(link.bandwidth):>11}{link.latency * 1e3:>9.2f} ms"
        yield _row(f"  {name}", f"{rates}   {', '.join(beside)}").rstrip()


def _links(machine: Machine) -> dict[str, Network]:
    """The links that a profile tells of, by the name of what they are between."""
    links: dict[str, Network | None] = {"any ranks": machine.network, "hosts": machine.nic}
    links = {f"{one.ranks} ranks": one for one in machine.between} | links
    return {name: link for name, link in links.items() if link is not None}


def _gb(rate: float) -> str:
    """Bytes per second in GB/s."""
    return three_digits(rate / 1e9)
