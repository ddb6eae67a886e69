"""The schedule IR: ops on lanes, buffers from pools. Plain data with a text form that parses back.

An op's *id* is a short word that says everything about it; no two ops of a schedule share one.

| id | lane | what it does |
|---|---|---|
| ``F3m0`` ``B3m0`` ``E9m0`` | compute | forward, recompute + backward of stage 3, epilogue (both), for micro-batch 0 |
| ``RW5.1@F3`` | read | weights of group 5, chunk 1, from disk to a host buffer, for visit ``F3`` |
| ``UW5.1@F3`` | h2d | the same chunk up to the device |
| ``DG5.1@B3`` | d2h | gradient chunk down to host memory, in bf16 if it takes a buffer for that on the device |
| ``AG5.1@B2`` | cpu | add it to the chunk that is already there |
| ``NG5.1`` ``ND5`` ``NORM`` | cpu, compute, cpu | partial sums of squares (host, device); the global norm |
| ``WG5.1`` ``RG5.1`` | write, read | gradient chunk to disk and back, while it waits for the norm |
| ``RS5.1`` ``OP5.1`` ``WS5.1`` | read, cpu, write | optimizer state chunk in, step, out |
| ``WW5.1`` ``UN5.1`` | write, h2d | the chunk's new weights to disk, or up to the device where they live |
| ``OD5`` | compute | optimizer step of a group whose state lives on the device |
| ``DC3m0`` ``WC3m0`` ``RC3m0`` ``UC3m0`` | d2h, write, read, h2d | checkpoint of stage 3 down, to disk, back, up |
| ``I3m0`` ``W3m0`` | compute | backward of stage 3 split: gradient of its input, gradient of its weights |
| ``GW5@F3`` ``GN5`` | net | all-gather of group 5's weights for a visit; of its new weights after a sharded step |
| ``AR5`` ``SG5@B3`` | net | all-reduce, reduce-scatter of group 5's gradient |
| ``AN`` | net | all-reduce of the norm |
| ``CM`` | write | commit of the step before, whose delayed steps are all on disk now |
| ``GC3m0`` | net | all-gather of a checkpoint of stage 3 that is kept in parts (ZeRO-R) |
| ``SA3m0`` ``RA3m0`` | send, recv | the activation that stage 3 puts out, to the peer, from the peer |
| ``SD3m0`` ``RD3m0`` | send, recv | the gradient with respect to it |

A collective has a ``group`` of ranks, each of which has an op of the same id; a ``send`` has the ``recv`` of the same
activation or gradient on its ``peer``. ``items`` is the number of micro-batches that one op computes at once.

A *visit* is one stay of a group's weights on the device: ``F3`` for all micro-batches of a stage (vertical),
``F3m0`` for one of them (horizontal).

A *buffer* is taken from a pool by one op and given back by a later one. ``reads`` and ``writes`` name the buffers
that an op touches, so that the checker can prove that no op races another.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal, get_args

from penstock.config import TIERS, Tier
from penstock.errors import ScheduleError

Lane = Literal["compute", "h2d", "d2h", "read", "write", "cpu", "net", "send", "recv"]
LANES: tuple[Lane, ...] = get_args(Lane)
LOCAL_LANES: tuple[Lane, ...] = LANES[:6]
"""Those that a rank needs no other rank for."""

_DIGITS = 15


def parse_number(text: str) -> int:
    """A whole number as a schedule has it: of at most 15 digits, and written in one way only; raises ScheduleError.

    Sums of such numbers, and their quotients by a rate, are far from what a float cannot hold.
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS and (text[0] != "0" or text == "0")):
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        raise ScheduleError(f"{shown!r} is not a number: write a whole one of at most {_DIGITS} digits, as 40")
    return int(text)


_SHOWN = 24

