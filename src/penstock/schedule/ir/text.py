"""The reader of the text form: references, ops, schedules and worlds, the inverse of their ``str``."""

import re
from functools import lru_cache

from penstock.config import TIERS, Tier
from penstock.errors import ScheduleError
from penstock.schedule.ir.ops import Carried, Op, Pool, Schedule
from penstock.schedule.ir.references import (
    ALONE,
    HOLDS,
    LANE_OF,
    OF_STAGES,
    Buffer,
    OpId,
    group_buffer,
    group_op,
    single_op,
    stage_buffer,
    stage_op,
    visit,
)
from penstock.schedule.ir.worlds import World, format_ranks

# ---- references

_DIGITS = 15
_SHOWN = 24
_VISIT = r"(?:@(?:([FBEIW])([0-9]+)(?:m([0-9]+))?|sum([0-9]+)))?"
_STAGE_OP = re.compile(r"([FBEIW]|[A-Z]{2})(\d+)m(\d+)")
_GROUP_OP = re.compile(rf"([A-Z]{{2}})(\d+)(?:\.(\d+))?{_VISIT}")
_STAGE_BUFFER = re.compile(r"([AaDNKCc])(\d+)m(\d+)(?:\.(\d+))?|(DX|X)m(\d+)")
_GROUP_BUFFER = re.compile(rf"([A-Za-z])(\d+)(?:\.(\d+))?(?:u(\d+))?{_VISIT}")


