"""The engine's part of a Trainer's ``checkpoint-N``: a snapshot, and which run and which store it was taken from.

A run has a name, in the place of the engine's position in the data: so its checkpoints and its store's commits have it,
and it is handed on to the run that is resumed. A store is replaced by a checkpoint only if they are of one run.
"""

import json
import os
import re
import shutil
import uuid
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock import files
from penstock.config import Budget
from penstock.config.budget import is_of_rank
from penstock.engine.arguments import WrapArguments
from penstock.engine.engine import Engine
from penstock.engine.resources import optimizer_for
from penstock.engine.start import describe_model
from penstock.errors import ConfigError, StoreError
from penstock.hf.models.exporting import export_as_given
from penstock.ranks.group import Ranks
from penstock.schedule.place import Format
from penstock.state.buffers import Buffers
from penstock.state.record import check_kept, check_param_groups, check_progress
from penstock.state.snapshots import require_like
from penstock.state.splits import SPLITS
from penstock.store.directory import entries
from penstock.store.facts import StoreFacts, facts_of, store_exists
from penstock.store.removal import delete_store
from penstock.store.snapshot_parts import opened_snapshot
from penstock.store.store import Store
from penstock.tape.blocks import find_blocks
from penstock.tape.groups import group_parameters

SNAPSHOT = "penstock.snapshot"
SCHEDULER = "scheduler.pt"
ARGUMENTS = "training_args.bin"
_ORIGIN = "penstock.json"
_ASIDE = "penstock.export"
_RUN = "run"
_PREFIX, _LAST, _RANDOM = "checkpoint-", "trainer_state.json", "rng_state*.pth"
_WEIGHTS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json")
"""names of the files of a model's weights"""


class OtherRunError(ConfigError):
    """The store has the state of another run, or of a later step, than what is to begin here."""


def name_run(engine: Engine, ranks: Ranks) -> None:
    """Give a run that begins a name that no other has."""
    with ranks.together("train"):
        engine.position = {_RUN: ranks.once("name of the run", lambda: uuid.uuid4().hex)}


def _run_of(position: Mapping[str, Any] | None) -> str | None:
    return None if position is None else position.get(_RUN)


def save(engine: Engine, folder: Path, budget: Budget, ranks: Ranks) -> None:
    """Write the whole state: weights, moments, the step, and where the run keeps its store. Every rank writes its part.

    Raises:
        StoreError: the disk is full or fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    engine.save(folder / SNAPSHOT, overwrite=True)
    if ranks.rank == 0:
        origin = {_RUN: _run_of(engine.position), "disk": _resolved(budget.disk_paths)}
        files.replace(folder / _ORIGIN, json.dumps(origin) + "\n", private=False)


def last_checkpoint(output_dir: str | Path) -> str | None:
    """The newest checkpoint of a Trainer's output folder that is complete, for ``resume_from_checkpoint``.

    A run that is killed while it saves leaves a part of one, which transformers' own search would name.
    """
    return next((str(folder) for folder in _checkpoints(Path(output_dir)) if _is_complete(folder)), None)


def last_complete(output_dir: Path) -> str | None:
    """``last_checkpoint``. None: there is no checkpoint at all.

    Raises:
        ConfigError: there are some, and none is complete.
    """
    found = last_checkpoint(output_dir)
    broken_off = _checkpoints(output_dir)
    if found is None and broken_off:
        raise ConfigError(
            f"{output_dir} has no complete checkpoint: saving {broken_off[0].name} was broken off. Remove "
            f"{' and '.join(map(str, broken_off))}, and begin anew: trainer.train()"
        )
    return found


def _checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoints in a Trainer's output folder, the newest first."""
    found = [(path.name.removeprefix(_PREFIX), path) for path in files.matching(output_dir, f"{_PREFIX}*")]
    numbered = [(int(number), path) for number, path in found if number.isdecimal() and path.is_dir()]
    return [path for _, path in sorted(numbered, reverse=True)]


def _is_complete(folder: Path) -> bool:
    """True if the file that the Trainer writes last is whole.

    Raises:
        OSError: it is there, and cannot be read: who passed it over would train again what it has.
    """
    try:
        json.loads((folder / _LAST).read_text())
    except (FileNotFoundError, ValueError):
        return False
    return True


def unmark(folder: Path) -> None:
    """Have a checkpoint's folder no longer be taken for a complete one, before it is written over: the parts that a
    kill leaves would be of two."""
    if folder.is_dir():
        files.remove(folder / _LAST)
        files.sync_folder(folder)


