"""The command line: ``penstock train`` and its relatives.

Settings, the run's folder, the display and the training loop around an engine. May import: ``errors``, ``files``,
``documents``, ``config``, ``schedule``, ``sim``, ``hardware``, ``loss``, ``shape``, ``planner``, ``report``, ``store``,
``optim``, ``data``, ``state``, ``ranks``, ``engine``, ``doctor``, ``hf``.
"""

import errno
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from penstock.cli.arguments import USAGE, ResumeArguments, TrainArguments, train_help
from penstock.cli.launch import process_count
from penstock.cli.located import is_plain_text
from penstock.cli.named_files import check_named_files
from penstock.cli.run_folder import Start, settings_of, trusts_code
from penstock.cli.settings import dump, load, unknown
from penstock.cli.showing.display import fail
from penstock.cli.words import help_of, read_words
from penstock.config import TrainConfig
from penstock.errors import BudgetError, ConfigError, ModelError, NonFiniteError, RankError, StoreError
from penstock.schedule.collection import no_collection
from penstock.store.directory import in_the_way


def main(words: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0: done. 2: asked for what cannot be, with nothing trained. 1: failed on the way. 128 and a signal's number:
    ended by it after a step, so 130 for Ctrl-C. 141: whoever read the output has seen enough, as a shell says of a
    program that a closed pipe ends.
    """
    words = sys.argv[1:] if words is None else list(words)
    warnings.showwarning = _show_warning
    _replace_closed_streams()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what the terminal has no character for; stderr escapes it
    try:
        code = _outcome(words)
        sys.stdout.flush()
        return code
    except OSError as error:  # of the output, which nobody gets any more
        # What is left goes nowhere, without a word when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            return 141
        fail(f"cannot write the output: {error.strerror}")
        return 1


def _replace_closed_streams() -> None:
    """Standard streams that the process was started without (``>&-``) lead nowhere: else the next file to be opened,
    such as the store's, would have a stream's number, and get what libraries print."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the process; takes the lowest number


_LOST = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO}
"""Error numbers with which writing to a file fails that was opened before, such as standard output."""


def _outcome(words: Sequence[str]) -> int:
    try:
        return _command(words)
    except (ConfigError, BudgetError, ModelError) as error:
        fail(str(error))
        return 2
    except (StoreError, NonFiniteError) as error:
        fail(str(error))
        return _code(error)
    except RankError as error:
        fail(str(error))
        sys.stdout.flush()
        os._exit(1)  # what torch still waits for of a rank that is gone would abort this process as it ends
    except OSError as error:
        if error.filename is None and error.errno in _LOST:
            raise
        where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else None
        fail(str(error) if where is None else f"{where}: {in_the_way(Path(where), error)}")
        return _code(error)
    except RuntimeError as error:
        loop = error.__context__  # pathlib's own error before Python 3.13, raised as the system's is handled
        if not (isinstance(loop, OSError) and loop.errno == errno.ELOOP):
            raise
        fail(f"{loop.filename}: {in_the_way(Path(loop.filename), loop)}")
        return 1
    except UnicodeEncodeError as error:  # of a file's name, in settings or in a folder
        if sys.getfilesystemencoding() == "utf-8":
            raise
        fail(_not_in_locale(error.object))
        return 2
    except MemoryError as error:
        fail(str(error) or "out of memory")
        return 1
    except KeyboardInterrupt:  # before training began or after it ended; in between it is a request
        fail("interrupted")
        return 130


def _not_in_locale(name: str) -> str:
    return (
        f"{name!a} has a character that is none in this locale, where names of files are in "
        f"{sys.getfilesystemencoding()}: set LC_ALL=C.UTF-8, or PYTHONUTF8=1"
    )


def _code(error: Exception) -> int:
    """The exit code of a command that the system, or the store, did not let do its work."""
    return 2 if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG else 1  # only what was asked for is so


def _command(words: Sequence[str]) -> int:
    match list(words):
        case ["--version"]:
            print(f"penstock {version('penstock')}")
        case [] | ["--help"] | ["-h"] | ["help"]:
            print(USAGE, end="")
        case ["help", word]:
            return _command([word, "--help"])
        case [word, *rest]:
            if word not in COMMANDS:
                raise ConfigError(unknown(word, list(COMMANDS), takes="penstock", what="command"))
            if process_count() > 1 and word not in _OF_RANKS:
                raise ConfigError(f"penstock {word} runs in one process: start it without torchrun")
            _require_here()
            if sys.getfilesystemencoding() != "utf-8" and (strange := [w for w in rest if not is_plain_text(w)]):
                raise ConfigError(_not_in_locale(strange[0]))
            if not {"--help", "-h"}.isdisjoint(rest):
                print(_help(word), end="")
                return 0
            return COMMANDS[word](rest)
    return 0


def _require_here() -> None:
    """Raises ConfigError: the working directory has been removed, which paths are relative to, and which libraries ask
    for."""
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(f"the working directory cannot be told ({error.strerror}): cd to one that is there") from None


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning is for the user of a command, who has no use for the line of code that gives it."""
    fail(f"warning: {message}")


def _help(command: str) -> str:
    if command == "train":
        return train_help()
    if command == "resume":
        return help_of(ResumeArguments)
    found = import_module(f"penstock.cli.{command}")
    return str(found.help_text()) if hasattr(found, "help_text") else help_of(found.Arguments)


def _other(command: str, words: Sequence[str]) -> int:
    """A command that is a module of its own, imported only when it is asked for."""
    found = import_module(f"penstock.cli.{command}")
    # Threads of torch wait as in a run of `penstock train`: see `_run`.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    read = getattr(found, "read_arguments", partial(read_words, found.Arguments))
    with _needing_hf(command):
        code: int = found.run(read(words))
    return code


def _train(words: Sequence[str]) -> int:
    arguments = read_words(TrainArguments, words)
    config = load(arguments.config, arguments.settings)
    if arguments.print_config:
        print(dump(config), end="")
        return 0
    return _run(config, arguments.start, own_code=trusts_code(arguments.settings))


def _resume(words: Sequence[str]) -> int:
    arguments = read_words(ResumeArguments, words)
    return _run(settings_of(arguments.run, arguments.settings), "resume", own_code=trusts_code(arguments.settings))


def _run(config: TrainConfig, start: Start, *, own_code: bool) -> int:
    with _needing_hf("train"):
        check_named_files(config, start)
    # Threads of torch that wait by spinning take the cores from the lanes' own threads. OpenMP reads this when torch is
    # loaded, which is here: on a busy two-core machine it makes a step several times faster (docs/log.md).
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with _needing_hf("train"), no_collection():
        from penstock.cli.train import train  # torch and transformers take seconds to import
    return train(config, start, own_code=own_code)


@contextmanager
def _needing_hf(command: str) -> Iterator[None]:
    """Inside, a package of the extra ``hf`` that is not installed is said to be, with the remedy."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("transformers", "tokenizers", "huggingface_hub"):
            raise
        raise ConfigError(
            f"penstock {command} needs {error.name}, which is not installed: pip install 'penstock[hf]'"
        ) from error


_OF_RANKS = ("train", "resume", "doctor")
"""Commands that several processes run together; any other is refused in more than one process."""
_OTHERS = ("verify", "export", "reshard", "plan", "simulate", "runs", "report", "doctor")
COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "init": partial(_other, "init"),
    "train": _train,
    "resume": _resume,
    **{name: partial(_other, name) for name in _OTHERS},
}
