"""Work that the first rank has done on other hosts: their drives are within reach of their own ranks alone.

The folder of a run is one, on a file system that all hosts share. The stores of a host's ranks are on its own drives:
the first rank of each host looks at them, and removes them, when the first of all asks for it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import TypeVar, cast

from penstock.errors import ConfigError, StoreError
from penstock.ranks.group import ALONE, Ranks
from penstock.store.facts import StoreFacts, facts_of, facts_of_all
from penstock.store.owner import Owner, owner_in

T = TypeVar("T")
Stores = Sequence[Sequence[Path]]
Work = Sequence[Callable[[], object]]


class Reach:
    """The hosts of ``ranks``. The first rank asks, within ``leads``, where all others ``follow`` it."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self._ranks = ranks
        self.hosts = ranks.hosts

    def of_host(self, stores: Stores, host: int | None = None) -> Stores:
        """Of all ranks' stores those of the ranks on a host; None: on this one."""
        each = len(stores) // self.hosts
        first = (self._ranks.host if host is None else host) * each
        return stores[first : first + each]

    @contextmanager
    def leads(self) -> Iterator[None]:
        """Within, the first rank may ask, and the others follow."""
        try:
            yield
        finally:
            if self.hosts > 1 and self._ranks.failure is None:
                self._ranks.gather_objects(_ASKED, None)

    def follow(self) -> None:
        """Do what the first rank asks for, if this is the first of its host, until it has asked for all."""
        if self.hosts == 1:
            return
        nothing: Work | None = None
        while (asked := self._ranks.gather_objects(_ASKED, nothing)[0]) is not None:
            self._answer(asked)

    def on_each(self, work: Callable[..., T], *given: object) -> list[T]:
        """The results of ``work(*given)`` on each host, by its first rank. All of it has to pickle.

        Raises:
            ConfigError, StoreError: what it raises on a host.
        """
        return self._asked([partial(work, *given)] * self.hosts)

    def _asked(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """``on_each``, with the work of each host."""
        if self.hosts == 1:
            return [works[0]()]
        self._ranks.gather_objects(_ASKED, works)
        answers = self._answer(works)[:: self._ranks.size // self.hosts]
        for answer in answers:
            if isinstance(answer, _Failed):
                raise answer.kind(answer.said)
        return cast(list[T], answers)

    def _answer(self, works: Work) -> list[object]:
        """All ranks' answers to what was asked of each host."""
        mine: object = None
        if self._ranks.is_first_on_host:
            try:
                mine = works[self._ranks.host]()
            except (ConfigError, StoreError) as error:
                mine = _Failed(type(error), str(error))
        return self._ranks.gather_objects("answer of each host", mine)

    def facts(self, stores: Stores) -> StoreFacts | None:
        """As ``facts_of_all``, of stores that are each on their own rank's host."""
        if self.hosts == 1 or len(stores) % self.hosts:  # those of another number of ranks are looked for here
            return facts_of_all(stores)
        works = [partial(_look, self.of_host(stores, host)) for host in range(self.hosts)]
        return facts_of_all(stores, look=lambda: [one for found in self._asked(works) for one in found])

    def require_one_folder(self, folder: Path, owner: Owner) -> None:
        """Raises ConfigError: on a host the run's folder is another one."""
        self.on_each(_require_run, folder, owner)


_ASKED = "work on each host"


class _Failed:
    """An error, as one rank tells another."""

    def __init__(self, kind: type[ConfigError | StoreError], said: str) -> None:
        self.kind, self.said = kind, said


def _look(stores: Stores) -> list[StoreFacts | None]:
    return [facts_of(paths) for paths in stores]


def _require_run(folder: Path, owner: Owner) -> None:
    for _ in range(_LOOKS):
        found = owner_in(folder)
        if found is not None and found.id == owner.id:
            return
        time.sleep(_APART)  # what another host has just written a network's file system may show late
    raise ConfigError(
        f"run={str(folder)!r} is another folder on host {gethostname()} than on the first: the folder of a run has to "
        "be on a file system that all hosts share (budget.disk names drives of each host's own)"
    )


_LOOKS, _APART = 5, 0.5
"""Number of looks for a run's folder, and the seconds between two of them."""