def flush(folder: Path) -> None:
    """Make durable what the library has written into a checkpoint's folder beside the snapshot, which is.

    Raises:
        OSError: the disk is full or fails.
    """
    for path in folder.iterdir():
        if path.is_file() and not path.is_symlink():
            with suppress(FileNotFoundError):  # another process's, which has given it its name meanwhile
                files.sync_file(path)
    for place in (folder, folder.parent, folder.parent.parent):  # which may be new as well
        if os.access(place, os.W_OK, effective_ids=True):  # or it has no name of ours, and may not be opened
            files.sync_folder(place)


def require(folder: Path) -> Path:
    """The folder, if training can go on from what is in it.

    Raises:
        ConfigError: it has no snapshot, or another file is missing; or it is not there.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder: give the path of a checkpoint-N of this run")
    if not (folder / SNAPSHOT).exists():
        raise ConfigError(
            f"{folder} has no {SNAPSHOT}, so training cannot go on from it: was it saved with save_only_model, or by "
            "a Trainer without the engine? Load its model instead, and start anew"
        )
    if lost := [name for name in (SCHEDULER, _LAST) if not (folder / name).is_file()]:
        raise ConfigError(
            f"{folder} has no {' and no '.join(lost)}: saving it was broken off, or it was not copied whole. Take "
            "another one: resume_from_checkpoint=True takes the last that is complete"
        )
    there = (path for name in (_LAST, _ORIGIN, SCHEDULER, _RANDOM) for path in files.matching(folder, name))
    if (damaged := next((path.name for path in there if not _is_whole(path)), None)) is not None:
        raise ConfigError(f"{folder}: {damaged} is damaged: put back what was there, or take another checkpoint")
    return folder


def _is_whole(path: Path) -> bool:
    """True if a file of JSON can be read, or one of ``torch.save`` has the contents that its checksums are of;
    ``torch.load`` does not look at these.

    Raises:
        OSError: it cannot be read.
    """
    content = path.read_bytes()
    try:
        if path.suffix == ".json":
            json.loads(content)
            return True
        with zipfile.ZipFile(BytesIO(content)) as archive:
            has_checksums = any(entry.CRC for entry in archive.infolist())  # torch may be told to leave them out
            return not has_checksums or archive.testzip() is None
    except (ValueError, EOFError, RuntimeError, OverflowError, zipfile.BadZipFile, zlib.error):
        return False


def look_into(folder: Path, model: nn.Module, asked: WrapArguments, ranks: Ranks) -> None:
    """Check that a checkpoint is one that this run can go on from, before a store is deleted for it: what its snapshot
    says, and where there is a store all that it holds, of which each of a host's ``ranks`` reads a part.

    Raises:
        StoreError: the snapshot cannot be read, or is of another model, precision, optimizer or number of strands.
        ConfigError: it was saved by a run with another seed.
    """
    path, sharing = folder / SNAPSHOT, ranks.sharing.size
    spec, precision, strands = asked.optimizer, asked.precision, sharing if asked.strands is None else asked.strands
    assert precision is not None, "the trainer has chosen one"
    form = Format.of(precision, spec.moment_count, spec.moments, spec.whole)
    groups = group_parameters(model, find_blocks(model, asked.blocks), form=form)
    described = describe_model(groups, Buffers(model), precision, spec, strands)
    settings = {key: described[key] for key in ("precision", "optimizer", "strands", SPLITS) if key in described}
    param_groups = optimizer_for(spec, groups).param_groups
    mine = {name: (list(parameter.shape), parameter.requires_grad) for name, parameter in model.named_parameters()}
    with opened_snapshot(path) as parts:
        saved = parts[0].meta
        check_kept(saved, str(path))
        made_for = saved["model"]
        require_like(made_for, settings, path, sharing)
        every = [parameter for group in made_for["groups"] for parameter in group["parameters"]]
        theirs = {name: (shape, trains) for name, shape, _, trains in every}
        require_like({"model": theirs}, {"model": mine}, path, sharing)
        check_progress(saved, str(path), trained=sum(trains for _, trains in mine.values()), seed=asked.seed)
        check_param_groups(saved["param_groups"], param_groups, str(path))
        each = ranks.size // ranks.hosts
        for part in parts[ranks.rank % each :: each] if _stores_in(asked.budget.disk_paths) else ():
            part.verify()


def to_replace(resumes: Path | None, budget: Budget, *, overwrite: bool) -> list[Sequence[Path]]:
    """The stores in the disk tier that a run takes the place of, which may go.

    What the run of the checkpoint that it ``resumes`` has left there may, whole or not: the checkpoint decides. So may
    a store in which no step was taken: it holds values that a model had, not those of the one that is given. One of
    another run may only where ``overwrite`` says so, and one of ``penstock train`` never.

    Raises:
        ConfigError: another run's state is there.
        StoreError: the store cannot be opened, or is in use.
    """
    stores = _stores_in(budget.disk_paths)
    origin = {} if resumes is None else _origin(resumes)
    same = origin.get("disk") == _resolved(budget.disk_paths)
    for paths in stores:
        if not overwrite:
            _check_replaceable(paths, origin, same=same)
        if (facts := facts_of(paths)) is not None:
            _is_no_runs(facts, paths[0])
    return stores


def make_room(resumes: Path | None, budget: Budget, *, overwrite: bool) -> None:
    """Remove what a run takes the place of, before it takes the model's values. Raises as ``to_replace``."""
    for paths in to_replace(resumes, budget, overwrite=overwrite):
        delete_store(paths, only=partial(_is_no_runs, path=paths[0]))


