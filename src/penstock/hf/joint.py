"""Batches that several ranks take together: those of a pipeline, each its own blocks of them; and those that share each
sequence, each its own span.

The library deals its batches out to all processes, as if each had a model of its own. Ranks that take them together
tell each other theirs, and go through all of them in the order that one process has them in. So a step is the same
whatever its ranks share, and so are batch sizes, the data's order, and whatever the library counts.
"""

import pickle
from collections.abc import Sequence
from typing import Any, TypeVar

from torch.distributed.device_mesh import DeviceMesh

from penstock.config.layout import LayoutConfig
from penstock.errors import ModelError
from penstock.ranks.group import Ranks
from penstock.ranks.start import torchrun_mesh
from penstock.tape import trees

T = TypeVar("T")


def mesh_of(layout: LayoutConfig, count: int, device: str) -> DeviceMesh | None:
    """The mesh of ``count`` processes that share a model so; None: there is one. ``device``: a kind.

    Raises:
        ConfigError: so many processes cannot.
    """
    layout.check_started(count)
    return torchrun_mesh(device, copies=layout.copies, pp=layout.pipeline, cp=layout.cp) if count > 1 else None


def take_together(ranks: Ranks) -> bool:
    """True if a rank's batches are taken by other ranks, too."""
    return ranks.stages > 1 or ranks.cp > 1


def to_tell(value: Any) -> Any:
    """A copy of what is told to others, on the CPU: its tensors have their own bytes alone, and not those of a larger
    one that they are views of."""
    return trees.replace(value, lambda tensor: tensor.detach().to("cpu", copy=True))


def theirs(ranks: Ranks, own: Sequence[T]) -> list[T]:
    """All that this rank takes of what each rank has been dealt: ``own``, ``to_tell``.

    Raises:
        ModelError: not all have been dealt as many, or what this rank has been dealt cannot be told.
    """
    try:
        told = pickle.dumps(list(own))
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # all that Python has for it
        raise ModelError(
            f"ranks that take batches together tell each other theirs, and this one has a value that cannot be told "
            f"({error}): let the data collator leave it out"
        ) from error
    by_rank: list[list[T]] = [pickle.loads(of_rank) for of_rank in ranks.gather_objects("batches", told)]
    if len(counts := {len(of_rank) for of_rank in by_rank}) > 1:
        raise ranks.of_all(
            ModelError(
                f"processes have {' and '.join(map(str, sorted(counts)))} micro-batches of a step: give all as many"
            )
        )
    dealt = [one for of_rank in by_rank for one in of_rank]
    groups = ranks.sharing.size // ranks.sharing.cp
    each, place = len(dealt) // groups, ranks.sharing.rank // ranks.sharing.cp
    return dealt[place * each : (place + 1) * each]


def given_back(ranks: Ranks, found: Sequence[T], *, at_once: bool = True) -> list[list[T]]:
    """Of each batch that this rank has been dealt, all that has come of it, by rank: one, or of each span one.

    ``found``: what has come of all that this rank has taken. That of a pipeline's first rank counts, which has the
    model's own code, the loss with it. All ranks are told all of it, of one batch of each group after the other unless
    ``at_once``, which is for small values.
    """
    groups, place = ranks.sharing.size // ranks.sharing.cp, ranks.sharing.rank // ranks.sharing.cp
    each = len(found) * groups // ranks.size
    own = range(ranks.rank * each, (ranks.rank + 1) * each)
    of_own: dict[int, list[T]] = {batch: [] for batch in own}
    step = len(found) if at_once else 1
    for first in range(0, len(found), step):
        values = list(found[first : first + step]) if ranks.pipe.rank == 0 else []
        for group, said in ranks.gather_objects("what has come of batches", (place, values)):
            for batch, value in enumerate(said, group * len(found) + first):
                if batch in of_own:
                    of_own[batch].append(value)
    return list(of_own.values())
