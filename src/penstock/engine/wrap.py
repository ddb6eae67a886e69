"""``wrap``: the settings of an engine, checked, and the engine made of them."""

import logging
import math
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from penstock.config import Budget, GradDtype, Precision
from penstock.engine import start
from penstock.engine.arguments import check_arguments
from penstock.engine.device import resolve_device
from penstock.engine.engine import Engine
from penstock.engine.start import WeightSource
from penstock.engine.turns import alone
from penstock.errors import ConfigError
from penstock.hardware.machine import DeviceKind, Machine
from penstock.hardware.profiles import check_device, find_profile, on_directories
from penstock.optim.spec import OptimizerSpec
from penstock.planner.means import with_pinned_gradients
from penstock.schedule.check import check
from penstock.schedule.ir.ops import Schedule
from penstock.store.owner import RUN_FILE, Owner, owner_in
from penstock.tape.guard import check_unguarded
from penstock.tape.passage import LossFn

log = logging.getLogger("penstock")


def wrap(
    model: nn.Module,
    *,
    optimizer: OptimizerSpec,
    budget: Budget,
    precision: Precision | None = None,
    schedule: Literal["vertical", "horizontal"] | Schedule = "vertical",
    clip_grad_norm: float | None = 1.0,
    device: torch.device | str | None = None,
    blocks: Sequence[nn.Module] | None = None,
    loss_fn: LossFn | None = None,
    seed: int = 0,
    io_threads: int = 4,
    overlap: bool = True,
    plan: Machine | Literal["auto"] | None = "auto",
    speculate: bool | None = None,
    delay: float | None = None,
    grad_dtype: GradDtype | None = None,
    compile: bool | str = False,  # noqa: A002  torch's word
    weights: WeightSource | None = None,
    init: bool = False,
    run: str | Path | None = None,
) -> Engine:
    """Put a model's state where the budget says and return the engine that trains it.

    Args:
        model: any module with repeated blocks, on the CPU or on the meta device (then it is initialised group by group
            with its own initialisation). Its parameters own no memory afterwards; the engine holds them.
        optimizer: ``penstock.AdamW(...)``, ``Adam``, ``SGD`` or ``Lion``. Its settings hold also where a store is
            continued; a snapshot brings its own.
        budget: memory per tier, and the directories of the disk tier. A directory that holds a store of the same
            model is continued from its last step. With directories all that is trained lives there and every step is
            durable, unless the budget says otherwise; without any, a kill costs what was not saved (``Engine.save``).
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``; None: bf16 on a GPU, fp32 on the CPU.
        schedule: a family, or a schedule of your own, which is checked.
        clip_grad_norm: largest global gradient norm; None: no clipping, and the optimizer overlaps with the backward.
        device: ``"cpu"`` or ``"cuda"``; None: the GPU if there is one, else the CPU.
        blocks: the submodules to run one by one; None: found.
        loss_fn: from (model, micro-batch) to a mean loss; None: ``model(**micro_batch).loss``. Micro-batches count by
            their labels that are not -100 (a share that a 16-bit loss rounds to 16 bits). Whether the first label of
            a row counts, too, is found out in the first pass, from the targets that torch's losses are called with
            (``StepStats.labels``); where that cannot be seen, ``step`` wants ``loss_weights``.
        seed: of dropout and of initialisation.
        io_threads: threads that help with disk transfers, 1 to 32. Changes no result.
        overlap: False runs everything one op at a time: the oracle.
        plan: the machine to plan for. ``"auto"``: the profile that ``penstock doctor`` has stored for this machine
            with this kind of device and the budget's directories. With a profile, placement, chunk size and depths are
            those that are predicted to be fastest, and ``Engine.prediction`` tells what was predicted. Without one
            (None, or none is stored) state is placed by an order of preference, and nothing is predicted. Changes no
            result.
        speculate: whether optimizer steps begin before the norm of all gradients is known, where the state is on disk
            and a step can be dropped. One whose norm is over ``clip_grad_norm`` is then run a second time. None: as the
            plan sees fit. Changes no result.
        delay: the share of the optimizer's work, 0 to 1, that is done during the next step's forward; what is pending
            is done before the state is looked at, saved or evaluated. A run that is killed goes on from the step before
            the last one then. None: as the plan sees fit. Changes no result.
        grad_dtype: ``"fp32"`` or ``"bf16"``: the dtype that the gradient of a step, summed in fp32 over everything, is
            rounded to before its norm and the optimizer. In bf16 half as many bytes go to host memory and wait there,
            where the plan finds that this is faster. Changes results, but not with the plan. None: fp32.
        compile: whether blocks are compiled by ``torch.compile``, all of a class at once; a text names its backend.
            Each shape of micro-batch is compiled for itself, so give few. Changes results (compiled code rounds
            elsewhere), but not with the schedule. Plans count the memory that blocks take without it.
        weights: where the values of a model on the meta device come from, such as ``penstock.hf.load(folder).weights``,
            which streams the shards of a folder. Not read where a store is continued. None: the model's own values, or
            on the meta device its own initialisation.
        init: whether a model whose folder's weights are waiting (``penstock.hf.load``) initialises itself instead.
            Without this, and without ``weights``, it is refused.
        run: the folder of a run of ``penstock train`` whose state is in the budget's directories, to go on with it. A
            store belongs to its run: nobody else may open it. None: the store belongs to no run.

    Raises:
        ConfigError, BudgetError, ModelError, StoreError: see their messages.
    """
    check_arguments(locals())  # before anything else has a name here
    if clip_grad_norm is not None and not (clip_grad_norm > 0 and math.isfinite(clip_grad_norm)):
        raise ConfigError(f"clip_grad_norm={clip_grad_norm!r}: must be a positive number, or None for no clipping")
    if not isinstance(schedule, Schedule) and schedule not in ("vertical", "horizontal"):
        raise ConfigError(f"schedule={schedule!r}: must be 'vertical', 'horizontal' or a penstock.Schedule")
    if not 1 <= io_threads <= 32:
        raise ConfigError(f"io_threads={io_threads}: must be at least 1 and at most 32")
    if plan is not None and plan != "auto" and not isinstance(plan, Machine):
        raise ConfigError(f"plan={plan!r}: must be 'auto', a penstock.hardware.machine.Machine or None")
    if weights is not None and not start.built_on_meta(model):
        raise ConfigError("weights has no effect: the model has values already. Build it on the meta device")
    _check_init(model, weights, init=init)
    where = resolve_device(device)
    if precision is None:
        precision = "fp32" if where.type == "cpu" else "bf16"
    if budget.gradients is not None and clip_grad_norm is None and precision != "fp16" and not delay:
        raise ConfigError(
            f"budget.gradients={budget.gradients!r} has no effect: without clip_grad_norm no gradient waits for a "
            "norm. Leave it out"
        )
    speculate = with_pinned_gradients(speculate, delay, budget)
    if not isinstance(schedule, Schedule):  # which says itself where state lives
        budget = budget.by_default(precision)
    budget = budget.with_pins(precision)
    if not budget.disk_paths and budget.durability is None:
        _say_that_nothing_is_kept()
    if isinstance(schedule, Schedule):
        check(schedule)
    make = partial(
        Engine,
        model,
        optimizer=optimizer,
        budget=budget,
        precision=precision,
        schedule=schedule,
        clip_grad_norm=clip_grad_norm,
        device=where,
        blocks=blocks,
        loss_fn=loss_fn or _model_loss,
        seed=seed,
        io_threads=io_threads,
        overlap=overlap,
        machine=_machine(plan, where, budget),
        speculate=speculate,
        delay=delay,
        grad_dtype=grad_dtype or "fp32",
        compile=("inductor" if compile is True else compile) or None,
        weights=weights,
        owner=None if run is None else _owner(Path(run)),
    )
    with alone(model, "this model"):
        check_unguarded(model)
        return make()


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


