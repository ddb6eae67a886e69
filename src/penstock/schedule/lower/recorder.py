"""Writes down one rank's ops in an order in which they can run one by one, and sizes the pools that follow from it.

One lane alone takes from a pool, in its order, and the order of the ops as a whole is possible with as many buffers as
it holds at once. So no timing can make a rank wait for itself: whichever op comes first of those that are not done, all
that it waits for comes before it, and nobody later can have taken its buffer.
"""

from collections.abc import Iterable, Mapping

from penstock.config import Tier
from penstock.schedule.ir.lanes import Lane
from penstock.schedule.ir.ops import Op, Pool, Schedule, Take
from penstock.schedule.ir.references import Buffer, OpId


class Recorder:
    """``amounts``: size of a buffer of each pool. Buffers of size 0 are followed, but not written down."""

    def __init__(self, amounts: Mapping[str, int]) -> None:
        self.ops: list[Op] = []
        self._amounts = amounts
        self._held: dict[Buffer, str] = {}
        self._taker: dict[str, Lane] = {}
        self._now = dict.fromkeys(amounts, 0)
        self._most = dict.fromkeys(amounts, 0)
        self._given_elsewhere: set[str] = set()

    def emit(
        self,
        ident: OpId,
        *,
        after: tuple[OpId, ...] = (),
        takes: Iterable[Take] = (),
        reads: Iterable[Buffer] = (),
        writes: Iterable[Buffer] = (),
        gives: Iterable[Buffer] = (),
        nbytes: int = 0,
        items: int = 1,
        peer: int = -1,
        group: str = "",
    ) -> OpId:
        """Write an op down; returns its id."""
        taken = tuple([take for take in takes if self._take(take, ident.lane)])
        read = tuple([name for name in reads if self._amounts[self._held[name]]])
        written = tuple([name for name in writes if self._amounts[self._held[name]]])
        given = tuple([name for name in gives if self._give(name, ident.lane)])
        self.ops.append(
            Op(
                id=ident,
                after=after,
                takes=taken,
                reads=read,
                writes=written,
                gives=given,
                nbytes=nbytes,
                items=items,
                peer=peer,
                group=group,
            )
        )
        return ident

    def _take(self, take: Take, lane: Lane) -> bool:
        name, pool = take
        assert name not in self._held, name
        assert self._taker.setdefault(pool, lane) == lane, f"{pool} is taken from by {self._taker[pool]} and {lane}"
        self._held[name] = pool
        now = self._now[pool] = self._now[pool] + 1
        if now > self._most[pool]:
            self._most[pool] = now
        return self._amounts[pool] > 0

    def _give(self, name: Buffer, lane: Lane) -> bool:
        pool = self._held.pop(name)
        self._now[pool] -= 1
        if self._taker[pool] != lane:
            self._given_elsewhere.add(pool)
        return self._amounts[pool] > 0

    def holds(self, name: Buffer) -> bool:
        return name in self._held

    def finish(
        self, name: str, micro_batches: int, *, fixed: Iterable[tuple[Tier, str, int]], lookahead: int
    ) -> Schedule:
        """The rank's schedule. ``lookahead`` more buffers go to each pool that a lane takes from and another gives
        back to: they let the first lane run ahead of the second. Gathered weights are ahead in the order itself.
        """
        assert not self._held, f"never given back: {sorted(self._held)}"
        pools = [
            Pool(
                name=pool,
                tier="device",
                size=amount,
                count=self._most[pool] + (lookahead if pool in self._given_elsewhere and pool != "weights" else 0),
                backed=False,
            )
            for pool, amount in self._amounts.items()
            if amount and self._most[pool]
        ]
        return Schedule(
            name=name,
            micro_batches=micro_batches,
            chunk=0,
            pools=tuple(pools),
            ops=tuple(self.ops),
            fixed=tuple(item for item in fixed if item[2]),
        )
