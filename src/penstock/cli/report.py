"""``penstock report``: from a run's folder to a page, a Chrome trace and a picture."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from penstock import files
from penstock.cli.disk_summary import allowed_per_day
from penstock.cli.environment import read_environment
from penstock.cli.launch import in_words
from penstock.cli.run_figures import RunFigures, read_run
from penstock.cli.run_folder import RUN_LOCK, own_files, own_folders, settings_file, settings_of
from penstock.cli.run_record import RunRecord
from penstock.cli.runs import difference_rows, figure_rows, shown_value
from penstock.cli.words import Words
from penstock.config import Tier, TrainConfig
from penstock.errors import ConfigError
from penstock.report.chrome import chrome_trace
from penstock.report.curves import MOST_RUNS
from penstock.report.picture import draw
from penstock.report.prediction import read_prediction
from penstock.report.run_page import Report, Table, run_page
from penstock.report.trace_file import choose_step, read_traces
from penstock.store.directory import LOCK, is_there
from penstock.store.making import BESIDE
from penstock.store.manifest import DATA
from penstock.store.owner import RUN_FILE


@dataclass(frozen=True, kw_only=True)
class Arguments(Words):
    """penstock report: what a run did, beside what it was predicted to do

      penstock report RUN [options]           RUN is the folder that penstock train wrote
      penstock report RUN OTHER ... [options] the same, with the curves of other runs over its own, and what differs

    | option | meaning |
    |---|---|
    | ``out`` | the page, one HTML file that loads nothing (RUN/report.html) |
    | ``step`` | the step that is shown op by op (of those in the trace that the newest prediction is of, the one whose
    time is the median) |
    | ``svg`` | also the timeline as a picture (RUN/timeline.svg); it needs matplotlib, which the extra penstock[report]
    brings. A picture's name ends as such a file's does |
    | ``png`` | the same (RUN/timeline.png) |
    | ``trace`` | also a Chrome trace of prediction and measurement: open it in https://ui.perfetto.dev |
    """

    command: ClassVar[str] = "penstock report"
    takes: ClassVar[str] = "a run's folder, and perhaps those of others"
    operands: ClassVar[tuple[str, ...]] = ("folder", "others")
    endings: ClassVar[Mapping[str, str]] = {"svg": ".svg", "png": ".png"}

    folder: Path
    others: tuple[Path, ...] = ()
    step: int | None = None
    out: Path | None = None
    svg: Path | bool = False
    png: Path | bool = False
    trace: Path | None = None

    def __post_init__(self) -> None:
        if pictures := [path for path in self.others if path.suffix in self.endings.values()]:
            raise ConfigError(
                f"{self.command} takes {self.takes}, and was given {self.folder} and {pictures[0]}: a picture's name "
                "follows its option, and ends as that says (--svg FILE.svg, --png FILE.png)"
            )
        if len(self.others) >= MOST_RUNS:
            raise ConfigError(f"{1 + len(self.others)} runs on one page: at most {MOST_RUNS} can be told apart")
        for key, ending in self.endings.items():
            if isinstance(path := getattr(self, key), Path) and path.suffix != ending:
                raise ConfigError(f"{key}={str(path)!r}: the file's name must end in {ending}")

    def require_folders(self) -> None:
        """Raises ConfigError: another run's folder is not there: it was perhaps meant as the value of an option before
        it."""
        if gone := [path for path in self.others if not path.is_dir()]:
            bare = next((ending for key, ending in self.endings.items() if getattr(self, key) is True), None)
            hint = "" if bare is None else f". A picture's name ends in {bare}"
            raise ConfigError(f"{self.command} takes {self.takes}, and {gone[0]} is no folder{hint}")

    @property
    def page(self) -> Path:
        return self.out or self.folder / "report.html"

    @property
    def pictures(self) -> Iterator[Path]:
        """Paths of the pictures to write."""
        for key, ending in self.endings.items():
            if path := getattr(self, key):
                yield path if isinstance(path, Path) else self.folder / f"timeline{ending}"


def run(arguments: Arguments) -> int:
    """Write what was asked for and say where it is; returns the exit code.

    Raises:
        ConfigError: the folder is not a run's, holds no trace, or a file cannot be read or written.
    """
    arguments.require_folders()
    _check_names(arguments)
    put = partial(_put, run=arguments.folder)

    found = gather(arguments.folder, arguments.step, arguments.others)
    _write(arguments.page, lambda path: put(path, run_page(found)))
    _say(arguments.page)
    for picture in arguments.pictures:
        _write(picture, lambda path: draw(path, found.prediction, found.step, found.budget, put))
        _say(picture)
    if arguments.trace is not None:
        _write(arguments.trace, lambda path: put(path, chrome_trace(found.prediction, found.step)))
        _say(arguments.trace)
    return 0


def _check_names(arguments: Arguments) -> None:
    """Raises ConfigError: a report would take the place of what a run needs, or be read as what one has measured."""
    made = {".html", *arguments.endings.values()}
    runs = {folder.resolve() for folder in (arguments.folder, *arguments.others)}
    for key, path in (("out", arguments.out), ("trace", arguments.trace)):
        if path is None:
            continue
        folder = path.parent.resolve()
        place = folder / path.name if folder in runs else path.resolve()
        if place.suffix not in made and _is_of_a_run(place, runs):
            raise ConfigError(f"--{key} {path}: this is the name of a file of the run itself: give another name")


def _is_of_a_run(place: Path, runs: Collection[Path]) -> bool:
    """True if a file is a run's own, in a folder that it has in its own, or a store's."""
    if place.parent in runs:
        names = (RUN_FILE, RUN_LOCK)
        own = place.name in names or place in own_files(place.parent) or place.match("trace*.json")
    else:
        below = (kept for run in runs for kept in (*own_folders(run), *run.glob("snapshot-*")))
        own = any(map(place.is_relative_to, below))
    return own or (place.name in (DATA, LOCK, *BESIDE) and is_there(place.parent / DATA))


def gather(folder: Path, step: int | None, others: Sequence[Path] = ()) -> Report:
    """Read a run's folder, and what is drawn over it of ``others``.

    Raises:
        ConfigError: it is not a run's folder, holds no trace, or a file in it is damaged.
    """
    settings_file(folder)
    config = settings_of(folder)
    steps = read_traces(folder)
    prediction = read_prediction(folder / "prediction.json")
    foretold = [] if prediction is None else [one for one in steps if one.step >= prediction.first]
    shown = choose_step(foretold if foretold and step is None else steps, step)
    later = prediction.first if prediction is not None and shown not in foretold else None
    if later is not None:
        prediction = None
    record = RunRecord.read(folder)
    ranks, hosts = (1, 1) if record is None else (record.ranks, record.hosts)
    runs = [read_run(path) for path in (folder, *others)]
    return Report(
        name=folder.resolve().name,
        description=_description(config, ranks),
        step=shown,
        metrics=runs[0].metrics,
        prediction=prediction,
        foretold_from=later,
        budget=_budget(config, ranks, hosts) if prediction is None else prediction.budget,
        allowed=allowed_per_day(config.budget, ranks, hosts),
        others=list(zip(_names(others, folder), (run.metrics for run in runs[1:]), strict=True)),
        tables=tuple(_tables(runs, read_environment(folder))),
    )


def _names(others: Sequence[Path], beside: Path) -> list[str]:
    """The names of other runs on the page of one: their folders', or all of a path whose name is that of two."""
    paths = [path.resolve() for path in others]
    names = [path.name for path in (beside.resolve(), *paths)]
    return [str(path) if names.count(path.name) > 1 else path.name for path in paths]


