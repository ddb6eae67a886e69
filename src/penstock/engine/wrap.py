"""``wrap``: the settings of an engine, checked, and the engine made of them."""

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import distributed as dist
from torch import nn

from penstock.config import Budget, Precision
from penstock.config.meanings import model_and
from penstock.config.step import check_deal, check_in_turn, check_pipeline, check_recompute
from penstock.documents.typed import hints_of, shown
from penstock.engine import dropped, start
from penstock.engine.arguments import WrapArguments, check_model
from penstock.engine.device import check_room, kind_of, resolve_device
from penstock.engine.engine import Engine
from penstock.engine.interrupt import holding
from penstock.engine.profile import profile_of, with_link
from penstock.engine.resources import open_resources
from penstock.engine.start import WeightSource
from penstock.engine.turns import alone
from penstock.errors import ConfigError, ModelError
from penstock.hardware.machine import Machine
from penstock.hardware.profiles import check_device, on_directories
from penstock.hardware.sharing import why_unknown
from penstock.optim.facade import rate_name
from penstock.optim.precision import DTYPES, say_what_is_left
from penstock.planner.fit import SizeError
from penstock.ranks.group import Ranks
from penstock.ranks.process_groups import join
from penstock.ranks.start import started_together
from penstock.schedule.check import check
from penstock.schedule.ir.ops import Schedule
from penstock.store.owner import RUN_FILE, Owner, owner_in
from penstock.tape.guard import check_unguarded
from penstock.tape.parameters import refuse_left_over

log = logging.getLogger("penstock")


@model_and(WrapArguments)
def wrap(model: nn.Module, asked: WrapArguments) -> Engine:
    """Put a model's state where the budget says and return the engine that trains it.

    ``model``: any module with repeated blocks, on the CPU or on the meta device (then it is initialised group by group
    with its own initialisation). Its parameters own no memory afterwards; the engine holds them.

    Raises:
        ConfigError, BudgetError, ModelError, StoreError: see their messages.
    """
    return wrap_among(None, model, asked)


def wrap_among(
    joined: Ranks | None, model: nn.Module, asked: WrapArguments, make_room: Callable[[], None] | None = None
) -> Engine:
    """``wrap`` for ranks that have ``joined`` already; None: those of ``asked.mesh``. The engine ends what they do
    together. ``make_room``: removes the stores that are there, once the arguments have been checked; None: they are
    gone on with."""
    check_model(model)
    if asked.weights is not None and not start.built_on_meta(model):
        raise ConfigError("weights has no effect: the model has values already. Build it on the meta device")
    _check_init(model, asked.weights, init=asked.init)
    device = resolve_device(asked.device)
    precision = asked.precision_on(kind_of(device))
    own = isinstance(asked.schedule, Schedule)
    budget = asked.budget if own else asked.budget.by_default()  # a schedule says itself where state lives
    budget = budget.with_pins()
    if not budget.disk_paths and budget.durability is None:
        _say_that_nothing_is_kept()
    if joined is None and asked.mesh is None and (count := started_together()) > 1:
        log.warning(
            "this is one of %d processes, and wrap was given no mesh: it trains by itself, as do the others "
            "(together: mesh=penstock.torchrun_mesh())",
            count,
        )
    owner = None if asked.run is None else _owner(Path(asked.run))
    _be_known_to_searches()
    dropped.settle()
    with alone(model, "this model"):
        check_unguarded(model)
        ranks = join(asked.mesh, device) if joined is None else joined
        try:
            with holding(False), ranks.together("wrap"):
                refuse_left_over(model)
                check_room(device, budget, model)
                _check_statistics(model, device, precision)
                _check_synchronised(model)
                if asked.precision is None and ranks.rank == 0:
                    say_what_is_left(model, precision)
                check_deal(asked.deal, dealt=ranks.are_pipeline)
                if not ranks.are_pipeline:
                    check_in_turn(asked.schedule)
                if ranks.size > 1:
                    ranks.jointly("what ranks cannot do", partial(_check_shared, asked, ranks))
                    ranks.agree_on_each(_said(asked, budget, precision))
                elif isinstance(asked.schedule, Schedule):
                    check(asked.schedule)  # that of several ranks when it is known what they share
                rate = rate_name(asked.optimizer, precision)
                machine = _machine_of_all(asked.plan, device, budget, rate, ranks)
                if asked.replan and machine is None:
                    raise ConfigError(
                        "replan=True, and nothing is predicted here that steps could differ from: see what the line "
                        "before says is missing, or leave replan out"
                    )
                budget = budget.of_rank(ranks.rank, ranks.size, ranks.hosts)
                settings = replace(asked, budget=budget, precision=precision, loss_fn=asked.loss_fn or _model_loss)
                resources = open_resources(
                    model, settings, device=device, machine=machine, owner=owner, ranks=ranks, make_room=make_room
                )
                return Engine(resources)
        except BaseException:
            ranks.close()
            raise


def _check_shared(asked: WrapArguments, ranks: Ranks) -> None:
    """Refuse what several ranks cannot do, or not yet."""
    if asked.stage == 0 and ranks.copies > 1:
        raise ConfigError(
            f"stage=0 gives each rank a copy of the state, and the mesh has {ranks.copies} copies that ranks share: "
            "give one of the two"
        )
    check_recompute(asked.recompute, asked.schedule, asked.compile, ranks.cp)
    if ranks.are_pipeline:
        check_pipeline(asked, asked.schedule, asked.replan, f"{ranks.stages} in each", ranks.each)
    if isinstance(asked.schedule, Schedule) and ranks.cp > 1:
        raise ConfigError(
            f"schedule={shown(asked.schedule)} is not there yet for ranks that share each sequence (cp={ranks.cp}): "
            "give 'vertical' or 'horizontal'"
        )


