"""Checks the record of a run that commits and snapshots keep besides its arrays, before anything is made of it.

A record has a checksum, and so is what somebody wrote; that it was penstock is not said. So each field is looked at.
"""

from collections.abc import Mapping, Sequence
from typing import Any, get_origin

from penstock.documents.text import MalformedError
from penstock.documents.typed import decode, expected, fits, hints_of, shown
from penstock.errors import ConfigError, StoreError
from penstock.optim.precision import LossScale
from penstock.state.stats import StepStats

_RUN: Mapping[str, Any] = {
    "step": int,
    "updates": int,
    "seed": int,
    "loss_scale": Mapping[str, Any],
    "missed": Mapping[str, int],
    "param_groups": Sequence[Mapping[str, Any]],
    "last": Mapping[str, Any] | None,
    "position": Mapping[str, Any] | None,
}
_STORED: Mapping[str, Any] = {"whole": bool, "slots": str}


def check_progress(found: Any, where: str, *, trained: int, seed: int) -> None:
    """Check how far a run has got, and ``where`` that stands. ``trained``: parameters that the model trains.

    Raises:
        StoreError: a field is missing, or of another type than a run writes.
        ConfigError: the run had another seed than ``seed``.
    """
    _check(found, _RUN, where)
    if min(found["step"], found["updates"], found["seed"]) < 0:
        raise StoreError(_damaged(where, "a count in it is negative"))
    _check_missed(found, where, trained)
    try:
        scale = decode(LossScale, found["loss_scale"])
    except MalformedError as error:
        raise StoreError(_damaged(where, f"loss_scale: {error}")) from None
    if not (2.0**-24 <= scale.value <= 2.0**24 and scale.interval >= 1 and scale.good >= 0):
        raise StoreError(_damaged(where, f"loss_scale: {shown(scale)}"))
    _check_last(found["last"], where)
    if found["seed"] != seed:
        raise ConfigError(
            f"this run was started with seed={found['seed']}, not {seed}: random numbers would differ. Pass "
            f"seed={found['seed']}"
        )


def check_stored(found: Any, where: str) -> None:
    """Check what a commit says of the store that it is in, and the step that it is of.

    Raises:
        StoreError: a field is missing, or of another type than a run writes.
    """
    _check(found, {"step": int, **_STORED}, where)
    if found["step"] < 0:
        raise StoreError(_damaged(where, "its step is negative"))


NAMES = "param_names"
"""The key by which torch keeps the parameters' names of one of an optimizer's param groups."""


def check_renumbered(found: Any, where: str, trained: Sequence[str]) -> None:
    """Check what of a record goes by the numbers, or the order, of the ``trained`` parameters, which have these names.

    Raises:
        StoreError: as above.
    """
    _check(found, {key: _RUN[key] for key in ("missed", "param_groups")}, where)
    _check_missed(found, where, len(trained))
    for group in found["param_groups"]:
        names = group.get(NAMES, [])
        if not fits(names, Sequence[str]) or not set(names) <= set(trained):
            raise StoreError(_damaged(where, f"param_groups: {NAMES}={shown(names)}"))


def _check_missed(found: Any, where: str, trained: int) -> None:
    if unknown := [i for i in found["missed"] if not (i.isdecimal() and len(i) < 10 and int(i) < trained)]:
        raise StoreError(_damaged(where, f"it counts steps of a parameter {shown(unknown[0])}"))


def check_kept(found: Any, where: str) -> None:
    """Check what a snapshot says that is read without its model.

    Raises:
        StoreError: as above.
    """
    _check(found, {"step": int, "model": Mapping[str, Any]}, where)


def check_param_groups(saved: Any, mine: Sequence[Mapping[str, Any]], where: str) -> None:
    """Check the settings of an optimizer against those that it has now.

    Raises:
        StoreError: there is another number of param groups, or a setting is of another type.
    """
    if len(saved) != len(mine):
        raise StoreError(
            f"the optimizer had {len(saved)} param groups when this was saved and has {len(mine)} now: wrap the model "
            "with the overrides that it was saved with"
        )
    for theirs, ours in zip(saved, mine, strict=True):
        for key, value in theirs.items():
            if key in ours and _kind(value) != _kind(ours[key]):
                raise StoreError(_damaged(where, f"param_groups: {key}={shown(value)}"))
        if NAMES in theirs and NAMES in ours and (other := {*theirs[NAMES]} ^ {*ours[NAMES]}):
            raise StoreError(
                f"{where}: {min(other)!r} was in another of the optimizer's param groups when this was saved: wrap the "
                "model with the overrides that it was saved with"
            )


def _kind(value: Any) -> str:
    if isinstance(value, list | tuple):
        kinds = list(map(_kind, value))
        return f"[{'text' if set(kinds) == {'text'} else ','.join(kinds)}]"  # of names there may be any number
    return "number" if fits(value, float) else "text" if isinstance(value, str | None) else type(value).__name__


def _check(found: Any, hints: Mapping[str, Any], where: str) -> None:
    if not isinstance(found, Mapping):
        raise StoreError(_damaged(where, f"it is {shown(found)}"))
    for key, hint in hints.items():
        if key not in found:
            raise StoreError(_damaged(where, f"it lacks {key!r}"))
        if not fits(found[key], hint):
            raise StoreError(_damaged(where, f"{key} must be {expected(hint)}, not {shown(found[key])}"))


def _check_last(last: Mapping[str, Any] | None, where: str) -> None:
    """Check the last step's figures: fields of ``StepStats``, but for its tables. A loss may be infinite or NaN."""
    if last is None:
        return
    kinds = {key: hint for key, hint in hints_of(StepStats).items() if get_origin(hint) is not dict}
    if lacking := kinds.keys() - last.keys():
        raise StoreError(_damaged(where, f"last lacks {min(lacking)!r}"))
    for key, value in last.items():
        if key not in kinds or not (fits(value, kinds[key]) or (kinds[key] is float and isinstance(value, float))):
            raise StoreError(_damaged(where, f"last.{shown(key)}={shown(value)}"))


def _damaged(where: str, why: str) -> str:
    return f"{where} is not what a run of penstock writes: {why}: go on from a snapshot"
