"""The layers that each stage of a pipeline holds, and the rank that holds the stage."""

from dataclasses import dataclass
from functools import cached_property

from penstock.errors import ConfigError
from penstock.schedule.lower.request import FamilyRequest


@dataclass(frozen=True, kw_only=True)
class Stages:
    """``layers`` spread over ``ranks`` x ``per_rank`` stages. ``folded``: the second half of the stages goes back
    through the ranks (rank r holds stages r and 2 ranks - 1 - r); otherwise they go round and round.
    """

    layers: int
    ranks: int
    per_rank: int
    folded: bool

    @cached_property
    def count(self) -> int:
        return self.ranks * self.per_rank

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """First layer of each stage, and the number of layers. Stage 0 always has one: it has the model's input."""
        return tuple(-(-s * self.layers // self.count) for s in range(self.count + 1))

    def rank_of(self, stage: int) -> int:
        lap, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.folded and lap % 2 else place

    def stage(self, rank: int, chunk: int) -> int:
        """The ``chunk``-th stage of a rank, in the order of the forward."""
        place = self.ranks - 1 - rank if self.folded and chunk % 2 else rank
        return chunk * self.ranks + place

    def of(self, rank: int) -> list[int]:
        """Stages of a rank, in the order of the forward."""
        return [self.stage(rank, chunk) for chunk in range(self.per_rank)]

    def held(self, rank: int) -> list[int]:
        """Layers of a rank."""
        return [layer for s in self.of(rank) for layer in range(self.firsts[s], self.firsts[s + 1])]


def spread(request: FamilyRequest, per_rank: int, *, folded: bool = False) -> Stages:
    """Spread layers over stages as evenly as can be, without changing their order. With one stage to a rank, a stage
    may hold no layer: it passes on what it gets.

    Raises:
        ConfigError: several stages to a rank, and not a layer for each.
    """
    count = request.ranks * per_rank
    layers = count if request.stage_ops else request.layers
    if per_rank > 1 and layers < count:
        raise ConfigError(
            f"{request.family} with {request.ranks} ranks of {per_rank} virtual stages needs at least {count} layers, "
            f"one for each stage, and got {layers}: ask for fewer ranks or virtual stages"
        )
    return Stages(layers=layers, ranks=request.ranks, per_rank=per_rank, folded=folded)
