"""``penstock completion``: a script with which a shell completes commands, options, settings and their values.

The commands' own declarations become a parser of argparse's, which shtab turns into the script. It parses nothing.
"""

import argparse
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Literal

import shtab

from penstock.cli.arguments import ResumeArguments, TrainArguments
from penstock.cli.settings import options_of, settings_below
from penstock.cli.words import SETTINGS, Words, declared, may_be_a_file, takes_no_value, values_of
from penstock.config import TrainConfig
from penstock.documents.typed import hints_of

Shell = Literal["bash", "zsh", "fish"]


@dataclass(frozen=True, kw_only=True)
class Arguments(Words):
    """penstock completion: prints a script with which a shell completes commands, options, settings and their values

      penstock completion bash > ~/.local/share/bash-completion/completions/penstock
      penstock completion zsh > ~/.zfunc/_penstock     with fpath=(~/.zfunc $fpath) in ~/.zshrc, before compinit
      penstock completion fish > ~/.config/fish/completions/penstock.fish

    Make the folder first if it is not there, and the script anew after an update. A shell that is started then
    completes penstock.
    """

    command: ClassVar[str] = "penstock completion"
    takes: ClassVar[str] = "a shell: bash, zsh or fish"
    operands: ClassVar[tuple[str, ...]] = ("shell",)

    shell: Shell


def run(arguments: Arguments) -> int:
    """Print the script. Returns the exit code."""
    from penstock.cli import COMMANDS  # which has this command, too

    print(shtab.complete(parser_of(tuple(COMMANDS)), shell=arguments.shell))
    return 0


def parser_of(commands: Sequence[str]) -> argparse.ArgumentParser:
    """All commands as argparse would have them."""
    parser = argparse.ArgumentParser(prog="penstock")
    parser.add_argument("--version", action="store_true", help="the version of penstock")
    below = parser.add_subparsers()
    helper = below.add_parser("help", help="what a command takes")
    helper.add_argument("command", choices=commands)
    for command in commands:
        kinds = kinds_of(command)
        about = (kinds[0].__doc__ or "").splitlines()[0].partition(": ")[2]
        one = below.add_parser(command, help=_plain(about))
        there: set[str] = set()
        for kind in kinds:
            _declare(one, kind, there)
    return parser


def kinds_of(command: str) -> tuple[type[Words], ...]:
    """The classes that a command's words are read into, of which one counts."""
    if command in _OWN:
        return (_OWN[command],)
    return options_of(import_module(f"penstock.cli.{command}").Arguments)


_OWN: dict[str, type[Words]] = {"train": TrainArguments, "resume": ResumeArguments}


def _declare(parser: argparse.ArgumentParser, kind: type[Words], there: set[str]) -> None:
    """The operands and options of a class, but for those that are ``there``, to which they are added."""
    hints = hints_of(kind)
    for name in kind.operands:
        many = typing.get_origin(hints[name]) is tuple
        _complete(parser.add_argument(name, nargs="+" if many else None), hints[name])
    options = [(option.flag, option.hint, option.meaning) for option in declared(kind)]
    for flag, hint, meaning in (*options, *(_settings() if SETTINGS in hints else ())):
        if flag in there:
            continue
        there.add(flag)
        if takes_no_value(hint) and (flag, hint, meaning) in options:
            parser.add_argument(flag, action="store_true", help=_plain(meaning))
        else:
            _complete(parser.add_argument(flag, help=_plain(meaning)), hint)


def _settings() -> Iterator[tuple[str, Any, str]]:
    """Each setting that a value on a command line makes sense of: its flag, type and meaning."""
    for each in settings_below(TrainConfig):
        if each.kind or hasattr(each.section, "shorthand"):
            yield f"--{each.name}", each.hint, (each.kind and each.meaning) or each.about


def _complete(action: argparse.Action, hint: Any) -> None:
    """Let a shell propose values for an option: the words that it takes, else names of files where it may be one."""
    if values := values_of(hint):
        action.choices = values
    elif may_be_a_file(hint):
        action.complete = shtab.FILE  # type: ignore[attr-defined]  # where shtab looks for it


def _plain(text: str) -> str:
    """A meaning in one line without markup; argparse takes a percent sign for a place to fill."""
    return " ".join(text.replace("``", "").split()).replace("%", "%%")
