"""A machine profile: what each link and each unit of a machine can do. Measured by ``penstock doctor``, or shipped.

All rates are bytes, FLOP or parameters per second; sizes are bytes. ``*_both`` is a rate while the opposite direction
is busy too, so that a duplex link has the same two rates and a shared one has about half.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from penstock.config import Tier
from penstock.documents.text import MalformedError, parse_json, read_text
from penstock.documents.typed import decode, hints_of, shown
from penstock.errors import ConfigError
from penstock.schedule.ir.lanes import LANES

HEAVIEST = 8
"""The largest weight of a drive in a stripe."""
DeviceKind = Literal["cuda", "cpu"]
"""Kinds of devices that may compute."""


@dataclass(frozen=True, kw_only=True)
class Sustained:
    """A drive's rates (bytes/s) once it has been written for long: most have a cache in front of their slower cells."""

    write: float
    read_both: float
    write_both: float
    after: int
    """bytes that had been written in a row before this was measured"""


@dataclass(frozen=True, kw_only=True)
class Drive:
    """A directory of the disk tier, or one drive of a machine that is only described. ``write``, ``read_both`` and
    ``write_both`` are what it does for a short while; ``steady`` has what a run gets of it.
    """

    path: str
    read: float
    write: float
    read_both: float
    write_both: float
    free: int
    """bytes that may be used"""
    kind: Literal["ssd", "hdd", "tmpfs", "network", "unknown"] = "ssd"
    tbw: float | None = None
    """the maker's rating: terabytes (1e12 bytes) that may be written in the drive's life"""
    node: int | None = None
    """the NUMA node of its controller, where the machine has several and tells"""
    mount: str | None = None
    """the mount point of its file system when this was measured; None: nobody has looked"""
    sustained: Sustained | None = None
    """None: nobody has measured that"""
    weight: int | None = None
    """its stripes of a store, in proportion to the other drives'; None: as many as its rates say"""
    directories: int = 1
    """a budget's directories that are on it, of which this is one: its figures are an equal part of the drive's"""

    @property
    def steady(self) -> "Drive":
        """The drive with the rates that state on disk gets of it: the sustained ones, where they are known."""
        known = self.sustained
        if known is None:
            return self
        return replace(self, write=known.write, read_both=known.read_both, write_both=known.write_both, sustained=None)


@dataclass(frozen=True, kw_only=True)
class Host:
    """Host memory and processor. ``optimizer``: parameters/s of a step, by ``"adamw.fp32"``, ``"adamw.bf16"``, ..."""

    cores: int
    memory: int
    """bytes that this process may use: the least of what is installed and every cgroup's limit"""
    lockable: int
    """bytes that may be page-locked (``ulimit -l``)"""
    copy: float
    """bytes/s of a copy in host memory, counted once"""
    optimizer: Mapping[str, float]
    nodes: int = 1
    """NUMA nodes that have cores"""


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device that computes. ``flops``: FLOP/s of a large matrix product, by dtype (``fp32``, ``bf16``, ...).
    ``copy``: bytes/s of a copy in its memory, counted once; None: in a profile from before that was measured."""

    name: str
    kind: DeviceKind
    memory: int
    flops: Mapping[str, float]
    h2d: float
    d2h: float
    h2d_both: float
    d2h_both: float
    copy: float | None = None
    optimizer: Mapping[str, float] = field(default_factory=dict)
    """parameters/s of an optimizer step on the device, as ``Host.optimizer``"""
    peak: Mapping[str, float] = field(default_factory=dict)
    """FLOP/s that its maker states, by dtype: of dense products that are summed in fp32; empty where none are known"""
    node: int | None = None
    """the NUMA node that it is on, where the machine has several and tells"""
    other_bits: tuple[str, ...] | None = None
    """optimizers, as in ``optimizer``, whose steps here differ from the host's in some bit; None: nobody has looked"""
    room: int | None = None
    """bytes that were free for a budget when this was measured, beside what the device itself, its libraries and other
    programs take; None: nobody has looked"""

    def differs(self, optimizer: str) -> str | None:
        """A line for a plan that lets ``optimizer`` step here: that the bits are not known to be the host's;
        None: they are."""
        if self.kind == "cpu" or (self.other_bits is not None and optimizer not in self.other_bits):
            return None
        if self.other_bits is None:
            return (
                f"whether {optimizer} steps on {self.name} have the host's bits has not been looked at: penstock "
                "doctor does"
            )
        return (
            f"{optimizer} steps on {self.name} differ from the host's in some bits, so where the state lives changes "
            "the numbers: budget.state: host or disk keeps it on one side"
        )


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """Parameters/s between the device's buffers and the optimizer on the host, by where fp32 becomes bf16.

    The first two are the link's, of a gradient by the dtype that crosses. The others are of an AdamW step on the host
    that writes the bf16 copy, by what it reads. A plan that casts gradients on the device takes ``grad_bf16`` and
    ``step_grad_bf16``; one that lets the optimizer round them, ``grad_fp32`` and ``step_grad_rounded``.
    """

    grad_bf16: float
    """cast on the device, then 2 bytes over d2h; one after the other"""
    grad_fp32: float
    """4 bytes over d2h"""
    step: float
    """reads an fp32 gradient as it is"""
    step_grad_bf16: float
    """reads a bf16 gradient"""
    step_grad_rounded: float
    """reads an fp32 gradient and rounds it to bf16"""

    def at(self, *, down: float, steps: float) -> "Crossing":
        """At multiples of its rates: of gradients on their way down, and of steps."""
        return at_pace(self, **{name: down if name.startswith("grad") else steps for name in vars(self)})


