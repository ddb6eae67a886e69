"""The command line arguments of ``penstock``, ``penstock train`` and ``penstock resume``, and the help of ``train``:
every setting by its section, with what it must be, its default and its meaning.
"""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from penstock.cli.run_folder import Start
from penstock.cli.settings import Setting, settings_below
from penstock.cli.words import Words, columns, help_of
from penstock.config import TrainConfig
from penstock.errors import ConfigError

USAGE = """\
penstock: trains language models that do not fit in memory

  penstock init --model NAME --data FILE --disk DIR  write a settings file for this machine; asks what is not given
  penstock train CONFIG.yaml [--SETTING VALUE ...]   train; writes metrics, trace and settings into the run's folder
      --overwrite      replace the run that is in the folder, and its state on disk
      --resume         go on with the run that is in the folder, or begin where there is none, and end with code 0
                       where it is complete: the one command that a script needs
      --print-config   print the resolved settings and stop
  penstock train --help                              every setting
  penstock resume RUN [--SETTING VALUE ...]          go on with the run in the folder RUN, with the settings it has
  penstock verify RUN                                read all of its last commit, and check every checksum
  penstock export RUN OUT                            write its last commit as a Hugging Face folder
  penstock reshard RUN --ranks N                     cut its state for another number of ranks
  penstock plan CONFIG.yaml | --model NAME           what a run will do on a machine, and what would help
  penstock simulate NAME|FILE [--costs MACHINE] ...  how long a schedule takes, and what memory it holds when
  penstock runs [FOLDER ...] [--compare]             list runs; show what two differ in, and their figures side by side
  penstock report RUN [--svg] [--step N]             one HTML page of what a run did, beside what was predicted
  penstock doctor [--path DIR ...]                   measure this machine for plans, and say what is wrong with it
  penstock COMMAND --help                            what a command takes
  penstock --version
"""


@dataclass(frozen=True, kw_only=True)
class TrainArguments(Words):
    """penstock train: trains a model as a settings file says

      penstock train CONFIG.yaml [--SETTING VALUE ...] [--overwrite | --resume] [--print-config]

    | option | meaning |
    |---|---|
    | ``overwrite`` | replace the run that is in the folder, and its state on disk |
    | ``resume`` | go on with the run that is in the folder, or begin where there is none |
    | ``print_config`` | print the resolved settings and stop |

    Each setting is a key in the file, or a flag: --optimizer.lr 1e-3. A flag's value is YAML: null,
    [1, 2], {{every: 5}}. Bytes may be written as 512MiB, 24GiB or 8GB. penstock init writes a file to
    begin with, docs/training.md tells more, and examples/ has files for more cases.
    """

    command: ClassVar[str] = "penstock train"
    takes: ClassVar[str] = "one settings file"
    operands: ClassVar[tuple[str, ...]] = ("config",)

    config: Path
    overwrite: bool = False
    resume: bool = False
    print_config: bool = False
    settings: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.overwrite and self.resume:
            raise ConfigError("--overwrite removes the earlier run and --resume goes on with it: give one of them")

    @property
    def start(self) -> Start:
        """The way to treat a run that is in the folder: replace it, go on with it, or refuse because of it."""
        return "overwrite" if self.overwrite else "resume" if self.resume else "new"


@dataclass(frozen=True, kw_only=True)
class ResumeArguments(Words):
    """penstock resume: go on with a run after a kill or a stop, or with more steps than it had

      penstock resume RUN [--SETTING VALUE ...]   RUN is the folder that penstock train wrote

    It goes on after the last step that the run has committed, with the settings that are in RUN/config.yaml. A flag
    changes one of them, as in penstock train: --steps 2000. The model, its adapters, the data, the batch and the seed
    stay as they are. penstock train --help lists every setting.
    """

    command: ClassVar[str] = "penstock resume"
    takes: ClassVar[str] = "one run's folder"
    operands: ClassVar[tuple[str, ...]] = ("run",)

    run: Path
    settings: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for key, value in self.settings:
            if key == "run":
                raise ConfigError(
                    f"--run {value}: penstock resume goes on in {self.run}, the folder it is given: drop it"
                )


# ---- penstock train --help

_FLAG = 34
"""Columns of the flags."""


def train_help() -> str:
    """The usage, then what a run is told first, a paragraph for each section, and what is rarely needed."""
    settings = settings_below(TrainConfig)
    order = [each for each in settings if "." not in each.name]
    rare = next(n for n, each in enumerate(order) if each.section and each.default != "required")
    parts = [help_of(TrainArguments).rstrip(), "\n".join(["run", *_rows(order[:rare])])]
    for section in order:
        inside = [each for each in settings if each.name.startswith(f"{section.name}.")]
        if inside:
            head = textwrap.wrap(f"{section.name}: {section.about}", columns(), subsequent_indent="  ")
            parts.append("\n".join([*head, *_rows(inside)]))
    parts.append("\n".join(["rarely needed", *_rows(order[rare:])]))
    return "\n\n".join(parts) + "\n"


def _rows(settings: list[Setting]) -> Iterator[str]:
    for each in settings:
        if not each.kind:
            continue
        shown = each.default if each.default.startswith("required") else f"default {each.default}"
        kind = each.kind.removesuffix(" or null") if each.default == "null" else each.kind
        head = f"  --{each.name:<{_FLAG - 4}}  {kind}; {shown}"
        yield from textwrap.wrap(head, columns(), subsequent_indent=" " * _FLAG, break_long_words=False)
        yield from textwrap.wrap(each.meaning, columns(), initial_indent=" " * 6, subsequent_indent=" " * 6)
