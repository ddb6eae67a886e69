"""The most activations that a walk has anywhere at once, where forwards and backwards take turns.

Vertically and horizontally that follows from the numbers of micro-batches and stages. Here it is counted: the walk is
gone through once, in the order in which ``Activations`` writes ops down, with the buffers that each takes and gives
back. As many are enough (``emitter``).
"""

from collections import Counter
from functools import lru_cache

from penstock.schedule.lower.route import Message, Route, Visit

Output = tuple[str, int, int]
"""A or D, stage, micro-batch: what a stage puts out, or the gradient with respect to it."""


@lru_cache(maxsize=256)
def under_way(route: Route, leaving: frozenset[int]) -> "UnderWay":
    """``leaving``: the stages whose saved activations leave the device."""
    return UnderWay(route, leaving)


class UnderWay:
    """The place of each activation, step by step.

    ``most``: the most at once of this rank's own stages' on the device, and gradients that they make there
    (``put_out``); of those ``received`` there from other ranks; of those that have come back there (``restored``); of
    those that are ``away``; and of stages whose backward is half done (``split``). ``left``: those that are ever away.
    """

    def __init__(self, route: Route, leaving: frozenset[int]) -> None:
        self._stages, self._leaving, self._following = route.program.stages, leaving, iter(route.visits[1:])
        self._places: dict[Output, str] = {}
        self._now, self.most = Counter[str](), Counter[str]()
        self.left = 0
        for step in route.walk:
            if isinstance(step, Message):
                self._cross(step)
            else:
                self._visit(step)

    def _cross(self, step: Message) -> None:
        kind, k, m = step.ident.kind, step.ident.stage, step.ident.micro_batch
        if kind in ("RA", "RD"):
            self._take((kind[1], k, m), "received")
        elif kind in ("SA", "SD"):
            self._give((kind[1], k, m))

    def _visit(self, step: Visit) -> None:
        kind, k, (m,) = step.kind, step.stage, step.micro_batches
        if kind == "F":
            self._take(("A", k, m), "put_out")
            if k and k - 1 in self._leaving:
                self._moves(("A", k - 1, m), "away")
                self.left += 1
        elif kind != "W":
            self._take(("D", k - 1, m), "put_out")
        if kind == "I":
            self._now["split"] += 1
            self.most["split"] = max(self.most["split"], self._now["split"])
        elif kind != "F":
            self._give(("A", k - 1, m))
            self._give(("D", k, m))
            self._now["split"] -= kind == "W"
        following = next(self._following, None)
        if following is not None and following.kind in "BI" and following.stage - 1 in self._leaving:
            self._moves(("A", following.stage - 1, following.micro_batches[0]), "restored")

    def _take(self, what: Output, place: str) -> None:
        way, k, _ = what
        if k >= 0 and (self._stages[k].activation if way == "A" else self._stages[k].gradient):
            self._places[what] = place
            self._now[place] += 1
            self.most[place] = max(self.most[place], self._now[place])

    def _give(self, what: Output) -> None:
        place = self._places.pop(what, None)
        if place is not None:
            self._now[place] -= 1

    def _moves(self, what: Output, place: str) -> None:
        """The new buffer is taken before the one that is there is given back."""
        before = self._places[what]
        self._take(what, place)
        self._now[before] -= 1
