"""``penstock runs``: which runs there are, how far they are, and what two of them differ in."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.cells import cell_len

from penstock.cli.run_figures import RunFigures, read_all
from penstock.cli.words import Words
from penstock.config import format_size
from penstock.config.sizes import three_digits
from penstock.errors import ConfigError
from penstock.report.sentence import format_long_time, format_time

_LONGEST = 40
"""Characters of a setting's value that are shown."""


@dataclass(frozen=True, kw_only=True)
class Arguments(Words):
    """penstock runs: the runs in a folder, or two and more beside each other

      penstock runs [FOLDER ...]               list the runs in a folder (runs), the one that was trained last first
      penstock runs RUN RUN ... --compare      what their settings differ in, and their figures side by side

    | option | meaning |
    |---|---|
    | ``compare`` | show the runs side by side |
    | ``json`` | print everything as JSON |
    """

    command: ClassVar[str] = "penstock runs"
    takes: ClassVar[str] = "folders that have runs in them, or runs' folders"
    operands: ClassVar[tuple[str, ...]] = ("folders",)

    folders: tuple[Path, ...] = (Path("runs"),)
    compare: bool = False
    json: bool = False


def run(arguments: Arguments) -> int:
    """Returns the exit code: 1 where a run could not be read.

    Raises:
        ConfigError: a folder is none, or there are too few runs to compare.
    """
    found, unreadable = read_all(arguments.folders)
    where = " and ".join(map(str, arguments.folders))
    if not found and not unreadable:
        raise ConfigError(f"there is no run in {where}: penstock train makes one (its run setting)")
    if arguments.compare and len(found) < 2:
        why = f" ({unreadable[0]})" if unreadable else ""
        raise ConfigError(f"--compare needs two runs or more, and there is {len(found) or 'none'} in {where}{why}")
    if not arguments.compare:
        found.sort(key=lambda run: run.last, reverse=True)
    if arguments.json:
        print(json.dumps([run.to_json() for run in found], indent=2))
    elif found:
        print("\n".join(compared(found) if arguments.compare else listed(found)))
    for text in unreadable:
        print(f"penstock: not shown: {text}", file=sys.stderr)
    return 1 if unreadable else 0


def listed(runs: Sequence[RunFigures]) -> list[str]:
    """A line for each run."""
    held = any(run.validation is not None for run in runs)
    heads = ["run", "model", "state", "steps", "loss", *(["held out"] if held else []), "tokens/s", "last step (UTC)"]
    rows = [
        [
            str(run.folder),
            run.config.model.name,
            run.state,
            _steps(run),
            _known(run.loss),
            *([_known(run.validation)] if held else []),
            _known(run.tokens_per_second, three_digits),
            f"{run.last:%Y-%m-%d %H:%M}",
        ]
        for run in runs
    ]
    return _table(heads, rows, left=3)


def compared(runs: Sequence[RunFigures]) -> list[str]:
    """Settings that differ, then figures; a column for each run."""
    names = [str(run.folder) for run in runs]
    differ = list(difference_rows(runs))
    lines = _table(["settings that differ", *names], differ, left=1) if differ else ["Their settings are the same."]
    return [*lines, "", *_table(["figures", *names], list(figure_rows(runs)), left=1)]


def difference_rows(runs: Sequence[RunFigures]) -> Iterator[list[str]]:
    """A row for each setting that is not the same in all runs. One that is null is as good as one that is not there."""
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        values = [run.settings.get(key, _MISSING) for run in runs]
        if any(value != values[0] for value in values) and not all(value in (None, _MISSING) for value in values):
            yield [key, *map(shown_value, values)]


_MISSING = object()


def shown_value(value: Any) -> str:
    """A setting's value for people."""
    if value is _MISSING:
        return "–"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def figure_rows(runs: Sequence[RunFigures]) -> Iterator[list[str]]:
    """A row for each figure, with a cell for each run."""
    yield ["state", *(run.state for run in runs)]
    yield ["steps", *map(_steps, runs)]
    yield ["last step (UTC)", *(f"{run.last:%Y-%m-%d %H:%M}" for run in runs)]
    yield ["loss of the last step", *(_known(run.loss) for run in runs)]
    common = min(run.step for run in runs)
    if common and any(run.step != common for run in runs):
        yield [f"loss of step {common}", *(_known(run.loss_at(common)) for run in runs)]
    if any(run.validation is not None for run in runs):
        yield ["held-out loss", *(_known(run.validation) for run in runs)]
    yield ["tokens", *(f"{run.tokens:,}" for run in runs)]
    yield ["tokens/s, median", *(_known(run.tokens_per_second, three_digits) for run in runs)]
    yield ["a step, median", *(_known(run.step_seconds, format_time) for run in runs)]
    yield ["time in steps", *(format_long_time(run.seconds) for run in runs)]
    for name, words in (("mfu", "MFU"), ("share_of_product", "of a large product's FLOP/s")):
        if any(run.share(name) is not None for run in runs):
            yield [words, *(_known(run.share(name), "{:.0%}".format) for run in runs)]
    for tier in ("device", "host"):
        yield [f"{tier} memory, peak", *(format_size(run.peak.get(tier, 0)) for run in runs)]
    yield ["written to drives", *(format_size(run.written) for run in runs)]
    if any(run.ranks > 1 for run in runs):
        yield ["ranks", *(str(run.ranks) for run in runs)]


def _steps(run: RunFigures) -> str:
    return f"{run.step:,}" if run.config.steps in (None, run.step) else f"{run.step:,} of {run.config.steps:,}"


def _known(value: float | None, form: Callable[[float], str] = "{:.4f}".format) -> str:
    return "–" if value is None else form(value)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Lines of columns as wide as they must be; the first ``left`` are set left, the others right."""
    lines = [[_in_a_line(cell) for cell in row] for row in (heads, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell + room if i < left else room + cell
            for i, (cell, room) in enumerate((c, " " * (w - cell_len(c))) for c, w in zip(row, widths, strict=True))
        ).rstrip()
        for row in lines
    ]


def _in_a_line(text: str) -> str:
    """The text with what moves a terminal's cursor, or is no character, as Python writes it: names of folders may have
    that."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
