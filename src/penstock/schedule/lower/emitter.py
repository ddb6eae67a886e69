"""Writes down one rank's ops in an order in which they can run one by one, and what each pool holds meanwhile.

Where one lane alone takes from a pool, in its order, as many buffers as are held at once in this order are enough. So
no timing can make a rank wait for itself: whichever op comes first of those that are not done, all that it waits for
comes before it, and nobody later can have taken its buffer.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from penstock.config import Tier
from penstock.schedule.ir.lanes import Lane
from penstock.schedule.ir.ops import Carried, Op, Pool, Schedule, Take
from penstock.schedule.ir.references import Buffer, OpId
from penstock.schedule.mesh import ProcessGroup


@dataclass(kw_only=True, slots=True)
class Touched:
    """The buffers of one op, while they are put together."""

    takes: list[Take] = field(default_factory=list)
    reads: list[Buffer] = field(default_factory=list)
    writes: list[Buffer] = field(default_factory=list)
    gives: list[Buffer] = field(default_factory=list)

    def make(self, name: Buffer, pool: str) -> None:
        """The op takes a buffer and fills it."""
        self.takes.append((name, pool))
        self.writes.append(name)

    def use_up(self, name: Buffer) -> None:
        self.reads.append(name)
        self.gives.append(name)


class Emitter:
    """Writes down a rank's ops. ``pools``: what buffers are taken from. They have the counts that were worked out
    before (``provision``), and all are used; or with a ``lookahead`` those that follow from the ops: as many as are
    held at once, and ``lookahead`` more where a lane takes and another gives back, so that the first may run ahead of
    the second. Gathered weights are ahead in the order itself. Buffers of size 0 are followed, but not written down.

    Invariant: a buffer is taken once and given once. ``held``: buffers of each pool that are taken where all ops so far
    have run.
    """

    def __init__(self, pools: Iterable[Pool], *, lookahead: int | None = None) -> None:
        self.ops: list[Op] = []
        self.carried: list[Carried] = []
        self.pools = {pool.name: pool for pool in pools}
        self.held = dict.fromkeys(self.pools, 0)
        self._lookahead = lookahead
        self._size_of = {pool.name: pool.size for pool in self.pools.values()}
        self._taken: dict[Buffer, tuple[str, Lane | None]] = {}
        self._most = dict.fromkeys(self.pools, 0)
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
        sizes, held, lane = self._size_of, self._taken, ident.lane
        taken = tuple([take for take in takes if self._take(*take, lane)]) if takes else ()
        read = tuple([name for name in reads if sizes[held[name][0]]]) if reads else ()
        written = tuple([name for name in writes if sizes[held[name][0]]]) if writes else ()
        given = tuple([name for name in gives if self._give(name, lane)]) if gives else ()
        self.ops.append(
            Op(
                id=ident,
                after=tuple(dict.fromkeys(after)) if after else (),
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

    def collective(
        self, ident: OpId, group: ProcessGroup, amount: int, op: Touched, *, after: Iterable[OpId] = (), items: int = 1
    ) -> OpId:
        """Write down a gather, or a reduction and a scatter, of an ``amount`` in all; an all-reduce is both, so that
        twice as much crosses. Returns the op's id."""
        return self.emit(
            ident,
            after=after,
            takes=op.takes,
            reads=op.reads,
            writes=op.writes,
            gives=op.gives,
            nbytes=group.sent(amount) * (2 if ident.kind in ("AR", "HR") else 1),
            items=items,
            group=group.name,
        )

    def carry(self, start: Buffer, end: Buffer, pool: str) -> None:
        """A buffer that the step before leaves as ``start``, and this one leaves as ``end``."""
        self.carried.append((start, end, pool))
        self._take(start, pool, None)

    def has_room(self, pool: str) -> bool:
        """True if a buffer is left where all ops so far have run, in the order of emission."""
        return self._lookahead is not None or self.held[pool] < self.pools[pool].count

    def _take(self, name: Buffer, pool: str, lane: Lane | None) -> bool:
        assert name not in self._taken, name
        self._taken[name] = pool, lane
        now = self.held[pool] = self.held[pool] + 1
        if now > self._most[pool]:
            self._most[pool] = now
        return self._size_of[pool] > 0

    def _give(self, name: Buffer, lane: Lane) -> bool:
        pool, taker = self._taken.pop(name)
        self.held[pool] -= 1
        if taker != lane:
            self._crossed.add(pool)
        return self._size_of[pool] > 0

    def schedule(
        self,
        name: str,
        *,
        micro_batches: int,
        chunk: int = 0,
        fixed: Iterable[tuple[Tier, str, int]] = (),
        speculative: bool = False,
    ) -> Schedule:
        """All that was written down. What is handed on to the next step is held at the end, and nothing else."""
        kept = self._taken.keys() ^ {end for _, end, _ in self.carried}
        assert not kept, f"never given back, or not there to hand on: {sorted(kept)}"
        unused = [name for name, most in self._most.items() if not most]
        assert self._lookahead is not None or not unused, f"nothing is taken from {unused}"
        return Schedule(
            name=name,
            micro_batches=micro_batches,
            chunk=chunk,
            pools=tuple(self.pools.values() if self._lookahead is None else self._counted(self._lookahead)),
            ops=tuple(self.ops),
            fixed=tuple(item for item in fixed if item[2]),
            carried=tuple(self.carried),
            speculative=speculative,
        )

    def _counted(self, lookahead: int) -> Iterable[Pool]:
        more = dict.fromkeys(self._crossed - {"weights"}, lookahead)
        for name, most in self._most.items():
            if most and self._size_of[name]:
                yield replace(self.pools[name], count=most + more.get(name, 0))