@dataclass(frozen=True, kw_only=True)
class Network:
    """Links between ranks, or between hosts. ``bandwidth``: bytes/s that a rank (a host) sends, and receives;
    ``latency``: seconds. ``contention``: of the lane ``net`` (``nic``) and others, as ``Machine.contention``, while all
    ranks (hosts) do the same."""

    bandwidth: float
    latency: float
    contention: Mapping[str, float] = field(default_factory=dict)

    def at(self, pace: float) -> "Network":
        """The links at a multiple of their bandwidth."""
        return at_pace(self, bandwidth=pace)


@dataclass(frozen=True, kw_only=True)
class Collectives(Network):
    """Links within each of several hosts, over which gathers on two levels go. ``exchange``: bytes/s of exchanges of
    gradients, where these have one level only; ``of_all``, ``latency_of_all``: of what all ranks do in one op."""

    exchange: float
    of_all: float
    latency_of_all: float

    def at(self, pace: float) -> "Network":
        return at_pace(self, bandwidth=pace, exchange=pace, of_all=pace)


@dataclass(frozen=True, kw_only=True)
class Between(Network):
    """Collectives between ``ranks`` processes of this machine, which all compute on its processors.

    ``other_bits``: what they compute otherwise than each other: optimizers, as ``Device.other_bits``, and ``product``.
    """

    ranks: int
    other_bits: tuple[str, ...] = ()


Part = TypeVar("Part", bound="Drive | Host | Device | Crossing | Network")


def at_pace(part: Part, **paces: float) -> Part:
    """A part of a machine with some of its rates, or tables of them, at a multiple. What is not known stays so."""

    def at(rate: Any, pace: float) -> Any:
        if isinstance(rate, Mapping):
            return {name: at(one, pace) for name, one in rate.items()}
        return None if rate is None else rate * pace

    return replace(part, **{name: at(getattr(part, name), pace) for name, pace in paces.items()})


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The time at which a profile was measured, and what else kept the machine busy."""

    at: str
    """the time in UTC, as ISO 8601 writes it"""
    load: float
    """cores that other programs kept busy meanwhile, on average"""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine (one rank's view of it).

    ``contention["a+b"]``: see ``penstock.sim.costs.Costs.contention``, for the pairs that the rates above do not tell:
    on a machine without a GPU, ``compute``, ``cpu``, ``h2d`` and ``d2h`` share cores and memory.
    ``crossing``: None in a profile that does not tell; ``penstock.hardware.crossing`` derives it then.
    ``network``: between the ranks of one machine, such as the GPUs of a board; ``nic``: a host's link to other hosts,
    which its ranks share. ``between``: for each number of ranks that was measured; none where nobody has.
    ``across``: one rank's link to those with its place on other hosts, or in other copies of the state: no part of a
    profile, it follows (``penstock.hardware.sharing``). So does ``of_sequence``: its link to those that share each
    sequence with it.
    ``measured``: None in a profile that was not, or that does not tell. ``source``: what the figures of a machine are
    from that is only described. ``file``: the one that the profile was read from, which is no part of it.
    ``overhead``: seconds from an op's end to the start of one that has waited for it on another lane. ``interpreter``:
    seconds of Python that an op of any lane takes, while compute can queue nothing. ``dispatch``: seconds that the host
    takes for an op of a model (``Work.ops``), besides what the op computes. ``warnings``: what doctor found wrong, in
    words.
    """

    name: str
    host: Host
    device: Device
    drives: tuple[Drive, ...] = ()
    crossing: Crossing | None = None
    network: Network | None = None
    nic: Network | None = None
    between: tuple[Between, ...] = ()
    contention: Mapping[str, float] = field(default_factory=dict)
    overhead: float = 0.0
    interpreter: float = 0.0
    dispatch: float = 0.0
    warnings: tuple[str, ...] = ()
    measured: Measured | None = None
    source: str = ""
    file: str = field(default="", compare=False)
    across: Network | None = None
    of_sequence: Network | None = None

    @property
    def memory(self) -> Mapping[Tier, int]:
        """Bytes of device and host."""
        return {"device": self.device.memory, "host": self.host.memory}

    def host_rate(self, optimizer: str) -> float:
        """Parameters/s of a step on the host, by a key of its rates (``"adamw.bf16"``).

        Raises:
            ConfigError: there is none.
        """
        if optimizer not in self.host.optimizer:
            known = ", ".join(sorted(self.host.optimizer)) or "none"
            raise ConfigError(
                f"the profile of {self.name} has no optimizer rate {optimizer}, only {known}: measure it with penstock "
                "doctor"
            )
        return self.host.optimizer[optimizer]

    def to_json(self) -> str:
        kept = {key: value for key, value in asdict(self).items() if key not in _NOT_KEPT}
        return json.dumps(kept, indent=2, sort_keys=True) + "\n"


