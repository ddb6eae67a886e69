"""One type of model in bf16: a step by the engine, against the model that ``from_pretrained`` gives in bf16.

Parameters that it keeps in fp32 are rounded as here, where all have one precision; a model that does not compute with
that is to be refused. The losses of the step are those of the plain model. Gradients are added in another order here
(in fp32, and where a tensor is read several times), so that they differ by rounding, which is large in bf16: the engine
may be as far from the plain model as that is from the same model in fp32.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

import penstock
from penstock.engine.batch import LABELS
from tests.sweep.inputs import OWN_LOSS, MicroBatch, loss_of
from tests.sweep.trial import Job, NotTriedError, Result, build_with_forms, called_blocks, line_of, quiet, steps_of

BF16 = torch.bfloat16
RATE = 64.0
"""of SGD: a parameter moves by so many times its gradient, which is then known from it to fp32's rounding"""
LOSSES = 1e-6
"""relative distance of losses: the plain one is the mean of two in Python"""

Gradients = Mapping[str, torch.Tensor]


def run(job: Job, disk: Path) -> Result:
    """Take a step with a type of model by the engine and by torch, both in bf16. ``disk``: an empty folder."""
    about: dict[str, Any] = asdict(job)
    try:
        model, forms = build_with_forms(job)
        micro_batches = steps_of(forms)[0][:2]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(BF16))
        true = _plain(copy.deepcopy(model), micro_batches)
        rounded = _loaded(model, disk)
        plain = _plain_in_bf16(rounded, micro_batches)
    except NotTriedError as error:
        return Result(**about, verdict="skipped", reason=str(error))
    except Exception as error:  # noqa: BLE001  transformers raises everything for what it cannot compute
        return Result(**about, verdict="skipped", reason=f"plain training fails: {line_of(error)}")
    if isinstance(plain, tuple) and not math.isfinite(plain[0]):
        return Result(**about, verdict="skipped", reason="plain training is not finite")
    about["inputs"] = forms.name
    for blocks in _ways(model, micro_batches):
        try:
            found = _by_engine(copy.deepcopy(model), micro_batches, blocks)
        except (penstock.ModelError, penstock.ConfigError, penstock.BudgetError) as error:
            if "blocks=" in str(error):
                continue
            return Result(**about, verdict="refused", reason=line_of(error))
        except Exception as error:  # noqa: BLE001  that is what is looked for
            return Result(**about, verdict="crashed", reason=line_of(error))
        if isinstance(plain, str):
            return Result(**about, verdict="skipped", reason=f"plain training fails: {plain}")
        return _compared(found, plain, true, about | {"given": "" if blocks is None else "blocks"})
    return Result(**about, verdict="refused", reason="no blocks that it can be run by")


def _ways(model: nn.Module, micro_batches: Sequence[MicroBatch]) -> Iterator[list[str] | None]:
    """The blocks to give, by name: none, and those that someone would name."""
    yield None
    yield from called_blocks(model, micro_batches)


def _compared(
    found: tuple[float, Gradients],
    plain: tuple[float, Gradients],
    true: tuple[float, Gradients],
    about: Mapping[str, Any],
) -> Result:
    if not math.isclose(found[0], plain[0], rel_tol=LOSSES):
        return Result(**about, verdict="differs", reason=f"loss {found[0]} for {plain[0]}")
    nothing = {name: torch.zeros(gradient.shape) for name, gradient in true[1].items()}
    allowed = _distance(plain[1], true[1]) + 2.0**-8 * _distance(true[1], nothing)
    error = _distance(found[1], plain[1]) / allowed
    reason = "" if error <= 1.0 else f"gradients are {error:.3g} times further away than rounding"
    return Result(**about, verdict="equal" if error <= 1.0 else "differs", error=round(error, 3), reason=reason)


def _distance(found: Gradients, wanted: Gradients) -> float:
    """L2, over all parameters."""
    return math.sqrt(sum(float((gradient - wanted[name]).double().square().sum()) for name, gradient in found.items()))


def _loaded(model: Any, folder: Path) -> Any:
    """The model as transformers loads it in bf16, all its parameters, too. What is frozen as it is built stays so."""
    model.save_pretrained(folder)
    loaded = type(model).from_pretrained(folder, dtype=BF16).train()
    trains = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in loaded.named_parameters():
        parameter.requires_grad_(trains[name]).data = parameter.detach().to(BF16)
    quiet(loaded)
    loaded.config.use_cache = False  # as in a step: keys that pass through a cache lie otherwise, for other last bits
    return loaded


def _rounded(micro_batch: MicroBatch) -> MicroBatch:
    return {
        name: value.to(BF16)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and name not in LABELS
        else value
        for name, value in micro_batch.items()
    }


def _plain_in_bf16(model: nn.Module, micro_batches: Sequence[MicroBatch]) -> tuple[float, Gradients] | str:
    """As ``_plain``; in words, torch's error where it refuses what the model computes."""
    try:
        return _plain(model, [_rounded(micro_batch) for micro_batch in micro_batches])
    except RuntimeError as error:
        return line_of(error)


def _plain(model: nn.Module, micro_batches: Sequence[MicroBatch]) -> tuple[float, Gradients]:
    """The mean loss of micro-batches, and the gradients of all parameters, added in fp32."""
    total = 0.0
    gradients = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    for micro_batch in micro_batches:
        model.zero_grad()
        loss = loss_of(model, micro_batch)
        (loss / len(micro_batches)).backward()
        total += float(loss.detach()) / len(micro_batches)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[name] += parameter.grad.float()
    return total, gradients


def _by_engine(
    model: nn.Module, micro_batches: Sequence[MicroBatch], blocks: Sequence[str] | None
) -> tuple[float, Gradients]:
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with penstock.wrap(
        model,
        optimizer=penstock.SGD(lr=RATE),
        budget=penstock.Budget(device="1GiB", host="1GiB", durability="none"),
        precision="bf16",
        device="cpu",
        clip_grad_norm=None,
        plan=None,
        blocks=None if blocks is None else [model.get_submodule(name) for name in blocks],
        loss_fn=loss_of if type(model).__name__ in OWN_LOSS else None,
    ) as engine:
        weights = [1 / len(micro_batches)] * len(micro_batches)
        loss = engine.step(micro_batches, loss_weights=weights).loss
        after = dict(engine.master_parameters())
    return loss, {name: (before[name] - after[name]) / RATE for name in before}