def parse_number(text: str) -> int:
    """A whole number as a schedule has it: of at most 15 digits, and written in one way only; raises ScheduleError.

    Sums of such numbers, and their quotients by a rate, are far from what a float cannot hold.
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS and (text[0] != "0" or text == "0")):
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        raise ScheduleError(f"{shown!r} is not a number: write a whole one of at most {_DIGITS} digits, as 40")
    return int(text)


def _number(text: str | None, default: int = -1) -> int:
    return default if text is None else parse_number(text)


@lru_cache(maxsize=1 << 17)
def op_id(text: str) -> OpId:
    """The id of an op that a text names.

    Raises:
        ScheduleError: the text names no op.
    """
    if text in ALONE:
        return single_op(text)
    if (match := _STAGE_OP.fullmatch(text)) and match[1] in OF_STAGES:
        return stage_op(match[1], parse_number(match[2]), parse_number(match[3]))
    match = _GROUP_OP.fullmatch(text)
    if match is None or match[1] not in LANE_OF or match[1] in OF_STAGES or match[1] in ALONE:
        raise ScheduleError(f"{text!r} is not an op: see penstock.schedule.ir.ops for the ids")
    stay = visit(match[4], parse_number(match[5]), _number(match[6])) if match[4] else None
    made = group_op(match[1], parse_number(match[2]), _number(match[3]), visit=stay, use=_number(match[7], 0))
    if made != text:
        raise ScheduleError(f"{text!r} is not an op: it is written {made}")
    return made


@lru_cache(maxsize=1 << 17)
def buffer(text: str) -> Buffer:
    """The buffer that a text names: any name will do, but only those in the tables of ``Buffer`` say what it holds."""
    try:
        return _known_buffer(text) or Buffer(text, "unknown")
    except ScheduleError:  # a number in it is not written as one is
        return Buffer(text, "unknown")


def _known_buffer(text: str) -> Buffer | None:
    found: Buffer | None = None
    if match := _STAGE_BUFFER.fullmatch(text):
        if match[5]:
            found = stage_buffer("A" if match[5] == "X" else "D", -1, parse_number(match[6]))
        else:
            part = _number(match[4], 0)
            found = stage_buffer(match[1], parse_number(match[2]), parse_number(match[3]), part=part)
    elif (match := _GROUP_BUFFER.fullmatch(text)) and match[1] in HOLDS and not match[8]:
        stay = visit(match[5], parse_number(match[6]), _number(match[7])) if match[5] else None
        found = group_buffer(match[1], parse_number(match[2]), _number(match[3]), visit=stay, use=_number(match[4]))
    return found if found == text else None


# ---- ops and schedules


_NAMES = ("after", "take", "read", "write", "give")
_NUMBERS = {"bytes": 0, "items": 1, "peer": -1}
"""Fields of an op that are numbers, with what they are where they are left out."""
_FIELDS = {*_NAMES, *_NUMBERS, "group", "elements"}


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
    names = {label: fields[label].split(",") if label in fields else [] for label in _NAMES}
    for label, found in names.items():
        if "" in found:
            raise ScheduleError(f"op {ident!r}: empty name in {label} {fields[label]!r}")
    takes = [item.partition("=") for item in names["take"]]
    for name, equals, pool in takes:
        if not (name and equals and pool):
            raise ScheduleError(f"op {ident!r}: take {name + equals + pool!r} must be written buffer=pool")
    numbers = dict(_NUMBERS)
    for label in filter(fields.__contains__, _NUMBERS):
        try:
            numbers[label] = parse_number(fields[label])
        except ScheduleError as error:
            raise ScheduleError(f"op {ident!r}: {label} {error}") from None
    return Op(
        id=op_id(ident),
        after=tuple(map(op_id, names["after"])),
        takes=tuple((buffer(name), pool) for name, _, pool in takes),
        reads=tuple(map(buffer, names["read"])),
        writes=tuple(map(buffer, names["write"])),
        gives=tuple(map(buffer, names["give"])),
        nbytes=numbers["bytes"],
        items=numbers["items"],
        peer=numbers["peer"],
        group=fields.get("group", ""),
        elements=_elements(ident, fields["elements"]) if "elements" in fields else None,
    )


def _elements(ident: str, text: str) -> tuple[int, int]:
    first, dash, end = text.partition("-")
    if not dash:
        raise ScheduleError(f"op {ident!r}: elements {text!r} must be written FIRST-END, as 0-8192")
    return parse_number(first), parse_number(end)


_TIER_OF: dict[str, Tier] = {tier: tier for tier in TIERS}
_TIER = "|".join(TIERS)
_HEADER = re.compile(r"schedule (\S+) micro-batches (\d+) chunk (\d+)( speculative)?")
_POOL = re.compile(rf"pool (\S+) ({_TIER}) (\d+) x (\d+)( counted)?")
_FIXED = re.compile(rf"fixed ({_TIER}) (\S+) (\d+)")
_CARRY = re.compile(r"carry (\S+) (\S+) (\S+)")


def _matched(form: re.Pattern[str], line: str, wanted: str) -> re.Match[str]:
    match = form.fullmatch(line)
    if match is None:
        raise ScheduleError(wanted)
    return match


def parse_schedule(text: str, *, first_line: int = 1) -> Schedule:
    """The inverse of ``str(schedule)``; blank lines and lines that start with ``#`` are skipped.

    ``first_line``: number of the text's first line in the file that it is from.

    Raises:
        ScheduleError: names the line.
    """
    header: re.Match[str] | None = None
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
                wanted = "the first line must be 'schedule NAME micro-batches M chunk ELEMENTS [speculative]'"
                header = _matched(_HEADER, line, wanted)
                micro_batches, chunk = parse_number(header[2]), parse_number(header[3])
            elif line.startswith("fixed "):
                match = _matched(_FIXED, line, f"{line!r}: write 'fixed TIER WHAT BYTES'")
                fixed.append((_TIER_OF[match[1]], match[2], parse_number(match[3])))
            elif line.startswith("pool "):
                wanted = f"{line!r}: a pool is written 'pool NAME TIER COUNT x BYTES [counted]'"
                name, tier, count, size, counted = _matched(_POOL, line, wanted).groups()
                room = {"count": parse_number(count), "size": parse_number(size)}
                pools.append(Pool(name=name, tier=_TIER_OF[tier], **room, backed=counted is None))
            elif line.startswith("carry "):
                match = _matched(_CARRY, line, f"{line!r}: write 'carry NAME-AT-START NAME-AT-END POOL'")
                carried.append((buffer(match[1]), buffer(match[2]), match[3]))
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


# ---- worlds


def parse_ranks(text: str) -> tuple[int, ...]:
    """The inverse of ``format_ranks``; raises ScheduleError."""
    ranks: list[int] = []
    wanted = f"{text!r} is not a list of ranks: write 0-3,8"
    for run in text.split(","):
        match = _matched(_RUN, run, wanted)
        first, last = parse_number(match[1]), parse_number(match[2] or match[1])
        if last >= MOST_RANKS:
            raise ScheduleError(f"{text!r}: ranks go up to {MOST_RANKS - 1:,}")
        ranks += range(first, last + 1)
        if len(ranks) > MOST_RANKS:
            break  # one of them is there twice
    if not ranks or len(set(ranks)) != len(ranks):
        raise ScheduleError(f"{text!r} names no rank, or one of them twice")
    return tuple(ranks)


MOST_RANKS = 100_000
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
    try:
        header = _matched(_WORLD, lines[said[0]].strip(), "the first line must be 'world NAME ranks P'")
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
