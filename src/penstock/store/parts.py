"""The stores of all ranks of a run, each with its part of the state, or all of it. One rank has one store."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.errors import StoreError
from penstock.store.facts import in_words
from penstock.store.store import Store


@contextmanager
def opened_parts(stores: Sequence[Sequence[Path]]) -> Iterator[tuple[Store, ...]]:
    """All ranks' stores, to be read alone, each as of the newest commit that all of them have. Each has its part of the
    state, or all of it.

    ``stores``: the directories of each, by rank.

    Raises:
        StoreError: one cannot be opened, is not that rank's, or is of another run than the others or has come to
            something else.
    """
    with ExitStack() as stack:
        found = tuple(stack.enter_context(Store.open(paths, writable=False)) for paths in stores)
        require_one_run([(store.paths[0], store.model) for store in found])
        newest = min(store.commits.sequence for store in found)
        for store in found:
            if store.commits.sequence > newest:
                store.take_back(newest)
        require_one_commit([(store.paths[0], in_words(store.last_commit())) for store in found])
        yield found


WHOLE = "whole"
"""The key that says, in the account of what a rank's store is made for, that it has all of the state."""
COPIES = "copies"
"""The key of the number of copies of the state, of which each is in the stores of as many neighbouring ranks."""
HOLDERS = "holders"
"""The key that says, of pipelines, which place has each group."""
STAGES = "stages"
"""The key of the number of ranks of each pipeline; where it is not there, all are one."""
OF_RANK = frozenset({"rank", "ranks", "world", WHOLE, COPIES, HOLDERS, STAGES})
"""All that this account has of ranks; that of a snapshot of one process has none of it."""


def of_rank(
    rank: int,
    ranks: int,
    *,
    whole: bool,
    copies: int = 1,
    holders: Sequence[int] | None = None,
    stages: int | None = None,
) -> dict[str, Any]:
    """The rank that a store belongs to, in the account of what it is made for; of one process nothing. ``holders``: of
    pipelines, the place that has each group; ``stages``: the ranks of each; None: all are one."""
    if ranks == 1:
        return {}
    if holders is not None:
        beside = {} if stages in (None, ranks) else {STAGES: stages}
        return {"rank": rank, "ranks": ranks, HOLDERS: list(holders)} | beside
    return {"rank": rank, "ranks": ranks} | ({WHOLE: True} if whole else {}) | ({COPIES: copies} if copies > 1 else {})


def number_of_parts(model: Mapping[str, Any]) -> int:
    """The number of parts that each group is cut into, of which a store has one; 1: it has all of it, or in a pipeline
    of those that it has. ``model``: what it is made for."""
    return 1 if model.get(WHOLE) else int(model.get("ranks", 1)) // int(model.get(COPIES, 1)) // stages_of(model)


def stages_of(model: Mapping[str, Any]) -> int:
    """The number of ranks of each pipeline; 1: there is none."""
    return int(model.get(STAGES, model["ranks"])) if HOLDERS in model else 1


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank's place among those that have the state: what a store says that it is of, or what is asked for."""

    rank: int
    ranks: int
    whole: bool = False
    copies: int = 1
    stages: int = 1

    @staticmethod
    def of(model: Mapping[str, Any]) -> "Place":
        """``model``: what a store is made for."""
        return Place(
            rank=model.get("rank", 0),
            ranks=model.get("ranks", 1),
            whole=bool(model.get(WHOLE)),
            copies=model.get(COPIES, 1),
            stages=stages_of(model),
        )

    def __str__(self) -> str:
        if self.ranks == 1:
            return "all of the state, of one process"
        if self.stages == self.ranks:
            return f"the blocks of rank {self.rank} of a pipeline of {self.ranks}"
        if self.stages > 1:
            beside = self.ranks // self.stages
            return f"the part of rank {self.rank} of {self.ranks}, which are {beside} pipelines of {self.stages}"
        if self.copies > 1:
            return f"the part of rank {self.rank} of {self.ranks}, which have {self.copies} copies of the state"
        return f"{'all of the state, as' if self.whole else 'the part of'} rank {self.rank} of {self.ranks}"

    def require(self, path: Path, model: Mapping[str, Any]) -> None:
        """Raises:
        StoreError: the store in ``path``, which is made for ``model``, is of another place.
        """
        had = Place.of(model)
        if had == self:
            return
        said = f"{path} has {had}, and what is asked for is {self}"
        if (had.stages > 1) != (self.stages > 1) and had.ranks > 1:
            go_on = "with ranks that share all state"
            if had.stages > 1:
                go_on = "as a pipeline" if had.stages == had.ranks else f"with {had.ranks} ranks, in pipelines"
                go_on += f" of {had.stages}"
            how = "in Python Engine.save, and Engine.load"
            if not 1 < self.stages < self.ranks:  # for which no store is cut
                pipeline = " --pipeline" if self.stages > 1 else ""
                how = f"penstock reshard RUN --ranks {self.ranks}{pipeline}; {how}"
            raise StoreError(f"{said}: go on {go_on}, or cut it anew ({how})")
        raise StoreError(
            f"{said}: go on with as many ranks as the run began with, in pipelines of as many, with stage=0 if it had "
            "that and else without, as many copies, on the same directories in the same order"
        )


def require_one_run(parts: Sequence[tuple[Path, Mapping[str, Any]] | None]) -> None:
    """``parts``: of each rank's store, by rank, a directory and what it is made for; None: it is lost.

    Raises:
        StoreError: one is not that rank's, or of another run than the others.
    """
    there = [(rank, *part) for rank, part in enumerate(parts) if part is not None]
    _, first, model = there[0]
    wanted = Place.of(model)
    for rank, path, own in there:
        replace(wanted, rank=rank, ranks=len(parts)).require(path, own)
        if own.get("world") != model.get("world"):
            raise StoreError(f"{first} and {path} have parts of two runs: put back what was there")


def require_one_commit(parts: Sequence[tuple[Path, str]]) -> None:
    """``parts``: of each store a directory, and its commit in words.

    Raises:
        StoreError: one has come to something else than another.
    """
    (first, wanted), *others = parts
    for path, said in others:
        if said != wanted:
            raise StoreError(f"{first} has come to {wanted}, and {path} to {said}: put back what was there")
