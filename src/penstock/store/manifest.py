"""The manifest in each directory of a store: the model that it is made for, and the directory's own number."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.documents.typed import shown
from penstock.errors import StoreError
from penstock.store.directory import is_there
from penstock.store.layout import ALIGN, Layout
from penstock.store.owner import Owner
from penstock.store.records import read_as
from penstock.store.striping import HEAVIEST, Striping

DATA = "penstock.store"
PARTIAL = "penstock.store.partial"  # what DATA is called until everything else is there
MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class _Account:
    """A manifest but for the layout."""

    store: str
    index: int
    directories: tuple[str, ...]
    stripe: int
    model: dict[str, Any]
    passing: bool
    owner: Owner | None = None
    weights: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Written(_Account):
    """A manifest as JSON has it."""

    layout: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Manifest(_Account):
    """The contents of the file ``manifest.json`` of the directory number ``index``. ``owner``: the run that it belongs
    to, None: no run. ``weights``: of the directories, by which the store is striped over them; empty: evenly.
    """

    layout: Layout

    def to_json(self) -> dict[str, object]:
        owner = None if self.owner is None else self.owner.to_json()
        said = vars(self) | {"directories": list(self.directories), "layout": self.layout.to_json(), "owner": owner}
        weights = said.pop("weights")
        return said | ({"weights": list(weights)} if weights else {})

    @property
    def striping(self) -> Striping:
        """The striping of the address space over the directories."""
        return Striping(files=len(self.directories), stripe=self.stripe, weights=self.weights)

    def __post_init__(self) -> None:
        if not 0 <= self.index < len(self.directories):
            raise ValueError(f"it is of directory {self.index} of {len(self.directories)}")
        if self.stripe < ALIGN or self.stripe % ALIGN:
            raise ValueError(f"stripe={self.stripe} is not a multiple of {ALIGN} bytes")
        if self.weights and len(self.weights) != len(self.directories):
            raise ValueError(f"it has weights for {len(self.weights)} of {len(self.directories)} directories")
        if not all(0 < weight <= HEAVIEST for weight in self.weights):
            raise ValueError(f"weights={shown(self.weights)}: each must be from 1 to {HEAVIEST}")

    @staticmethod
    def read(path: Path) -> "Manifest":
        """Raises:
        StoreError: it is missing, damaged, or not what a store writes.
        """
        written = read_as(path / MANIFEST, "store", _Written)
        try:
            return Manifest(**vars(written) | {"layout": Layout.from_json(written.layout)})
        except (StoreError, ValueError) as e:
            raise StoreError(f"{path / MANIFEST} is damaged: {e}") from e


def read_manifests(paths: Sequence[Path]) -> Manifest:
    """The manifest of the first directory, when all of them agree and are given in their order."""
    for path in paths:
        if not is_there(path / DATA) and not is_there(path / MANIFEST):
            raise StoreError(f"{path} holds no store: create one, or give the directory of one")
    found = [Manifest.read(path) for path in paths]
    require_all(paths, found)
    for path in paths:
        if not is_there(path / DATA):
            raise StoreError(f"{path / DATA} is missing: if the store's creation was interrupted, delete the store")
    return found[0]


def require_all(paths: Sequence[Path], found: Sequence[Manifest]) -> None:
    """Check that these, found in ``paths``, are all the manifests of one store.

    Raises:
        StoreError: one is of another store or a copy, some are missing, or their order is another.
    """
    first = found[0]
    for path, manifest in zip(paths, found, strict=True):
        if manifest.store != first.store:
            raise StoreError(f"{paths[0]} and {path} belong to different stores: give the directories of one")
    by_part: dict[int, Path] = {}
    for path, manifest in zip(paths, found, strict=True):
        if (other := by_part.setdefault(manifest.index, path)) is not path:
            raise StoreError(f"{other} and {path} have the same part of one store: leave out the one that is a copy")
    missing = [
        f"number {i + 1} (made as {first.directories[i]})" for i in range(len(first.directories)) if i not in by_part
    ]
    if missing:
        raise StoreError(f"the store has {len(first.directories)} directories, missing here: {', '.join(missing)}")
    order = sorted(range(len(found)), key=lambda i: found[i].index)
    if order != list(range(len(found))):
        right = ", ".join(str(paths[i]) for i in order)
        raise StoreError(f"the store's directories are given in another order than they were made in: give {right}")


def require_alike(had: Mapping[str, Any], asked: Mapping[str, Any], where: str) -> None:
    """Raises:
    StoreError: what the store in ``where`` was made for differs from what is asked for; names the first difference.
    """
    differs = _difference(had, asked, "")
    if differs is not None:
        raise StoreError(
            f"{where}: the store was made for another model: {differs}: put back what it was made with, or give "
            "another directory"
        )


def _difference(ours: object, theirs: object, where: str) -> str | None:
    """The first place where two JSON values differ, in words; None if they are equal."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in [*ours, *(key for key in theirs if key not in ours)]:
            place = f"{where}.{key}" if where else str(key)
            if key not in ours or key not in theirs:
                return f"{place} is only in {'this model' if key in theirs else 'the store'}"
            found = _difference(ours[key], theirs[key], place)
            if found is not None:
                return found
        return None
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple) and len(ours) == len(theirs):
        pairs = (_difference(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(ours, theirs, strict=True)))
        return next((found for found in pairs if found is not None), None)
    return None if ours == theirs else f"{where} is {shown(ours)} in the store and {shown(theirs)} in this model"
