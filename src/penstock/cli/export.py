"""``penstock export``: the last commit of a run as a folder that any tool of Hugging Face loads."""

import errno
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from penstock.cli.kept_files import kept_of, vouched_by
from penstock.cli.own_store import require_own_store
from penstock.cli.run_folder import model_folder, settings_of
from penstock.cli.run_snapshots import record_in, require_newest
from penstock.cli.showing.progress import progress
from penstock.config import Precision, TrainConfig, format_size, parse_size
from penstock.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from penstock.hf.models.exporting import Written
    from penstock.state.values import Committed

EXPORT_HELP = """\
penstock export: writes the model of a run's last commit as a Hugging Face folder; the run stays as it is

Of a run without a disk, the model of the last snapshot in its folder.

  penstock export RUN OUT        RUN is the folder that penstock train wrote; OUT is the new folder

  --dtype T                      fp32, bf16 or fp16: of its weights (as the model came; new ones as they were trained)
  --shard-size SIZE              most bytes of a file (5GB)
  --overwrite                    replace the model's folder that OUT is
  --merge                        of a run with lora: the whole model, with the adapters merged into its weights; if not
                                 given, OUT is the adapter alone, as peft writes it, in fp32

  --trust-remote-code            run the Python code that RUN keeps with its model; a model that needs it is refused
                                 otherwise, whatever RUN says

OUT has safetensors files, config.json, generation_config.json and the tokenizer, as save_pretrained writes them. It is
there whole or not at all. Reads from disk, a few MB at a time, and checks every checksum. The run must not be training.
"""

_SWITCHES = ("--overwrite", "--merge", "--trust-remote-code")
_HINT = "Try: penstock export --help"


@dataclass(frozen=True, kw_only=True)
class ExportArguments:
    """``penstock export``. ``dtype``: None: the model's own. ``merge``: adapters into the weights that they are for.
    ``own_code``: run the Python code that the run keeps with its model, if it needs it."""

    run: Path
    out: Path
    dtype: Precision | None = None
    shard_size: int = 5 * 1000**3
    overwrite: bool = False
    merge: bool = False
    own_code: bool = False


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
        elif key not in ("--dtype", "--shard-size", *_SWITCHES):
            raise ConfigError(f"penstock export has no {key}. {_HINT}")
        elif key in given:
            raise ConfigError(f"{key} is given twice: keep one")
        elif key in _SWITCHES:
            if equals:
                raise ConfigError(f"{key} takes no value, and was given {value!r}")
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
        run=folders[0],
        out=folders[1],
        dtype=known,
        shard_size=shard_size,
        overwrite="--overwrite" in given,
        merge="--merge" in given,
        own_code="--trust-remote-code" in given,
    )


def run_export(arguments: ExportArguments) -> int:
    """Export, and say what was written. Returns the exit code.

    Raises:
        ConfigError: there is no run, it has committed nothing, or OUT exists.
        ModelError: a value is too large for the dtype, or the installed transformers cannot build the model.
        StoreError: the run is in use or its state damaged, or the disk is full or fails.
    """
    config = settings_of(arguments.run)
    if arguments.merge and config.lora is None:
        raise ConfigError(f"--merge has no effect: {arguments.run} has no adapters (lora)")
    state, record = _state(config, arguments.run)
    if (keeps := kept_of(arguments.run, vouched_by(record))) is not None:
        keeps.below(model_folder(arguments.run).name).require(arguments.run)
    # Being ended is no reason to leave half a folder behind: as Ctrl-C does, this unwinds what has been begun.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with state as found, progress("written") as bar:
            written, seconds = _write(arguments, config, found, bar.show)
    except StoreError as error:
        if error.errno in (errno.EAGAIN, errno.EWOULDBLOCK):
            raise StoreError(
                f"{arguments.run} is training (its store is in use): wait for it to end, or stop it with Ctrl-C, "
                "which it does after its step; then export, and go on with penstock resume"
            ) from error
        raise
    what = "its adapter" if config.lora is not None and not arguments.merge else "its model"
    print(
        f"{arguments.out}: step {found.step} of {arguments.run}, {what} in "
        f"{str(written.dtype).removeprefix('torch.')}, {format_size(written.nbytes)} in {written.files} "
        f"file{'s' * (written.files > 1)}, in {seconds:.1f} s"
    )
    return 0


def _write(
    arguments: ExportArguments, config: TrainConfig, found: "Committed", show: Callable[[int, int], None]
) -> "tuple[Written, float]":
    """What was written, and the seconds that it took."""
    from penstock.hf.lora import with_adapters
    from penstock.hf.models.adapters import Merged
    from penstock.hf.models.exporting import Source, copy_companions, write_adapter, write_folder
    from penstock.hf.models.kept import kept_model

    began = time.perf_counter()
    kept = kept_model(model_folder(arguments.run), trust_remote_code=arguments.own_code, flag="--trust-remote-code")
    model, values = Source.of(kept, found.values), found.values
    if config.lora is not None:
        source = config.model.path
        assert source is not None, "adapters are for a model that is there"
        kept.model.name_or_path = str(Path(source).resolve()) if Path(source).is_dir() else source
        adapted: Any = with_adapters(kept.model, config.lora)
        if not arguments.merge:
            adapted.peft_config[adapted.active_adapter].revision = config.model.revision
            written = write_adapter(
                arguments.out,
                adapted,
                values,
                partial(copy_companions, kept.folder, adapter=True),
                dtype=arguments.dtype,
                overwrite=arguments.overwrite,
            )
            return written, time.perf_counter() - began
        model = replace(model, values=Merged(values, adapted))
    written = write_folder(
        arguments.out,
        model,
        partial(copy_companions, kept.folder),
        dtype=arguments.dtype,
        shard_size=arguments.shard_size,
        overwrite=arguments.overwrite,
        progress=show,
    )
    return written, time.perf_counter() - began


def _state(config: TrainConfig, run: Path) -> "tuple[AbstractContextManager[Committed], Mapping[str, Any] | None]":
    """The values of a run's last commit, or of the snapshot that a run without a disk has; and what that says."""
    from penstock.state.values import committed, kept

    if paths := config.budget.disk_paths:
        record = require_own_store(run, paths).record
        return committed(paths), record
    snapshot = require_newest(run)
    return kept(snapshot), record_in(snapshot)
