"""One type of model: three steps by the engine, state on disk, against the same steps by a plain loop of torch.

The plain loop knows nothing of the engine: ``torch.optim.AdamW`` and gradient accumulation, each micro-batch's mean
loss counted by its share of the step's labels. Which labels a model's loss counts is found out by changing them, one at
a time, and looking at the loss.
"""

import copy
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import penstock
from penstock.engine.wrap import wrap
from penstock.hf.models.loading import Loaded, load
from penstock.tape.kv_cache import CachesOff
from tests.sweep.configs import tiny_of
from tests.sweep.inputs import KINDS, OWN_LOSS, Form, Forms, MicroBatch, NoFormError, forms_of, loss_of

Verdict = Literal["equal", "refused", "differs", "crashed", "skipped"]

LARGEST = 8_000_000
"""parameters; a type whose tiny configuration has more is not small"""
CLIP = 1.0
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-4}
"""``eps`` is far above the rounding error of a gradient, of which AdamW would make a full step otherwise."""
STEPS: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = (
    ("main", ((2, 12), (3, 8), (1, 10))),
    ("other", ((2, 9), (1, 12))),
    ("main", ((1, 8), (2, 12), (2, 6))),
)
"""(form, rows and tokens of micro-batches) of each step: odd and even counts, the second of text alone if it can be"""
ROUNDING = 2.0**-24


