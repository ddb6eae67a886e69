"""Hosts that train together: how many of which machine, and the ranks of each."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.errors import ConfigError
from penstock.hardware.machine import Machine, Network
from penstock.hardware.profiles import machine_named

MOST_HOSTS = 4096
_PART = re.compile(r"(\d{1,6})x(\d{1,6})(?:x(.+))?")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """``count`` hosts that are alike: each is such a machine, in short of this ``name``."""

    name: str
    machine: Machine
    count: int


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Hosts in the order of their ranks, those of a kind beside each other, with ``each`` ranks on every one."""

    kinds: tuple[Kind, ...]
    each: int

    @property
    def count(self) -> int:
        return sum(kind.count for kind in self.kinds)

    @property
    def ranks(self) -> int:
        return self.count * self.each

    @property
    def alike(self) -> bool:
        return len(self.kinds) == 1

    def kind_of(self, rank: int) -> int:
        """The index of the kind of host that a rank is on."""
        host, index = rank // self.each, 0
        while host >= self.kinds[index].count:
            host -= self.kinds[index].count
            index += 1
        return index

    @property
    def words(self) -> str:
        """``2 x h100-80g and 1 x a100-40g``."""
        return " and ".join(f"{kind.count} x {kind.name}" for kind in self.kinds)


def hosts_named(text: str, own: Callable[[], Machine], nic: Network | None) -> Hosts:
    """The hosts that ``--hosts`` names: ``2x8xh100-80g``, two machines of 8 ranks each, or several kinds of them joined
    by ``+``. A kind is named as ``--machine`` is; without a name it is ``own``. ``nic``: a host's link to the others,
    if not what a profile says.

    Raises:
        ConfigError: it names none; or the ranks of hosts differ in number.
    """
    kinds: list[Kind] = []
    ranks: set[int] = set()
    for word in text.split("+"):
        match = _PART.fullmatch(word.strip())
        if match is None or not 1 <= int(match[1]) <= MOST_HOSTS or not int(match[2]):
            raise ConfigError(
                f"hosts={text!r}: {word!r} names no hosts. Write how many, the ranks of each and their machine, as "
                "2x8xh100-80g, and join several kinds with +"
            )
        machine = own() if match[3] is None else machine_named(match[3])
        if nic is not None:
            machine = replace(machine, nic=nic)
        name = machine.name if match[3] is None else Path(match[3]).stem
        kinds.append(Kind(name=name, machine=machine, count=int(match[1])))
        ranks.add(int(match[2]))
    if len(ranks) > 1:
        raise ConfigError(f"hosts={text!r}: a run has as many ranks on each of its hosts: give all of them the same")
    return Hosts(kinds=tuple(kinds), each=ranks.pop())
