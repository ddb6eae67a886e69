"""A training run by a library's loop, of any arguments, and all that a user could see of it.

``seen`` makes a ``Run``, by the library's trainer or by the engine's; ``differences`` compares what two have shown.
"""

import contextlib
import copy
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import trl
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainingArguments

import penstock
from penstock.hf.engine_arguments import EngineArguments
from tests import library_runs, preferred
from tests.library_runs import llama
from tests.run_parts import (
    CLASSES,
    DATA,
    MODELS,
    OF_TRL,
    Batches,
    Meddler,
    Meddling,
    Notes,
    largest,
    metrics,
    own_loss,
    rows,
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is drawn. ``settings``: of the arguments. ``brings``: of the Trainer."""

    model: str = "llama"
    kind: str = ""  # of TRL's data
    adapter: bool = False
    data: str = "list"
    count: int = 9
    extra: bool = False
    evaluated: str = ""  # "", "one", "two"
    eval_count: int = 5
    eval_data: str = "list"
    eval_labels: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)
    metrics: str = ""  # "", "all", "batches"
    logits: bool = False
    loss: bool = False
    cls: str = ""
    patience: int = 0
    meddling: tuple[Meddling, ...] = ()
    optimizer: tuple[Any, Any] | None = None
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    resumed: int = 0  # the step after which it is stopped, and goes on
    on_disk: bool = False


def seen(run: Run, folder: Path, *, by_engine: bool) -> dict[str, Any]:
    """All that there is to see of a run. ``error``: it ended in one."""
    shutil.rmtree(folder, ignore_errors=True)
    found: dict[str, Any] = {}
    trainer: Any = None
    try:
        trainer = _trainer(run, folder, by_engine=by_engine)
        for number, what in enumerate(run.before):
            found[f"{number} {what}, before"] = AFTER[what](trainer, run, folder)
        if run.resumed:
            trainer.add_callback(library_runs.StopAfter(run.resumed))
            trainer.train()
            found["first"] = _of(trainer)
            with contextlib.suppress(AttributeError):
                trainer.end() if by_engine else None
            trainer = _trainer(run, folder, by_engine=by_engine)
            found["returned"] = _returned(trainer.train(resume_from_checkpoint=True))
        else:
            found["returned"] = _returned(trainer.train())
        found["trained"] = _of(trainer)
        for number, what in enumerate(run.after):
            found[f"{number} {what}"] = AFTER[what](trainer, run, folder)
            found[f"{number} {what}, then"] = _of(trainer)
    except Exception as error:  # noqa: BLE001
        found["error"] = error
    finally:
        if trainer is not None:
            if by_engine:
                with contextlib.suppress(Exception):
                    found["weights"] = {n: t.clone().float() for n, t in trainer.engine.master_parameters()}
                trainer.end()
            else:
                found["weights"] = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        torch.use_deterministic_algorithms(False)
        transformers.utils.logging.set_verbosity_warning()
    found["files"] = _files(run, folder)
    return found


def _after_predict(trainer: Any, run: Run, folder: Path) -> Any:
    found = trainer.predict(DATA[run.eval_data](_eval_rows(run, 3)))
    return {"predictions": found.predictions, "label_ids": found.label_ids, "metrics": found.metrics}


AFTER: dict[str, Callable[[Any, Run, Path], Any]] = {
    "evaluate": lambda trainer, run, folder: (
        None
        if run.model in OF_TRL and not run.evaluated
        else trainer.evaluate(None if run.evaluated else DATA[run.eval_data](_eval_rows(run, 3)))
    ),
    "evaluate other": lambda trainer, run, folder: trainer.evaluate(
        {"a": DATA["list"](_eval_rows(run, 4)), "b": DATA[run.eval_data](_eval_rows(run, 5))},
        metric_key_prefix="other",
    ),
    "evaluate the first": lambda trainer, run, folder: trainer.evaluate("first") if run.evaluated == "two" else None,
    "predict": _after_predict,
    "save model": lambda trainer, run, folder: trainer.save_model(str(folder / "out" / "saved")),
    "save model in place": lambda trainer, run, folder: trainer.save_model(),
    "save state": lambda trainer, run, folder: trainer.save_state(),
    "train": lambda trainer, run, folder: _returned(trainer.train()),
    "parameters": lambda trainer, run, folder: trainer.get_num_trainable_parameters(),
    "save metrics": lambda trainer, run, folder: trainer.save_metrics("all", {"a": 1.0}),
}


def _eval_rows(run: Run, seed: int) -> list[dict[str, Any]]:
    found = rows(run.model + run.kind, run.eval_count, seed, extra=run.extra)
    if not run.eval_labels:
        found = [{k: v for k, v in row.items() if "label" not in k and "positions" not in k} for row in found]
    return found


def _trainer(run: Run, folder: Path, *, by_engine: bool) -> Any:
    settings = {"report_to": [], "use_cpu": True, "disable_tqdm": True} | copy.deepcopy(dict(run.settings))
    of_trl = run.model in OF_TRL
    if of_trl:
        settings["bf16"] = False
        if by_engine and run.model in ("DPOTrainer", "KTOTrainer"):
            settings["precompute_ref_log_probs"] = not run.adapter
    args = (OF_TRL[run.model] if of_trl else TrainingArguments)(str(folder / "out"), **settings)
    library = penstock.hf if by_engine else trl if of_trl else transformers
    bases: tuple[Any, ...] = (getattr(library, run.model if of_trl else "Trainer"),)
    if (own := CLASSES[run.cls]) is not None:
        bases = (own, *bases)
    cls = type("Mine", bases, {})
    given: dict[str, Any] = {}
    if of_trl:
        given["processing_class"] = library_runs.tokenizer()
        if run.adapter:
            given["peft_config"] = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
        elif not by_engine and run.model in ("DPOTrainer", "KTOTrainer"):
            given["ref_model"] = llama()
    if run.evaluated:
        kind = DATA[run.eval_data]
        one = kind(_eval_rows(run, 1))
        given["eval_dataset"] = one if run.evaluated == "one" else {"first": one, "second": kind(_eval_rows(run, 2))}
    if run.metrics:
        given["compute_metrics"] = metrics if run.metrics == "all" else Batches()
    if run.logits:
        given["preprocess_logits_for_metrics"] = largest
    if run.loss:
        given["compute_loss_func"] = own_loss
    if run.optimizer is not None:
        given["optimizer_cls_and_kwargs"] = run.optimizer
    callbacks: list[Any] = [Meddler(run.meddling)] if run.meddling else []
    if run.patience:
        callbacks.append(EarlyStoppingCallback(run.patience))
    notes = Notes()
    if by_engine:
        given["engine"] = _engine(folder / "store" if run.on_disk else None)
    data = DATA[run.data](rows(run.model + run.kind, run.count, 0, extra=run.extra))
    model = preferred.model_for(run.model) if of_trl else MODELS[run.model][0]()
    trainer = cls(model=model, args=args, train_dataset=data, callbacks=[*callbacks, notes], **given)
    trainer.notes = notes
    return trainer


def _engine(disk: Path | None) -> EngineArguments:
    kept = {} if disk is None else {"disk": disk, "weights": "disk", "state": "disk"}
    return EngineArguments(budget=penstock.Budget(device="512MiB", host="64MiB", **kept), plan=None)


def _returned(output: Any) -> dict[str, Any]:
    """What training returns, by name."""
    return dict(zip(("global_step", "training_loss", "metrics"), output, strict=True))


def _of(trainer: Any) -> dict[str, Any]:
    state = {k: v for k, v in vars(trainer.state).items() if k not in ("log_history", "stateful_callbacks")}
    return {
        "log": [dict(line) for line in trainer.state.log_history],
        "state": state,
        "control": dict(vars(trainer.control)),
        "callbacks": json.loads(json.dumps(trainer.state.stateful_callbacks, default=str)),
        "events": list(trainer.notes.events),
        # of a param group that is empty the engine has none
        "rates": None if trainer.lr_scheduler is None else sorted({*trainer.lr_scheduler.get_last_lr()}),
        # peft has taken a best adapter over for evaluation
        "training": trainer.model.training or trainer.args.load_best_model_at_end,
        "in train": trainer.is_in_train,
    }


_OWN_FILES = ("penstock.snapshot", "penstock.json", "optimizer.pt")


def _files(run: Run, folder: Path) -> dict[str, Any]:
    out = folder / "out"
    found: dict[str, Any] = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        of_own = any(part in _OWN_FILES for part in path.relative_to(out).parts)
        if path.is_dir() or of_own or name.startswith("reference-"):
            continue
        if path.suffix == ".json":
            found[name] = json.loads(path.read_text())
            if path.name == "adapter_config.json":  # of a set
                found[name]["target_modules"].sort()
        elif path.suffix == ".safetensors":
            found[name] = {key: value.float() for key, value in load_file(path).items()}
        elif path.name == "rng_state.pth":
            # TRL's own has a second model, where the engine goes through the data
            found[name] = None if run.model in ("DPOTrainer", "KTOTrainer") else torch.load(path, weights_only=False)
        elif path.name == "scheduler.pt":
            found[name] = None if run.adapter else torch.load(path, weights_only=False)
        elif path.name == "training_args.bin":
            found[name] = type(torch.load(path, weights_only=False)).__name__
        else:
            found[name] = path.read_bytes()
    return found


_TIMES = ("runtime", "per_second", "model_preparation_time", "mem_cpu", "output_dir", "logging_dir", "_name_or_path")


def differences(mine: Any, theirs: Any, where: str = "", *, rtol: float = 1e-4, atol: float = 1e-5) -> list[str]:
    """What of two things seen is not the same, up to rounding."""
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        found = []
        if mine.keys() != theirs.keys():
            more, less = sorted(map(str, mine.keys() - theirs.keys())), sorted(map(str, theirs.keys() - mine.keys()))
            found.append(f"{where}: has {more}, lacks {less}")
        elif list(mine) != list(theirs) and not where.startswith("/weights"):
            found.append(f"{where}: order {list(mine)} {list(theirs)}")
        for key in mine.keys() & theirs.keys():
            if not any(part in str(key) for part in _TIMES):
                found += differences(mine[key], theirs[key], f"{where}/{key}", rtol=rtol, atol=atol)
        return found
    if isinstance(mine, list | tuple) and isinstance(theirs, list | tuple):
        if len(mine) != len(theirs):
            at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
            return [f"{where}: {len(mine)} {len(theirs)}; at {at}: {mine[at or 0 :][:1]} {theirs[at or 0 :][:1]}"]
        return [
            d
            for i, (a, b) in enumerate(zip(mine, theirs, strict=True))
            for d in differences(a, b, f"{where}/{i}", rtol=rtol, atol=atol)
        ]
    if isinstance(mine, torch.Tensor | np.ndarray) and isinstance(theirs, torch.Tensor | np.ndarray):
        a, b = torch.as_tensor(mine), torch.as_tensor(theirs)
        if (type(mine), a.shape, a.dtype) != (type(theirs), b.shape, b.dtype):
            return [f"{where}: {type(mine)} {a.dtype} {list(a.shape)}, {type(theirs)} {b.dtype} {list(b.shape)}"]
        # one number of a model that AdamW moves by a gradient near 0 is another one
        off = (a.double() - b.double()).abs() - rtol * b.double().abs()
        return [] if not a.numel() or float(off.max()) <= 10 * atol else [f"{where}: off by {float(off.max())}"]
    if isinstance(mine, float) and isinstance(theirs, float):
        same = abs(mine - theirs) <= atol + rtol * abs(theirs) or (mine != mine and theirs != theirs) or mine == theirs
        return [] if same else [f"{where}: {mine} {theirs}"]
    if isinstance(mine, str) and isinstance(theirs, str):
        mine, theirs = mine.replace("/mine/", "/"), theirs.replace("/theirs/", "/")
    if type(mine) is not type(theirs) and not (isinstance(mine, Exception) or isinstance(theirs, Exception)):
        return [f"{where}: {mine!r} ({type(mine).__name__}), {theirs!r} ({type(theirs).__name__})"]
    if isinstance(mine, Exception):
        return [] if (type(mine), str(mine)) == (type(theirs), str(theirs)) else [f"{where}: {mine!r}, {theirs!r}"]
    return [] if mine == theirs or mine is theirs else [f"{where}: {mine!r}, {theirs!r}"]
