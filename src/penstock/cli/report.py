"""``penstock report``: from a run's folder to a page, a Chrome trace and a picture."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from penstock import files
from penstock.cli.disk_summary import allowed_per_day
from penstock.cli.run_folder import settings_file, settings_of
from penstock.cli.run_record import RunRecord
from penstock.cli.words import Words
from penstock.config import Tier, TrainConfig
from penstock.errors import ConfigError
from penstock.report.chrome import chrome_trace
from penstock.report.metrics_file import read_metrics
from penstock.report.picture import draw
from penstock.report.prediction import read_prediction
from penstock.report.run_page import Report, run_page
from penstock.report.trace_file import choose_step, read_traces


@dataclass(frozen=True, kw_only=True)
class Arguments(Words):
    """penstock report: what a run did, beside what it was predicted to do

      penstock report RUN [options]   RUN is the folder that penstock train wrote

    | option | meaning |
    |---|---|
    | ``out`` | the page, one HTML file that loads nothing (RUN/report.html) |
    | ``step`` | the step that is shown op by op (of those in the trace, the one whose time is the median) |
    | ``svg`` | also the timeline as a picture (RUN/timeline.svg); it needs matplotlib, which the extra penstock[report]
    brings. A picture's name ends as such a file's does |
    | ``png`` | the same (RUN/timeline.png) |
    | ``trace`` | also a Chrome trace of prediction and measurement: open it in https://ui.perfetto.dev |
    """

    command: ClassVar[str] = "penstock report"
    takes: ClassVar[str] = "one run's folder"
    operands: ClassVar[tuple[str, ...]] = ("folder",)
    endings: ClassVar[Mapping[str, str]] = {"svg": ".svg", "png": ".png"}

    folder: Path
    step: int | None = None
    out: Path | None = None
    svg: Path | bool = False
    png: Path | bool = False
    trace: Path | None = None

    def __post_init__(self) -> None:
        for key, ending in self.endings.items():
            if isinstance(path := getattr(self, key), Path) and path.suffix != ending:
                raise ConfigError(f"{key}={str(path)!r}: the file's name must end in {ending}")

    @property
    def pictures(self) -> Iterator[Path]:
        """Where pictures are to be written."""
        for key, ending in self.endings.items():
            if path := getattr(self, key):
                yield path if isinstance(path, Path) else self.folder / f"timeline{ending}"


def run(arguments: Arguments) -> int:
    """Write what was asked for and say where it is; returns the exit code.

    Raises:
        ConfigError: the folder is not a run's, holds no trace, or a file cannot be read or written.
    """
    found = gather(arguments.folder, arguments.step)
    put = partial(_put, run=arguments.folder)
    _write(arguments.out or arguments.folder / "report.html", lambda path: put(path, run_page(found)))
    for picture in arguments.pictures:
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
    record = RunRecord.read(folder)
    ranks = 1 if record is None else record.ranks
    return Report(
        name=folder.resolve().name,
        description=_description(config, ranks),
        step=choose_step(steps, step),
        traced=len(steps),
        metrics=read_metrics(folder / "metrics.jsonl"),
        prediction=prediction,
        budget=_budget(config, ranks) if prediction is None else prediction.budget,
        allowed=allowed_per_day(config.budget, ranks),
    )


def _budget(config: TrainConfig, ranks: int) -> dict[Tier, int]:
    """What a rank was given."""
    given = config.budget.of_rank(0, ranks)
    return {"device": given.device_bytes, "host": given.host_bytes}


def _description(config: TrainConfig, ranks: int) -> str:
    size, count = (0, 0) if config.micro_batch_size is None else config.split
    cut = f"{count} micro-batch{'es' * (count > 1)} of {size} x {config.data.sequence_length} tokens" if size else ""
    parts = [
        config.model.name,
        f"{config.schedule} schedule",
        cut,
        config.precision or "",
        f"rank 0 of {ranks}" if ranks > 1 else "",
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
    print(f"wrote {path} ({path.stat().st_size / 1e3:,.0f} kB)")
