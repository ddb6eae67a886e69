"""From micro-batches to what the model's stages are for them: each shape is probed once, and labels are looked at."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from penstock.engine import batch
from penstock.engine.interrupt import holding
from penstock.engine.labels import LabelCount
from penstock.engine.probed import Probed, within
from penstock.engine.resources import EngineResources
from penstock.engine.spans import SpanLabels
from penstock.engine.timing import orthogonal_rate, time_stages
from penstock.engine.visiting import VisitingWeights
from penstock.hardware.machine import Machine
from penstock.schedule.program import Program
from penstock.schedule.work import model_flops, shares_again
from penstock.shape.model import with_exchanges
from penstock.tape import trees
from penstock.tape.outline import Outline, outline_of
from penstock.tape.unequal import unequal_dtypes_told
from penstock.tape.waits import sentence

log = logging.getLogger("penstock")

MicroBatches = Mapping[batch.Shapes, Mapping[str, Any]]
"""A micro-batch of each shape."""

_MANY = 4
"""Changes of a model, but such that take the last one back, after which its user is told what they cost."""


class Probing:
    """Results of the probe so far, for training and for evaluation, and what is known of how labels count. All ranks
    come to each of its methods together, each with its own micro-batches."""

    def __init__(self, resources: EngineResources, *, make_room: Callable[[], None]) -> None:
        """``make_room``: called before a probe that comes unexpectedly: gives the memory of steps back."""
        self._shared = resources
        self._make_room = make_room
        self.labels = LabelCount() if resources.spans is None else SpanLabels(resources.ranks.cp)
        self.found: dict[bool, dict[batch.Shapes, Probed]] = {True: {}, False: {}}
        """all that is known of steps, and of evaluations"""
        self._outlines: dict[bool, Outline] = {}
        """the model's when that was probed, or as steps have left it"""
        self._last: dict[bool, tuple[Outline, dict[batch.Shapes, Probed]]] = {}
        """the outline from before the last change of the model, and what was found of that"""
        self._may_change_itself = True
        self._forgotten = 0
        self._waits: set[str] = set()  # what has been said of them

    def is_of_another(self, *, train: bool) -> bool:
        """True if this rank's model is another one than was probed, in its modules, their modes, hooks or switches, by
        which it may do, and need, something else."""
        outline = outline_of(self._shared.tape.model)
        return self._outlines.setdefault(train, outline) != outline

    def set_aside(self, *, train: bool) -> bool:
        """Set what was found aside, as the model of some rank is another one: those of all are probed again, together.
        True: each is as it was before the last change, and what was found then holds again."""
        outline, last = outline_of(self._shared.tape.model), self._last.get(train)
        self._last[train] = self._outlines[train], self.found[train]
        is_again = last is not None and last[0] == outline
        is_again = all(self._shared.ranks.gather_objects("model from before", is_again))
        self._outlines[train], self.found[train] = last if is_again and last is not None else (outline, {})
        if is_again:
            return True
        self._forgotten += 1
        if self._forgotten == _MANY:
            log.warning(
                "the model was changed between two steps for the %sth time, in its modules, modes, hooks or switches "
                "(True, False). Each time it is probed again, and a plan is made, which takes about as long as a few "
                "steps: hang up hooks once, and leave switches, if steps need not differ",
                _MANY,
            )
        return False

    def has_stepped(self) -> None:
        """A step is done. What its forwards have changed of the model by themselves was so when it was probed, too: it
        is no reason to probe it again."""
        if self._may_change_itself:
            outline = outline_of(self._shared.tape.model)
            self._may_change_itself = outline != self._outlines.get(True)
            if self._may_change_itself:
                self._outlines = {True: outline}

    def find(self, given: MicroBatches, machine: Machine | None, *, train: bool) -> dict[batch.Shapes, Probed]:
        """The results for those shapes that the others are within; in a pipeline for each that there is, but where
        calls are handed the same. ``machine``: that stages are timed on; None: they are not."""
        found = self.found[train]
        if self._shared.ranks.are_pipeline:
            known = {**given, **found}
            largest = [shape for shape in known if not within(shape, known, batch.handed_alike)]
            shapes = [shape for shape in largest if any(batch.handed_alike(shape, s) for s in given)]
        else:
            shapes = [s for s in given if not within(s, given)]
        with self._visiting() as weights:
            for shape in shapes:
                if shape not in found:
                    found[shape] = self._probe(given[shape], weights, machine, train=train)
        self._outlines[train] = outline_of(self._shared.tape.model)  # now: forwards may hang up hooks of their own
        self._may_change_itself |= train
        return {shape: found[shape] for shape in shapes}

    def look_at_labels(self, micro_batches: Sequence[Mapping[str, Any]]) -> None:
        """Find out how labels count, where that is unsure, as soon as a rank has a micro-batch that tells."""
        telling = self.labels.telling(micro_batches)
        # All ranks are unsure, or none is.
        if self.labels.unsure and any(self._shared.ranks.gather_objects("labels that tell", telling is not None)):
            self._make_room()
            with self._visiting() as weights:
                if telling is not None:
                    self._probe(telling, weights, None, train=False)

    def flops_of(self, micro_batches: Sequence[Mapping[str, Any]]) -> float:
        """FLOPs of a step of these micro-batches, which were probed. One that is smaller than the one that was counts
        in proportion to its tokens."""
        total = 0.0
        for mb in micro_batches:
            shape = batch.shapes(mb)
            known = self.found[True].get(shape) or next(
                found for other, found in self.found[True].items() if batch.covers(other, shape)
            )
            total += known.flops * batch.tokens(mb) / max(known.tokens, 1)
        return total

    @contextmanager
    def _visiting(self) -> Iterator[VisitingWeights]:
        """The weights for probes, in which all ranks take part. What one has learned of labels, then all know."""
        shared = self._shared
        weights = VisitingWeights(shared)
        with shared.tape.undo.after(weights.close):
            with nullcontext() if shared.spans is None else shared.spans.ulysses.by_itself(), holding(False):
                yield weights
            weights.ended()
        self.labels.agree(shared.ranks)

    def _probe(
        self, micro_batch: Mapping[str, Any], weights: VisitingWeights, machine: Machine | None, *, train: bool
    ) -> Probed:
        """Let the tape learn the model's stages, with weights brought to the device as they are touched, and time them
        when there is a machine to predict for.
        """
        shared, nbytes = self._shared, batch.nbytes(micro_batch, self._shared.arrays.dtype)
        micro_batch = self.labels.to_probe(micro_batch)
        fresh = partial(batch.to_device, micro_batch, shared.device, shared.arrays.dtype)
        inputs = fresh()
        moved, before = batch.shapes(inputs), trees.to_collect_in(inputs)
        with unequal_dtypes_told(shared.tape.model, shared.arrays.dtype):
            copies = weights.are_copies
            alone = shared.ranks.size == 1
            learned = shared.tape.probe(
                inputs, weights.load, weights.unload, all_copies=copies, train=train, alone=alone
            )
        batch.check_not_collected(before)
        del inputs, before
        self.labels.learn(micro_batch, learned.losses, learned.loss)
        waits = sentence(learned.waits)
        if waits is not None and waits not in self._waits:
            self._waits.add(waits)
            log.info("%s", waits)
        times = None
        if train and machine is not None:
            program = Program(groups=tuple(g.spec for g in shared.groups), stages=learned.stages)
            if shared.ranks.are_pipeline and shared.ranks.each == 1:
                # From here on all compute at once. Of pipelines beside each other each has shapes of its own to probe,
                # and neighbours bring weights together: there nobody may wait for all.
                shared.ranks.gather_objects("beginning of the times", None)
            times = time_stages(shared.tape, program, learned.facts, fresh, weights)
            times = replace(times, orthogonal=self._orthogonal, again=shares_again(learned.work))
            times = with_exchanges(times, learned.work, machine)  # nobody has waited for the others
        return Probed(
            stages=learned.stages,
            facts=learned.facts,
            times=times,
            flops=model_flops(learned.work),
            tokens=batch.tokens(micro_batch),
            nbytes=nbytes,
            moved=moved,
            handed=learned.handed,
            carried=learned.carried,
        )

    @cached_property
    def _orthogonal(self) -> float | None:
        """Rate at which matrices are made orthogonal, as in ``StageTimes``."""
        groups = self._shared.matrices.values()
        return orthogonal_rate([p for group in groups for _, pieces in group for p in pieces], self._shared.device)
