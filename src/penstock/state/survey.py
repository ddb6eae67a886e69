"""The stores of a run's ranks: what each rank finds, and what all of them do about it.

1. Each rank looks at its own directories: ``survey``. That opens, changes and decides nothing.
2. All ranks tell each other what they have found, which makes a table: a ``Survey`` of each rank.
3. Each makes the same decision, or finds the same refusal, of the table and of nothing else: ``decided``.
4. Each does what it says (``state.opening``).

| steps | stores | decision |
|---|---|---|
| none | one is not there, or has no commit | all begin anew |
| some | one is lost, and another rank has the same part | it is taken over from that rank |
| some | one is lost, and no other rank has the same part | refused |
| | else | all go on from the newest commit that all have: from number 0, and so from nothing, they then begin anew |

What is taken over or gone on from has to be what is asked for, of one run, and one whole step's.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.config.budget import folder_of_rank, is_of_rank
from penstock.errors import ConfigError, StoreError
from penstock.ranks.group import Ranks
from penstock.state.convert import has_other_form, like_but_for_form
from penstock.state.splits import as_known, require_splits
from penstock.state.take_over import Drive, drives_of, givers, no_store
from penstock.store import successor
from penstock.store.directory import entries, is_locked, locked
from penstock.store.facts import StoreFacts, facts_of, in_words, left_behind
from penstock.store.manifest import Manifest, require_alike
from penstock.store.owner import Owner, check_owner
from penstock.store.parts import OF_RANK, Place, require_one_commit, require_one_run

Refusal = StoreError | ConfigError


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A rank's store as it is asked for. ``model``: the description that it is made for, of the model, the optimizer,
    and the rank's ``place``. ``parts``: that a copy of the state is cut into, of which ranks have one each.
    ``any_strands``: the store says how many strands there are, and not ``model``. ``weights``: by which a new store is
    striped over its directories, asked when it is made."""

    paths: Sequence[Path]
    slots: int
    model: dict[str, Any]
    owner: Owner | None
    place: Place
    parts: int
    any_strands: bool
    weights: Callable[[Sequence[Path]], Sequence[int]]

    def kept(self, had: Mapping[str, Any]) -> dict[str, Any]:
        """The part of what a store is made for, ``had``, that nothing is asked about."""
        return {key: had[key] for key in ("world", "strands")[: 1 + self.any_strands] if key in had}


