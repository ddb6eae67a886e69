"""Settings of a step, the same in the file, in flags, in ``wrap``, in other libraries' loops and in plans.

A new setting of steps is one field here, with its row in the table and its check. Everything that takes a step's
settings takes these classes, or a class of its own that adds to them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from penstock.config.budget import Budget, GradDtype, Precision
from penstock.config.checked import check_fields
from penstock.errors import ConfigError

StreamedFamily = Literal["vertical", "horizontal"]
"""Orders of a schedule in which a rank streams all blocks: block by block, or micro-batch by micro-batch."""

Family = Literal[StreamedFamily, "1f1b", "interleaved-1f1b", "zero-bubble"]
"""Orders of a schedule that the planner makes: these; or of the ranks of a pipeline, forwards and backwards of one
micro-batch at a time in turn, or with backwards in two parts."""

IN_TURN: Final[tuple[Family, ...]] = ("1f1b", "interleaved-1f1b", "zero-bubble")
"""Orders that only the ranks of a pipeline have."""

IN_ONE_PIECE: Final[tuple[Family, ...]] = ("1f1b", "zero-bubble")
"""Orders of these with the blocks of each rank one behind the other in the model."""

SPLIT: Final[tuple[Family, ...]] = ("zero-bubble",)
"""Orders of these with backwards in two parts, where they can be."""

ZeroStage = Literal[0, 1, 2, 3]
"""Stage of ZeRO: the tensors that several ranks have parts of."""

SyncBuffers = Literal["mean", "first", "own"]
"""Whose values of the model's buffers ranks go on with after a step."""

STRANDS = 1024
"""The most strands that make sense: nobody has more ranks."""
_DEFAULT: Mapping[str, Precision] = {"cpu": "fp32", "cuda": "bf16"}


def parts_of(stage: ZeroStage | None, ranks: int) -> int:
    """The number of parts that so many ranks cut the state into, of which each has one; 1: each has all of it."""
    return 1 if stage == 0 else ranks


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """Settings of a step's streams: which work may overlap, and what crosses between device and host.

    | field | meaning |
    |---|---|
    | ``grad_dtype`` | ``fp32``, or ``bf16``: each step's gradient is rounded to it, once, before norm and optimizer.
    Half as many bytes then go to host memory and wait there, where that is faster. Changes results, but not with the
    plan |
    | ``delay`` | share of each group's chunks that steps in the next step's forward, 0 to 1, so that a kill costs up to
    one step more. Changes no result; None: the plan chooses |
    | ``strands`` | number of strands that a step's gradients are summed in, each over a share of the micro-batches;
    they are then added up in pairs. Changes results, but not with the number of ranks: a power of two of them that is
    not above it gives the same bits. Kept in the store; None: that of the store, or as many as there are ranks |
    | ``stage`` | stage of ZeRO (arXiv 1910.02054): what several ranks have parts of. 0: nothing, each has all of the
    state on its own drives and in its own memory; 1, 2: state, gradients, and weights between steps, which are gathered
    once a step and stay on the device; 3: weights too, which are gathered for each use. One process has all of
    everything. Changes no result; None: the plan chooses 2 or 3 |
    | ``sync_buffers`` | what ranks go on with where a forward changes buffers of the model, as BatchNorm does its
    running statistics: after each step all with the ``mean`` of all ranks' values, or with those of the ``first``, as
    DistributedDataParallel's ``broadcast_buffers`` does; or each with its ``own``, as without that. None: such a model
    is refused on several ranks. One process has its own |
    | ``deal`` | number of blocks that each rank of a pipeline has, in the order of ranks, as ``penstock plan --hosts``
    finds it for hosts that differ. Kept in the store. Changes no result; None: that of the store, or as many on each,
    but fewer on the first, which has the ends |
    | ``recompute`` | whether the backward of a block computes the block again: ``true``: always; ``false``: of no block
    whose graph can be kept, so that what autograd saves of all of them has to have room on the device. Changes no
    result; None: the plan keeps as many graphs as pay and have room, none if ``budget.activations`` is host or disk |
    | ``speculate`` | whether what is on disk steps before the gradients' norm is known; a step whose norm is over
    ``clip_grad_norm`` is run again. Changes no result; None: the plan chooses |
    """

    grad_dtype: GradDtype = "fp32"
    delay: float | None = None
    speculate: bool | None = None
    recompute: bool | None = None
    strands: int | None = None
    stage: ZeroStage | None = None
    sync_buffers: SyncBuffers | None = None
    deal: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_fields(self, of=StreamConfig)
        if self.deal is not None:
            object.__setattr__(self, "deal", tuple(self.deal))  # from Python it may be a list
        check_delay(self.delay)
        if self.strands is not None and (self.strands < 1 or self.strands > STRANDS):
            raise ConfigError(f"strands={self.strands}: must be from 1 to {STRANDS}")

    def parts(self, ranks: int) -> int:
        """The number of parts that so many ranks cut the state into."""
        return parts_of(self.stage, ranks)

    def steps_early(self, budget: Budget) -> bool | None:
        """``speculate``, of a run with this budget. Where the budget says where gradients wait, they are to wait."""
        return self.speculate if budget.gradients is None else bool(self.speculate)

    def check_with(self, budget: Budget) -> None:
        """Raises:
        ConfigError: settings of the step and of the budget contradict each other.
        """
        if self.recompute is False and budget.activations in ("host", "disk"):
            raise ConfigError(
                f"budget.activations={budget.activations!r} has no effect with recompute=False: the inputs of blocks "
                "that are not computed again stay on the device. Leave one out"
            )
        if budget.gradients is not None and self.speculate and not self.delay:
            raise ConfigError(
                f"budget.gradients={budget.gradients!r} has no effect with speculate=True: no gradient waits. Leave "
                "one out"
            )