@dataclass(frozen=True, kw_only=True)
class Job:
    """A class of transformers, with the configuration of a type."""

    kind: str
    type: str
    model: str

    @property
    def name(self) -> str:
        return f"{self.kind} {self.type} {self.model}"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a job.

    ``reason``: of what is not equal. ``inputs``: what it was trained with. ``labels``: which of its labels count, all
    or all but the first. ``given``: what the engine asked for and was given. ``folder``: what comes of it when it is
    loaded from one. ``error``: the largest relative to what is allowed. ``seconds``: of a processor.
    """

    kind: str
    type: str
    model: str
    verdict: Verdict
    reason: str = ""
    inputs: str = ""
    labels: str = ""
    given: str = ""
    folder: str = ""
    error: float = 0.0
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in ("", 0.0)}


def jobs() -> list[Job]:
    """Every type of the installed transformers, each class and configuration once."""
    found: dict[tuple[str, type], Job] = {}
    for kind, of in sorted(KINDS.items(), key=lambda item: item[1].media == "text"):  # with all that it takes
        for model_type, classes in getattr(modeling_auto, of.mapping).items():
            for name in (classes,) if isinstance(classes, str) else classes:
                found.setdefault((name, CONFIG_MAPPING[model_type]), Job(kind=kind, type=model_type, model=name))
    return sorted(found.values(), key=lambda job: job.name)


def run(job: Job, disk: Path, *, in_memory: bool = False) -> Result:
    """Train a type of model by the engine and by the plain loop. ``disk``: an empty folder for the engine's store;
    ``in_memory``: there is none, and everything has room on the device."""
    about: dict[str, Any] = asdict(job)
    try:
        model, forms = build_with_forms(job)
        steps = steps_of(forms)
        first = _counts_first(model, steps[0][0])
    except NotTriedError as error:
        return Result(**about, verdict="skipped", reason=str(error))
    except Exception as error:  # noqa: BLE001  transformers raises everything for a configuration it cannot build
        return Result(**about, verdict="skipped", reason=f"does not build: {line_of(error)}")
    about |= {"inputs": forms.name, "labels": {True: "all", False: "but the first", None: ""}[first]}
    plain = copy.deepcopy(model)
    try:
        weights = [_weights(model, mbs, first=first is not False) for mbs in steps]
        wanted = plain_loop(plain, steps, weights)
    except Exception as error:  # noqa: BLE001  as above
        return Result(**about, verdict="skipped", reason=f"plain training fails: {line_of(error)}")
    if not all(math.isfinite(n) for n in wanted):
        return Result(**about, verdict="skipped", reason="plain training is not finite")

    def budget(folder: Path) -> penstock.Budget:
        if in_memory:
            return penstock.Budget(device="1GiB", host="1GiB", durability="none")
        return penstock.Budget(device="1GiB", host="1GiB", disk=folder, weights="disk", state="disk")

    result = _by_engine(copy.deepcopy(model), plain, steps, wanted, budget(disk), about)
    given: dict[str, Any] = {}
    ways = [("blocks=", "blocks", names) for names in called_blocks(model, [mbs[0] for mbs in steps])]
    for number, (asked, key, value) in enumerate([*ways, ("loss_weights", "weights", weights)]):
        if result.verdict == "refused" and asked in result.reason:
            given[key] = value
            said = about | {"given": ", ".join(given).replace("weights", "loss_weights")}
            again = budget(disk.with_name(f"again{number}"))
            result = _by_engine(copy.deepcopy(model), plain, steps, wanted, again, said, **given)
    if result.verdict != "equal":
        return result
    folder = _from_folder(model, steps[0][0], disk.with_name("folder"), given.get("blocks"))
    return replace(result, folder=folder, verdict="differs" if folder.startswith("other") else "equal")


class NotTriedError(Exception):
    """A type cannot be tried; says why."""


def build_with_forms(job: Job) -> tuple[nn.Module, Forms]:
    """The model of a job, and what it can be trained with.

    Raises:
        NotTriedError: it is large, does not build, or nothing that was tried gives a loss.
    """
    try:
        with torch.device("meta"):
            count = sum(p.numel() for p in build(job).parameters())
        if count > LARGEST:
            raise NotTriedError(f"does not get small: {count:,} parameters")
        model = build(job)
        try:
            return model, forms_of(model, job.kind)
        except NoFormError:  # some cannot make a cache for their own configuration
            CachesOff(model)
            return model, forms_of(model, job.kind)
    except NoFormError as error:
        raise NotTriedError(f"no inputs: {error}") from error
    except NotTriedError:
        raise
    except Exception as error:
        raise NotTriedError(f"does not build: {line_of(error)}") from error


def _by_engine(
    model: nn.Module,
    plain: nn.Module,
    steps: Sequence[Sequence[MicroBatch]],
    wanted: Sequence[float],
    budget: penstock.Budget,
    about: dict[str, Any],
    weights: Sequence[Sequence[float] | None] = (None, None, None),
    blocks: Sequence[str] | None = None,
) -> Result:
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = penstock.AdamW(**ADAMW)  # type: ignore[arg-type]
    try:
        with wrap(
            model,
            optimizer=optimizer,
            budget=budget,
            precision="fp32",
            device="cpu",
            clip_grad_norm=CLIP,
            plan=None,
            blocks=None if blocks is None else [model.get_submodule(name) for name in blocks],
            loss_fn=loss_of if type(model).__name__ in OWN_LOSS else None,
        ) as engine:
            losses = [engine.step(mbs, loss_weights=given).loss for mbs, given in zip(steps, weights, strict=True)]
            after = dict(engine.master_parameters())
    except (penstock.ModelError, penstock.ConfigError, penstock.BudgetError) as error:
        return Result(**about, verdict="refused", reason=line_of(error))
    except Exception as error:  # noqa: BLE001  that is what is looked for
        return Result(**about, verdict="crashed", reason=line_of(error))
    error, where = compare(before, after, dict(plain.named_parameters()))
    of_losses = max(abs(a - b) / max(abs(b), 1e-3) / (64 * ROUNDING) for a, b in zip(losses, wanted, strict=True))
    if of_losses > error:
        error, where = of_losses, f"losses {losses} for {list(wanted)}"
    return Result(
        **about,
        verdict="equal" if error <= 1.0 else "differs",
        error=round(error, 3),
        reason="" if error <= 1.0 else where,
    )


def called_blocks(model: nn.Module, micro_batches: Sequence[MicroBatch]) -> list[list[str]]:
    """The modules that every forward calls and that someone would name as ``blocks``: lists of them, the largest first,
    and then what the members of a list have in common.
    """
    calls = list[set[nn.Module]]()
    hooks = [m.register_forward_pre_hook(lambda m, _: calls[-1].add(m)) for m in model.modules()]
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for micro_batch in micro_batches:
            calls.append(set())
            loss_of(model, micro_batch)
    model.load_state_dict(state)
    for hook in hooks:
        hook.remove()
    called = set.intersection(*calls)
    lists = [
        [f"{name}.{member}" for member in dict(m.named_children())]
        for name, m in model.named_modules()
        if isinstance(m, nn.ModuleList) and len(m) and all(part in called for part in m)
    ]
    parts = [
        [f"{name}.{part}" for name in names]
        for names in lists
        for part in dict(model.get_submodule(names[0]).named_children())
        if all(dict(model.get_submodule(name).named_children()).get(part) in called for name in names)
    ]

    def size(names: Sequence[str]) -> int:
        return sum(p.numel() for name in names for p in model.get_submodule(name).parameters())

    found = [*sorted(lists, key=size, reverse=True), *sorted(parts, key=size, reverse=True)]
    return [names for names in found if size(names)]


def _from_folder(model: Any, micro_batch: MicroBatch, folder: Path, blocks: Sequence[str] | None) -> str:
    """What comes of a model that is saved, and loaded by the engine: its loss and buffers are those that it had."""
    try:
        model.save_pretrained(folder)
        loaded = _loaded(model, folder)
    except (penstock.ModelError, penstock.ConfigError) as error:
        return f"refused: {line_of(error)}"
    except Exception as error:  # noqa: BLE001  transformers cannot save all that it can build
        return f"cannot be saved: {line_of(error)}"
    budget = penstock.Budget(device="1GiB", host="1GiB", weights="host", state="host")
    quiet(loaded.model)
    try:
        with wrap(
            loaded.model,
            optimizer=penstock.SGD(lr=0.0),
            budget=budget,
            precision="fp32",
            device="cpu",
            plan=None,
            weights=loaded.weights,
            blocks=None if blocks is None else [loaded.model.get_submodule(name) for name in blocks],
            loss_fn=loss_of if type(model).__name__ in OWN_LOSS else None,
        ) as engine:
            buffers = {name: b.clone() for name, b in engine.model.named_buffers()}
            found = engine.evaluate([micro_batch])
    except (penstock.ModelError, penstock.ConfigError, penstock.BudgetError) as error:
        return f"refused: {line_of(error)}"
    except Exception as error:  # noqa: BLE001  that is what is looked for
        return f"other: {line_of(error)}"
    for name, buffer in model.named_buffers():
        if not torch.equal(buffers[name].nan_to_num(), buffer.to(buffers[name].dtype).nan_to_num()):
            return f"other values in buffer {name}"
    with torch.no_grad():
        wanted = float(loss_of(model.eval(), micro_batch))
    close = math.isclose(found, wanted, rel_tol=64 * ROUNDING, abs_tol=1e-6)
    return "equal" if close else f"other loss: {found} for {wanted}"


def _loaded(model: Any, folder: Path) -> Loaded:
    """What ``load`` gives, also after what its refusal says to try."""
    try:
        return load(folder, model_class=type(model))
    except penstock.ModelError as error:
        said = re.search(r"try model_type '(\w+)' in config.json", str(error))
        if said is None:
            raise
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"model_type": said[1]}))
        return load(folder, model_class=type(model))


def build(job: Job) -> nn.Module:
    """The model of a job, in training mode, with nothing at random."""
    cls = getattr(transformers, job.model)
    torch.manual_seed(0)
    config = tiny_of(cls, CONFIG_MAPPING[job.type])
    if job.kind == "masked" and getattr(config, "is_decoder", False):
        config.is_decoder = False
    model = cls._from_config(config, dtype=torch.float32).train()
    quiet(model)
    return model


def quiet(model: nn.Module) -> None:
    """Let nothing of a model be left to chance, nor to rounding: a batch norm over equal values divides by ``eps``."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eps = 0.1
        for key, value in vars(module).items():
            if isinstance(value, float) and (
                "drop" in key or (key == "p" and isinstance(module, nn.modules.dropout._DropoutNd))
            ):
                setattr(module, key, 0.0)


