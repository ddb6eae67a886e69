"""The engine's part of a Trainer's ``checkpoint-N``: a snapshot, and which store it was taken from."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from penstock.config import Budget
from penstock.engine import Engine
from penstock.errors import ConfigError
from penstock.hf.models.exporting import Dtype, export
from penstock.store.store import Store

SNAPSHOT = "penstock.snapshot"
SCHEDULER = "scheduler.pt"
ARGUMENTS = "training_args.bin"
_ORIGIN = "penstock.json"
_ASIDE = "penstock.export"
_DTYPES: Mapping[torch.dtype, Dtype] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_PREFIX, _LAST = "checkpoint-", "trainer_state.json"


def save(engine: Engine, folder: Path) -> None:
    """Write the whole state: weights, moments, the step, and where the run keeps its store.

    Raises:
        StoreError: the disk is full or fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    engine.save(folder / SNAPSHOT, overwrite=True)
    (folder / _ORIGIN).write_text(json.dumps({"disk": _resolved(engine.budget)}) + "\n")


def last_checkpoint(output_dir: str | Path) -> str | None:
    """The newest checkpoint of a Trainer's output folder that is complete, for ``resume_from_checkpoint``.

    A run that is killed while it saves leaves a part of one, which transformers' own search would name.
    """
    found = {int(p.name.removeprefix(_PREFIX)): p for p in Path(output_dir).glob(f"{_PREFIX}*") if _is_complete(p)}
    return str(found[max(found)]) if found else None


def _is_complete(folder: Path) -> bool:
    """Whether the file that the Trainer writes last is whole."""
    try:
        json.loads((folder / _LAST).read_text())
    except (OSError, ValueError):
        return False
    return folder.name.removeprefix(_PREFIX).isdigit()


def require(folder: Path) -> Path:
    """The folder, if it has a snapshot.

    Raises:
        ConfigError: it has none.
    """
    if not (folder / SNAPSHOT).exists():
        raise ConfigError(
            f"{folder} has no {SNAPSHOT}, so training cannot go on from it: was it saved with save_only_model, or by "
            "a Trainer without the engine? Load its model instead, and start anew"
        )
    return folder


def load(engine: Engine, folder: Path) -> None:
    """Take the checkpoint's state over: what the engine and its store had is gone.

    Raises:
        StoreError: the snapshot is damaged, or another model's.
        ConfigError: it was saved by a run with another seed.
    """
    engine.load(folder / SNAPSHOT)


def make_room(resumes: Path | None, budget: Budget, *, overwrite: bool) -> None:
    """Make the disk tier free for a run, before it takes the model's values.

    What the run of the checkpoint that it resumes has left there is deleted, whole or not: the checkpoint decides. A
    store of another run is deleted only where ``overwrite`` says so.

    Raises:
        ConfigError: another run's state is there.
    """
    if not Store.exists(budget.disk_paths):
        return
    if overwrite or (resumes is not None and _origin(resumes) == _resolved(budget)):
        Store.delete(budget.disk_paths)
        return
    with Store.open(budget.disk_paths) as store:
        record = store.last_commit()
    if record is not None and (record["step"] or not record["whole"]):
        raise ConfigError(
            f"budget.disk: {budget.disk_paths[0]} holds the state of another run after step {record['step']}. To go on "
            "with it: trainer.train(resume_from_checkpoint=True). To replace it: EngineArguments(overwrite=True)"
        )


def _origin(folder: Path) -> list[str] | None:
    file = folder / _ORIGIN
    return list(json.loads(file.read_text())["disk"]) if file.exists() else None


def _resolved(budget: Budget) -> list[str]:
    return [str(path.resolve()) for path in budget.disk_paths]


def write_model(engine: Engine, folder: Path, tokenizer: Any, dtype: torch.dtype | None) -> None:
    """Write the model as ``save_pretrained`` of its class does: of one with adapters, these alone.

    ``dtype``: of the model as the Trainer was given it; None: of the folder that it was loaded from. The weights are
    streamed into a folder of their own first, and then moved to where other files of the Trainer may be.

    Raises: as ``penstock.hf.export``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / _ASIDE
    if aside.exists():  # a kill has left it
        shutil.rmtree(aside)
    export(engine, aside, tokenizer=tokenizer, dtype=None if dtype is None else _DTYPES.get(dtype))
    _move_into(folder, aside)


def _move_into(folder: Path, aside: Path) -> None:
    """Put a model's files in the place of those of an earlier one, which may have had more shards."""
    for old in (*folder.glob("model*.safetensors"), *folder.glob("model.safetensors.index.json")):
        old.unlink()
    for file in aside.iterdir():
        os.replace(file, folder / file.name)
    aside.rmdir()