@dataclass(frozen=True, kw_only=True)
class Survey:
    """All that a rank finds where its store is to be. ``facts``: of the store that is there, with records of its
    commits that say no more than step, ``whole`` and figures. ``store``: its id. ``of_ranks``: what it says of ranks
    and strands. ``moments``: their form in it; ``converts``: another is asked for. ``misfit``: the reason that it is
    not what is asked for, but for the number of slots; ``other_slots``: the same of that; ``in_the_way``: the reason
    that no run can begin here."""

    paths: tuple[Path, ...]
    drives: tuple[Drive, ...]
    facts: StoreFacts | None = None
    store: str = ""
    of_ranks: Mapping[str, Any] = field(default_factory=dict)
    moments: str = ""
    converts: bool = False
    misfit: Refusal | None = None
    other_slots: Refusal | None = None
    in_the_way: Refusal | None = None

    @property
    def newest(self) -> int:
        """The number of the newest commit; 0: there is none, -1: nor a store."""
        return -1 if self.facts is None else max(self.facts.records)

    @property
    def untouched(self) -> bool:
        """True if nothing that is there has a step."""
        return self.facts is None or self.facts.untouched


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The way on of all ranks. ``commit``: the number of the one that they go on from; 0: what there was before the
    first; None: they begin anew. ``givers``: by rank that has lost its state, the one that it is taken over from
    first."""

    commit: int | None
    givers: Mapping[int, int] = field(default_factory=dict)


def survey(asked: Asked, ranks: Ranks) -> Survey:
    """Raises:
    StoreError: what is there cannot be read, is in use or another run's, or not in the directories that it was made in.
    """
    paths, facts = asked.paths, facts_of(asked.paths)
    found = Survey(paths=tuple(path.resolve() for path in paths), drives=drives_of(paths), facts=facts)
    if found.untouched:
        found = replace(found, in_the_way=_refusal(lambda: _require_free(asked, ranks)))
    if facts is None:
        return found
    if facts.unfit is not None:
        raise StoreError(facts.unfit)
    if any(map(is_locked, paths)):
        with ExitStack() as stack:
            locked(paths, stack, writes=False)  # says whose it is
    check_owner(facts.owner, asked.owner, str(paths[0]))
    manifest = Manifest.read(paths[0])
    kept, form = ("step", "whole", "last"), manifest.model.get("moments", "fp32")
    records = {
        number: None if record is None else {key: record[key] for key in kept if key in record}
        for number, record in facts.records.items()
    }
    return replace(
        found,
        facts=replace(facts, records=records),
        store=manifest.store,
        of_ranks={key: manifest.model[key] for key in (*OF_RANK, "strands") if key in manifest.model},
        moments=form,
        converts=form != asked.model.get("moments", "fp32"),
        misfit=_refusal(lambda: _require_fits(facts, manifest, asked)),
        other_slots=_refusal(lambda: _require_slots(manifest, asked)),
    )


def _refusal(check: Callable[[], None]) -> Refusal | None:
    try:
        check()
    except (StoreError, ConfigError) as error:
        return type(error)(str(error))
    return None


def _require_fits(facts: StoreFacts, manifest: Manifest, asked: Asked) -> None:
    """Check that all of a store is there, and what is asked for, but for the form of moments, and slots."""
    had, path = manifest.model, asked.paths[0]
    if facts.missing:
        raise StoreError(f"{facts.missing[0]} holds no store, and {path} has a part of one: is the drive mounted?")
    asked.place.require(path, had)
    model, where = as_known(asked.model, had) | asked.kept(had), ", ".join(map(str, asked.paths))
    require_splits(had, model, str(path))
    if has_other_form(had, model, str(path)):
        require_alike(like_but_for_form(had), like_but_for_form(model), where)
    else:
        require_alike(had, model, where)


def _require_slots(manifest: Manifest, asked: Asked) -> None:
    """Check that a store has as many slots as are asked for: with one, a step overwrites what counts, and nothing that
    is promised of two holds."""
    slots = max((extent.slots for extent in manifest.layout.extents), default=asked.slots)
    if slots != asked.slots:
        raise ConfigError(
            f"budget.slots={asked.slots}: the store in {asked.paths[0]} was made with slots={slots}, and keeps them: "
            "give that, or load a snapshot into a new directory"
        )


def _require_free(asked: Asked, ranks: Ranks) -> None:
    """Check that where a run begins there is no state of ranks that are on another host now; none that one process has
    left where ranks have their folders; and none of ranks where one process has its own."""
    alone, each = ranks.size == 1, ranks.size // ranks.hosts
    for rank in range(ranks.size):
        place = folder_of_rank(asked.paths[0].parent, rank)
        if rank // each != ranks.host and (facts := facts_of([place])) is not None and not facts.untouched:
            raise StoreError(
                f"{place} is the state of a rank that is on another host now: torchrun has given the hosts other "
                "numbers. Start each with the number that it had (--node-rank with --master-addr), or move it away"
            )
    parts: dict[str, list[tuple[int, Path]]] = {}
    for path in asked.paths:
        for place in filter(is_of_rank, entries(path)) if alone else [path.parent]:
            if (found := successor.manifest_of(place)) is not None:
                parts.setdefault(found.store, []).append((found.index, place))
    for found_parts in parts.values():  # all directories of a store: the first has the commits
        places = [place for _, place in sorted(found_parts)]
        if (facts := facts_of(places)) is not None and not facts.untouched:
            whose = "a rank of several" if alone else "one process"
            raise StoreError(
                f"{places[0]} has the state of {whose}, and this run, of {ranks.size}, would begin anew: go on with as "
                "many as there were, or give another directory"
            )


def decided(table: Sequence[Survey], parts: int) -> Decision:
    """The decision of all ranks. ``table``: by rank; ``parts``: that a copy of the state is cut into.

    Raises:
        StoreError, ConfigError: they can neither begin nor go on; says what to do.
    """
    newest, begun = max(one.newest for one in table), not all(one.untouched for one in table)
    # Ranks are at most one commit apart. What is further behind, or has none where another one's is of a step, a start
    # has made that came to nothing.
    least = max(newest - 1, any(one.facts is not None and one.facts.step for one in table))
    behind = [one.untouched and one.newest < least for one in table]
    lost = [rank for rank, is_behind in enumerate(behind) if begun and is_behind]
    takers = givers(lost, [one.drives for one in table], parts)
    there = {rank: one for rank, one in enumerate(table) if rank not in takers}
    oldest = min(there.values(), key=lambda one: one.newest)
    if oldest.facts is None and begun:
        raise no_store(oldest.paths[0])
    # What has no commit may be another model's, or run's; but a drive that is not mounted may have one.
    absent = any(one.facts is not None and one.facts.missing for one in table)
    if not begun and (oldest.facts is None or (oldest.newest == 0 and not absent)):
        _raise_first([one.in_the_way for one in table])
        return Decision(commit=None)
    _raise_first([there[rank].misfit if rank in there else None for rank in range(len(table))])
    own = [(there[rank].paths[0], there[rank].of_ranks) if rank in there else None for rank in range(len(table))]
    require_one_run(own)
    if newest > oldest.newest + 1:
        raise StoreError(left_behind([(one.paths[0], one.newest) for one in there.values()], newest))
    _require_one_step(list(there.values()), oldest.newest)
    _raise_first([there[rank].other_slots if rank in there else None for rank in range(len(table))])
    if takers and oldest.converts:
        raise ConfigError(
            f"optimizer.moments: {oldest.paths[0]} has another form of moments, and another rank has lost its state, "
            "which it can take over as it is: put the setting back"
        )
    return Decision(commit=oldest.newest, givers=takers)


def _require_one_step(there: Sequence[Survey], number: int) -> None:
    """Check that all have a commit of this number, of one whole step, or are as before the first; and one form of
    moments."""
    commits = []
    for one in there:
        assert one.facts is not None, "there is a store"
        if number not in one.facts.records:
            raise StoreError(
                f"{one.paths[0]} is at commit {one.newest}, other ranks are at the one before, and that cannot be read "
                "there: go on from a snapshot"
            )
        commits.append((one.paths[0], one.facts.records[number]))
    require_one_commit([(path, in_words(record)) for path, record in commits])
    for path, record in commits:
        if record is not None and not record["whole"]:
            raise StoreError(
                f"{path}: the run that used this store was stopped in or before step {record['step'] + 1}, and what is "
                "on disk is not one step's state. Remove the directory to start over (and load a snapshot if there is "
                "one)"
            )
    forms = {one.moments: one.paths[0] for one in there}
    if len(forms) > 1:
        said = " and ".join(f"{path} has {form}" for form, path in forms.items())
        raise StoreError(f"the stores of all ranks have several forms of moments: {said}: put back what was there")


def _raise_first(found: Sequence[Refusal | None]) -> None:
    """Raise the refusal of the first rank that has one. ``found``: by rank."""
    for rank, error in enumerate(found):
        if error is not None:
            raise type(error)(f"rank {rank}: {error}" if len(found) > 1 else str(error))