def check_clip(limit: float | None) -> None:
    """Raises:
    ConfigError: gradients cannot be scaled down to this norm.
    """
    if limit is not None and not (limit > 0 and math.isfinite(limit)):
        raise ConfigError(f"clip_grad_norm={limit}: must be positive, or null (None) for no clipping")


def check_delay(delay: float | None, *, delays: bool = True) -> None:
    """``delays``: the schedule may be one that can delay steps.

    Raises:
        ConfigError: it cannot, or the delay is no share.
    """
    if delay is not None and not 0 <= delay <= 1:
        raise ConfigError(f"delay={delay:g}: must be from 0 to 1, or left out")
    if delay and not delays:
        raise ConfigError(f"delay={delay:g} needs schedule='vertical': others go to every block several times")


def fields_of(config: object, kind: type = StreamConfig) -> dict[str, Any]:
    """The fields of ``kind`` that a class which adds to it has, as keyword arguments of another one that does."""
    return {field.name: getattr(config, field.name) for field in fields(kind)}


@dataclass(frozen=True, kw_only=True)
class StepConfig(StreamConfig):
    """Settings of a step, with those that a library's own loop says itself.

    | field | meaning |
    |---|---|
    | ``precision`` | ``fp32``, ``bf16`` or ``fp16``; None: bf16 on a GPU, fp32 on the CPU |
    | ``clip_grad_norm`` | gradients are scaled down to this norm; None: off |
    """

    precision: Precision | None = None
    clip_grad_norm: float | None = 1.0

    def __post_init__(self) -> None:
        check_fields(self, of=StepConfig)
        super().__post_init__()
        check_clip(self.clip_grad_norm)
        if self.speculate is not None and not self.needs_norm:
            raise ConfigError(
                "speculate has no effect without clip_grad_norm or precision: fp16, as no step waits for a norm then: "
                "drop it, or set clip_grad_norm"
            )

    @property
    def needs_norm(self) -> bool:
        """True if the numbers of a step depend on the norm of all its gradients: clipping, or fp16's overflow."""
        return self.clip_grad_norm is not None or self.precision == "fp16"

    def precision_on(self, kind: Literal["cpu", "cuda"]) -> Precision:
        """The precision that counts, on a kind of device."""
        return self.precision or _DEFAULT[kind]

    def check_with(self, budget: Budget) -> None:
        super().check_with(budget)
        if budget.gradients is not None and not self.needs_norm and not self.delay:
            raise ConfigError(
                f"budget.gradients={budget.gradients!r} has no effect: without clip_grad_norm no gradient waits for a "
                "norm. Leave it out"
            )


def sharing(strands: int) -> tuple[int, ...]:
    """The numbers of ranks that can share so many strands, each with whole branches of their sum."""
    return tuple(strands >> n for n in reversed(range(strands.bit_length())) if not strands % (1 << n))


