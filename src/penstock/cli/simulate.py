"""``penstock simulate``: how long a schedule takes, and how much memory it holds when."""

import sys
from pathlib import Path

from penstock import files
from penstock.cli.simulate_arguments import Arguments
from penstock.cli.simulate_case import Case
from penstock.cli.simulate_source import described_families, source_of
from penstock.cli.simulate_view import as_json, figures_of, show
from penstock.cli.words import help_of
from penstock.errors import ConfigError, ScheduleError
from penstock.hardware.profiles import shipped_names
from penstock.report.chrome import write_simulation
from penstock.report.simulated_page import simulated_page
from penstock.schedule.check.worlds import check_world
from penstock.schedule.collection import no_collection
from penstock.shape.shipped import CONFIGS
from penstock.sim.result import Simulation
from penstock.sim.simulate import simulate


def help_text() -> str:
    """The usage, with the machines, models and schedules that have names."""
    return help_of(
        Arguments, machines=", ".join(shipped_names()), models=", ".join(CONFIGS), families=described_families()
    )


def run(arguments: Arguments) -> int:
    """Run the command; returns its exit code.

    Raises:
        ConfigError: what was asked for is wrong, impossible or cannot be written.
    """
    for path in filter(None, (arguments.html, arguments.trace)):
        _check_writable(path)
    with no_collection():
        try:
            source = source_of(arguments)
            if not source.checked:
                check_world(source.world)
            if arguments.text:
                sys.stdout.write(str(source.world))
                return 0
            case = source.case()
            simulation = simulate(case.world, case.costs)
        except ScheduleError as error:
            raise ConfigError(f"{arguments.name}: {error}") from None
        written = _write_files(case, simulation, arguments.html, arguments.trace)
        figures = figures_of(case, simulation)
        if arguments.json:
            print(as_json(case, simulation, figures))
        else:
            show(case, simulation, figures, sys.stdout)
            print(*written, sep="\n", end="\n" if written else "")
    return 0


def _write_files(case: Case, simulation: Simulation, html: Path | None, trace: Path | None) -> list[str]:
    """Write what was asked for; a line about each."""
    written = []
    try:
        if (path := html) is not None:
            files.write_named(
                path, simulated_page(simulation, title=case.title, unit=case.unit, costs=case.costs_in_words)
            )
            written.append(f"written      {path} (open it in a browser)")
        if (path := trace) is not None:
            write_simulation(simulation, path)
            written.append(f"written      {path} (open it in https://ui.perfetto.dev)")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    return written


def _check_writable(path: Path) -> None:
    """Say what is wrong with a file's name before the work, not after it."""
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder, and a file's name is needed")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")
