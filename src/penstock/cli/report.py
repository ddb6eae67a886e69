"""``penstock report``: from a run's folder to a page, a Chrome trace and a picture."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock import files
from penstock.cli.run_folder import settings_file, settings_of
from penstock.config import Tier, TrainConfig
from penstock.errors import ConfigError
from penstock.report.chrome import chrome_trace
from penstock.report.metrics_file import read_metrics
from penstock.report.picture import draw
from penstock.report.prediction import read_prediction
from penstock.report.run_page import Report, run_page
from penstock.report.trace_file import choose_step, read_traces

REPORT_HELP = """\
penstock report: what a run did, beside what it was predicted to do

  penstock report RUN [options]   RUN is the folder that penstock train wrote
      --out FILE     the page, one HTML file that loads nothing (RUN/report.html)
      --step N       the step that is shown op by op (of those in the trace, the one whose time is the median)
      --svg [FILE]   also the timeline as a picture (RUN/timeline.svg); it needs matplotlib, which the extra
                     penstock[report] brings
      --png [FILE]   the same (RUN/timeline.png)
      --trace FILE   also a Chrome trace of prediction and measurement: open it in https://ui.perfetto.dev
"""

_FILES = ("--out", "--svg", "--png", "--trace")
_PICTURES = {"--svg": ".svg", "--png": ".png"}
_HINT = "Try: penstock report --help"


@dataclass(frozen=True, kw_only=True)
class ReportArguments:
    """``penstock report``. ``out``: None is RUN/report.html. ``step``: None is the one of median time."""

    run: Path
    step: int | None = None
    out: Path | None = None
    svg: Path | None = None
    png: Path | None = None
    trace: Path | None = None


def parse_report(words: Sequence[str]) -> ReportArguments:
    """Take apart the words after ``penstock report``. A flag's value is the next word, or follows ``=``.

    A picture needs no name: without a word after it that ends as such a file does, it is in the run's folder.

    Raises:
        ConfigError: no folder or several, an unknown flag, or a flag without a usable value.
    """
    folders: list[str] = []
    flags: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            folders.append(word)
            continue
        key, equals, value = word.partition("=")
        if key not in (*_FILES, "--step"):
            raise ConfigError(f"penstock report has no {key}. {_HINT}")
        if key in flags:
            raise ConfigError(f"{key} is given twice: give it once")
        named = bool(rest) and not rest[0].startswith("--")
        if key in _PICTURES and not equals:
            flags[key] = rest.pop(0) if named and rest[0].endswith(_PICTURES[key]) else ""
            continue
        if not equals:
            value = rest.pop(0) if named else ""
        if not value:
            raise ConfigError(f"{key} needs a value: {key} {'NUMBER' if key == '--step' else 'FILE'}")
        flags[key] = value
    if len(folders) != 1:
        found = "none" if not folders else " and ".join(folders)
        endings = " and ".join(_PICTURES[key] for key in _PICTURES if key in flags)
        hint = f"A picture's name ends in {endings}. " if folders and endings else ""
        raise ConfigError(f"penstock report takes one run's folder, and was given {found}. {hint}{_HINT}")
    step = flags.get("--step")
    if step is not None and not step.isdecimal():
        raise ConfigError(f"--step {step!r} is not a step's number")
    run = Path(folders[0])
    paths = {key: Path(flags[key]) if key in flags else None for key in _FILES}
    for key, ending in _PICTURES.items():
        if flags.get(key) == "":
            paths[key] = run / f"timeline{ending}"
        elif (path := paths[key]) is not None and path.suffix != ending:
            raise ConfigError(f"{key} {path}: the file's name must end in {ending}")
    return ReportArguments(
        run=run,
        step=None if step is None else int(step),
        out=paths["--out"],
        svg=paths["--svg"],
        png=paths["--png"],
        trace=paths["--trace"],
    )


def report(arguments: ReportArguments) -> int:
    """Write what was asked for and say where it is; returns the exit code.

    Raises:
        ConfigError: the folder is not a run's, holds no trace, or a file cannot be read or written.
    """
    found = gather(arguments.run, arguments.step)
    put = partial(_put, run=arguments.run)
    _write(arguments.out or arguments.run / "report.html", lambda path: put(path, run_page(found)))
    for picture in (arguments.svg, arguments.png):
        if picture is not None:
            _write(picture, lambda path: draw(path, found.prediction, found.step, found.budget, put))
    if arguments.trace is not None:
        _write(arguments.trace, lambda path: put(path, chrome_trace(found.prediction, found.step)))
    return 0


def gather(folder: Path, step: int | None) -> Report:
    """Read a run's folder.

    Raises:
        ConfigError: it is not a run's folder, holds no trace, or a file in it is damaged.
    """
    settings_file(folder)
    config = settings_of(folder)
    steps = read_traces(folder)
    prediction = read_prediction(folder / "prediction.json")
    return Report(
        name=folder.resolve().name,
        description=_description(config),
        step=choose_step(steps, step),
        traced=len(steps),
        metrics=read_metrics(folder / "metrics.jsonl"),
        prediction=prediction,
        budget=_budget(config) if prediction is None else prediction.budget,
    )


def _budget(config: TrainConfig) -> dict[Tier, int]:
    return {"device": config.budget.device_bytes, "host": config.budget.host_bytes}


def _description(config: TrainConfig) -> str:
    size, count = (0, 0) if config.micro_batch_size is None else config.split
    cut = f"{count} micro-batch{'es' * (count > 1)} of {size} x {config.data.sequence_length} tokens" if size else ""
    parts = [
        config.model.name,
        f"{config.schedule} schedule",
        cut,
        config.precision or "",
    ]
    return ", ".join(part for part in parts if part)


def _put(path: Path, content: str | bytes, run: Path) -> None:
    """In a run's folder a report takes the place of what is there; elsewhere it goes where the user's path leads."""
    if path.parent.resolve() == run.resolve():
        files.replace(path, content)
    else:
        files.write_named(path, content)


def _write(path: Path, write: Callable[[Path], None]) -> None:
    try:
        write(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    print(f"wrote {path} ({path.stat().st_size / 1e3:,.0f} kB)")
