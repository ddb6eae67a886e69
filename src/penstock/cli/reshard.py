"""``penstock reshard``: the state of a run for another number of ranks.

New stores are written beside the old ones, each in a folder within the directories that it is to have, and so on their
drives. Once all of them are whole, ``run.json`` says so, and from then on the old ones go and the new ones take their
place. Whatever is interrupted the same command finishes.
"""

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from penstock.cli.launch import how_to_start, in_words
from penstock.cli.own_store import require_no_copy, require_own_stores
from penstock.cli.run_folder import RUN_LOCK, settings_of, write_settings
from penstock.cli.run_record import Resharding, RunRecord
from penstock.cli.run_snapshots import strands_kept
from penstock.cli.showing.progress import progress
from penstock.cli.split import check_goes_on
from penstock.cli.words import Words
from penstock.config import Family, TrainConfig
from penstock.config.batch import dealt
from penstock.config.budget import is_of_rank
from penstock.config.step import IN_TURN, STRANDS, check_strands
from penstock.errors import ConfigError, StoreError
from penstock.store.directory import DirectoryLock, is_there, make_directory, sync_directory
from penstock.store.manifest import DATA, Manifest
from penstock.store.removal import delete_part, delete_store

_STAGED = "resharded-"
"""The beginning of the name of the folder of new stores; the run's id follows."""


@dataclass(frozen=True, kw_only=True)
class Arguments(Words):
    """penstock reshard: cuts the state of a run for another number of ranks, which then goes on with the same bits

      penstock reshard RUN --ranks N   RUN is the folder that penstock train wrote
      penstock reshard RUN --undo

    | option | meaning |
    |---|---|
    | ``ranks`` | how many are to train it from now on; 1: one process |
    | ``undo`` | leave it as it was, after an interruption before the new state was whole |
    | ``pipeline`` | blocks are dealt out to them (``pipeline`` of the settings); without, they share all state |
    | ``cp`` | so many neighbours share each sequence from now on (``cp`` of the settings); without, as many as did |
    | ``strands`` | how the gradients of a step are summed from now on (docs/ranks.md), where the ranks cannot share
    the strands that the run has; changes its numbers from the next step on |

    Reads the last commit and checks every checksum; needs room for a second copy of the state. Interrupted at any
    moment it loses nothing, and is finished by the same command. The run must not be training.
    """

    command: ClassVar[str] = "penstock reshard"
    takes: ClassVar[str] = "a run's folder"
    operands: ClassVar[tuple[str, ...]] = ("folder",)

    folder: Path
    ranks: int | None = None
    undo: bool = False
    pipeline: bool = False
    cp: int | None = None
    strands: int | None = None

    def __post_init__(self) -> None:
        if self.undo and (self.ranks or self.pipeline or self.cp or self.strands):
            raise ConfigError("--undo leaves the run as it was: leave the other options out")
        if self.ranks is None and not self.undo:
            raise ConfigError(f"it needs --ranks. Try: {self.command} --help")
        if self.pipeline and self.ranks == 1:
            raise ConfigError("--pipeline with --ranks 1: one process is no pipeline. Leave one out")
        for key, value in (("ranks", self.ranks), ("cp", self.cp), ("strands", self.strands)):
            if value is not None and not 1 <= value <= STRANDS:
                raise ConfigError(f"--{key} {value}: must be from 1 to {STRANDS:,}")


def run(arguments: Arguments) -> int:
    """Cut a run's state anew, and say what was done. Returns the exit code.

    Raises:
        ConfigError: there is no run, it keeps no state on disk, or these ranks cannot sum its gradients.
        StoreError: it is training, its state is damaged, or a drive is full or fails.
    """
    folder = arguments.folder
    config = settings_of(folder)
    lock = DirectoryLock(folder, name=RUN_LOCK)
    try:
        record = RunRecord.read(folder)
        if record is None or record.pending is not None:
            ranks = arguments.ranks or 1
            raise ConfigError(f"{folder} has not begun to train: start it with {how_to_start(ranks)} train")
        return _run(arguments, config, record)
    finally:
        lock.release()


