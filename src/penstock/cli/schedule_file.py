"""A schedule that a user has written: read, checked, and what is wrong with it named by file and line."""

from pathlib import Path

from penstock.documents.text import MalformedError, read_text
from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.check.worlds import faults
from penstock.schedule.ir.text import parse_ranks, parse_world
from penstock.schedule.ir.worlds import World

MOST_OPS = 4_000_000
"""About as many as fit in 4 GB with all that is known of them. Ranks that share one text have ops of their own."""
_MOST_BYTES = 256 * MOST_OPS
_MOST_NAMED = 10
"""The most violations that one message names."""


def read_world(path: Path) -> World:
    """The schedules of all ranks in a file, or that of one; checked.

    Raises:
        ConfigError: the file cannot be read, is no schedule, or breaks rules: names lines and ops.
    """
    try:
        text = read_text(path, _MOST_BYTES).removeprefix("\ufeff")
    except (OSError, MalformedError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot read the schedule in {path}: {reason}") from None
    try:
        world = parse_world(text)
    except ScheduleError as error:
        raise ConfigError(f"{path}: {error}") from None
    if (ops := sum(len(rank.ops) for rank in world.ranks)) > MOST_OPS:
        raise ConfigError(f"{path}: its {len(world.ranks):,} ranks have {ops:,} ops, and {MOST_OPS:,} fit in memory")
    if found := list(faults(world)):
        named = [(line_of(text, fault.rank, fault.op), fault) for fault in found[:_MOST_NAMED]]
        lines = [f"{path}: {'' if line is None else f'line {line}: '}{fault}" for line, fault in named]
        if len(found) > _MOST_NAMED:
            lines.append(f"... and {len(found) - _MOST_NAMED} more")
        raise ConfigError("\n".join(lines))
    return world


def line_of(text: str, rank: int, op: str) -> int | None:
    """The number of the line that begins with an op, or with ``op``'s words, in a text that parses: the last one, if
    the rank has it twice. None if not there.
    """
    here, found, wanted = True, None, op.split()
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split(maxsplit=max(2, len(wanted)))
        if words[:1] == ["rank"]:
            here = rank in parse_ranks(words[1])
        elif here and wanted and words[: len(wanted)] == wanted:
            found = number
    return found
