"""The memory that a step needs, read off its route and settings before any op exists.

This is the one place that sizes a pool, with ``activation_provision`` for its part: builders take buffers only from
here, and a planner weighs its options with it without building a schedule for each.

What a delay ratio costs in memory. A delayed gradient is held on the host from the backward that makes it until the
next step's forward comes to its group, 4 bytes per parameter. When the optimizer waits for the norm, all gradients are
on the host at the end of the backward anyway: a delay costs nothing more. When it does not wait, the delayed share of
them is what the peak of that pool is. Saved activations on the host are the mirror image: the forward fills them block
by block while it uses the delayed gradients up, and the backward the other way round. Where it takes less, both live in
one pool, whose size is the most that ever is in use of the two together: that of the larger one and at most one
visit's more, and what rounding up to whole buffers costs. Nothing else grows. Weights whose home is host memory stay
where they are: their old values are of no use while a step is delayed, but that memory is not lent out.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Literal

from penstock.config import Tier
from penstock.schedule.ir.ops import ChunkAt, Pool
from penstock.schedule.lower.activation_provision import ActivationProvision
from penstock.schedule.lower.kept import kept_groups, most_kept
from penstock.schedule.lower.pools import (
    BETWEEN_COPIES,
    EXCHANGE,
    KEPT,
    SUMS,
    UPDATES,
    class_of,
    exchanged_between_copies,
    exchanged_bytes,
    secondary_pool,
    size_classes,
    staged,
)
from penstock.schedule.lower.route import Route
from penstock.schedule.lower.seat import ONE_RANK, Seat, not_streamed
from penstock.schedule.lower.stay import Stay
from penstock.schedule.place import (
    BF16,
    FP32,
    Chunk,
    Settings,
    chunk_count,
    delayed_share,
    most_sums,
    page_up,
    trained_chunks,
)


def narrow_groups(route: Route, settings: Settings) -> frozenset[int]:
    """Groups whose gradients are rounded on the device, so that they cross to the host, and wait, in bf16."""
    return route.whole if settings.casts_on_device else frozenset()


class Provision:
    """All pools of one step, and which of them a group's weights and device gradients come from.

    ``delayed``: streamed group -> indices of its chunks that step in the next step's forward; empty without a delay.
    ``secondary``: groups of which what has crossed between hosts stays in host memory from their first load to their
    last.
    ``kept``: group -> the visit whose load leaves the weights in host memory until they are stepped (``kept``).
    ``saved_activations_pool`` and ``held_pool``: where saved activations on the host, and gradients that wait, are
    taken from.
    ``activation_parts``: buffers that a saved activation on the host takes. Where the ``seat`` shares groups with other
    ranks the program has this rank's parts of them, and on the device the whole of a group is put together for a visit.
    """

    def __init__(self, route: Route, settings: Settings, seat: Seat = ONE_RANK) -> None:
        self.route = route
        self.s = settings
        self.seat = seat
        self._groups = route.program.groups
        self._held_counts: dict[tuple[int, int], int] = {}
        self.weights_pool: dict[int, str] = {}
        self.gradients_pool: dict[int, str] = {}
        self.delayed = self._delayed()
        again = (g for g, loads in self.stay.loads.items() if len(loads) > 1 and self.moves(g))
        self.secondary = frozenset(again if seat.sharding.secondary else ())
        kept = kept_groups(route, settings, self.stay, self._on_time) if settings.keep else {}
        self.kept = {g: i for g, i in kept.items() if g not in self.secondary}  # of these no load but the first is read
        self.activations = ActivationProvision(route, settings, self.stay)
        """the part of it that is about activations: those that leave the device, and graphs that are kept there"""
        self._narrow = narrow_groups(route, settings)
        self.saved_activations_pool, self.held_pool, self.activation_parts = "saved_activations", "gradients_held", 1
        self.gradient_parts_pool = "gradient_parts"
        self.pools: dict[str, Pool] = {}
        for pool in self._all():
            assert pool.name not in self.pools
            self.pools[pool.name] = pool

    # ---- what the pools follow from

    @cached_property
    def stay(self) -> Stay:
        return self.route.stay(self.s.depths.weights, throughout=self.seat.sharding.stay)

    def whole_weights(self, g: int) -> int:
        """Bytes of a group's weights, put together from the parts of all ranks."""
        return self.seat.parts * self._groups[g].numel * self.s.form.weight_bytes

    def secondary_bytes(self, g: int) -> int:
        """Bytes of what this rank has of a group's weights once they have crossed between hosts."""
        return self.whole_weights(g) // self.seat.crossed

    def whole_gradient(self, g: int) -> int:
        """Bytes of a group's gradient on the device, before each rank has its part of the sum."""
        return self.seat.parts * self._groups[g].trainable * FP32

    def moves(self, g: int) -> bool:
        """True if a group's weights are brought to the device, or put together there, for each visit."""
        return self.s.place.weights[g] != "device"

    @cached_property
    def streamed(self) -> tuple[int, ...]:
        """Trainable groups that step in host memory: their gradients go down."""
        return tuple(g for g in self.route.gradient_visits if self.s.place.state[g] != "device")

    @cached_property
    def _uses(self) -> tuple[tuple[int, int], ...]:
        """(group, use) of each gradient that goes down."""
        return tuple((g, use) for g in self.streamed for use in range(len(self.route.uses[g])))

    def gradient_bytes(self, g: int) -> int:
        """Bytes of an element of a group's gradient on the host and on disk."""
        return BF16 if g in self._narrow else FP32

    @cached_property
    def widest_gradient(self) -> int:
        """Bytes of the largest element of a gradient on the host. All host buffers of gradients have room for it."""
        return max(map(self.gradient_bytes, self.streamed), default=FP32)

    def held(self, g: int, use: int, *, waits: bool) -> bool:
        """True if the host gradient of a group's ``use``-th stage outlives the visit that makes it.

        ``waits``: its step comes later, after the norm or in the next step.
        """
        route, visits = self.route, self.route.gradient_visits[g]
        stays = waits and self.s.place.gradients == "host"
        last = use == 0 and (stays or len(route.uses[g]) > 1 or route.last_visit[g] > visits[-1])
        return last or (self._summed(g, use) and not self.sums_all_parts)

    def sums(self, g: int, use: int) -> int:
        """The buffers that a chunk takes where the host gradient of a group's ``use``-th stage is held: more than one
        where several strands are summed there. Several ranks' sums are in a pool of their own, ``SUMS``."""
        return self._most_sums if self._summed(g, use) and not self.sums_all_parts else 1

    @property
    def sums_all_parts(self) -> bool:
        """True if gradients that are summed on the host are of all ranks' parts, which are exchanged after that."""
        return self.seat.sharding.reduce in ("scatter-late", "all")

    @property
    def updates_up(self) -> str:
        """The pool of updates of matrices on their way to the device."""
        return UPDATES if self.sums_all_parts else "updates_up"

    def _summed(self, g: int, use: int) -> bool:
        """True if the gradient of a group's ``use``-th stage is summed on the host."""
        return (g, self.route.uses[g][use]) in self.route.summed

    @cached_property
    def device_sums(self) -> int:
        """The most gradients of a group on the device at once, where its strands are summed there."""
        return most_sums(self.s.micro_batches, self.s.strands)

    @cached_property
    def _most_sums(self) -> int:
        return most_sums(self.s.micro_batches, self.s.strands, staged=True)

    def trained_count(self, g: int) -> int:
        """Number of chunks of a group that are stepped; they come first. Only groups that stream have any: layers
        are not cut into chunks."""
        return _trained_counts(self.route, self.s.chunk)[g]

    def held_count(self, g: int, use: int) -> int:
        """The number of buffers that are held for chunks of a group's gradient of its ``use``-th stage."""
        if (g, use) not in self._held_counts:
            late = len(self.delayed.get(g, ()))
            on_time = self.trained_count(g) - late
            held = late * self.held(g, use, waits=True) + on_time * self.held(g, use, waits=self.s.waits(g))
            self._held_counts[g, use] = self.sums(g, use) * held
        return self._held_counts[g, use]

    def _delayed(self) -> dict[int, frozenset[int]]:
        if not self.s.delay:
            return {}
        delayed: dict[int, frozenset[int]] = {}
        first, so_far, last = 0, 0, self.route.program.last_stepped
        for g in sorted(self.streamed):
            count = self.trained_count(g)
            if g in last:
                delayed[g] = frozenset(range(count))
                continue
            if self._groups[g].whole:  # all or nothing: whichever brings the delayed chunks so far nearer to the share
                late = (first + count) * self.s.delay - so_far > count / 2
                delayed[g] = frozenset(range(count if late else 0))
            else:
                delayed[g] = delayed_share(first, count, self.s.delay)
            first += count
            so_far += len(delayed[g])
        return delayed

    @cached_property
    def _on_time(self) -> dict[int, int]:
        """By group, the chunks that step on the host within this step's backward; groups that wait are left out."""
        within = self.seat.steps == "within"
        groups = (g for g in self.streamed if within and not self.s.waits(g))
        return {g: self.trained_count(g) - len(self.delayed.get(g, ())) for g in groups}

    def state_passes(self, g: int, numel: int) -> bool:
        """True if a step of so many elements of a group has its state in a buffer: it is on disk, and there is some
        besides the momentum of matrices."""
        return self.s.place.state[g] == "disk" and self.s.form.passed_bytes(self._groups[g], numel) > 0

    @cached_property
    def ahead(self) -> tuple[ChunkAt, ...]:
        """The chunks that a step reads at its end for the next one: of those that are delayed, the first that come from
        disk, in the order of their steps. A buffer of each pool that they are from is left to the step's own; what
        takes matrices whole, and what comes behind that, is read when its turn has come.
        """
        room = {"state": self.s.depths.state - 1, "new_weights": self.s.depths.stage_out - 1}
        found: list[ChunkAt] = []
        for g, index in self._late_in_order():
            group = self._groups[g]
            pools = ["state"] * self.state_passes(g, 1) + ["new_weights"] * self.s.place.stepped_in_passing(group)
            if group.whole or not all(room[pool] for pool in pools):
                break
            for pool in pools:
                room[pool] -= 1
            found += [(g, index)] * bool(pools)
        return tuple(found)

    def _late_in_order(self) -> Iterator[ChunkAt]:
        """The delayed chunks in the order in which they are stepped: before the first visit that reads them."""
        for i, visit in enumerate(self.route.visits if self.delayed else ()):
            for g in self.route.reads(visit.kind, visit.stage):
                if self.route.readers[g][0] == i:
                    yield from ((g, index) for index in sorted(self.delayed.get(g, ())))

    def keeps(self, g: int, c: Chunk) -> bool:
        """True if a chunk's weights are in host memory when it is stepped, since the last load of its group."""
        return g in self.kept and c.trainable and c.index not in self.delayed.get(g, ())

    @cached_property
    def _flows(self) -> list[tuple[int, int, int]]:
        """Buffers of gradients by visit: used up before it, made by it, and free after it. Only with a delay."""
        route, place = self.route, self.s.place
        used, freed = Counter[int](), Counter[int]()
        for g, late in self.delayed.items():
            used[route.readers[g][0]] += len(late) * (place.gradients == "host")
            freed[route.gradient_visits[g][-1]] += sum(self.held_count(g, use) for use in range(1, len(route.uses[g])))
            if not self.s.waits(g):
                freed[route.last_visit[g]] += (self.trained_count(g) - len(late)) * self.held(g, 0, waits=False)
        made = Counter[int]()
        for g in self.delayed:
            for i in route.gradient_visits[g]:
                made[i] += self.held_count(g, route.uses[g].index(route.visits[i].stage))
        return [(used[i], made[i], freed[i]) for i in range(len(route.visits))]

    def _most_held(self, parts: int) -> int:
        """The most buffers that delayed gradients, and saved activations of ``parts`` buffers each, use at once.

        Counted in the order in which a visit takes them. A buffer counts as free only from the visit on that cannot
        start before it is: earlier, if the lanes run ahead, which the count then leaves room for.
        """
        now = most = sum(map(len, self.delayed.values())) if self.s.place.gradients == "host" else 0
        for visit, (used, made, freed) in zip(self.route.visits, self._flows, strict=True):
            now -= used
            if parts:
                moves = len(self.activations.leaving(visit.stage - 1, visit.micro_batches))
                now += parts * moves * ((visit.kind == "F") - (visit.kind == "B"))
            most = max(most, now)
            now += made
            most = max(most, now)
            now -= freed
        return most

    @cached_property
    def _gradients_held(self) -> int:
        """The most buffers that held gradients use at once, without saved activations."""
        return self._most_held(0) if self.delayed else sum(self.held_count(g, use) for g, use in self._uses)

    def _share(self) -> list[Pool]:
        """The pool of saved activations and held gradients together, where that takes less than one for each.

        Its buffers are as large as one of either, or as a gradient, of which a saved activation then takes several.
        """
        if not self.delayed:
            return []
        activations, gradients = list(self.activations.on_host("held")), list(self._held("held"))
        if not (activations and gradients):
            return []
        apart = [*activations, *gradients]
        best, least = None, sum(pool.size * pool.count for pool in apart)
        for size in (max(pool.size for pool in apart), gradients[0].size):
            parts = -(-activations[0].size // size)
            pool = Pool(name="held", tier="host", size=size, count=self._most_held(parts))
            if pool.size * pool.count < least:
                best, least, self.activation_parts = pool, pool.size * pool.count, parts
        if best is None:
            return []
        self.saved_activations_pool = self.held_pool = best.name
        return [best]

    # ---- the pools

    def _all(self) -> Iterable[Pool]:
        refused = "" if self.seat is ONE_RANK else not_streamed(self.seat, self.s.place)
        assert not refused, refused
        shared = self._share()
        apart = () if shared else self.activations.on_host(self.saved_activations_pool)
        activations = (*self.activations.pools(), *apart)
        return (*self._weights(), *self._gradients(), *activations, *self._staging(), *shared)

    def _weights(self) -> Iterator[Pool]:
        """Shared by size class. With several ranks, this one's part: one is sent while one is brought."""
        needed = _moved(self.route, self.s.place.weights)
        part = {g: self._groups[g].numel * self.s.form.weight_bytes for g in needed}
        sizes = tuple((g, self.whole_weights(g)) for g in part)
        for pool, members in _by_class(self.route, "weights", sizes, self.s.depths.weights):
            self.weights_pool |= dict.fromkeys(members, pool.name)
            yield replace(pool, count=len(members)) if self.seat.sharding.stay else pool
        if self.seat.sharding.weights and part:
            yield Pool(name="weight_parts", tier="device", size=max(part.values()), count=2)
        of_size = Counter(map(self.secondary_bytes, sorted(self.secondary)))
        for size, count in of_size.items():
            yield Pool(name=secondary_pool(size), tier="host", size=size, count=count)

    def _gradients(self) -> Iterator[Pool]:
        """Shared by size class; a group that steps on the device has a buffer of its own. With several ranks, of each
        chunk what is sent and received, and the sum: one goes down while one is made, or is added up on each of two
        levels."""
        part = {g: self._groups[g].trainable * FP32 for g in self.streamed}
        sizes = tuple((g, self.whole_gradient(g)) for g in part)
        of_visit = self.device_sums if self.route.together == self.s.micro_batches else 1
        for pool, members in _by_class(self.route, "gradients", sizes, self.s.depths.gradients, of_visit):
            self.gradients_pool |= dict.fromkeys(members, pool.name)
            yield pool
        if self.seat.shards.size > 1 and part:
            levels, copies = 1 + self.seat.adds_on_levels, self.seat.copies.size
            size = exchanged_bytes(self.seat, self.s.chunk)
            yield Pool(name=self.gradient_parts_pool, tier="device", size=self.s.chunk * FP32, count=2 + (copies > 1))
            yield Pool(name=EXCHANGE, tier="device", size=size, count=levels)
        if self.seat.copies.size > 1 and part:
            size = exchanged_between_copies(self.seat, self.s.chunk)
            yield Pool(name=BETWEEN_COPIES, tier="device", size=size, count=1)
        for g in sorted(self.route.gradient_visits.keys() - part.keys()):
            assert len(self.route.uses[g]) == 1, "a tied group cannot keep its state on the device"
            name = self.gradients_pool[g] = f"gradients.of{g}"
            yield Pool(name=name, tier="device", size=self._groups[g].trainable * FP32, count=self.device_sums)

    def _held(self, name: str) -> Iterator[Pool]:
        if count := self._gradients_held:
            yield Pool(name=name, tier="host", size=self.s.chunk * self.widest_gradient, count=count)

    def _from_disk(self, g: int) -> bool:
        """True if any chunk of a group's weights is read from disk to go up to the device and no further: a delayed
        one's first load comes from its step, and the last of one that is kept is the step's."""
        loads = 1 if g in self.secondary else len(self.stay.loads[g])
        late = len(self.delayed.get(g, ()))
        frozen, on_time = chunk_count(self._groups[g].frozen, self.s.chunk), self.trained_count(g) - late
        passing = (loads * bool(frozen), (loads - 1) * bool(late), (loads - (g in self.kept)) * bool(on_time))
        return self.s.place.weights[g] == "disk" and any(passing)

    def _staging(self) -> Iterator[Pool]:
        """Host chunks on their way between disk, device and optimizer, and gradients that wait on the host."""
        place, form, route = self.s.place, self.s.form, self.route
        streamed, uses = self.streamed, self._uses
        on_disk = any(self._from_disk(g) for g in route.readers)
        summed, apart = [(g, use) for g, use in uses if self._summed(g, use)], self.sums_all_parts
        out = (summed and not apart) or any(self.held_count(g, use) < self.trained_count(g) for g, use in uses)
        waiting = any(self.s.waits(g) for g in streamed) or any(self.delayed.values())
        back = place.gradients == "disk" and waiting
        on_disk_state = [self._groups[g] for g in streamed if place.state[g] == "disk"]
        sizes = [(g, min(self.s.chunk, g.trainable)) for g in on_disk_state]
        state = max((form.passed_bytes(g, n) for g, n in sizes), default=0)
        momentum = max((form.momentum_bytes(g, n) for g, n in sizes if g.whole), default=0)
        passing = any(
            place.stepped_in_passing(self._groups[g]) and (g not in self.kept or self.delayed.get(g)) for g in streamed
        )

        if not self._narrow.isdisjoint(streamed):
            # A lane rounds and sends one chunk at a time: more buffers would wait for it.
            yield Pool(name="casts", tier="device", size=self.s.chunk * BF16, count=1)
        if self.held_pool == "gradients_held":
            yield from self._held("gradients_held")
        if summed and apart:
            count = sum(self.trained_count(g) for g, _ in summed) * self._most_sums
            of_all = self.seat.parts * self.s.chunk * FP32  # of a chunk of every rank's part
            yield Pool(name=SUMS, tier="host", size=of_all, count=count)
            yield staged("sums_out", of_all, self.s.depths)
        if self.kept:
            count = most_kept(route, self.s.depths.weights, self.kept, self._on_time) + self.s.depths.stage_out
            yield Pool(name=KEPT, tier="host", size=self.s.chunk * form.weight_bytes, count=count)
        yield from (
            staged(name, self.s.chunk * width, self.s.depths)
            for name, width, wanted in (
                ("stage_in", form.weight_bytes, on_disk),
                ("gradients_out", self.widest_gradient, out),
                ("gradients_in", self.widest_gradient, back),
                ("new_weights", form.weight_bytes, passing),
            )
            if wanted
        )
        if state:
            yield staged("state", page_up(state), self.s.depths)
        if momentum:
            yield staged("momentum", page_up(momentum), self.s.depths)
        if any(self._groups[g].whole for g in streamed):
            yield from self._updates()

    def _updates(self) -> Iterator[Pool]:
        """Updates of matrices: chunks on the host, and on the device of as many groups as are there at once: those
        that step after one visit, or of those that come one after the other two."""
        matrices = [g for g in self.streamed if self._groups[g].whole]
        after = Counter(self.route.last_visit[g] for g in matrices)
        largest = max(self._groups[g].trainable for g in matrices) * BF16
        count = max(*after.values(), min(len(matrices), 2))
        yield staged("updates_down", self.s.chunk * BF16, self.s.depths)
        up = staged("updates_up", self.s.chunk * BF16, self.s.depths)
        if self.sums_all_parts:
            # All chunks of a visit's sums go up to be exchanged before the first update does, in the same lane.
            chunks = Counter[int]()
            for g in matrices:
                chunks[self.route.last_visit[g]] += self.trained_count(g)
            up = replace(up, name=UPDATES, count=max(chunks.values()))
        yield up
        yield Pool(name="updates", tier="device", size=self.seat.parts * largest, count=count)
        if self.seat.parts > 1:
            yield Pool(name="update_parts", tier="device", size=largest, count=count)


@lru_cache(maxsize=256)
def _trained_counts(route: Route, chunk: int) -> tuple[int, ...]:
    """The number of chunks of each group that are stepped."""
    return tuple(trained_chunks(group, chunk) for group in route.program.groups)


@lru_cache(maxsize=256)
def _moved(route: Route, weights: tuple[Tier, ...]) -> tuple[int, ...]:
    """The groups whose weights any visit brings to the device, by where they live."""
    return tuple(dict.fromkeys(g for visit in route.times for g in route.reads(*visit) if weights[g] != "device"))


@lru_cache(maxsize=256)
def _by_class(
    route: Route, label: Literal["weights", "gradients"], sizes: tuple[tuple[int, int], ...], depth: int, each: int = 1
) -> tuple[tuple[Pool, tuple[int, ...]], ...]:
    """Device pools by size class of (group, bytes), each with room for one visit's needs and ``depth`` - 1 more to run
    ahead; with each its groups. Of weights a visit needs what it reads, of gradients what it makes, ``each``
    in so many buffers.
    """
    needs = {visit: (route.reads if label == "weights" else route.gradients)(*visit) for visit in route.times}
    classes = size_classes(n for _, n in sizes)
    size_of = {g: class_of(n, classes) for g, n in sizes if n}
    pools = []
    for i, size in enumerate(classes):
        members = {g for g, own in size_of.items() if own == size}
        need = {visit: each * sum(g in members for g in groups) for visit, groups in needs.items()}
        visits = sum(route.times[visit] for visit, n in need.items() if n)
        count = max(need.values()) + (depth - 1 if visits > 2 else 0)
        pool = Pool(name=f"{label}.{i}", tier="device", size=size, count=count)
        pools.append((pool, tuple(sorted(members))))
    return tuple(pools)
