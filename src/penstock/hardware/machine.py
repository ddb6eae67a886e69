"""A machine profile: what each link and each unit of a machine can do. Measured by ``penstock doctor``, or shipped.

All rates are bytes, FLOP or parameters per second; sizes are bytes. ``*_both`` is a rate while the opposite direction
is busy too, so that a duplex link has the same two rates and a shared one has about half.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from datetime import datetime
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from penstock.config import Tier
from penstock.documents.text import MalformedError, read_text
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

    The first four are the link's: of a gradient and of weights, by the dtype that crosses. The others are of an AdamW
    step on the host beside bf16 weights, by what it reads and writes. A plan that casts gradients on the device takes
    ``grad_bf16`` and ``step_grad_bf16``; one that lets the optimizer round them, ``grad_fp32`` and
    ``step_grad_rounded``. Weights that the optimizer casts: ``step``, then ``weights_bf16``; that the device casts:
    ``step_no_copy``, then ``weights_fp32``.
    """

    grad_bf16: float
    """cast on the device, then 2 bytes over d2h; one after the other"""
    grad_fp32: float
    """4 bytes over d2h"""
    weights_bf16: float
    """2 bytes over h2d"""
    weights_fp32: float
    """4 bytes over h2d, then cast on the device"""
    step: float
    """reads an fp32 gradient as it is, writes the bf16 copy"""
    step_grad_bf16: float
    """reads a bf16 gradient, writes the bf16 copy"""
    step_grad_rounded: float
    """reads an fp32 gradient and rounds it to bf16, writes the bf16 copy"""
    step_no_copy: float
    """reads an fp32 gradient as it is, writes no copy beside the master"""

    def at(self, *, down: float, up: float, steps: float) -> "Crossing":
        """At multiples of its rates: of gradients on their way down, of weights on theirs up, and of steps."""
        paces = {"grad": down, "weights": up, "step": steps}
        return at_pace(self, **{name: paces[name.partition("_")[0]] for name in vars(self)})


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


def parse_machine(text: str, where: str) -> Machine:
    """The inverse of ``Machine.to_json``. ``where``: what the text is from, for messages.

    Raises:
        ConfigError: names the key that is missing, unknown, twice there, of a wrong type, or out of range.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if twice := [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]:
            raise ConfigError(f"{where}: key {twice[0]} is there twice in one object: keep one")
        return dict(pairs)

    try:
        data = json.loads(text, object_pairs_hook=once)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # no JSON, a number of thousands of digits, thousands of brackets
        raise ConfigError(f"{where}: this is not JSON ({error}). penstock doctor makes a machine profile") from None
    machine: Machine = _build(Machine, data, where, "")
    return machine


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


def _build(kind: type, data: Any, where: str, at: str) -> Any:
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: {at or 'the profile'} must be an object with keys, not {_shown(data)}")
    known = {name: hint for name, hint in get_type_hints(kind).items() if name not in _NOT_KEPT}
    prefix = f"{at}." if at else ""
    if unknown := sorted(data.keys() - known.keys()):
        raise ConfigError(f"{where}: unknown key {prefix}{unknown[0]}. Known: {', '.join(known)}")
    values = {name: _value(known[name], name, data[name], where, f"{prefix}{name}") for name in known if name in data}
    try:
        return kind(**values)
    except TypeError:
        needed = [n for n in known if n not in data]
        raise ConfigError(f"{where}: key {prefix}{needed[0]} is missing") from None


def _value(hint: Any, name: str, value: Any, where: str, at: str) -> Any:
    """A value of a field called ``name`` with this type."""
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if value is None and NoneType in kinds:
        return None
    kind, within = kinds[0], get_args(kinds[0])
    if is_dataclass(kind):
        return _build(cast(type, kind), value, where, at)
    if get_origin(kind) is tuple:
        items = _list(value, where, at)
        if within[0] is str:
            return tuple(map(str, items))
        return tuple(_build(within[0], item, where, f"{at}[{i}]") for i, item in enumerate(items))
    if get_origin(kind) is Mapping:
        if not isinstance(value, dict) or (name == "flops" and not value):
            raise ConfigError(f"{where}: {at} must be an object of numbers, not {_shown(value)}")
        if name == "contention" and (wrong := [key for key in value if not _is_pair(key)]):
            raise ConfigError(f"{where}: {at}.{wrong[0]}: a pair of lanes is written 'cpu+read'")
        return {key: _number(v, where, f"{at}.{key}", name) for key, v in value.items()}
    if get_origin(kind) is Literal:
        if value not in within:
            raise ConfigError(f"{where}: {at}={_shown(value)} is not {' or '.join(within)}")
        return value
    if name == "at":
        return _time(value, where, at)
    if kind is not str:
        return _number(value, where, at, name, whole=kind is int)
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {at}={_shown(value)} is not a text")
    return value


def _time(value: Any, where: str, at: str) -> str:
    try:
        if datetime.fromisoformat(value).tzinfo is not None:
            return str(value)
    except (TypeError, ValueError):
        pass
    raise ConfigError(f"{where}: {at}={_shown(value)} is not a time with its zone, as 2026-01-31T12:00:00+00:00 is")


def _is_pair(key: str) -> bool:
    first, plus, second = key.partition("+")
    return bool(plus) and {first, second} <= set(LANES) and first != second


def _list(value: Any, where: str, at: str) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"{where}: {at} must be a list, not {_shown(value)}")
    return value


def _number(value: Any, where: str, at: str, name: str, *, whole: bool = False) -> float:
    """A number in the range of a key called ``name``."""
    shown, most = _shown(value), _MOST.get(name, _MOST_OF_OTHERS)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or abs(value) == math.inf:
        raise ConfigError(f"{where}: {at}={shown} is not a number")
    zero = name in _MAY_BE_ZERO
    if value < 0 or (value == 0 and not zero):
        raise ConfigError(f"{where}: {at}={shown} must be {'at least' if zero else 'more than'} 0: measure it anew")
    if value > most or (value < 1 and not zero):
        raise ConfigError(f"{where}: {at}={shown} must be from {0 if zero else 1} to {most:g}: measure it anew")
    if whole and value != int(value):
        raise ConfigError(f"{where}: {at}={shown} must be a whole number")
    return int(value) if whole else float(value)


def _shown(value: Any) -> str:
    """A value as Python writes it, or the beginning of that."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


_SHOWN = 60