def _owner(run: Path) -> Owner:
    owner = owner_in(run)
    if owner is None:
        raise ConfigError(
            f"run={str(run)!r} is not the folder of a run: it has no {RUN_FILE}, which penstock train writes"
        )
    return owner


@cache
def _say_that_nothing_is_kept() -> None:
    """Once in a process: that is how a library is used, and what calls it may save by itself."""
    log.warning(
        "state is in memory alone (no budget.disk): a kill costs what was not saved by engine.save "
        "(budget.durability='none' says that this is meant)"
    )


def _machine(plan: Machine | Literal["auto"] | None, device: torch.device, budget: Budget) -> Machine | None:
    """The machine to plan for, which computes on the kind of device that the run does, on the budget's directories."""
    if plan is None:
        return None
    kind: DeviceKind = "cpu" if device.type == "cpu" else "cuda"
    if plan == "auto":
        return find_profile(budget.disk_paths, kind=kind)
    check_device(plan, kind)
    return on_directories(plan, budget.disk_paths)


def _model_loss(model: nn.Module, micro_batch: Mapping[str, Any]) -> torch.Tensor:
    loss = model(**micro_batch).loss
    if loss is None:
        raise ConfigError("the model returned no loss: give micro-batches with 'labels', or pass loss_fn to wrap()")
    assert isinstance(loss, torch.Tensor)
    return loss
