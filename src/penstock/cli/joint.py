"""A run's folder and the ranks that train it: the first looks at it and writes there, the others learn what counts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.cli.claim import Claim, claimed
from penstock.cli.run_folder import Start, steps_written
from penstock.config import TrainConfig
from penstock.ranks.group import Ranks


class Joint:
    """The folder of a run as each rank sees it.

    ``step``: the step that the run goes on after; None: it begins. ``is_complete``: it has done all its steps, and
    written down what they did, so that nothing of it is needed any more.
    """

    def __init__(self, ranks: Ranks, config: TrainConfig, claim: Claim | None) -> None:
        """``claim``: the first rank's."""
        self.ranks = ranks
        self.folder = Path(config.run)
        self._claim = claim
        self.step = ranks.once("step to go on from", lambda: self._first.step)
        self.is_complete = ranks.once("end of the run", lambda: _all_done(config, self._first))

    @property
    def _first(self) -> Claim:
        assert self._claim is not None, "asked of the first rank alone"
        return self._claim

    def begin(self, config: TrainConfig) -> None:
        """Make the folder that of a new run; what it replaces goes. See ``Claim.begin``."""
        self.ranks.once("beginning", lambda: self._first.begin(config))

    def state_made(self) -> None:
        """All ranks have made their stores."""
        self.ranks.once("state", lambda: self._first.state_made())

    @property
    def has_steps(self) -> bool:
        """True if there is a step to go on from, as far as this rank knows."""
        return self.step is not None if self._claim is None else self._claim.has_steps


def _all_done(config: TrainConfig, claim: Claim) -> bool:
    if claim.step is None or config.steps is None or claim.step < config.steps:
        return False
    return steps_written(claim.folder) >= claim.step


@contextmanager
def joint(ranks: Ranks, config: TrainConfig, start: Start) -> Iterator[Joint]:
    """The folder of a run, locked by the first rank. If it leaves with an error, what the start has made is taken back.

    Raises:
        ConfigError, StoreError: as ``claimed``, on the first rank.
        RankError: on the others, then.
    """
    if ranks.rank:
        yield Joint(ranks, config, None)
        return
    with claimed(config, start, ranks.size) as claim, ranks.together():
        yield Joint(ranks, config, claim)
