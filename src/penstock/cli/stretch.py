"""A run from a start, or a resumption, to a stop."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from penstock.cli.run_folder import trace_path
from penstock.cli.showing.display import Display
from penstock.cli.showing.meter import Meter
from penstock.cli.showing.pace import Pace
from penstock.config import TrainConfig
from penstock.data.batches import Batches, HeldOut
from penstock.engine.engine import Engine
from penstock.ranks.group import Ranks


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A run from a start to a stop. ``ranks``: who trains. ``after``: contexts that last until the engine is closed,
    which may take as long as a commit. ``first``: steps that earlier stretches have done. ``kept``: the digest of what
    the run keeps beside its store, which each commit has."""

    config: TrainConfig
    folder: Path
    ranks: Ranks
    display: Display
    engine: Engine
    after: ExitStack
    kept: str
    train: Batches
    validation: HeldOut | None
    first: int
    meter: Meter
    pace: Pace

    @property
    def trace(self) -> Path | None:
        return None if self.config.trace_steps == 0 else trace_path(self.folder, self.first, self.ranks.rank)
