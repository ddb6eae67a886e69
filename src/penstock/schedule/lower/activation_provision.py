"""The memory that the saved activations of a step need, and graphs that are kept with them.

A saved activation leaves the device after the next stage has read it, and comes back before that stage's backward,
unless the plan has it stay there, or the graph of the call that it goes into is kept.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property

from penstock.schedule.ir.ops import Pool
from penstock.schedule.lower.graphs import GRAPHS, kept_graphs
from penstock.schedule.lower.pools import staged
from penstock.schedule.lower.route import Route
from penstock.schedule.lower.stay import Stay
from penstock.schedule.lower.under_way import under_way
from penstock.schedule.place import Settings, page_up

RECEIVED = "received"
"""The pool of activations, and gradients with respect to them, that come from other ranks of a pipeline."""

SPLIT = "split"
"""The pool of what the first part of a backward holds for the second."""

RESTORED = "restored"
"""The pool of saved activations that have come back to the device."""


class ActivationProvision:
    """Saved activations that leave the device, graphs that are kept there, and the pools of both.

    ``graphs``: stage -> the number of its micro-batches under way, the last ones, whose graphs are kept (``graphs``).
    ``graphs_pool``: stage -> the pool of its graphs, which has only graphs of that size.
    """

    def __init__(self, route: Route, settings: Settings, stay: Stay) -> None:
        self.route = route
        self.s = settings
        self.stay = stay
        self.graphs = kept_graphs(route, settings.depths.graphs) if settings.train else {}
        graph = {k: route.program.stages[k].graph or 0 for k in self.graphs}
        self._graph_sizes = sorted(set(graph.values()), reverse=True)
        self.graphs_pool = {k: f"{GRAPHS}.{self._graph_sizes.index(size)}" for k, size in graph.items()}

    def leaving(self, stage: int, micro_batches: Sequence[int]) -> Sequence[int]:
        """The micro-batches, of those under way, whose saved activation of a stage is moved off the device."""
        if not self.s.train or self.s.place.activations == "device" or not self._reads(stage):
            return ()
        if stage + 1 in self.graphs and self.route.takes_turns:
            return ()
        leaving = self.stay.leaving(stage, self.s.depths.inputs) - self.graphs.get(stage + 1, 0)
        return micro_batches[: max(leaving, 0)]

    def keeps_graph(self, stage: int, micro_batch: int, micro_batches: Sequence[int]) -> bool:
        """True if the graph of a stage's call is kept, of one of those that visit it together."""
        first = len(micro_batches) - self.graphs.get(stage, 0)
        return micro_batch in micro_batches[max(first, 0) :]

    def _reads(self, stage: int) -> bool:
        """True if it is this rank whose backward reads what a stage has put out."""
        return stage + 2 < len(self.route.program.stages) and self.route.program.has(stage + 1)

    def pools(self) -> Iterator[Pool]:
        """Saved activations on the device and their gradients, which torch's allocator owns; those that come back, and
        those on their way from and to disk.

        The first two come from the allocator's memory of one stream, which it uses for one when the other is done with
        it: a gradient is made when no more than those of its stage, and the saved activations that stay, are there.
        What comes back is written on another stream, for which the allocator would take other memory: it has buffers of
        its own, for the micro-batches under way and one on its way.
        """
        stages, most = self.route.program.stages, self._most
        bodies = stages[:-1]
        size = max(s.activation for s in bodies)
        if size:
            yield Pool(name="activations", tier="device", size=size, count=most["put_out"], backed=False)
            if most["received"]:
                yield Pool(name=RECEIVED, tier="device", size=size, count=most["received"], backed=False)
        for i, nbytes in enumerate(self._graph_sizes):
            count = sum(n for k, n in self.graphs.items() if stages[k].graph == nbytes)
            yield Pool(name=f"{GRAPHS}.{i}", tier="device", size=nbytes, count=count, backed=False)
        if most["split"]:
            held = max(stage.split or 0 for stage in bodies if self.route.program.has(stage.index))
            yield Pool(name=SPLIT, tier="device", size=held, count=most["split"], backed=False)
        if most["away"]:
            yield Pool(name=RESTORED, tier="device", size=page_up(size), count=most["restored"])
            if self.s.place.activations == "disk":
                for name in ("saved_activations_out", "saved_activations_in"):
                    yield staged(name, page_up(size), self.s.depths)

    @cached_property
    def _most(self) -> Counter[str]:
        """The buffers for each place of an activation, as in ``UnderWay.most``: counted on the walk where forwards and
        backwards take turns. Elsewhere most are away in the end of the forward."""
        stages = self.route.program.stages
        if self.route.takes_turns:
            found = under_way(self.route, frozenset(k for k in range(len(stages)) if self.leaving(k, (0,))))
            most, left = Counter(found.most), found.left
            most["put_out"] += self.s.depths.inputs
        else:
            left = sum(len(self.leaving(k, range(self.route.at_once))) for k in range(len(stages)))
            gradient = self.s.train and any(s.gradient for s in stages[:-1])
            stay = self.s.train and self.s.place.activations == "device"
            put_out, received = self._put_out(stay=stay) + gradient, self._received(stay=stay)
            most = Counter(put_out=put_out, received=received, restored=self.route.at_once, away=left)
        most["restored"] = min(most["restored"] + 1, left)
        return most

    def _put_out(self, *, stay: bool) -> int:
        """Buffers of saved activations that this rank's stages put out. What is sent to another rank is gone once it is
        there. ``stay``: the others are on the device until their backward, as inputs of calls with a graph are."""
        program, at_once = self.route.program, self.route.at_once
        with_graph = {k - 1: n for k, n in self.graphs.items() if program.stages[k - 1].activation}
        filled = [stage.index for stage in program.stages[:-1] if stage.activation]  # others' outputs stay, as ``kept``
        if program.dealt is None:
            if stay:
                return at_once * len(filled)
            return at_once + self.s.depths.inputs + sum(with_graph.values())
        own = [k for k in filled if program.has(k) and not program.dealt.crosses(k)]
        kept = at_once * len(own) if stay else at_once * bool(own) + sum(with_graph.get(k, 0) for k in own)
        return kept + self.s.depths.inputs

    def _received(self, *, stay: bool) -> int:
        """Buffers of what other ranks of a pipeline send: of all micro-batches of one visit, since nobody reads any of
        it before the visit that comes then; and of inputs that ``stay`` until their backward, or the last block's."""
        program, at_once = self.route.program, self.route.at_once
        dealt = program.dealt
        if dealt is None:
            return 0
        last = len(program.stages) - 2
        stages = program.stages
        inputs = [k for k in range(1, last + 1) if dealt.has(k) and dealt.crosses(k - 1) and stages[k - 1].activation]
        if stay:
            kept = at_once * len(inputs)
        elif self.s.train:
            with_graph = sum(self.graphs.get(k, 0) for k in inputs if k != last)
            kept = with_graph + (at_once - len(self.leaving(last - 1, range(at_once))) if last in inputs else 0)
        else:
            kept = 0
        return kept + at_once

    def on_host(self, name: str) -> Iterator[Pool]:
        """The pool of those that are away in host memory, if any are."""
        bodies = self.route.program.stages[:-1]
        if self._most["away"] and self.s.place.activations == "host":
            size = max(s.activation for s in bodies)
            yield Pool(name=name, tier="host", size=page_up(size), count=self._most["away"])
