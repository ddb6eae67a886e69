"""The folder of one run, and what is written there. Who may write into it: ``claim``."""

import json
import logging
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import xxhash

from penstock import files
from penstock.cli.located import parse_yaml
from penstock.cli.run_record import RunRecord
from penstock.cli.settings import dump, load_text
from penstock.cli.trackers.tracking import FOLDERS, IDS
from penstock.config import TrainConfig
from penstock.errors import ConfigError
from penstock.report.metrics_file import lines_until
from penstock.report.prediction import Prediction
from penstock.store.owner import RUN_FILE

log = logging.getLogger("penstock")

Start = Literal["new", "overwrite", "resume"]

_SETTINGS = "config.yaml"
_PREDICTION = "prediction.json"
METRICS = "metrics.jsonl"
RUN_LOCK = "run.lock"
_FILES = (
    _SETTINGS,
    _PREDICTION,
    "report.html",
    "timeline.svg",
    "timeline.png",
    METRICS,
    "data.json",
    "kept.json",
    "environment.json",
    IDS,
)
_MODEL = "model"
_DATA = "data"
_AHEAD = f"ahead{files.PARTIAL}"
"""The folder of what is made for a run that is to begin in the place of another one, while that is there."""
_PREPARED = re.compile(r"(tokenizer-)?[0-9a-f]{16}(\.[0-9a-f]+)?(\.partial)?")
"""Names of the folders that ``data.prepare`` makes in ``data``."""

_TRACES = "trace*.json"


def settings_path(folder: Path) -> Path:
    """The file with the resolved settings of a run."""
    return folder / _SETTINGS


def settings_file(folder: Path) -> Path:
    """The resolved settings of the run in a folder.

    Raises:
        ConfigError: there is no run there.
    """
    if not folder.is_dir():
        what = files.no_folder(folder)
        raise ConfigError(f"{folder} {what}: give the folder of a run, which penstock train writes (its run setting)")
    if not (folder / _SETTINGS).is_file():
        raise ConfigError(
            f"{folder} is not the folder of a run: it has no {_SETTINGS}. Give the folder that penstock train wrote"
        )
    return folder / _SETTINGS


def settings_of(folder: Path, flags: Sequence[tuple[str, str]] = ()) -> TrainConfig:
    """The settings of the run in a folder, with flags laid over them.

    That a model's own code may run (``model.trust_remote_code``) is for the flags to say: a folder does not allow it to
    itself.

    They name the folder as it was called when the run began. If it is called otherwise now (it was moved, or the
    current directory is another), what they say is in it is looked for where it is now; what flags say is not.

    Raises:
        ConfigError: there is no run there, or its settings or the flags cannot be read.
    """
    record = RunRecord.read(folder)
    if record is not None and record.pending is not None:  # killed while it began: these are to be its settings
        config = load_text(record.pending.settings, str(folder / RUN_FILE), flags)
    else:
        config = load_text(_settings_text(settings_file(folder)), str(folder / _SETTINGS), flags)
    config = replace(config, model=replace(config.model, trust_remote_code=trusts_code(flags)))
    before = Path(config.run)
    if before.resolve() == folder.resolve():
        return config
    if any(key.replace("-", "_") == "budget.disk" and "{run}" not in value for key, value in flags):
        return replace(config, run=str(folder))  # a place that is named now is meant as it is

    def moved(path: Path) -> str:
        return str(folder / path.relative_to(before)) if path.is_relative_to(before) else str(path)

    disks = tuple(map(moved, config.budget.disk_paths))
    disk = None if not disks else disks[0] if len(disks) == 1 else disks
    prepared = config.data.prepared and moved(Path(config.data.prepared))
    return replace(
        config,
        run=str(folder),
        data=replace(config.data, prepared=prepared),
        budget=replace(config.budget, disk=disk),
    )


def started_in(folder: Path) -> Path:
    """The directory that was current when the run in ``folder`` was started, as far as its settings say: that from
    which they name the folder; else the one that is current now.

    Raises:
        ConfigError: its settings cannot be read.
    """
    run = Path(load_text(_settings_text(settings_file(folder)), str(folder / _SETTINGS)).run)
    at = len(folder.parts) - len(run.parts)
    return Path(*folder.parts[:at]) if folder.parts[at:] == run.parts and not run.is_absolute() else Path()


def trusts_code(flags: Sequence[tuple[str, str]]) -> bool:
    """True if flags say that a model's own code may run."""
    said = [value for key, value in flags if key.replace("-", "_") == "model.trust_remote_code"]
    return bool(said) and parse_yaml(said[-1], "--model.trust_remote_code", flag=True).value is True