def check_pipeline(settings: StreamConfig, schedule: object, replan: bool | None, asked: str, beside: int) -> None:
    """Look at what several ranks may be asked for, and those of a pipeline may not. ``asked``: the words that ask for
    the pipeline; ``beside``: ranks that share what is one rank's in it.

    Raises:
        ConfigError: it is asked for.
    """
    for name, value, why in (
        ("schedule", schedule, "which go vertically, or in turn (1f1b)" if schedule == "horizontal" else ""),
        ("stage", settings.stage, _why_no_stage(settings.stage, beside)),
        ("sync_buffers", settings.sync_buffers, "whose blocks change no buffers" if settings.sync_buffers else ""),
        ("replan", replan, "which keep the plans that they have made" if replan else ""),
    ):
        if why:
            raise ConfigError(
                f"{name}={value!r} is not for the ranks of a pipeline ({asked}), {why}: leave it out, or let ranks "
                "share all state (without a pipeline)"
            )


def _why_no_stage(stage: ZeroStage | None, beside: int) -> str:
    if stage is None or (beside > 1 and stage > 0):
        return ""
    return "each of which has all of its own blocks" if beside == 1 else "of which each has a part of its blocks"


def check_in_turn(schedule: object) -> None:
    """Raises:
    ConfigError: it is an order of a pipeline, which is not asked for.
    """
    if schedule in IN_TURN:
        raise ConfigError(
            f"schedule={schedule!r} is an order of the ranks of a pipeline, and there is none: set pipeline (for "
            "wrap: mesh=penstock.torchrun_mesh(pp=N)), or give 'vertical' or 'horizontal'"
        )


def check_deal(deal: Sequence[int] | None, *, dealt: bool) -> None:
    """``dealt``: whether blocks are: the ranks are a pipeline.

    Raises:
        ConfigError: blocks are dealt, and there is no pipeline.
    """
    if deal is not None and not dealt:
        raise ConfigError(
            f"deal={list(deal)} says how many blocks each rank of a pipeline has, and there is none: leave it out"
        )


def check_not_compiled(schedule: object, compiled: object) -> None:
    """Raises:
    ConfigError: backwards are to be run in two parts, and are compiled.
    """
    if schedule in SPLIT and compiled:
        raise ConfigError(
            f"schedule={schedule!r} and compile: it runs a block's backward in two parts, and what is compiled is run "
            "as a whole. Leave compile out, or give '1f1b'"
        )


def check_recompute(recompute: bool | None, schedule: object, compiled: object, cp: int = 1) -> None:
    """Raises:
    ConfigError: it is said whether blocks are computed again, and all of them have to be.
    """
    if recompute is None:
        return
    for name, asked, why in (
        ("schedule", schedule if schedule in SPLIT else None, "whose backwards in two parts begin with the block"),
        ("compile", compiled, "as graphs of compiled blocks are not kept"),
        ("cp", cp if cp > 1 else None, "where attention waits for other ranks in the backward, too"),
    ):
        if asked:
            effect = "has no effect" if recompute else "cannot be"
            raise ConfigError(f"recompute={recompute} {effect} with {name}={asked!r}, {why}: leave recompute out")


def check_strands(strands: int, ranks: int) -> None:
    """Raises:
    ConfigError: so many ranks cannot share the strands, each with whole branches of their sum.
    """
    if ranks not in sharing(strands):
        raise ConfigError(
            f"strands={strands} with {ranks} rank{'s' * (ranks > 1)}: must be {ranks} times a power of two, so that "
            "each rank has whole branches of their sum (a pipeline counts as one)"
        )


def check_copies(copies: int, ranks: int, stage: ZeroStage | None = None) -> None:
    """Raises:
    ConfigError: so many ranks cannot have so many copies of the state, in that stage of ZeRO.
    """
    if copies == 1:
        return
    each, rest = divmod(ranks, copies)
    if rest or each < 2 or each & (each - 1):
        raise ConfigError(
            f"copies={copies} with {ranks} rank{'s' * (ranks > 1)}: each copy of the state is cut over as many ranks, "
            "2, 4, 8 or another power of two. Give as many copies as there are hosts, or leave copies out"
        )
    if stage == 0:
        raise ConfigError(
            f"copies={copies} with stage=0, which gives each rank a copy of the state: leave one of the two out"
        )