_NOT_KEPT = {"file", "across", "of_sequence"}
_FORMER = ("weights_bf16", "weights_fp32", "step_no_copy")
"""Rates of ``crossing`` in profiles of before, for casts of weights on the device, which no plan makes."""


def parse_machine(text: str, where: str) -> Machine:
    """The inverse of ``Machine.to_json``. ``where``: what the text is from, for messages.

    Raises:
        ConfigError: names the key that is missing, unknown, twice there, of a wrong type, or out of range.
    """
    try:
        data = parse_json(text, numbers=_number)
        if isinstance(data, dict) and isinstance(crossing := data.get("crossing"), dict):
            data["crossing"] = {key: rate for key, rate in crossing.items() if key not in _FORMER}
        found: Machine = _in_range(decode(Machine, data), Machine, "", "")
        if own := [name for name in sorted(_NOT_KEPT) if getattr(found, name)]:
            raise MalformedError(f"{own[0]} is no part of a profile")
    except MalformedError as error:
        raise ConfigError(f"{where}: {error}. penstock doctor makes a machine profile") from None
    return found


def load_machine(path: Path) -> Machine:
    """Read a profile; raises ConfigError."""
    try:
        text = read_text(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this machine profile: {error.strerror}") from error
    except MalformedError as error:
        raise ConfigError(f"{path}: this is no machine profile: {error}. penstock doctor makes one") from None
    return replace(parse_machine(text, str(path)), file=str(path))


_MAY_BE_ZERO = {"latency", "overhead", "interpreter", "dispatch", "free", "lockable", "node", "contention", "load"}
_MOST = dict.fromkeys(("load", "latency", "overhead", "interpreter", "dispatch", "contention"), 1e6) | {
    "weight": HEAVIEST
}
_MOST_OF_OTHERS = 1e21
"""No machine is near these limits, and what is within them neither overflows nor takes for ever to simulate."""


def _number(text: str) -> float:
    """A number with a point or an exponent, as one without where it is whole: sizes may be written as 64e9."""
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < 1 << 53 else number


def _in_range(value: Any, hint: Any, name: str, at: str) -> Any:
    """A value of a field called ``name``, with floats where its type says so; raises MalformedError."""
    if is_dataclass(value) and not isinstance(value, type):
        hints, prefix = hints_of(type(value)), f"{at}." if at else ""
        parts = {key: _in_range(getattr(value, key), kind, key, f"{prefix}{key}") for key, kind in hints.items()}
        return replace(value, **parts)
    if isinstance(value, tuple):
        return tuple(_in_range(item, hint, name, f"{at}[{i}]") for i, item in enumerate(value))
    if isinstance(value, Mapping):
        if name == "flops" and not value:
            raise MalformedError(f"{at} must have a number for each dtype, and has none")
        if name == "contention" and (wrong := [key for key in value if not _is_pair(key)]):
            raise MalformedError(f"{at}.{wrong[0]}: a pair of lanes is written 'cpu+read'")
        return {key: _in_range(item, float, name, f"{at}.{key}") for key, item in value.items()}
    if isinstance(value, str) or value is None:
        if name == "at" and not _has_zone(value):
            raise MalformedError(f"{at}={shown(value)} is not a time with its zone, as 2026-01-31T12:00:00+00:00 is")
        return value
    zero, most = name in _MAY_BE_ZERO, _MOST.get(name, _MOST_OF_OTHERS)
    if value < 0 or (value == 0 and not zero):
        raise MalformedError(f"{at}={value} must be {'at least' if zero else 'more than'} 0")
    if value > most or (value < 1 and not zero):
        raise MalformedError(f"{at}={value} must be from {0 if zero else 1} to {most:g}")
    return value if hint in (int, int | None) else float(value)


def _has_zone(text: str | None) -> bool:
    try:
        return datetime.fromisoformat(text or "").tzinfo is not None
    except ValueError:
        return False


def _is_pair(key: str) -> bool:
    first, plus, second = key.partition("+")
    return bool(plus) and {first, second} <= set(LANES) and first != second
