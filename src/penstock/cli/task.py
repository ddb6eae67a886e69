"""The planner's task, and requests, by a run's settings: for ``penstock plan``, and for the split of a run's batch."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import files
from penstock.config import DataConfig, ModelConfig, StepConfig, TrainConfig, asked_vocabulary, fields_of, format_size
from penstock.config.budget import is_of_rank
from penstock.config.step import SPLIT, check_copies
from penstock.errors import BudgetError
from penstock.hardware.machine import DeviceKind, Machine
from penstock.hardware.profiles import file_system, on_one_drive
from penstock.hardware.sharing import of_each_rank, room_of_each
from penstock.planner.dealt import programs_of
from penstock.planner.request import Request
from penstock.planner.task import TOKEN_BYTES, Task
from penstock.schedule.mesh import Mesh
from penstock.schedule.place import Format
from penstock.shape.huggingface import HuggingFaceModel, model_shape
from penstock.shape.meta import Change
from penstock.shape.model import ModelShape
from penstock.shape.shipped import CONFIGS, shipped_name
from penstock.store.directory import entries
from penstock.store.manifest import DATA
from penstock.store.packed import free_bytes
from penstock.store.removal import SCRATCH

if TYPE_CHECKING:
    from torch import nn


def task_of(config: TrainConfig, machine: Machine, *, ranks: int = 1, hosts: int = 1) -> Task:
    """The task of a run whose schedule is a family; of several ``ranks`` what one of them is to do, as all do the same.
    ``hosts``: with as many of the ranks on each; ``machine``: one of them, with what is free on its drives.

    Raises:
        ConfigError: the machine's profile lacks what the settings need, the model is refused, or so many ranks cannot
            have so many copies of the state.
    """
    assert not isinstance(config.schedule, Path)
    check_copies(config.copies, ranks, config.stage)
    disk_free = room_of_each(machine.drives, ranks // hosts)
    if ranks > 1:
        machine = of_each_rank(machine, ranks, hosts=hosts, copies=config.copies, cp=config.cp)
    spec = config.optimizer.spec
    return Task(
        shape=shape_of(config, machine.device.kind),
        machine=machine,
        budget=config.budget.of_rank(0, ranks, hosts),
        ranks=ranks // config.copies,
        copies=config.copies,
        hosts=hosts,
        sequence_length=config.data.sequence_length,
        optimizer=config.optimizer.name,
        moment_count=spec.moment_count,
        moments=spec.moments,
        whole=spec.whole,
        families=(config.schedule,),
        disk_free=disk_free,
        **fields_of(config, StepConfig) | {"precision": config.precision_on(machine.device.kind)} | _compiled(config),
    )


def requests_of(
    config: TrainConfig, shape: ModelShape, kind: DeviceKind, size: int, count: int, ranks: int, hosts: int = 1
) -> list[Request]:
    """The requests for plans that a run's engines will make with ``count`` micro-batches of ``size`` sequences: the one
    that all ``ranks`` have, or those of a pipeline's ranks, of several pipelines the first one's."""
    assert not isinstance(config.schedule, Path)
    form, beside = form_of(config, kind), ranks // config.pipeline
    each = beside // config.copies
    profile = shape.profile(size, config.data.sequence_length, form)
    if config.pipeline > 1:
        programs = programs_of(profile.program, config.pipeline, config.deal, config.schedule, beside)
    else:
        programs = [Mesh(data=config.parts(each)).everyone().part(profile.program)]
    budget = config.budget.by_default().with_pins()
    return [
        Request(
            program=program,
            budget=budget.of_rank(place * beside, ranks, hosts),
            form=form,
            micro_batches=count,
            wait=config.needs_norm,
            **fields_of(config) | _compiled(config),
            ranks=each,
            copies=config.copies,
            hosts=hosts,
            family=config.schedule,
            inputs=count * profile.tokens * TOKEN_BYTES,
            accelerated=kind != "cpu",
        )
        for place, program in enumerate(programs)
    ]


def _compiled(config: TrainConfig) -> dict[str, Any]:
    """The fields of a step that compiled blocks change: none of their graphs is kept."""
    return {"recompute": True} if config.compile else {}


def form_of(config: TrainConfig, kind: DeviceKind) -> Format:
    """The format of a run's state."""
    spec = config.optimizer.spec
    return Format.of(config.precision_on(kind), spec.moment_count, spec.moments, spec.whole)


def check_names(config: TrainConfig, kind: DeviceKind) -> None:
    """Compare the parameters that the optimizer's settings name with those that the model has, all of them.

    Raises:
        ConfigError: a name is of none; or the model is refused.
    """
    spec = config.optimizer.spec
    if spec.overrides or (spec.whole is not None and (spec.whole.splits or spec.whole.elementwise)):
        from penstock.engine.resources import check_rules

        check_rules(shape_of(config, kind).build(), spec, config.precision_on(kind))


