"""``penstock init``: a settings file with comments, for a model, data and a machine."""

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from penstock import files
from penstock.cli.commented import written
from penstock.cli.first_look import (
    DataFacts,
    MachineFacts,
    ModelFacts,
    look_at_data,
    look_at_disk,
    look_at_machine,
    look_at_model,
)
from penstock.cli.named_files import check_named_files
from penstock.cli.proposal import Proposal, propose
from penstock.cli.settings import load_text
from penstock.cli.words import Words
from penstock.errors import ConfigError
from penstock.store.directory import is_there

T = TypeVar("T")

OUTPUT = "train.yaml"
NO_DISK = "none"


@dataclass(frozen=True, kw_only=True)
class Arguments(Words):
    """penstock init: writes a settings file that says what each setting means and why it was chosen

      penstock init                                         asks for what it needs
      penstock init --model NAME --data FILE --disk DIR     asks nothing: for scripts

    | option | meaning |
    |---|---|
    | ``model`` NAME | a folder of safetensors files, a name on the hub, or for random weights a config.json |
    | ``data`` PATH | a file, a folder, a glob pattern or a data set on the hub; or a mapping, as data.sources has them:
    '{{path: qa.jsonl, fields: {{prompt: question, completion: answer}}}}' |
    | ``disk`` DIR | a directory on a fast drive, for what does not fit in memory; once for each drive; none: no disk |
    | ``machine`` NAME|FILE | the machine that it will run on, if not this one: one that ships with penstock, or a
    profile of penstock doctor |
    | ``run`` DIR | the folder of the run (runs/ and the model's name) |
    | ``output`` FILE | the file to write |
    | ``overwrite`` | replace the file, if it is there |

    It looks at the model's configuration, at the first documents, and at what is free on the machine or in its profile;
    nothing is measured. Try what it has written with penstock plan, change what you like, and train.
    """

    command: ClassVar[str] = "penstock init"
    takes: ClassVar[str] = "no words but options (--model NAME --data FILE --disk DIR)"

    model: str | None = None
    data: tuple[str, ...] = ()
    disk: tuple[str, ...] = ()
    machine: str | None = None
    run: Path | None = None
    output: Path = Path(OUTPUT)
    overwrite: bool = False

    def __post_init__(self) -> None:
        if NO_DISK in self.disk and len(self.disk) > 1:
            raise ConfigError(f"--disk {NO_DISK} beside other directories: give one or the other")


def run(arguments: Arguments) -> int:
    """Look, ask what was not given, write the file, and say what to do next. Returns the exit code.

    Raises:
        ConfigError: something is not given and there is nobody to ask; or what is given is not there or of no use.
    """
    needed = [key for key in ("model", "data", "disk") if not getattr(arguments, key)]
    if needed and not sys.stdin.isatty():
        flags = {"model": "--model NAME", "data": "--data FILE", "disk": f"--disk DIR (or --disk {NO_DISK})"}
        raise ConfigError(
            f"penstock init asks for what it needs, but there is no terminal here: give "
            f"{' and '.join(flags[key] for key in needed)}. Try: penstock init --help"
        )
    _check_output(arguments)
    model = _answer("--model", arguments.model, "Model: a folder, a name on the hub, or a config.json", look_at_model)
    template = model.template
    data = _answer(
        "--data",
        arguments.data or None,
        "Data: a file, a folder, a pattern, or a data set on the hub",
        lambda paths: look_at_data(paths, template=template, tokenizer=model.tokenizer),
        several=True,
    )
    machine = arguments.machine
    if needed and machine is None:
        machine = _asked("Machine: one that ships with penstock, a profile's file, or this one", "this one", _machine)
    disk = _answer(
        "--disk",
        arguments.disk or None,
        f"Disk: a directory on a fast drive for what does not fit in memory, or {NO_DISK}",
        lambda paths: look_at_disk(() if paths == (NO_DISK,) else paths, here=machine is None),
        several=True,
    )
    facts = look_at_machine(machine, disk.paths)
    proposal = propose(model=model, data=data, disk=disk, machine=facts, run=arguments.run)
    return _write(arguments, proposal, model, data, facts)


def _machine(word: str) -> str | None:
    name = None if word == "this one" else word
    look_at_machine(name, ())
    return name


def _answer(
    flag: str, given: str | tuple[str, ...] | None, question: str, look: Callable[..., T], *, several: bool = False
) -> T:
    """Look at what the flag was given, or else at the answer to the question, and return what was found.

    Raises:
        ConfigError: what the flag was given is of no use, or the answers have ended.
    """
    if given is None:
        return _asked(question, None, (lambda word: look((word,))) if several else look)
    try:
        return look(given)
    except ConfigError as error:
        raise ConfigError(f"{'' if str(error).startswith(flag) else f'{flag}: '}{error}") from None


def _asked(question: str, default: str | None, look: Callable[[str], T]) -> T:
    """Ask, look at the answer, and return what was found; an answer that is of no use is asked for again.

    Raises:
        ConfigError: standard input ends before there is an answer.
    """
    while True:
        print(f"{question}{'' if default is None else f' [{default}]'}: ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise ConfigError("the answers ended before the last question: nothing was written")
        answer = line.strip() or default
        if not answer:
            continue
        try:
            return look(answer)
        except ConfigError as error:
            print(f"  {error}", file=sys.stderr)


def _check_output(arguments: Arguments) -> None:
    """Raises ConfigError: the file is there and nobody has said that it may go, or it cannot be written."""
    output = arguments.output
    if is_there(output) and not (arguments.overwrite and output.is_file()):
        how = "--overwrite replaces it, and --output FILE names another" if output.is_file() else "give --output FILE"
        raise ConfigError(f"--output {output}: it is there already: {how}")
    if not os.access(output.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--output {output}: {output.parent} is no folder that can be written to")


def _write(arguments: Arguments, proposal: Proposal, model: ModelFacts, data: DataFacts, machine: MachineFacts) -> int:
    output = arguments.output
    text = written(proposal.settings, proposal.reasons, title=(*proposal.title, *_next(output, machine)))
    check_named_files(load_text(text, str(output)), "new")
    files.replace(output, text, private=False)
    for line in (model.said, data.said, machine.said, *proposal.warnings):
        print(line)
    print(f"\nWrote {output}, which says why each value was chosen. Next:")
    for line in _next(output, machine):
        print(f"  {line}")
    return 0


def _next(output: Path, machine: MachineFacts) -> tuple[str, ...]:
    name = shlex.quote(str(output))
    there = "" if machine.name is None else f" --machine {shlex.quote(machine.name)}"
    return (
        f"penstock plan {name}{there}    what to expect of it",
        f"penstock train {name}",
    )
