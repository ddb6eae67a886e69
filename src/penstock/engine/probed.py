"""Results of the probe for each shape of micro-batch, and for several shapes together."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.engine import batch
from penstock.engine.arguments import WrapArguments
from penstock.errors import ModelError
from penstock.schedule.dealt import check_split
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.program import Stage
from penstock.shape.model import StageTimes
from penstock.tape import trees
from penstock.tape.early_stop import last_of_all
from penstock.tape.facts import StageFacts
from penstock.tape.handed import HandedOn
from penstock.tape.refusals import NO_GRAPHS, NOTHING_TRAINS

_OF_PLACES = ("assigned", "finds", "undoes")
"""Facts that hold for all micro-batches if they do for one, be it of another step: where a forward finds in a place
what it puts there, its own probe sees no change."""
_OF_ANY = ("buffers", "written")
"""Facts that hold for all micro-batches of a step if they do for one."""
_SIZES = ("activation", "gradient", "kept", "forward_peak", "backward_peak", "split_peak")


def within(
    shape: batch.Shapes,
    others: Iterable[batch.Shapes],
    covers: Callable[[batch.Shapes, batch.Shapes], bool] = batch.covers,
) -> bool:
    """True if a micro-batch is smaller than another one in every respect, or in those that ``covers`` looks at."""
    return any(other != shape and covers(other, shape) for other in others)


Places = tuple[trees.Place, ...]
"""The tensors of a stage's saved activation that can be moved."""


def join(probed: Sequence[tuple[Stage, ...]], movable: Sequence[tuple[Places, ...]]) -> tuple[Stage, ...]:
    """Stages that have room for each of several micro-batches. ``movable``: for each of these, by stage.

    Raises:
        ModelError: they went different ways through the model.
    """
    ways = {tuple((s.kind, s.name) for s in stages) for stages in probed}
    if len(ways) > 1:
        raise ModelError(
            "micro-batches of one step take different ways through the model's blocks: give each step micro-batches "
            "that take the same way"
        )
    joined = []
    for same, known in zip(zip(*probed, strict=True), zip(*movable, strict=True), strict=True):
        stage = replace(
            same[0],
            forward_reads=tuple(sorted({g for s in same for g in s.forward_reads})),
            backward_reads=tuple(sorted({g for s in same for g in s.backward_reads})),
            gradients=tuple(sorted({g for s in same for g in s.gradients})),
            **{size: max(getattr(s, size) for s in same) for size in _SIZES},
            split=_most([s.split for s in same]),
            graph=_most([s.graph for s in same]),
        )
        if len(set(known)) > 1:  # what only some of them can move stays for the others
            stage = replace(stage, kept=stage.kept + stage.activation + stage.gradient)
            if not _movable_for_all(known):
                stage = replace(stage, activation=0, gradient=0)
        joined.append(stage)
    return tuple(joined)


def _most(sizes: Sequence[int | None]) -> int | None:
    """The largest of sizes; None where one is not known."""
    known = [size for size in sizes if size is not None]
    return max(known) if len(known) == len(sizes) else None


def _movable_for_all(known: Sequence[Places]) -> Places:
    """The places that every micro-batch can move: the size of an output can decide whether it has memory of its own or
    is a view."""
    return tuple(place for place in known[0] if all(place in places for places in known))


def join_facts(
    probed: Sequence[tuple[StageFacts, ...]], known: Iterable[tuple[StageFacts, ...]] = ()
) -> tuple[StageFacts, ...]:
    """The stages' facts by which the tape can run each of several micro-batches. ``probed``: those of each one;
    ``known``: those of all that were probed so far, of which some may take other ways through the model."""
    joined = []
    every = [*probed, *(facts for facts in known if [f.site for f in facts] == [f.site for f in probed[0]])]
    for stage, same in enumerate(zip(*probed, strict=True)):
        facts = replace(
            same[0],
            offload=_movable_for_all([f.offload for f in same]),
            trains=any(f.trains for f in same),
            reachable=any(f.reachable for f in same),
            last=last_of_all([f.last for f in same]),
            **{name: tuple(dict.fromkeys(x for f in same for x in getattr(f, name))) for name in _OF_ANY},
            **{n: tuple(dict.fromkeys(x for facts in every for x in getattr(facts[stage], n))) for n in _OF_PLACES},
        )
        joined.append(facts)
    return tuple(joined)


@dataclass(frozen=True, kw_only=True)
class Probed:
    """Results of the probe for one shape of micro-batch. ``times``: only where there is a machine to predict for.
    ``flops``: of the model, forward and backward, without what is computed again; ``tokens``, ``nbytes``: of the
    micro-batch; ``moved``: its shapes as it is on the device, in the compute dtype; ``carried``: as of
    ``Learned``.
    """

    stages: tuple[Stage, ...]
    facts: tuple[StageFacts, ...]
    times: StageTimes | None
    flops: int
    tokens: int
    nbytes: int
    moved: batch.Shapes
    handed: HandedOn
    carried: str | None


def check_probed(
    probed: Sequence[Probed], stages: Sequence[Stage], asked: WrapArguments, count: int, *, train: bool
) -> None:
    """Look at what the probe has found of ``count`` micro-batches, with their ``stages``, before a plan is made.

    Raises:
        ModelError: the schedule that is ``asked`` for would change the numbers, or cannot be; or nothing trains.
    """
    carried = next((p.carried for p in probed if p.carried is not None), None)
    if carried is not None and count > 1 and asked.schedule != "horizontal":
        raise ModelError(carried)
    if not train:
        return
    if not any(stage.gradients for stage in stages):
        raise ModelError(NOTHING_TRAINS)
    if not isinstance(asked.schedule, Schedule):
        check_split(stages, asked.schedule)
    if asked.recompute is False and all(stage.graph is None for stage in stages):
        raise ModelError(NO_GRAPHS)


def slowest_of(times: Sequence[StageTimes | None]) -> StageTimes | None:
    """Times of the stages that cover each of several micro-batches."""
    known = [t for t in times if t is not None]
    if not known:
        return None
    of_weights = [t.weights for t in known]  # of a shape whose backwards are run as a whole there are none
    return StageTimes(
        forward=tuple(max(same) for same in zip(*(t.forward for t in known), strict=True)),
        backward=tuple(max(same) for same in zip(*(t.backward for t in known), strict=True)),
        weights=tuple(max(same) for same in zip(*of_weights, strict=True)) if all(of_weights) else (),
        again=tuple(min(same) for same in zip(*(t.again for t in known), strict=True)),
        orthogonal=min((t.orthogonal for t in known if t.orthogonal is not None), default=None),
    )