_COMPUTE = re.compile(r"([FBEIW])(\d+)m(\d+)")
_GROUP = re.compile(r"([A-Z]{2})(\d+)(?:\.(\d+))?(?:@([A-Za-z0-9_]+))?")
_CHECKPOINT = re.compile(r"(\w\w)(\d+)m(\d+)")
_ALONE = frozenset({"NORM", "AN", "CM"})
"""Words of ops that there is one of."""
_OF_STAGES = {"DC", "WC", "RC", "UC", "GC", "SA", "RA", "SD", "RD"}
_KIND_LANE: dict[str, Lane] = {
    **dict.fromkeys(("F", "B", "E", "I", "W", "ND", "OD"), "compute"),
    **dict.fromkeys(("RW", "RG", "RS", "RC"), "read"),
    **dict.fromkeys(("WG", "WS", "WW", "WC", "CM"), "write"),
    **dict.fromkeys(("UW", "UN", "UC"), "h2d"),
    **dict.fromkeys(("DG", "DC"), "d2h"),
    **dict.fromkeys(("AG", "NG", "OP", "NORM"), "cpu"),
    **dict.fromkeys(("GW", "GN", "AR", "SG", "GC", "AN"), "net"),
    **dict.fromkeys(("SA", "SD"), "send"),
    **dict.fromkeys(("RA", "RD"), "recv"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Word:
    """An op's id, taken apart. What a kind does not have is -1 or empty."""

    kind: str
    lane: Lane
    stage: int = -1
    group: int = -1
    chunk: int = -1
    micro_batch: int = -1
    visit: str = ""


@lru_cache(maxsize=1 << 17)  # schedules of one model have mostly the same ids
def parse_word(text: str) -> Word:
    """Take an op's id apart.

    Raises:
        ScheduleError: the text names no op.
    """
    if text in _ALONE:
        return Word(kind=text, lane=_KIND_LANE[text])
    pattern = _COMPUTE if text[1:2].isdigit() else _CHECKPOINT if text[:2] in _OF_STAGES else _GROUP
    match = pattern.fullmatch(text)
    if match is not None and pattern is not _GROUP:
        kind = match[1]
        return Word(kind=kind, lane=_KIND_LANE[kind], stage=parse_number(match[2]), micro_batch=parse_number(match[3]))
    if match is None or match[1] not in _KIND_LANE:
        raise ScheduleError(f"{text!r} is not an op: see penstock.schedule.op for the words")
    kind, chunk = match[1], -1 if match[3] is None else parse_number(match[3])
    return Word(kind=kind, lane=_KIND_LANE[kind], group=parse_number(match[2]), chunk=chunk, visit=match[4] or "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One unit of work. ``after``: ids of ops of the same rank that must be done; ``takes``: (buffer, pool);
    ``nbytes``: moved; ``items``: micro-batches computed at once; ``peer``: the other rank of a send or recv, else -1;
    ``group``: name of the process group of a collective, else empty.
    """

    id: str
    word: Word
    after: tuple[str, ...] = ()
    takes: tuple[tuple[str, str], ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    nbytes: int = 0
    items: int = 1
    peer: int = -1
    group: str = ""

    @property
    def lane(self) -> Lane:
        return self.word.lane

    def __str__(self) -> str:
        parts = [self.id]
        for label, values in (
            ("after", self.after),
            ("take", [f"{name}={pool}" for name, pool in self.takes]),
            ("read", self.reads),
            ("write", self.writes),
            ("give", self.gives),
        ):
            if values:
                parts += [label, ",".join(values)]
        for label, value, default in (
            ("bytes", self.nbytes, 0),
            ("items", self.items, 1),
            ("peer", self.peer, -1),
            ("group", self.group, ""),
        ):
            if value != default:
                parts += [label, str(value)]
        return " ".join(parts)


_FIELDS = {"after", "take", "read", "write", "give", "bytes", "items", "peer", "group"}


def parse_op(text: str) -> Op:
    """Parse one line of a schedule's text form; raises ScheduleError."""
    ident, *rest = text.split()
    if len(rest) % 2:
        raise ScheduleError(f"op {ident!r}: {rest[-1]!r} has no value")
    fields = dict(zip(rest[::2], rest[1::2], strict=True))
    if unknown := set(fields) - _FIELDS:
        raise ScheduleError(f"op {ident!r}: unknown field {sorted(unknown)[0]!r}")

    if len(fields) * 2 < len(rest):
        twice = next(label for label in fields if rest[::2].count(label) > 1)
        raise ScheduleError(f"op {ident!r}: field {twice!r} appears twice")

    def names(label: str) -> tuple[str, ...]:
        found = tuple(fields[label].split(",")) if label in fields else ()
        if "" in found:
            raise ScheduleError(f"op {ident!r}: empty name in {label} {fields[label]!r}")
        return found

    takes = []
    for item in names("take"):
        name, equals, pool = item.partition("=")
        if not (name and equals and pool):
            raise ScheduleError(f"op {ident!r}: take {item!r} must be written buffer=pool")
        takes.append((name, pool))

    def number(label: str, default: int) -> int:
        if label not in fields:
            return default
        try:
            return parse_number(fields[label])
        except ScheduleError as error:
            raise ScheduleError(f"op {ident!r}: {label} {error}") from None

    return Op(
        id=ident,
        word=parse_word(ident),
        after=names("after"),
        takes=tuple(takes),
        reads=names("read"),
        writes=names("write"),
        gives=names("give"),
        nbytes=number("bytes", 0),
        items=number("items", 1),
        peer=number("peer", -1),
        group=fields.get("group", ""),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """``count`` buffers of ``size`` bytes each on one tier.

    ``backed``: the pool owns its memory. Otherwise it only counts what torch's allocator holds (activations).
    """

    name: str
    tier: Tier
    size: int
    count: int
    backed: bool = True

    def __str__(self) -> str:
        return f"pool {self.name} {self.tier} {self.count} x {self.size}{'' if self.backed else ' counted'}"


_POOL = re.compile(r"pool (\S+) (\S+) (\d+) x (\d+)( counted)?")


def _parse_pool(text: str) -> Pool:
    match = _POOL.fullmatch(text)
    if match is None or match[2] not in TIERS:
        raise ScheduleError(f"{text!r}: a pool is written 'pool NAME TIER COUNT x BYTES [counted]'")
    tier = next(tier for tier in TIERS if tier == match[2])
    return Pool(
        name=match[1], tier=tier, count=parse_number(match[3]), size=parse_number(match[4]), backed=match[5] is None
    )


def peak_bytes(pools: Iterable[Pool], fixed: Iterable[tuple[Tier, str, int]], tier: Tier) -> int:
    """Bytes of a tier with all pools full, plus what is held all the time."""
    full = sum(pool.size * pool.count for pool in pools if pool.tier == tier)
    return full + sum(nbytes for where, _, nbytes in fixed if where == tier)


Carried = tuple[str, str, str]
"""(name at the start, name at the end, pool) of a buffer that a step hands on to the next one."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Schedule:
    """All ops of one step of one rank. The order of ``ops`` is each lane's order, and one in which they can run one by
    one; ``fixed`` is memory held all the time.
    """

    name: str
    micro_batches: int
    """of the step; each has a number below this"""
    chunk: int
    """Largest number of elements of a chunk; a group's chunks are given by ``chunks()`` of the builder. 0: groups are
    not cut, and group l is what stage l computes with (the schedules that do not offload)."""
    pools: tuple[Pool, ...]
    ops: tuple[Op, ...]
    fixed: tuple[tuple[Tier, str, int], ...] = field(default=())
    """(tier, what, bytes) that the whole step holds: resident weights and state, working memory."""
    carried: tuple[Carried, ...] = ()
    """Buffers that are held when the step starts, as the step before has left them, and when it ends."""
    speculative: bool = False
    """Whether steps of chunks that come from disk and go back there need not come after the norm: see
    ``Settings.speculate``."""

    @cached_property
    def by_id(self) -> dict[str, Op]:
        return {op.id: op for op in self.ops}

    @cached_property
    def lanes(self) -> dict[Lane, tuple[Op, ...]]:
        lanes: dict[Lane, list[Op]] = {lane: [] for lane in LOCAL_LANES}
        for op in self.ops:
            lanes.setdefault(op.lane, []).append(op)
        return {lane: tuple(ops) for lane, ops in lanes.items()}

    def bytes_per_lane(self) -> dict[Lane, int]:
        return {lane: sum(op.nbytes for op in ops) for lane, ops in self.lanes.items()}

    def peak_bytes(self, tier: Tier) -> int:
        """Upper bound of the bytes in use on a tier: all pools full, plus what is fixed."""
        return peak_bytes(self.pools, self.fixed, tier)

    def __repr__(self) -> str:
        """``str`` is the text form, which may be long."""
        return f"<Schedule {self.name}: {len(self.ops)} ops, {self.micro_batches} micro-batches>"

    def __str__(self) -> str:
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        header = f"schedule {self.name} micro-batches {self.micro_batches} chunk {self.chunk}"
        yield f"{header} speculative" if self.speculative else header
        for tier, what, nbytes in self.fixed:
            yield f"fixed {tier} {what} {nbytes}"
        yield from map(str, self.pools)
        for start, end, pool in self.carried:
            yield f"carry {start} {end} {pool}"
        yield from map(str, self.ops)


def reserved_bytes(schedule: Schedule) -> dict[Tier, int]:
    """What a schedule takes of each tier before its first op: what is fixed, and the pools that own their memory."""
    owned = [pool for pool in schedule.pools if pool.backed]
    return {tier: peak_bytes(owned, schedule.fixed, tier) for tier in TIERS}


_HEADER = re.compile(r"schedule (\S+) micro-batches (\d+) chunk (\d+)( speculative)?")
_FIXED = re.compile(r"fixed (\S+) (\S+) (\d+)")
_CARRY = re.compile(r"carry (\S+) (\S+) (\S+)")


def parse_schedule(text: str, *, first_line: int = 1) -> Schedule:
    """The inverse of ``str(schedule)``; blank lines and lines that start with ``#`` are skipped.

    ``first_line``: number of the text's first line in the file that it is from.

    Raises:
        ScheduleError: names the line.
    """
    header: re.Match[str] | None = None
    micro_batches = chunk = 0
    fixed: list[tuple[Tier, str, int]] = []
    pools: list[Pool] = []
    carried: list[Carried] = []
    ops: list[Op] = []
    for number, raw in enumerate(text.splitlines(), start=first_line):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        try:
            if header is None:
                header = _HEADER.fullmatch(line)
                if header is None:
                    raise ScheduleError(
                        "the first line must be 'schedule NAME micro-batches M chunk ELEMENTS [speculative]'"
                    )
                micro_batches, chunk = parse_number(header[2]), parse_number(header[3])
            elif line.startswith("fixed "):
                match = _FIXED.fullmatch(line)
                if match is None or match[1] not in TIERS:
                    raise ScheduleError(f"{line!r}: write 'fixed TIER WHAT BYTES'")
                fixed.append((next(tier for tier in TIERS if tier == match[1]), match[2], parse_number(match[3])))
            elif line.startswith("pool "):
                pools.append(_parse_pool(line))
            elif line.startswith("carry "):
                match = _CARRY.fullmatch(line)
                if match is None:
                    raise ScheduleError(f"{line!r}: write 'carry NAME-AT-START NAME-AT-END POOL'")
                carried.append((match[1], match[2], match[3]))
            else:
                ops.append(parse_op(line))
        except ScheduleError as error:
            raise ScheduleError(f"line {number}: {error}") from None
    if header is None:
        raise ScheduleError("the schedule is empty")
    return Schedule(
        name=header[1],
        micro_batches=micro_batches,
        chunk=chunk,
        pools=tuple(pools),
        ops=tuple(ops),
        fixed=tuple(fixed),
        carried=tuple(carried),
        speculative=header[4] is not None,
    )