def _check_statistics(model: nn.Module, device: torch.device, precision: Precision) -> None:
    """Refuse what torch cannot compute: its batch norms on a processor want running statistics in the dtype of their
    weights, or without weights in fp32, and here they stay as they are."""
    kinds, computes = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), DTYPES[precision]
    for name, norm in model.named_modules() if device.type == "cpu" else ():
        if not isinstance(norm, kinds) or norm.running_mean is None:
            continue
        kept = norm.running_mean.dtype
        if kept is not computes and (norm.affine or kept is not torch.float32):
            raise ConfigError(
                f"precision={precision!r}: {name or 'the model'} is a batch norm, which torch computes on a processor "
                f"only with weights in the dtype of its running statistics, {str(kept).removeprefix('torch.')}: "
                + ("" if kept is torch.float32 else "call model.float() and ")
                + "give precision='fp32'"
            )


def _check_synchronised(model: nn.Module) -> None:
    """Refuse batch norms that wait for other processes within a forward: nothing sees to it that all ranks run a block
    equally often."""
    for name, module in model.named_modules() if dist.is_available() and dist.is_initialized() else ():
        if isinstance(module, nn.SyncBatchNorm):
            raise ModelError(
                f"{name or 'the model'} is a SyncBatchNorm, which waits for the other processes whenever it runs, and "
                "here blocks run again (in probes, for a backward), not equally often on each rank: give the model "
                "BatchNorm (without convert_sync_batchnorm), which normalises each micro-batch by itself; sync_buffers "
                "says what becomes of its running statistics"
            )


def _said(asked: WrapArguments, budget: Budget, precision: Precision) -> dict[str, Any]:
    """The arguments that decide about the numbers and the plan, and so have to be the same on all ranks."""
    own = {"budget", "loss_fn", "device", "mesh", "weights", "blocks", "run", "plan"}
    settings = {key: repr(getattr(asked, key)) for key in sorted(hints_of(WrapArguments).keys() - own)}
    tiers = {f"budget.{key}": repr(getattr(budget, key)) for key in sorted(hints_of(Budget))}
    return settings | tiers | {"precision": precision}


def _check_init(model: nn.Module, weights: WeightSource | None, *, init: bool) -> None:
    """Refuse to train from random numbers where nobody has said so."""
    waiting = start.waiting_weights(model) if start.built_on_meta(model) else None
    if waiting is not None and weights is None and not init:
        raise ConfigError(
            f"the model has no values, and {waiting} are waiting for it: pass weights=loaded.weights, or init=True to "
            "train from random values"
        )
    if init and (waiting is None or weights is not None):
        raise ConfigError(
            "init has no effect: "
            + ("weights are given" if weights is not None else "no folder's weights are waiting for this model")
            + ". Leave it out"
        )
    unknown = None if weights is None else start.not_given(model, weights)
    if unknown is not None:
        raise ConfigError(
            f"weights has no values for {unknown!r}, which would begin at random. To a model with adapters (peft) give "
            "weights=penstock.hf.lora.BaseWeights(loaded.weights); to another module around a loaded model, a source "
            "that knows its parameters by the names that they have there"
        )


def _owner(run: Path) -> Owner:
    owner = owner_in(run)
    if owner is None:
        raise ConfigError(
            f"run={str(run)!r} is not the folder of a run: it has no {RUN_FILE}, which penstock train writes"
        )
    return owner


def _be_known_to_searches() -> None:
    """Have accelerate's search for a batch size know a budget that is too small, where this may be within one."""
    if "accelerate.utils.memory" in sys.modules:
        from penstock.compat.accelerate import take_for_no_memory

        take_for_no_memory(SizeError)


@cache
def _say_that_nothing_is_kept() -> None:
    """Once in a process: that is how a library is used, and what calls it may save by itself."""
    log.warning(
        "state is in memory alone (no budget.disk): a kill costs what was not saved by engine.save "
        "(budget.durability='none' says that this is meant)"
    )


def _machine_of_all(
    plan: Machine | Literal["auto"] | None, device: torch.device, budget: Budget, optimizer: str, ranks: Ranks
) -> Machine | None:
    """The machine that all ranks are on, as rank 0 knows it."""
    found = _machine(plan, device, budget, optimizer, ranks) if ranks.rank == 0 else None
    found = with_link(found if plan == "auto" else None, ranks, budget.disk_paths, device) or found
    unknown = None if found is None else why_unknown(found, ranks.size, ranks.hosts, ranks.copies)
    if ranks.size > 1 and unknown is not None:
        log.warning("nothing is predicted: %s", unknown)
        found = None
    return ranks.gather_objects("machine", found)[0]


def _machine(
    plan: Machine | Literal["auto"] | None, device: torch.device, budget: Budget, optimizer: str, ranks: Ranks
) -> Machine | None:
    """The machine to plan for, which computes on the kind of device that the run does, on the budget's directories."""
    if plan is None:
        return None
    if plan == "auto":
        return profile_of(budget.disk_paths, device, optimizer, ranks.size // ranks.hosts)
    check_device(plan, kind_of(device))
    return on_directories(plan, budget.disk_paths)


def _model_loss(model: nn.Module, micro_batch: Mapping[str, Any]) -> torch.Tensor:
    output = model(**micro_batch)
    loss = getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(
            "the model returned no loss: give micro-batches with 'labels', or pass loss_fn to wrap(), as what it "
            f"returned is a {type(output).__name__} without a tensor in .loss"
        )
    return loss
