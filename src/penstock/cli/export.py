"""``penstock export``: the last commit of a run as a folder that any tool of Hugging Face loads."""

import errno
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from penstock.cli.progress import progress
from penstock.cli.run_folder import model_folder, settings_of
from penstock.config import Precision, TrainConfig, format_size, parse_size
from penstock.errors import ConfigError, StoreError
from penstock.store.store import Store

if TYPE_CHECKING:
    from penstock.hf.models.exporting import Written
    from penstock.run.values import Committed

EXPORT_HELP = """\
penstock export: writes the model of a run's last commit as a Hugging Face folder; the run stays as it is

  penstock export RUN OUT        RUN is the folder that penstock train wrote; OUT is the new folder

  --dtype T                      fp32, bf16 or fp16: of its weights (as the model came; new ones as they were trained)
  --shard-size SIZE              most bytes of a file (5GB)
  --overwrite                    replace the model's folder that OUT is

OUT has safetensors files, config.json, generation_config.json and the tokenizer, as save_pretrained writes them. It is
there whole or not at all. Reads from disk, a few MB at a time, and checks every checksum. The run must not be training.
"""

_HINT = "Try: penstock export --help"


@dataclass(frozen=True, kw_only=True)
class ExportArguments:
    """``penstock export``. ``dtype``: None: the model's own."""

    run: Path
    out: Path
    dtype: Precision | None = None
    shard_size: int = 5 * 1000**3
    overwrite: bool = False


def parse_export(words: Sequence[str]) -> ExportArguments:
    """Take apart the words after ``penstock export``.

    Raises:
        ConfigError: not two folders, an unknown flag, or a value that it cannot have.
    """
    folders: list[Path] = []
    given: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.partition("=")
        if not word.startswith("--"):
            folders.append(Path(word))
        elif key not in ("--dtype", "--shard-size", "--overwrite"):
            raise ConfigError(f"penstock export has no {key}. {_HINT}")
        elif key in given:
            raise ConfigError(f"{key} is given twice: keep one")
        elif key == "--overwrite":
            if equals:
                raise ConfigError(f"--overwrite takes no value, and was given {value!r}")
            given[key] = ""
        elif not equals and (not rest or rest[0].startswith("--")):
            raise ConfigError(f"{key} needs a value. {_HINT}")
        else:
            given[key] = value if equals else rest.pop(0)
    if len(folders) != 2:
        found = " and ".join(map(str, folders)) or "neither"
        raise ConfigError(f"penstock export takes a run's folder and a new one, and was given {found}. {_HINT}")
    dtype, size = given.get("--dtype"), given.get("--shard-size", "5GB")
    known = next((p for p in get_args(Precision) if p == dtype), None)
    if dtype is not None and known is None:
        raise ConfigError(f"--dtype {dtype}: must be one of {', '.join(get_args(Precision))}")
    try:
        shard_size = parse_size(size)
    except ConfigError as error:
        raise ConfigError(f"--shard-size {error}") from None
    if not shard_size:
        raise ConfigError(f"--shard-size {size}: must be more than 0")
    return ExportArguments(
        run=folders[0], out=folders[1], dtype=known, shard_size=shard_size, overwrite="--overwrite" in given
    )


def run_export(arguments: ExportArguments) -> int:
    """Export, and say what was written. Returns the exit code.

    Raises:
        ConfigError: there is no run, it has committed nothing, or OUT exists.
        ModelError: a value is too large for the dtype, or the installed transformers cannot build the model.
        StoreError: the run is in use or its state damaged, or the disk is full or fails.
    """
    from penstock.run.values import committed

    config = settings_of(arguments.run)
    paths = _store(config, arguments.run)
    # Being ended is no reason to leave half a folder behind: as Ctrl-C does, this unwinds what has been begun.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    began = time.perf_counter()
    try:
        with committed(paths) as found, progress("written") as bar:
            written = _write(arguments, config, found, bar.show)
    except StoreError as error:
        if error.errno in (errno.EAGAIN, errno.EWOULDBLOCK):
            raise StoreError(
                f"{arguments.run} is training (its store is in use): wait for it to end, or stop it with Ctrl-C, "
                "which it does after its step; then export, and go on with penstock resume"
            ) from error
        raise
    parameters = sum(place.shape.numel() for place in found.values.parameters.values())
    print(
        f"{arguments.out}: step {found.step} of {arguments.run}, {parameters / 1e6:.1f}M parameters in "
        f"{str(written.dtype).removeprefix('torch.')}, {format_size(written.nbytes)} in {written.files} "
        f"file{'s' * (written.files > 1)}, in {time.perf_counter() - began:.1f} s"
    )
    return 0


def _write(arguments: ExportArguments, config: TrainConfig, found: "Committed", show: object) -> "Written":
    from penstock.hf.models.exporting import Source, copy_companions, write_folder
    from penstock.hf.models.kept import kept_model

    assert callable(show)
    kept = kept_model(model_folder(arguments.run), trust_remote_code=config.model.trust_remote_code)
    return write_folder(
        arguments.out,
        Source.of(kept, found.values),
        lambda folder: copy_companions(kept.folder, folder),
        dtype=arguments.dtype,
        shard_size=arguments.shard_size,
        overwrite=arguments.overwrite,
        progress=show,
    )


def _store(config: TrainConfig, run: Path) -> tuple[Path, ...]:
    paths = config.budget.disk_paths
    if not paths:
        raise ConfigError(f"{run} keeps no state on disk (budget.disk), so there is nothing to export")
    if not Store.exists(paths):
        raise ConfigError(f"{paths[0]} holds no store: the run has not begun, or it was removed")
    return paths