def as_cut_before(config: TrainConfig) -> TrainConfig:
    """The settings of a run that is to go on, with the size of micro-batch that it has had so far if none is asked for.

    Raises:
        ConfigError: the settings of the run in its folder cannot be read.
    """
    path = settings_path(Path(config.run))
    if config.micro_batch_size is not None or not path.is_file():
        return config
    before = load_text(_settings_text(path), str(path))
    if before.sequences_per_step != config.sequences_per_step:
        return config
    return replace(config, micro_batch_size=before.micro_batch_size)


def own_files(folder: Path) -> list[Path]:
    """The files that a run writes into its folder, but for ``run.json`` and its lock; they need not be there."""
    left = (path for name in (*_FILES, RUN_FILE) for path in files.left_of(folder / name))
    return [*(folder / name for name in _FILES), *left, *folder.glob(_TRACES)]


def own_folders(folder: Path) -> list[Path]:
    """The folders that a run writes into its own, and that are there."""
    found = [folder / name for name in (f"{_MODEL}{files.PARTIAL}", _AHEAD, *FOLDERS)]
    if any((model_folder(folder) / name).is_file() for name in ("config.json", "penstock.json")):
        found.append(model_folder(folder))
    found += [path for path in data_folder(folder).glob("*") if _PREPARED.fullmatch(path.name)]
    return [path for path in found if path.is_dir()]


def ahead_folder(folder: Path) -> Path:
    """The folder in a run's own in which the data of the run are made that is to take its place."""
    return folder / _AHEAD


def data_folder(folder: Path) -> Path:
    """The folder of a run's prepared data, where its settings name none."""
    return folder / _DATA


def model_folder(folder: Path) -> Path:
    """The folder of a run in which its model's configuration, code and tokenizer are kept."""
    return folder / _MODEL


def has_steps(folder: Path) -> bool:
    """True if a step has left its numbers in this folder. Without them there may be steps all the same: they may have
    been moved away.

    Raises:
        OSError: that cannot be looked at.
    """
    try:
        return (folder / METRICS).stat().st_size > 0
    except FileNotFoundError:
        return False


def last_line(folder: Path) -> Mapping[str, Any]:
    """The numbers of the last step that has left them in this folder; none: empty. A line that a power cut has torn
    does not count.

    Raises:
        ConfigError: they cannot be read.
    """
    lines, _ = lines_until(folder / METRICS, sys.maxsize)
    return dict(json.loads(lines[-1])) if lines else {}


def trace_path(folder: Path, first: int, rank: int) -> Path:
    """One rank's trace of a stretch that starts after ``first`` steps; a resumed one does not replace the others."""
    whose = f"-rank-{rank}" if rank else ""
    return folder / (f"trace{whose}-from-{first + 1}.json" if first else f"trace{whose}.json")


def write_settings(folder: Path, config: TrainConfig) -> None:
    """Write the resolved settings, whole or not at all: without them a run cannot be resumed."""
    write_settings_text(folder, dump(config))


def write_settings_text(folder: Path, text: str) -> None:
    """Write settings that have been dumped before, whole or not at all. The last line has a checksum of the others."""
    assert not text or text.endswith("\n")
    files.replace(folder / _SETTINGS, f"{text}{_LAST_LINE}{xxhash.xxh3_64_hexdigest(text.encode())}\n")


_LAST_LINE = "# Written by penstock; without this line the file may be changed by hand. xxh3_64 of all above: "
_SIGNS = (b"penstock", b"xxh3_64")


def _settings_text(path: Path) -> str:
    """The settings of a run as they were written.

    Raises:
        ConfigError: they are damaged, or were changed by hand without saying so.
    """
    try:
        data = files.read(path)
    except OSError as error:
        raise ConfigError(f"cannot read the settings in {path}: {error.strerror}") from None
    head, found, digest = data.rpartition(_LAST_LINE.encode())
    if not found and not any(sign in data.rstrip().rpartition(b"\n")[2] for sign in _SIGNS):
        head = data  # changed by hand, and said so
    elif not found or digest != f"{xxhash.xxh3_64_hexdigest(head)}\n".encode():
        raise ConfigError(
            f"{path} is not what the run wrote there. If you have changed it: settings of a run are changed by flags "
            f"(penstock resume {shlex.quote(str(path.parent))} --steps 100), or by hand if the file's last line is "
            "removed as well. If you have not: check the drive, and put the file back from a copy, or put it right and "
            "remove its last line"
        )
    try:
        return head.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read the settings in {path}: it is not UTF-8 text") from None


def write_prediction(folder: Path, prediction: Prediction) -> None:
    """Put what was predicted beside the trace of what happens; replaces an earlier plan's."""
    files.replace(folder / _PREDICTION, prediction.to_json())
