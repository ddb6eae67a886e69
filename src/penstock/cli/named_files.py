"""The files that settings name, looked for before torch and transformers are imported: that takes seconds."""

import errno
import os
from pathlib import Path
from typing import get_args

from penstock import files
from penstock.cli.run_folder import Start
from penstock.cli.trackers import check_installed
from penstock.config import DataConfig, Family, ModelConfig, TrainConfig
from penstock.config.data import each_source
from penstock.errors import ConfigError
from penstock.store.directory import in_the_way, is_there


def check_named_files(config: TrainConfig, start: Start) -> None:
    """Refuse what is not there, with the messages of those who read it. What may be on the hub is left to them.

    A run that goes on needs its data; its model it keeps itself.

    Raises:
        ConfigError: a schedule, a folder of a model, a source of data, a tokenizer, a template or the package of a
            tracker is missing; or a folder to write into cannot be one.
    """
    if isinstance(config.schedule, Path) and not config.schedule.exists():
        raise ConfigError(
            f"schedule={str(config.schedule)!r}: must be {', '.join(get_args(Family))} or a file, and there is no such "
            "file"
        )
    check_installed(config.trackers)
    _check_data(config.data, may_have_moved=start == "resume")
    for key, folder in (
        ("run", config.run if start != "resume" else None),
        ("data.prepared", config.data.prepared),
        *(("budget.disk", p) for p in config.budget.disk_paths),
    ):
        if folder is not None:
            _check_folder(key, Path(folder))
    if start != "resume":
        check_model(config.model)


def _check_folder(key: str, folder: Path) -> None:
    """Raises ConfigError: what is there is no folder, or what it would have to be made in is none."""
    try:
        folder.stat()
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise ConfigError(f"{key}: {folder}: {in_the_way(folder, error)}") from None
    above = (place for place in folder.absolute().parents if os.path.exists(place))
    there = folder if os.path.exists(folder) or os.path.islink(folder) else next(above)
    if not there.is_dir():
        raise ConfigError(f"{key}={str(folder)!r}: {there} {files.no_folder(there)}: give a folder")


def _check_data(data: DataConfig, *, may_have_moved: bool) -> None:
    from penstock.data.sources.find import local_source

    held_out = data.validation.sources if data.validation is not None else None
    for key, sources in (("data.sources", data.sources), ("data.validation.sources", held_out)):
        for source in () if sources is None else each_source(sources):
            try:
                local_source(source)
            except ConfigError as error:
                if not may_have_moved:
                    raise
                raise ConfigError(
                    f"{error}. If it has been moved, give {key} with the place that it has now"
                ) from error
    for key in ("tokenizer", "chat_template"):
        given = getattr(data, key)
        if not isinstance(given, str) or (Path(given).is_dir() if key == "tokenizer" else Path(given).is_file()):
            continue
        if is_there(Path(given)):
            kind = "folder of a tokenizer" if key == "tokenizer" else "file with a template"
            raise ConfigError(f"data.{key}={given!r}: what is there is no {kind}: give one")
        if key == "chat_template" or _is_a_path(given):
            raise ConfigError(f"data.{key}={given!r}: there is no such file or folder")


def check_model(model: ModelConfig) -> None:
    if not isinstance(model.config, str) and not model.path:
        return
    path = Path(os.path.expanduser(model.source))
    if not path.exists() and not _is_a_path(model.source):
        return  # perhaps a name on the hub
    from penstock.hf.models.folder import CONFIG, resolve, weight_files

    if model.config is not None and path.is_file() and path.name == CONFIG:
        return
    folder = resolve(model.source, revision=model.revision, weights=False)
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder}: it has no {CONFIG}: give the folder of a Hugging Face model")
    if model.path:
        weight_files(folder)


def _is_a_path(name: str) -> bool:
    """True if a name is of no shape that a name on the hub may have."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1