def _tables(runs: Sequence[RunFigures], environment: Mapping[str, str]) -> Iterator[Table]:
    first = runs[0]
    if len(runs) > 1:
        names = [str(run.folder) for run in runs]
        yield Table(caption="Figures of the runs", heads=["", *names], rows=list(figure_rows(runs)), shown=True)
        rows = list(difference_rows(runs)) or [["none", *("" for _ in runs)]]
        yield Table(caption="Settings that differ", heads=["", *names], rows=rows, shown=True)
    settings = [[key, shown_value(value)] for key, value in first.settings.items()]
    yield Table(caption="Settings", heads=["setting", "value"], rows=settings)
    if environment:
        rows = [[key, value] for key, value in environment.items()]
        yield Table(caption="Machine and versions of the last start", heads=["", ""], rows=rows)


def _budget(config: TrainConfig, ranks: int, hosts: int) -> dict[Tier, int]:
    """The first rank's budget of device and host memory, in bytes."""
    given = config.budget.of_rank(0, ranks, hosts)
    return {"device": given.device_bytes, "host": given.host_bytes}


def _description(config: TrainConfig, ranks: int) -> str:
    size, count = (0, 0) if config.micro_batch_size is None else config.split
    cut = f"{count} micro-batch{'es' * (count > 1)} of {size} x {config.data.sequence_length} tokens" if size else ""
    parts = [
        config.model.name,
        f"{config.schedule} schedule",
        cut,
        config.precision or "",
        f"rank 0 of {in_words(ranks, pipeline=config.pipeline)}" if ranks > 1 else "",
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
        raise ConfigError(
            f"cannot write {path}: {error.strerror}. A report may go elsewhere: --out FILE for the page, and a "
            "name for each picture (--svg FILE)"
        ) from error


def _say(path: Path) -> None:
    print(f"wrote {path} ({path.stat().st_size / 1e3:,.0f} kB)")
