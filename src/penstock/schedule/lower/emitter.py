"""Writes down one rank's ops in an order in which they can run one by one, and what each pool holds meanwhile.

Where one lane alone takes from a pool, in its order, as many buffers as are held at once in this order are enough. So
no timing can make a rank wait for itself: whichever op comes first of those that are not done, all that it waits for
comes before it, and nobody later can have taken its buffer.
"""

from collections.abc import Iterable, Mapping

from penstock.schedule.ir.lanes import Lane
from penstock.schedule.ir.ops import Carried, Op, Pool, Take
from penstock.schedule.ir.references import Buffer, OpId


class Emitter:
    """``sizes``: of a buffer of each pool. Buffers of size 0 are followed, but not written down.

    Invariant: a buffer is taken once and given once. ``held``: buffers of each pool that are taken where all ops so far
    have run.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.ops: list[Op] = []
        self.carried: list[Carried] = []
        self.held = dict.fromkeys(sizes, 0)
        self._sizes = sizes
        self._taken: dict[Buffer, tuple[str, Lane | None]] = {}
        self._most = dict.fromkeys(sizes, 0)
        self._crossed: set[str] = set()
        """pools that another lane gives back to than takes from them"""

    def emit(
        self,
        ident: OpId,
        *,
        after: Iterable[OpId] = (),
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
        sizes, held = self._sizes, self._taken
        taken = tuple([take for take in takes if self._take(*take, ident.lane)])
        read = tuple([name for name in reads if sizes[held[name][0]]])
        written = tuple([name for name in writes if sizes[held[name][0]]])
        given = tuple([name for name in gives if self._give(name, ident.lane)])
        self.ops.append(
            Op(
                id=ident,
                after=tuple(dict.fromkeys(after)),
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

    def carry(self, start: Buffer, end: Buffer, pool: str) -> None:
        """A buffer that the step before leaves as ``start``, and this one leaves as ``end``."""
        self.carried.append((start, end, pool))
        self._take(start, pool, None)

    def _take(self, name: Buffer, pool: str, lane: Lane | None) -> bool:
        assert name not in self._taken, name
        self._taken[name] = pool, lane
        now = self.held[pool] = self.held[pool] + 1
        if now > self._most[pool]:
            self._most[pool] = now
        return self._sizes[pool] > 0

    def _give(self, name: Buffer, lane: Lane) -> bool:
        pool, taker = self._taken.pop(name)
        self.held[pool] -= 1
        if taker != lane:
            self._crossed.add(pool)
        return self._sizes[pool] > 0

    @property
    def used(self) -> list[str]:
        """The pools that something is taken from."""
        return [pool for pool, most in self._most.items() if most]

    def pools(self, lookahead: int) -> tuple[Pool, ...]:
        """The pools that follow from the ops, on the device. ``lookahead`` more buffers go to each that a lane takes
        from and another gives back to: they let the first lane run ahead of the second. Gathered weights are ahead in
        the order itself.
        """
        assert not self._taken, f"never given back: {sorted(self._taken)}"
        more = dict.fromkeys(self._crossed - {"weights"}, lookahead)
        sizes, most = self._sizes, self._most
        return tuple(
            Pool(name=pool, tier="device", size=sizes[pool], count=most[pool] + more.get(pool, 0), backed=False)
            for pool in self.used
            if sizes[pool]
        )