def _run(arguments: Arguments, config: TrainConfig, record: RunRecord) -> int:
    folder, ranks, under_way = arguments.folder, arguments.ranks, record.resharding
    require_no_copy(folder, [record.owner], config.budget.stores(record.ranks, record.hosts))
    if under_way is not None and under_way.replaces:
        same = (ranks, arguments.pipeline) == (under_way.ranks, under_way.pipeline)
        if not same or any(
            asked not in (None, found)
            for asked, found in ((arguments.cp, under_way.cp), (arguments.strands, under_way.strands))
        ):
            record.require_settled(folder)
        _put_in_place(folder, config, record)
    else:
        if under_way is not None:
            record = _taken_back(folder, config, record)
        if ranks is None or not _write(arguments, ranks, config, record):
            who = in_words(record.ranks, record.hosts, config.pipeline)
            print(f"{folder} is one of {who}: it is left as it was")
            return 0
    assert ranks is not None, "it is what was under way"
    who = in_words(ranks, pipeline=ranks if arguments.pipeline else 1)
    print(f"{folder} goes on with {who}: {how_to_start(ranks)} resume {shlex.quote(str(folder))}")
    return 0


def _write(arguments: Arguments, ranks: int, config: TrainConfig, record: RunRecord) -> bool:
    """Make the new stores, and put them in place; False: they would be as the old ones."""
    from penstock.engine.stripes import weights_of_rank
    from penstock.state.reshard import reshard

    folder, cp = arguments.folder, arguments.cp or config.cp
    if config.copies > 1:
        raise ConfigError(
            f"{folder} has copies={config.copies} of the state, which cannot be cut anew: go on with as many"
        )
    if not config.budget.disk_paths:
        go_on = _without_stores(arguments, ranks, config)
        raise ConfigError(f"{folder} keeps no state on disk (budget.disk): there is nothing to cut. {go_on}")
    old, _ = require_own_stores(folder, config.budget)
    manifests = [Manifest.read(path) for paths in old for path in paths]
    had = int(manifests[0].model.get("strands", 1))
    asked_for = ranks, 1, arguments.strands or had, ranks if arguments.pipeline else 1, cp
    if asked_for == (record.ranks, record.hosts, had, config.pipeline, config.cp):
        return False
    strands, ids = _strands(arguments, ranks, config, cp, had), {found.store for found in manifests}
    targets = config.budget.stores(ranks)
    for path in _flat(targets):
        if is_there(path / DATA) and Manifest.read(path).store not in ids:
            raise ConfigError(f"{path} holds the state of another run, and is where this one's would go: move it away")
    asked = Resharding(ranks=ranks, strands=strands, replaces=(), pipeline=arguments.pipeline, cp=arguments.cp)
    _settled(config, asked)  # what these ranks cannot have is said before anything is changed
    record = replace(record, resharding=asked)
    record.write(folder)
    new = _staged(config, ranks, record)
    try:
        for path in _flat(new):
            make_directory(path.parent)
        with progress("written") as show:
            weights = [weights_of_rank(paths, (), rank, ranks) for rank, paths in enumerate(new)]
            reshard(
                old,
                new,
                names=targets,
                strands=strands,
                weights=weights,
                whole=config.parts(ranks) == 1 and not arguments.pipeline,
                pipeline=arguments.pipeline,
                family=_order(config),
                show=show,
            )
    except BaseException:
        _taken_back(folder, config, record)
        raise
    record = replace(record, resharding=replace(asked, replaces=tuple(sorted(ids))))
    record.write(folder)
    _put_in_place(folder, config, record)
    return True


def _without_stores(arguments: Arguments, ranks: int, config: TrainConfig) -> str:
    """Advice for a run that keeps its state in snapshots: how these ranks go on from the last one.

    Raises:
        ConfigError: they cannot go on from it.
        StoreError: the snapshot is damaged.
    """
    folder, strands = arguments.folder, strands_kept(arguments.folder)
    if strands is None:
        return "It has no snapshot to go on from either"
    asked = Resharding(ranks=ranks, strands=strands, replaces=(), pipeline=arguments.pipeline, cp=arguments.cp)
    layout = _settled(config, asked)
    changed = [(key, getattr(layout, key)) for key in _OF_LAYOUT if getattr(layout, key) != getattr(config, key)]
    flags = "".join(f" --{key} {'null' if value is None else value}" for key, value in changed)
    check_goes_on(layout, strands, ranks, flags)
    who = in_words(ranks, pipeline=layout.pipeline)
    return f"From its snapshot {who} can go on: {how_to_start(ranks)} resume {shlex.quote(str(folder))}{flags}"


_OF_LAYOUT = ("pipeline", "cp", "stage", "deal", "schedule")
"""Settings that say how ranks share the model, which may be others for other ranks."""


