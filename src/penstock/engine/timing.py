"""Times each stage of a model: forward and backward of one micro-batch, once more after the probe.

The probe watches every operation and is slowed down by it. A pass of this runs the same stages as a step does, with
gradients added up, and nothing beside them.
"""

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from penstock.config.optimizer import NS_STEPS
from penstock.doctor.work import wait_for
from penstock.engine.visiting import VisitingWeights
from penstock.optim.orthogonal import orthogonalise
from penstock.schedule.matrices import Piece, orthogonal_flop
from penstock.schedule.program import Program, Stage
from penstock.shape.model import StageTimes
from penstock.tape.buffers import ModulesBefore
from penstock.tape.facts import StageFacts
from penstock.tape.tape import Tape


def time_stages(
    tape: Tape,
    program: Program,
    facts: tuple[StageFacts, ...],
    fresh: Callable[[], Mapping[str, Any]],
    visiting: VisitingWeights,
) -> StageTimes:
    """Seconds of every stage for the micro-batch that ``fresh`` makes, with its tensors on the device. Changes nothing
    of the model.

    Stages that are alike (the blocks of a transformer) count with their median, so that one interruption does not tell.
    A short pass is made several times, and the median counts: a slow spell of the machine does not tell, either, nor
    does a moment in which others who compute here stood still. The fastest would be one that few steps come up to.
    """
    timed = partial(_pass, tape, program, facts, fresh, visiting)
    if tape.compiled:  # what is compiled on the way is compiled once
        timed()
    began, passes = time.perf_counter(), [timed()]
    while (so_far := time.perf_counter() - began) < _SHORT and len(passes) < (_MANY if so_far < _BRIEF else _FEW):
        passes.append(timed())
    passes.sort(key=lambda times: sum(times.forward) + sum(times.backward))
    return passes[(len(passes) - 1) // 2]


def orthogonal_rate(matrices: Sequence[Piece], device: torch.device) -> float | None:
    """FLOP/s at which updates of such matrices are made orthogonal there, one after the other: the best of two passes
    over those that differ; None where there are none."""
    flop = seconds = 0.0
    generator = torch.Generator(device).manual_seed(0)
    for (count, rows, columns), times in Counter((p.count, p.rows, p.columns) for p in matrices).items():
        piece = Piece(dim=0, start=0, size=rows, count=count, rows=rows, columns=columns)
        update = torch.randn(count, rows, columns, dtype=torch.bfloat16, device=device, generator=generator)
        passes = [_seconds(device, partial(orthogonalise, update, [piece], NS_STEPS)) for _ in "12"]
        flop += times * orthogonal_flop(piece, NS_STEPS)
        seconds += times * min(passes)
    return flop / seconds if seconds else None


_FEW, _SHORT = 5, 2.0
"""passes that are made unless they take so many seconds"""
_MANY, _BRIEF = 16, 0.5
"""passes that are made as long as they take less"""


def _pass(
    tape: Tape,
    program: Program,
    facts: tuple[StageFacts, ...],
    fresh: Callable[[], Mapping[str, Any]],
    visiting: VisitingWeights,
) -> StageTimes:
    stages = program.stages
    forward, backward, weights = ([0.0] * len(stages) for _ in range(3))
    before = ModulesBefore(tape.model, generators=tape.generators.values(), places=tape.moving)
    on_gradient, sink = tape.on_gradient, _Sink(program, tape.device)

    def end() -> None:
        tape.on_gradient = on_gradient
        try:
            tape.finish()
        finally:
            before.put_back()

    with tape.undo.after(end):
        tape.on_gradient, tape.facts = sink, facts
        tape.begin(0, [fresh()], [1.0], stages=stages)
        for k, stage in enumerate(stages):
            # The epilogue runs backward at once, so it needs what its backward reads, too.
            reads = stage.forward_reads if k < len(stages) - 1 else (*stage.forward_reads, *stage.backward_reads)
            with visiting.there(reads):
                forward[k] = _seconds(tape.device, partial(tape.forward, k, 0))
        for k, stage in reversed(list(enumerate(stages[:-1]))):
            reads = (*stage.backward_reads, *stage.gradients)
            run = tape.backward if stage.split is None else tape.backward_inputs
            with visiting.there(reads):
                backward[k] = _seconds(tape.device, partial(run, k, 0))
            if stage.split is not None:
                weights[k] = _seconds(tape.device, partial(tape.backward_weights, k, 0))
                backward[k] += weights[k]
    return StageTimes(
        forward=_typical(stages, program, forward),
        backward=_typical(stages, program, backward),
        weights=_typical(stages, program, weights) if any(weights) else (),
    )


def _seconds(device: torch.device, work: Callable[[], None]) -> float:
    wait_for(device)
    began = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - began


def _typical(stages: Sequence[Stage], program: Program, seconds: Sequence[float]) -> tuple[float, ...]:
    """The median over stages that are alike: calls with the same sizes on as many parameters."""

    def kind(stage: Stage) -> tuple[object, ...]:
        if stage.kind == "segment":
            return (stage.index,)
        sizes = tuple(program.groups[g].numel for g in stage.forward_reads)
        return (sizes, stage.activation, stage.gradient, stage.forward_peak, stage.backward_peak)

    alike: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for stage, value in zip(stages, seconds, strict=True):
        alike[kind(stage)].append(value)
    return tuple(statistics.median(alike[kind(stage)]) for stage in stages)


class _Sink:
    """Adds gradients up as a step does, into memory that nobody reads."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self._flat = torch.zeros(max(g.trainable for g in program.groups), dtype=torch.float32, device=device)

    def __call__(self, parameter: torch.nn.Parameter, stage: int, gradient: torch.Tensor) -> None:
        self._flat[: gradient.numel()].view_as(gradient).add_(gradient)