def steps_of(forms: Forms) -> list[list[MicroBatch]]:
    """The micro-batches of each step."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for which, shapes in STEPS:
        form: Form = forms.other if which == "other" and forms.other is not None else forms.main
        made.append([form(generator, *shape) for shape in shapes])
    return made


def _counts_first(model: nn.Module, micro_batch: MicroBatch) -> bool | None:
    """True if a model's loss depends on the first label of a row; None: labels are not a row of tokens."""
    labels = micro_batch.get("labels")
    if labels is None or labels.dim() < 2:
        return None
    state = copy.deepcopy(model.state_dict())
    found = []
    for change in (0, 1):
        torch.manual_seed(1)
        changed = labels.clone()
        changed[:, 0] = changed[:, 0] + change
        with torch.no_grad():
            found.append(float(loss_of(model, micro_batch | {"labels": changed})))
        model.load_state_dict(state)
    return found[0] != found[1]


def plain_loop(
    model: nn.Module, steps: Sequence[Sequence[MicroBatch]], weights: Sequence[Sequence[float]]
) -> list[float]:
    """Train a model by torch alone. The loss of each step. ``weights``: what each micro-batch's loss counts."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)  # type: ignore[arg-type]
    losses = []
    for micro_batches, counts in zip(steps, weights, strict=True):
        total = 0.0
        for weight, micro_batch in zip(counts, micro_batches, strict=True):
            loss = loss_of(model, micro_batch)
            (loss * weight).backward()
            total += float(loss.detach()) * weight
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def _weights(model: nn.Module, micro_batches: Sequence[MicroBatch], *, first: bool) -> list[float]:
    """What each micro-batch's loss counts: its share of the labels that its mean is over, or of the rows, or 1."""
    connectionist = getattr(model.config, "ctc_loss_reduction", None) if type(model).__name__.endswith("CTC") else None
    if connectionist == "sum":
        return [1.0] * len(micro_batches)
    if "labels" not in micro_batches[0]:
        return [1.0 / len(micro_batches)] * len(micro_batches)
    counts = [
        len(mb["labels"]) if connectionist else int((mb["labels"] if first else mb["labels"][:, 1:]).ne(-100).sum())
        for mb in micro_batches
    ]
    return [count / sum(counts) for count in counts]


def compare(
    before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], wanted: dict[str, nn.Parameter]
) -> tuple[float, str]:
    """How far parameters are from those of the plain loop, as a multiple of what is allowed: a thousandth of what
    training has changed in each and of what one step can, and its rounding. The worst, and its name.
    """
    worst, where = 0.0, ""
    for name, target in wanted.items():
        if target.numel() == 0:
            continue
        value = target.detach().double()
        step = ADAMW["lr"] * math.sqrt(value.numel())
        allowed = 1e-3 * ((value - before[name].double()).norm() + step) + 8 * ROUNDING * value.norm()
        off = float((after[name].double() - value).norm() / allowed)
        if not off <= worst:
            worst, where = off, name
    return worst, f"{where} is {worst:.3g} times further away than rounding"


def line_of(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