def shape_of(config: TrainConfig, kind: DeviceKind) -> HuggingFaceModel:
    """The model that ``penstock train`` builds; one that has no formula is built here too, to refuse what it would.

    Raises:
        ConfigError: the model is refused.
    """
    from penstock.shape import decoders

    given = _configuration(config.model)
    if config.model.init and (config.data.tokenizer is not None or isinstance(config.model.config, Mapping)):
        vocabulary = _vocabulary(config.data)
        asked = asked_vocabulary(given, vocabulary) if isinstance(config.model.config, Mapping) else vocabulary
        given = {**given, "vocab_size": asked}
        if asked < vocabulary or decoders.from_config(given, name="model") is None:
            from penstock.cli.model import run_model

            run_model(config.model, config.data)
    return replace(
        model_shape(given, kind=kind, loss_tile=config.loss_tile),
        change=_change(config),
        cp=config.cp,
        splits=config.schedule in SPLIT,
        name=config.model.name,
    )


def _change(config: TrainConfig) -> Change | None:
    """The change to a model once it is built: adapters, or blocks that compute in pieces. None: it stays as it is."""
    if config.lora is None and config.mlp_tile is None and config.attention_heads is None:
        return None

    def change(model: "nn.Module") -> "nn.Module":
        from penstock.cli.changed import changed

        return changed(model, config)

    return change


def _vocabulary(data: DataConfig) -> int:
    """Tokens of a tokenizer that will be trained, or that is there."""
    if data.vocabulary is not None:
        return data.vocabulary
    from penstock.cli.model import vocabulary_of
    from penstock.data.opening import choose_tokenizer

    return vocabulary_of(data, choose_tokenizer(data, None))


def shipped_shape(model: ModelConfig) -> str | None:
    """The name under which the shape of the settings' model ships, where they name no file, so that no hub is asked."""
    if (
        isinstance(model.config, Mapping)
        or model.revision is not None
        or Path(os.path.expanduser(model.source)).exists()
    ):
        return None
    return shipped_name(model.source)


def _configuration(model: ModelConfig) -> Mapping[str, Any]:
    """A model's configuration: that in the settings, that of the file they name, or the published one. No weights are
    looked for.
    """
    if isinstance(model.config, Mapping):
        return model.config
    if (name := shipped_shape(model)) is not None:
        return CONFIGS[name]
    file = Path(model.source)
    if not file.is_file():
        from penstock.hf.models.folder import CONFIG, resolve

        file = resolve(model.source, revision=model.revision, weights=False) / CONFIG
    return model_shape(file).config


def as_free_here(machine: Machine, paths: Sequence[Path]) -> Machine:
    """The machine with the bytes that a store in these directories may use: what is free now, and what one that is
    there already takes. Directories on one file system have equal parts of it."""
    if not paths:
        return machine
    free, systems, users = dict[int | None, int](), list(map(file_system, paths)), on_one_drive(paths)
    for path, system in zip(paths, systems, strict=True):
        free[system] = free.get(system, shutil.disk_usage(files.nearest_folder(path)).free) + _stored(path)
    parts = (free[system] // count for system, count in zip(systems, users, strict=True))
    drives = (replace(drive, free=part) for drive, part in zip(machine.drives, parts, strict=True))
    return replace(machine, drives=tuple(drives))


def check_room(
    config: TrainConfig, model: "nn.Module", kind: DeviceKind, ranks: int, hosts: int, replaced: Sequence[Path]
) -> None:
    """Look for room for the stores of a run that is to begin, before its data are read, which may take hours.
    ``replaced``: directories of stores that go as it begins.

    Raises:
        BudgetError: this host's drives have no room for weights and state alone, wherever a plan has them live.
    """
    budget, form = config.budget, form_of(config, kind)
    if not budget.disk_paths or (hosts > 1 and config.pipeline > 1):  # whose hosts have parts of different sizes
        return
    if form.whole is not None:  # matrices have one moment
        form = replace(form, moments=min(form.moments, 1), whole=None)
    state = sum(p.numel() * (form.weight_bytes + form.per_element * p.requires_grad) for p in model.parameters())
    needed = int(budget.slots * config.copies * state) // hosts
    systems = {file_system(path): files.nearest_folder(path) for path in budget.disk_paths}
    free = sum(map(free_bytes, systems.values()))
    free += sum(_stored(path) for path in {*budget.disk_paths, *replaced} if file_system(path) in systems)
    if needed > free:
        raise BudgetError(
            f"budget.disk: {format_size(needed)} ({needed} bytes) of disk are needed for weights and state, and "
            f"{format_size(free)} are free in {', '.join(map(str, budget.disk_paths))}: free "
            f"{format_size(needed - free)} more, or give another directory, or several on different drives"
            + (". With budget.slots=1 it takes half, and a kill within a step costs the run" * (budget.slots == 2))
        )


def _stored(path: Path) -> int:
    """Bytes of the stores that are in a directory: of one process or of ranks, with what they keep for a while."""
    places = (path, *filter(is_of_rank, entries(path)))
    stores = (place / name for place in places for name in (DATA, Path(SCRATCH, DATA)))
    return sum(file.stat().st_size for file in stores if file.is_file())
