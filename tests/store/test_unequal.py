"""A store whose directories have shares of their own: fixed when it is made, and the same for whoever reads it."""

import logging
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import StoreError
from penstock.store import making
from penstock.store.layout import ALIGN, Layout
from penstock.store.making import file_sizes
from penstock.store.manifest import Manifest
from penstock.store.pace import pace
from penstock.store.store import STRIPE, Store
from penstock.store.striping import Striping
from tests.store.test_store import directories, random_bytes, read

LAYOUT = Layout.build([("weights", 24 * ALIGN, 1), ("state", 48 * ALIGN, 2)])
WEIGHTS = (3, 1)


def made(paths: list[Path], weights: tuple[int, ...] = WEIGHTS) -> Store:
    return Store.create(paths, LAYOUT, model={}, stripe=ALIGN, weights=weights)


def test_each_directory_has_its_share_of_what_is_kept_and_written(tmp_path: Path) -> None:
    paths, data = directories(tmp_path, 2), random_bytes(48 * ALIGN)
    with made(paths) as store:
        store.write("state", 0, data, 1)
        assert store.files.written_each == [36 * ALIGN, 12 * ALIGN]
        assert sum(store.files.written_each) == store.stats.bytes_written
        held = Counter[str]()
        for file, _, nbytes in store.lend("state", 1).stretches:
            held[file.path.parent.name] += nbytes
        assert held == {"drive0": 36 * ALIGN, "drive1": 12 * ALIGN}
    sizes = tuple((path / "penstock.store").stat().st_size for path in paths)
    assert sizes == file_sizes(LAYOUT, Striping(files=2, stripe=ALIGN, weights=WEIGHTS))
    assert sizes[0] == pytest.approx(3 * sizes[1], abs=8 * ALIGN)


def test_what_is_written_is_read_and_verified_after_a_reopening(tmp_path: Path) -> None:
    paths, data = directories(tmp_path, 2), random_bytes(48 * ALIGN)
    with made(paths) as store:
        store.write("state", 0, data, 1)
        store.commit({})
    with Store.open(paths) as store:
        assert store.weights == WEIGHTS
        assert np.array_equal(read(store, "state", slot=1), data)
        assert not [damage for _, damage in store.verify({"state": 1}) if damage]
        file, offset, _ = next(one for one in store.lend("state", 1).stretches if one[0].path.parent == paths[1])
        with file.path.open("r+b") as drive:
            drive.seek(offset)
            drive.write(b"?")
        assert [str(paths[1]) in text for _, damage in store.verify({"state": 1}) for text in damage] == [True]


def test_equal_drives_have_the_manifest_that_they_always_had(tmp_path: Path) -> None:
    for name, weights in (("none", ()), ("ones", (2, 2))):
        (tmp_path / name).mkdir()
        with made(directories(tmp_path / name, 2), weights) as store:
            assert store.weights == (1, 1)
        assert Manifest.read(tmp_path / name / "drive0").weights == ()
        assert '"weights":' not in (tmp_path / name / "drive0" / "manifest.json").read_text()


@pytest.mark.parametrize(
    ("weights", "said"), [((1, 2, 3), "weights for 3 of 2"), ((0, 1), "must be from 1"), ((1, 10**9), "must be from 1")]
)
def test_weights_that_cannot_be_are_a_damaged_manifest(weights: tuple[int, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Manifest(
            store="s", index=0, directories=("a", "b"), stripe=ALIGN, layout=LAYOUT, model={}, passing=False,
            weights=weights,
        )  # fmt: skip


def test_where_only_an_even_stripe_has_room_the_store_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    paths = directories(tmp_path, 2)
    for path in paths:
        path.mkdir()
    total = sum(file_sizes(LAYOUT, Striping(files=2, stripe=STRIPE)))
    room = {paths[0]: total, paths[1]: total}

    def check(where: list[Path], layout: Layout, striping: Striping, *, replaces: bool) -> None:
        """Two file systems, the first of which has less room than its share would be."""
        if striping.weights and room[where[0]] < 2 * total:
            raise StoreError(f"{where[0]}: the store needs more")

    monkeypatch.setattr(making, "check_room", check)
    with caplog.at_level(logging.WARNING, "penstock"), made(paths) as store:
        assert store.weights == (1, 1)
    assert f"striping evenly over drives that are not equally fast, as only so there is room: {paths[0]}" in caplog.text


def test_a_drive_is_measured_in_a_moment_and_nothing_is_left(tmp_path: Path) -> None:
    assert pace(tmp_path) > 1e6
    assert not list(tmp_path.iterdir())