def _strands(arguments: Arguments, ranks: int, config: TrainConfig, cp: int, had: int) -> int:
    """The number of strands that the run has from now on.

    Raises:
        ConfigError: the ranks cannot share them, or they cannot be dealt a step's micro-batches.
    """
    strands, ranks = arguments.strands or had, 1 if arguments.pipeline else ranks
    try:
        check_strands(strands, ranks)
    except ConfigError as error:
        raise ConfigError(f"{error}. Give --strands {ranks}, which changes the run's numbers from here on") from None
    count = config.sequences_per_step // (config.micro_batch_size or 1)
    if arguments.pipeline and cp > 1:
        raise ConfigError(
            f"--pipeline: {config.run} has cp={cp}, and what is made is one pipeline, whose ranks share no sequences: "
            "leave it out, or give --cp 1"
        )
    if ranks % cp:
        raise ConfigError(
            f"cp={cp}: {in_words(ranks)} cannot share sequences {cp} by {cp}: give --cp 1, or another divisor of the "
            "ranks, which changes the run's numbers from here on"
        )
    dealt(count, "micro-batches", ranks // cp, "give another --ranks, as a run keeps its batch")
    return strands


def _taken_back(folder: Path, config: TrainConfig, record: RunRecord) -> RunRecord:
    """A reshard whose stores are not whole is as if it had not begun."""
    assert record.resharding is not None, "one has"
    _clear(_staged(config, record.resharding.ranks, record))
    settled = replace(record, resharding=None)
    settled.write(folder)
    return settled


def _put_in_place(folder: Path, config: TrainConfig, record: RunRecord) -> None:
    """Remove the old stores, and move the new ones where they belong. Can be broken off anywhere and done again.

    Raises:
        StoreError: a new one is not there; or a drive fails.
    """
    asked = record.resharding
    assert asked is not None, "there are new stores"
    targets = _flat(config.budget.stores(asked.ranks))
    new = _staged(config, asked.ranks, record)
    for target, staged in zip(targets, _flat(new), strict=True):
        in_place = is_there(target / DATA) and Manifest.read(target).store not in asked.replaces
        if not is_there(staged) and not in_place:
            raise StoreError(f"{target} lacks its part of the new state, which was whole: is the drive mounted?")
    for paths in config.budget.stores(record.ranks, record.hosts):
        for path in paths:
            delete_part(path, only=lambda found: found.store in asked.replaces)
            if is_there(path):  # before it has any name of the new one: whichever order a file system keeps them in
                sync_directory(path)
    for target, staged in zip(targets, _flat(new), strict=True):
        if not is_there(staged):
            continue
        if is_there(target / DATA) and is_there(staged / DATA):
            raise StoreError(f"{target} holds the state of another run, and is where this one's goes: move it away")
        for item in sorted(staged.iterdir(), key=lambda item: item.name == DATA):  # with which it is a store: the last
            os.replace(item, target / item.name)
        sync_directory(target)
        staged.rmdir()
    _clear(new)
    for path in _flat(config.budget.stores(record.ranks, record.hosts)):
        if is_of_rank(path) and path not in targets:
            with suppress(OSError):  # something else is in it: not ours to remove
                path.rmdir()
    settled = _settled(config, asked)
    if settled != config:
        write_settings(folder, settled)
    replace(record, ranks=asked.ranks, hosts=1, resharding=None).write(folder)


def _settled(config: TrainConfig, asked: Resharding) -> TrainConfig:
    """The settings that a run goes on with.

    Raises:
        ConfigError: one of them is not for the ranks of a pipeline.
    """
    back = config.schedule in IN_TURN and not asked.pipeline
    return replace(
        config,
        strands=None if config.strands is None else asked.strands,
        pipeline=asked.ranks if asked.pipeline else 1,
        cp=asked.cp or config.cp,
        stage=None if asked.pipeline else config.stage,
        deal=None,  # blocks are dealt anew, or there is no pipeline any more
        schedule="vertical" if back else config.schedule,
    )


def _order(config: TrainConfig) -> Family:
    """The order of a pipeline's ranks, which says how its blocks are dealt out."""
    return next((order for order in IN_TURN if config.schedule == order), "vertical")


def _clear(staged: Sequence[Sequence[Path]]) -> None:
    """Remove what was staged of new stores."""
    for path in _flat(staged):
        if is_there(path):
            delete_store([path])
        with suppress(OSError):  # something else is in it: not ours to remove
            path.rmdir()
        if is_of_rank(path.parent):
            with suppress(OSError):
                path.parent.rmdir()


def _staged(config: TrainConfig, ranks: int, record: RunRecord) -> list[list[Path]]:
    """The directories that new stores are written in: each within the one that it is moved to, be that a drive's."""
    return [[path / f"{_STAGED}{record.id[:8]}" for path in paths] for paths in config.budget.stores(ranks)]


def _flat(stores: Sequence[Sequence[Path]]) -> list[Path]:
    return [path for paths in stores for path in paths]
