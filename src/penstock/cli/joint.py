"""A run's folder and the ranks that train it: the first looks at it and writes there, the others learn what counts."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch import nn

from penstock.cli import removal
from penstock.cli.claim import Claim, claimed
from penstock.cli.metrics import VALIDATION
from penstock.cli.reach import Reach
from penstock.cli.run_folder import Start, last_line
from penstock.cli.run_record import RunRecord
from penstock.cli.task import check_room
from penstock.config import TrainConfig
from penstock.hardware.machine import DeviceKind
from penstock.ranks.group import Ranks
from penstock.state.settled import settle_together
from penstock.store.owner import Owner


class Joint:
    """The folder of a run as each rank sees it.

    ``step``: the step that the run goes on after; None: it begins. ``is_complete``: it has done all its steps, and
    written down what they did, so that nothing of it is needed any more.
    """

    def __init__(self, ranks: Ranks, config: TrainConfig, claim: Claim | None, reach: Reach) -> None:
        """``claim``: the first rank's."""
        self.ranks = ranks
        self.folder = Path(config.run)
        self._claim = claim
        self._reach = reach
        self._began: Owner | None = None
        self.step = ranks.once("step to go on from", lambda: self._first.step)
        self.is_complete = ranks.once("end of the run", lambda: _all_done(self._first, config))

    @property
    def _first(self) -> Claim:
        assert self._claim is not None, "asked of the first rank alone"
        return self._claim

    def check_room(self, config: TrainConfig, model: nn.Module, kind: DeviceKind) -> None:
        """As ``task.check_room``, of a run that is to begin here."""
        ranks = self.ranks
        self.ranks.once(
            "room on the drives",
            lambda: check_room(config, model, kind, ranks.size, ranks.hosts, self._first.replaced),
        )

    def look_ahead(self, look: Callable[[Path], object]) -> None:
        """As ``Claim.look_ahead``, which the first rank does."""
        self.ranks.decided("what begins", lambda: self._first.look_ahead(look))

    def begin(self, config: TrainConfig) -> None:
        """Make the folder that of a new run; what it replaces goes. See ``Claim.begin``."""
        if self.ranks.rank:
            self._reach.follow()
        else:
            with self._reach.leads():
                self._first.begin(config)
        self._began = self.ranks.once("beginning", lambda: self._first.began)

    def take_back_here(self, config: TrainConfig) -> None:
        """Remove what the start has made on this host's drives, if it has begun the run and no step is committed. The
        first host's go with the folder."""
        if self._began is None or self.ranks.host == 0 or not self.ranks.is_first_on_host:
            return
        stores = self._reach.of_host(config.budget.stores(self.ranks.size, self.ranks.hosts))
        removal.take_back_elsewhere(self.folder, self._began, stores)

    def state_made(self) -> None:
        """All ranks have made their stores."""
        self.ranks.once("state", lambda: self._first.state_made())

    @property
    def has_steps(self) -> bool:
        """True if there is a step to go on from, as far as this rank knows."""
        return self.step is not None if self._claim is None else self._claim.has_steps


def _all_done(claim: Claim, config: TrainConfig) -> bool:
    if claim.step is None or claim.steps is None or claim.step < claim.steps:
        return False
    last = last_line(claim.folder)
    return last.get("step", 0) >= claim.step and (config.evaluate is None or VALIDATION in last)


def _settle(ranks: Ranks, config: TrainConfig, start: Start) -> None:
    """State of the ranks' run that is being converted is put in its place: each rank's is within its own reach. That of
    another number of ranks, on one host, the first one puts there as it claims the run.

    Raises:
        StoreError: it cannot be; or the folder of the run cannot be read.
    """
    if ranks.size == 1 or start == "new" or not config.budget.disk_paths:
        return

    def theirs() -> bool:
        record = RunRecord.read(Path(config.run))
        return record is not None and (record.ranks, record.hosts, record.resharding) == (ranks.size, ranks.hosts, None)

    if ranks.by_rank("ranks of the run", theirs if ranks.rank == 0 else lambda: False)[0]:
        own = config.budget.of_rank(ranks.rank, ranks.size, ranks.hosts).disk_paths
        settle_together(ranks, own, ranks.size if ranks.are_pipeline else config.parts(ranks.each))


@contextmanager
def joint(ranks: Ranks, config: TrainConfig, start: Start) -> Iterator[Joint]:
    """The folder of a run, locked by the first rank. If it leaves with an error, what the start has made is taken back.

    Raises:
        ConfigError, StoreError: as ``claimed``, on the first rank.
        RankError: on the others, then.
        StoreError: on all ranks: state that was being converted cannot be put in its place.
    """
    _settle(ranks, config, start)
    reach = Reach(ranks)
    if ranks.rank:
        reach.follow()
        run = Joint(ranks, config, None, reach)
        try:
            yield run
        except BaseException:
            run.take_back_here(config)
            raise
        return
    with ExitStack() as stack:
        with reach.leads():
            claim = stack.enter_context(claimed(config, start, ranks.size, reach))
        stack.enter_context(ranks.together("the run"))
        yield Joint(ranks, config, claim, reach)
