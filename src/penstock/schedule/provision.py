"""The pools that a step needs, read off its route and settings before any op exists.

This is the one place that sizes a pool: builders take buffers only from here, and a planner weighs its options with it
without building a schedule for each.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from penstock.schedule.op import Pool
from penstock.schedule.place import FP32, Settings, chunk_count, page_up
from penstock.schedule.route import Route


def size_classes(sizes: Iterable[int]) -> list[int]:
    """Buffer sizes such that every size fits in a class at most twice as large."""
    classes: list[int] = []
    for size in sorted(set(sizes), reverse=True):
        if size and (not classes or size < classes[-1] / 2):
            classes.append(size)
    return classes


def class_of(size: int, classes: Sequence[int]) -> int:
    """The size of the smallest class that holds ``size``."""
    return min(c for c in classes if c >= size)


class Provision:
    """All pools of one step, and which of them a group's weights and device gradients come from."""

    def __init__(self, route: Route, settings: Settings) -> None:
        self.route = route
        self.s = settings
        self.weights_pool: dict[int, str] = {}
        self.gradients_pool: dict[int, str] = {}
        self.pools: dict[str, Pool] = {}
        for pool in (*self._weights(), *self._gradients(), *self._activations(), *self._staging()):
            assert pool.name not in self.pools
            self.pools[pool.name] = pool

    # ---- what the pools follow from

    def moving(self, kind: str, stage: int) -> list[int]:
        """Groups whose weights a visit brings to the device."""
        return [g for g in self.route.reads(kind, stage) if self.s.place.weights[g] != "device"]

    def streamed(self) -> Iterator[int]:
        """Trainable groups that step in host memory: their gradients go down."""
        return (g for g in self.route.gradient_visits if self.s.place.state[g] != "device")

    def held(self, g: int, use: int) -> bool:
        """Whether the host gradient of a group's ``use``-th stage outlives the visit that makes it."""
        route, visits = self.route, self.route.gradient_visits[g]
        waits = self.s.wait and self.s.place.gradients == "host"
        last = use == 0 and (waits or len(route.uses[g]) > 1 or route.last_visit[g] > visits[-1])
        return last or (g, route.uses[g][use]) in route.summed

    def leaves(self, k: int) -> bool:
        """Whether stage k's checkpoint is moved off the device. The last block's is used at once and never leaves."""
        stages = self.route.program.stages
        away = self.s.train and self.s.place.checkpoints != "device"
        return away and stages[k].checkpoint > 0 and k < len(stages) - 2

    # ---- the pools

    def _by_class(
        self, label: str, sizes: Mapping[int, int], needs: Mapping[tuple[str, int], Sequence[int]], depth: int
    ) -> Iterator[tuple[Pool, list[int]]]:
        """Device pools by size class, each with room for one visit's needs and ``depth`` - 1 more to run ahead."""
        classes = size_classes(sizes.values())
        for i, size in enumerate(classes):
            members = {g for g, n in sizes.items() if n and class_of(n, classes) == size}
            need = {visit: sum(g in members for g in groups) for visit, groups in needs.items()}
            visits = sum(self.route.times[visit] for visit, n in need.items() if n)
            count = max(need.values()) + (depth - 1 if visits > 2 else 0)
            yield Pool(name=f"{label}.{i}", tier="device", size=size, count=count), sorted(members)

    def _weights(self) -> Iterator[Pool]:
        needs = {visit: self.moving(*visit) for visit in self.route.times}
        groups = self.route.program.groups
        sizes = {g: groups[g].numel * self.s.form.weight_bytes for gs in needs.values() for g in gs}
        for pool, members in self._by_class("weights", sizes, needs, self.s.depths.weights):
            self.weights_pool |= dict.fromkeys(members, pool.name)
            yield pool

    def _gradients(self) -> Iterator[Pool]:
        """Shared by size class; a group that steps on the device has a buffer of its own."""
        groups = self.route.program.groups
        needs = {visit: self.route.gradients(*visit) for visit in self.route.times}
        sizes = {g: groups[g].trainable * FP32 for g in self.streamed()}
        for pool, members in self._by_class("gradients", sizes, needs, self.s.depths.gradients):
            self.gradients_pool |= dict.fromkeys(members, pool.name)
            yield pool
        for g in sorted(self.route.gradient_visits.keys() - sizes.keys()):
            assert len(self.route.uses[g]) == 1, "a tied group cannot keep its state on the device"
            name = self.gradients_pool[g] = f"gradients.of{g}"
            yield Pool(name=name, tier="device", size=groups[g].trainable * FP32, count=1)

    def _activations(self) -> Iterator[Pool]:
        """Checkpoints and their gradients on the device (torch's allocator owns the memory), and away from it."""
        bodies, at_once = self.route.program.stages[:-1], self.route.at_once
        away = sum(self.leaves(k) for k in range(len(bodies)))
        size = max(s.checkpoint for s in bodies)
        gradient = max(s.gradient for s in bodies) if self.s.train else 0
        # Two more than are under way: one on its way out, one on its way in.
        stay = self.s.train and self.s.place.checkpoints == "device"
        if size:
            count = at_once * len(bodies) if stay else at_once + 2
            yield Pool(name="activations", tier="device", size=size, count=count, backed=False)
        if gradient:
            yield Pool(name="activation_gradients", tier="device", size=gradient, count=at_once + 1, backed=False)
        if away and self.s.place.checkpoints == "host":
            yield Pool(name="checkpoints", tier="host", size=page_up(size), count=away * at_once)
        if away and self.s.place.checkpoints == "disk":
            for name in ("checkpoints_out", "checkpoints_in"):
                yield Pool(name=name, tier="host", size=page_up(size), count=self.s.depths.checkpoints)

    def _staging(self) -> Iterator[Pool]:
        """Host chunks on their way between disk, device and optimizer, and gradients that wait on the host."""
        place, form, depths, route = self.s.place, self.s.form, self.s.depths, self.route
        streamed = list(self.streamed())
        uses = [(g, use) for g in streamed for use in range(len(route.uses[g]))]
        held = sum(chunk_count(route.program.groups[g].trainable, self.s.chunk) for g, use in uses if self.held(g, use))
        on_disk = any(place.weights[g] == "disk" for visit in route.times for g in self.moving(*visit))
        out = any((g, route.uses[g][use]) in route.summed or not self.held(g, use) for g, use in uses)
        back = bool(streamed) and self.s.wait and place.gradients == "disk"
        state = any(place.state_on_disk(g, form) for g in streamed)
        leaves = form.split and any(place.weights[g] != "host" for g in streamed)

        def pool(name: str, width: int, count: int) -> Pool:
            return Pool(name=name, tier="host", size=self.s.chunk * width, count=count)

        yield from (
            pool(name, width, count)
            for name, width, count, wanted in (
                ("stage_in", form.weight_bytes, depths.stage_in, on_disk),
                ("gradients_held", FP32, held, held > 0),
                ("gradients_out", FP32, depths.stage_out, out),
                ("gradients_in", FP32, depths.stage_out, back),
                ("state", form.state_slot_bytes, depths.state, state),
                ("new_weights", form.weight_bytes, depths.stage_out, leaves),
            )
            if wanted
        )
