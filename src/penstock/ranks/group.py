"""The ranks of a run: what the processes that train one model do together, and what that is for one that is alone."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

from penstock.errors import BudgetError, ConfigError, NonFiniteError, RankError, ScheduleError, StoreError
from penstock.ranks.order import add_up
from penstock.ranks.share import WHOLE, Share

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


class Ranks:
    """The ranks of a run, and this one's place among them. This class is that of who is alone.

    | attribute | meaning |
    |---|---|
    | ``rank``, ``size`` | this one's number, of so many |
    | ``stages`` | the ranks of each pipeline, all of which go through the same micro-batches, each its own stages; 1:
    there is none |
    | ``hosts`` | the number of hosts that they are on; neighbours, as many on each |
    | ``copies`` | copies of the state that they have, each of as many neighbouring ranks (``axes``) |
    | ``cp`` | neighbouring ranks that share each sequence: they are given the same micro-batches, of which each has a
    span |

    Whatever all ranks do together, they do in the same order. A call that another rank does not come to raises
    RankError once that has failed, ended, or does not answer; afterwards nothing can be done together any more.
    """

    rank: int = 0
    size: int = 1
    stages: int = 1
    hosts: int = 1
    copies: int = 1
    cp: int = 1
    _of_all: "weakref.ref[BaseException] | None" = None
    _pipe: "Ranks | None" = None
    _sharing: "Ranks | None" = None
    _of_sequence: "Ranks | None" = None
    _of_copy: "Ranks | None" = None
    _of_part: "Ranks | None" = None
    _of_host: "Ranks | None" = None
    _of_place: "Ranks | None" = None

    @property
    def are_pipeline(self) -> bool:
        """True if each rank has stages of its own."""
        return self.stages > 1

    @property
    def pipe(self) -> "Ranks":
        """The ranks of this one's pipeline, which have the same micro-batches."""
        return self._pipe or (self if self.are_pipeline else ALONE)

    @property
    def sharing(self) -> "Ranks":
        """The ranks that share the micro-batches of a step, and all that this one has of the state. In pipelines those
        of one place; of one pipeline each rank has all micro-batches."""
        return self._sharing or (ALONE if self.are_pipeline else self)

    @property
    def of_sequence(self) -> "Ranks":
        """The ranks that share this one's sequences, for what their attention moves between them."""
        return self._of_sequence or ALONE

    def number(self, micro_batch: int, count: int) -> int:
        """The number in the whole step of one of this rank's ``count`` micro-batches, by which random numbers are
        drawn: all ranks' are counted, and then all again for the next span of each."""
        ranks = self.sharing
        span, group = ranks.rank % ranks.cp, ranks.rank // ranks.cp
        return (span * (ranks.size // ranks.cp) + group) * count + micro_batch

    @property
    def host(self) -> int:
        """The number of the host that this rank is on."""
        return self.rank // (self.size // self.hosts)

    @property
    def is_first_on_host(self) -> bool:
        return self.rank % (self.size // self.hosts) == 0

    @property
    def each(self) -> int:
        """The number of ranks that share each group of one copy of the state."""
        return self.size // self.copies // self.stages

    @property
    def of_copy(self) -> "Ranks":
        """The ranks that share this one's copy of the state, for what they alone move between them."""
        return self._of_copy or self._sharing or self

    @property
    def of_part(self) -> "Ranks":
        """The ranks that have the same part of the state as this one, of each copy one."""
        return self._of_part or ALONE

    @property
    def of_host(self) -> "Ranks":
        """The ranks of this one's host, for what they alone move between them where collectives have two levels: on
        several hosts of several ranks, with one copy of the state."""
        return self._of_host or ALONE

    @property
    def of_place(self) -> "Ranks":
        """The ranks with this one's place, one of each host, where ``of_host`` has any. What they move does not meet
        what all ranks do together."""
        return self._of_place or ALONE

    def share(self, parts: int, holders: Sequence[int] = ()) -> Share:
        """The elements of every param group that this rank has, if there are as many parts; 1: each has all.
        ``holders``: of a pipeline, the rank that has each group."""
        assert parts in (1, self.each)
        if self.are_pipeline:
            return Share(rank=self.rank, size=parts, holders=tuple(holders))
        return WHOLE if parts == 1 else Share(rank=self.rank % self.each, size=parts)

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        """Send a tensor, which is contiguous, to another rank of the pipeline (``pipe``); returns when that has it."""
        raise AssertionError("who is alone has nobody to send to")

    def receive(self, into: torch.Tensor, peer: int) -> None:
        """Fill a tensor, which is contiguous, with the next one that another rank of the pipeline sends."""
        raise AssertionError("who is alone has nobody to receive from")

    def gather(self, out: torch.Tensor, part: torch.Tensor) -> None:
        """Fill ``out`` [size * n] with all ranks' ``part`` [n], one after the other."""
        out.copy_(part)

    def exchange(self, out: torch.Tensor, into: torch.Tensor) -> None:
        """Send row r of ``into`` [size, n] to rank r, and fill row r of ``out`` with what that sends to this one."""
        out.copy_(into)

    def exchange_and_add(self, into: torch.Tensor, out: torch.Tensor, total: torch.Tensor) -> None:
        """Send row r of ``into`` [size, n] to rank r, and add up in ``total`` [n] what all send to this one, in the one
        order (``order``). By way of ``out``, which is as large as ``into``; both are overwritten."""
        self.exchange(out, into)
        add_up(tuple(out), total)

    def gather_objects(self, what: str, value: T) -> list[T]:
        """The values of all ranks, by rank: small ones that pickle. ``what`` names them, the same on each rank.

        Raises:
            RankError: ``what`` is something else on another rank, which is elsewhere in its run.
        """
        return [value]

    def once(self, what: str, work: Callable[[], T]) -> T:
        """The result of ``work``, which rank 0 does for all: each gets it, a small value that pickles."""
        found = work() if self.rank == 0 else None
        return cast(T, self.gather_objects(what, found)[0])

    def decided(self, what: str, work: Callable[[], T]) -> T:
        """As ``once``, of work that takes a while, or may be refused: the others wait, rather than take rank 0's cores
        for the same.

        Raises:
            BudgetError, ConfigError: on all ranks, what it raises.
        """

        def decision() -> T | BudgetError | ConfigError:
            try:
                return work()
            except (BudgetError, ConfigError) as error:
                return type(error)(str(error))

        found = self.once(what, decision)
        if isinstance(found, BudgetError | ConfigError):
            raise self.of_all(found)
        return found

    def after_first(self, what: str, work: Callable[[], T]) -> T:
        """This rank's result of ``work``, which all ranks do, rank 0 before the others: they find what it has made."""
        if self.rank == 0:
            found = work()
            self.gather_objects(what, None)
            return found
        self.gather_objects(what, None)
        return work()

    def by_rank(self, what: str, work: Callable[[], T]) -> list[T]:
        """The results of ``work``, which each rank does for itself, by rank: small values that pickle. An error that
        one of them finds is raised on all, and they can go on together.

        Raises:
            StoreError, ConfigError, BudgetError, ScheduleError: this rank's own; or else that of the first other one,
                which it names.
        """
        own: StoreError | ConfigError | BudgetError | ScheduleError | None = None
        try:
            told: tuple[list[T], tuple[type[StoreError | ConfigError | BudgetError | ScheduleError], str] | None]
            try:
                told = [work()], None
            except (StoreError, ConfigError, BudgetError, ScheduleError) as error:
                own, told = error, ([], (type(error), str(error)))
            every = self.gather_objects(what, told)
            if own is not None:
                raise self.of_all(own)
            for rank, (_, failure) in enumerate(every):
                if failure is not None:
                    raise self.of_all(failure[0](f"rank {rank}: {failure[1]}"))
            return [found[0] for found, _ in every]
        finally:
            del own  # its traceback holds this frame, which would hold it

    def jointly(self, what: str, work: Callable[[], T]) -> T:
        """This rank's result of ``work``, which counts once all have done it. Raises as ``by_rank``."""
        found: list[T] = []
        self.by_rank(what, lambda: found.append(work()))
        return found[0]

    def alike(self, work: Callable[[], T]) -> T:
        """The result of ``work``, which is the same on all ranks, of what all know; so is an error of it."""
        try:
            return work()
        except (StoreError, ConfigError) as error:
            self.of_all(error)
            raise

    def lend(self, tensor: torch.Tensor, owner: int) -> None:
        """Make a tensor on the CPU what it is on rank ``owner``."""

    def beside(self) -> "Ranks":
        """These ranks for another thread of each, whose collectives do not meet those of this thread. All ranks come
        here."""
        return self

    def is_of_all(self, error: BaseException) -> bool:
        """True if an error is the last that all ranks have raised alike."""
        return self._of_all is not None and self._of_all() is error

    def of_all(self, error: E) -> E:
        """An error that all ranks are about to raise alike: it ends nothing for the others."""
        self._of_all = weakref.ref(error)  # its traceback holds a model, and who is alone is there for ever
        return error

    @property
    def failure(self) -> RankError | None:
        """The error that has ended all that ranks do together; None: nothing has."""
        return None

    def check(self) -> None:
        """Raises:
        RankError: another rank has failed.
        """
        if self.failure is not None:
            raise RankError(str(self.failure))

    def fail(self, error: BaseException) -> None:
        """Tell those who wait for this rank that it cannot go on, and why."""

    @contextmanager
    def together(self, call: str) -> Iterator[None]:
        """Make an error within the context fail on all ranks. ``call``: what all of them call, for people.

        Raises:
            RankError: another rank has failed.
        """
        self.check()
        try:
            yield
        except NonFiniteError:  # all ranks have found the same
            raise
        except BaseException as error:
            if not self.is_of_all(error):
                self.fail(error)
            raise

    def agree(self, what: str, value: Any, *, how: str = "") -> None:
        """Check that all ranks have the same. ``how``: what makes it so, for those that have not.

        Raises:
            ConfigError: they have not, on each of them, in the same words; they can go on together.
        """
        self._compare(what, self.gather_objects(what, value), how)

    def agree_on_each(self, settings: Mapping[str, Any]) -> None:
        """Check that all ranks have the same of each of some settings. ConfigError names the first that differs."""
        found = self.gather_objects("settings", dict(settings))
        for what in settings:
            self._compare(what, [theirs[what] for theirs in found])

    def _compare(self, what: str, found: Sequence[Any], how: str = "") -> None:
        if any(other != found[0] for other in found):
            said = "; ".join(f"rank {self.number_of(rank)}: {other}" for rank, other in enumerate(found))
            then = f": {how}" if how else ""
            raise self.of_all(ConfigError(f"all ranks need the same {what}, and theirs differ ({said}){then}"))

    def number_of(self, rank: int) -> int:
        """The number among all of one of these ranks."""
        return rank

    @property
    def broken_off(self) -> bool:
        """True if a collective was given up that may still write to what it was given: that must stay where it is."""
        return False

    def close(self) -> None:
        """End this rank's part. Whoever waits for it learns that it has ended."""


ALONE = Ranks()