def _is_no_runs(facts: StoreFacts, path: Path) -> bool:
    """Raises ConfigError: a store is one of ``penstock train``."""
    if facts.owner is not None:
        raise ConfigError(f"budget.disk: {path} holds the state of a run of penstock train: give another directory")
    return True


def _stores_in(directories: Sequence[Path]) -> list[Sequence[Path]]:
    """The directories of every store in the budget's: of one process, and of each rank of several, how many they were
    when it was made."""
    ranks = sorted({path.name for directory in directories for path in entries(directory) if is_of_rank(path)})
    of_ranks = ([d / name for d in directories if (d / name).is_dir()] for name in ranks)
    return [paths for paths in (directories, *of_ranks) if store_exists(paths)]


def _check_replaceable(paths: Sequence[Path], origin: Mapping[str, Any], *, same: bool) -> None:
    """``same``: the run of the checkpoint had the same directories."""
    try:
        with Store.open(paths, writable=False) as store:
            record = store.last_commit()
    except StoreError:
        if same:  # it was killed while it made the store
            return
        raise
    if record is None or (record["whole"] and not record["step"]):
        return
    run = _run_of(record.get("position"))
    if run is None or run != origin.get(_RUN):
        raise OtherRunError(
            f"budget.disk: {paths[0]} holds the state of another run after step {record['step']}. To go on "
            "with that: trainer.train(resume_from_checkpoint=...) with a checkpoint of it. To replace it: "
            "EngineArguments(overwrite=True)"
        )


def _origin(folder: Path) -> dict[str, Any]:
    file = folder / _ORIGIN
    return dict(json.loads(file.read_text())) if file.exists() else {}


def _resolved(directories: Sequence[Path]) -> list[str]:
    return [str(path.resolve()) for path in directories]


def write_model(engine: Engine, folder: Path, ranks: Ranks, tokenizer: Any, dtypes: Mapping[str, torch.dtype]) -> None:
    """Write the model as ``save_pretrained`` of its class does; of a model with adapters, the adapters alone. All ranks
    come here, and the first writes.

    ``dtypes``: of the parameters as the Trainer was given them; a model that came without values is written in that of
    the folder that it was loaded from, and its adapters in fp32. The weights are streamed into a folder of their own
    first, and then moved to where other files of the Trainer may be.

    Raises: as ``penstock.hf.export``.
    """
    aside = folder / _ASIDE
    if ranks.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        if aside.exists():  # a kill has left it
            shutil.rmtree(aside)
    export_as_given(engine, aside, tokenizer=tokenizer, own=dtypes)
    if ranks.rank == 0:
        _move_into(folder, aside)


def _move_into(folder: Path, aside: Path) -> None:
    """Put a model's files in the place of those of an earlier one, which may have had more shards. Adapters leave the
    files of a model's weights where they are."""
    names = [file.name for file in aside.iterdir()]
    if any(map(_WEIGHTS.fullmatch, names)):
        for old in [file for file in folder.iterdir() if _WEIGHTS.fullmatch(file.name)]:
            old.unlink()
    for name in names:
        if (folder / name).is_dir():  # nothing can be moved onto a folder
            files.remove(folder / name)
        os.replace(aside / name, folder / name)
    aside.rmdir()
