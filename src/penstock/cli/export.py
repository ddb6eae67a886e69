"""``penstock export``: the last commit of a run as a folder that any tool of Hugging Face loads."""

import errno
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.cli.kept_files import kept_of, vouched_by
from penstock.cli.own_store import require_own_stores
from penstock.cli.run_folder import model_folder, settings_of
from penstock.cli.run_snapshots import record_in, require_newest
from penstock.cli.showing.progress import progress
from penstock.cli.words import Words
from penstock.config import Precision, TrainConfig, format_size, parse_size
from penstock.config.sizes import TEXT_LEAST, check_size
from penstock.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from penstock.hf.models.exporting import Written
    from penstock.state.values import Committed


@dataclass(frozen=True, kw_only=True)
class Arguments(Words):
    """penstock export: writes the model of a run's last commit as a Hugging Face folder; the run stays as it is

    Of a run without a disk, the model of the last snapshot in its folder.

      penstock export RUN OUT        RUN is the folder that penstock train wrote; OUT is the new folder

    | option | meaning |
    |---|---|
    | ``dtype`` | of its weights; without it as the model came, of a new one as it was trained |
    | ``shard_size`` | most bytes of a file, but for one of a single larger tensor |
    | ``overwrite`` | replace the model's folder that OUT is |
    | ``merge`` | of a run with lora: the whole model, with the adapters merged into its weights; without it OUT is the
    adapter alone, as peft writes it, in fp32 |
    | ``trust_remote_code`` | run the Python code that RUN keeps with its model; a model that needs it is refused
    otherwise, whatever RUN says |

    OUT has safetensors files, config.json, generation_config.json and the tokenizer, as save_pretrained writes them. It
    is there whole or not at all. Reads from disk, a few MB at a time, and checks every checksum. The run must not be
    training.
    """

    command: ClassVar[str] = "penstock export"
    takes: ClassVar[str] = "a run's folder and a new one"
    operands: ClassVar[tuple[str, ...]] = ("folder", "out")

    folder: Path
    out: Path
    dtype: Precision | None = None
    shard_size: str | int | float = "5GB"
    overwrite: bool = False
    merge: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_size("shard_size", self.shard_size, TEXT_LEAST)
        if not parse_size(self.shard_size):
            raise ConfigError(f"shard_size={self.shard_size}: must be more than 0")


def run(arguments: Arguments) -> int:
    """Export, and say what was written. Returns the exit code.

    Raises:
        ConfigError: there is no run, it has committed nothing, or OUT exists.
        ModelError: a value is too large for the dtype, or the installed transformers cannot build the model.
        StoreError: the run is in use or its state damaged, or the disk is full or fails.
    """
    config = settings_of(arguments.folder)
    adapter = config.lora is not None and not arguments.merge
    if arguments.merge and config.lora is None:
        raise ConfigError(f"--merge has no effect: {arguments.folder} has no adapters (lora)")
    if adapter and arguments.shard_size != Arguments.shard_size:
        raise ConfigError(
            f"--shard-size has no effect: {arguments.folder} has adapters (lora), which are one file without --merge"
        )
    state, record = _state(config, arguments.folder)
    keeps = kept_of(arguments.folder, vouched_by(record))
    keeps.below(model_folder(arguments.folder).name).require(
        arguments.folder, config.data.prepared_in(arguments.folder)
    )
    try:
        with _unwound_by_sigterm(), state as found, progress("written") as show:
            written, seconds = _write(arguments, config, found, show)
    except StoreError as error:
        if error.errno in (errno.EAGAIN, errno.EWOULDBLOCK):
            raise StoreError(
                f"{arguments.folder} is training (its store is in use): wait for it to end, or stop it with Ctrl-C, "
                "which it does after its step; then export, and go on with penstock resume"
            ) from error
        raise
    if found.step == 0:
        print(
            f"{arguments.folder} has taken no step yet: this is the model as it began. penstock resume goes on with it"
        )
    what = "its adapter" if adapter else "its model"
    print(
        f"{arguments.out}: step {found.step} of {arguments.folder}, {what} in "
        f"{str(written.dtype).removeprefix('torch.')}, {format_size(written.nbytes)} in {written.files} "
        f"file{'s' * (written.files > 1)}, in {seconds:.1f} s"
    )
    return 0


@contextmanager
def _unwound_by_sigterm() -> Iterator[None]:
    """Being ended is no reason to leave half a folder behind: as Ctrl-C does, it unwinds what has been begun."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _write(
    arguments: Arguments, config: TrainConfig, found: "Committed", show: Callable[[int, int], None]
) -> "tuple[Written, float]":
    """Write the model, or its adapter, to ``--out``. Returns a description of it, and the seconds that it took."""
    from penstock.hf.lora import with_adapters
    from penstock.hf.models.adapters import Merged
    from penstock.hf.models.exporting import Source, copy_companions, write_adapter, write_folder
    from penstock.hf.models.kept import kept_model

    began = time.perf_counter()
    trusted = arguments.trust_remote_code
    kept = kept_model(model_folder(arguments.folder), trust_remote_code=trusted, flag="--trust-remote-code")
    model, values = Source.of(kept, found.values), found.values
    if config.lora is not None:
        assert config.model.path is not None, "adapters are for a model that is there"
        # The settings may name it from the folder that the run began in, which need not be this one.
        named = (kept.base or config.model.path, config.model.path)
        base = next((str(Path(folder).resolve()) for folder in named if Path(folder).is_dir()), named[0])
        kept.model.config.name_or_path = kept.model.name_or_path = base
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
        shard_size=parse_size(arguments.shard_size),
        overwrite=arguments.overwrite,
        progress=show,
    )
    return written, time.perf_counter() - began


def _state(config: TrainConfig, run: Path) -> "tuple[AbstractContextManager[Committed], Mapping[str, Any] | None]":
    """The values of a run's last commit, or of the snapshot that a run without a disk has; and what that says."""
    from penstock.state.values import committed, kept

    if config.budget.disk_paths:
        stores, facts = require_own_stores(run, config.budget)
        return committed(stores), facts.record
    snapshot = require_newest(run)
    return kept(snapshot), record_in(snapshot)
