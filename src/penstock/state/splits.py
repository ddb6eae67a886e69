"""Muon's splits in the account of what a store or a snapshot is made for. They change no array, but every step."""

from collections.abc import Mapping
from typing import Any

from penstock.documents.typed import shown
from penstock.errors import StoreError

SPLITS = "splits"
"""The key of the parameters that are several matrices, and their parts. Versions up to 0.1.0 have not written it."""


def require_splits(had: Mapping[str, Any], model: Mapping[str, Any], where: str) -> None:
    """Check that matrices are cut for their updates as they were. ``had``, ``model``: what both describe.

    Raises:
        StoreError: they are not.
    """
    if SPLITS in had and SPLITS in model and had[SPLITS] != model[SPLITS]:
        raise StoreError(
            f"{where}: Muon's splits were {shown(had[SPLITS])}, by parameter, and are {shown(model[SPLITS])} now, with "
            "which its updates would be others: give those that the run began with (optimizer.splits, Muon(splits=...))"
        )


def as_known(model: Mapping[str, Any], had: Mapping[str, Any]) -> dict[str, Any]:
    """A description without splits, if ``had`` is of a version that has not written them."""
    return {key: value for key, value in model.items() if key != SPLITS or key in had}
