"""The words after ``penstock``: one command, one file, switches, and any setting as a flag."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.cli.run_folder import Start
from penstock.errors import ConfigError

USAGE = """\
penstock: trains language models that do not fit in memory

  penstock train CONFIG.yaml [--SETTING VALUE ...]   train; writes metrics, trace and settings into the run's folder
      --overwrite      replace the run that is in the folder, and its state on disk
      --resume         go on with the run that is in the folder; begin where there is none yet, and end with code 0
                       where it is complete: the one command that a script needs
      --print-config   print the resolved settings and stop
  penstock train --help                              every setting
  penstock resume RUN [--SETTING VALUE ...]          go on with the run in the folder RUN, with the settings it has
  penstock verify RUN                                read all of its last commit, and check every checksum
  penstock export RUN OUT                            write its last commit as a Hugging Face folder
  penstock plan CONFIG.yaml | --model NAME           what a run will do on a machine, and what would help
  penstock simulate NAME|FILE [--costs MACHINE] ...  how long a schedule takes, and what memory it holds when
  penstock report RUN [--svg] [--step N]             one HTML page of what a run did, beside what was predicted
  penstock doctor [--path DIR ...]                   measure this machine for plans, and say what is wrong with it
  penstock COMMAND --help                            what a command takes
  penstock --version
"""

RESUME_HELP = """\
penstock resume: go on with a run after a kill or a stop, or with more steps than it had

  penstock resume RUN [--SETTING VALUE ...]   RUN is the folder that penstock train wrote

It goes on after the last step that the run has committed, with the settings that are in RUN/config.yaml. A flag changes
one of them, as in penstock train: --steps 2000. The model, the data, the batch and the seed stay as they are.
penstock train --help lists every setting.
"""

_SWITCHES = ("--overwrite", "--resume", "--print-config")


@dataclass(frozen=True, kw_only=True)
class TrainArguments:
    """``penstock train``. ``flags``: dotted setting and its value as written. ``start``: what to do with an old run."""

    config: Path
    flags: tuple[tuple[str, str], ...] = ()
    start: Start = "new"
    print_config: bool = False


def parse_train(words: Sequence[str]) -> TrainArguments:
    """Take apart the words after ``penstock train``. A flag's value is the next word, or follows ``=``.

    Raises:
        ConfigError: no file or several, a flag without a value, or switches that contradict each other.
    """
    files, flags, switches = _take_apart(words, _SWITCHES)
    if len(files) != 1:
        found = "none" if not files else " and ".join(files)
        raise ConfigError(f"penstock train takes one settings file, and was given {found}. {_HINT}")
    if switches >= {"--overwrite", "--resume"}:
        raise ConfigError("--overwrite removes the earlier run and --resume goes on with it: give one of them")
    return TrainArguments(
        config=Path(files[0]),
        flags=flags,
        start="overwrite" if "--overwrite" in switches else "resume" if "--resume" in switches else "new",
        print_config="--print-config" in switches,
    )


@dataclass(frozen=True, kw_only=True)
class ResumeArguments:
    """``penstock resume``. ``run``: the folder of a run. ``flags``: as for ``penstock train``."""

    run: Path
    flags: tuple[tuple[str, str], ...] = ()


def parse_resume(words: Sequence[str]) -> ResumeArguments:
    """Take apart the words after ``penstock resume``.

    Raises:
        ConfigError: no folder or several, a flag without a value, or one that names another folder.
    """
    folders, flags, _ = _take_apart(words, ())
    if len(folders) != 1:
        found = "none" if not folders else " and ".join(folders)
        raise ConfigError(f"penstock resume takes one run's folder, and was given {found}. Try: penstock resume --help")
    for key, value in flags:
        if key == "run":
            raise ConfigError(
                f"--run {value}: penstock resume goes on in {folders[0]}, the folder it is given: drop it"
            )
    return ResumeArguments(run=Path(folders[0]), flags=flags)


def _take_apart(words: Sequence[str], known: Sequence[str]) -> tuple[list[str], tuple[tuple[str, str], ...], set[str]]:
    """Words into files, settings as flags, and the switches that are ``known``."""
    files: list[str] = []
    flags: list[tuple[str, str]] = []
    switches: set[str] = set()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word in known:
            switches.add(word)
        elif word.startswith("--") and "=" in word:
            key, _, value = word.removeprefix("--").partition("=")
            flags.append((key, value))
        elif word.startswith("--"):
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"{word} needs a value: {word} VALUE (text in YAML: null, true, [1, 2])")
            flags.append((word.removeprefix("--"), rest.pop(0)))
        else:
            files.append(word)
    return files, tuple(flags), switches


_HINT = "Try: penstock train --help"
