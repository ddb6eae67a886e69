"""Penstock's losses through disk are those of a plain loop with the formulas of docs/numerics.md, in all bits."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench.equal_losses import PICTURE, distances, draw, plain, streamed, written_out

pytestmark = pytest.mark.usefixtures("one_thread")


def test_losses_equal_those_of_a_plain_loop(tmp_path: Path) -> None:
    ours = streamed(3, tmp_path)
    assert distances(ours, plain(written_out, 3)) == [0, 0, 0]
    assert ours[2] < ours[0]


def test_the_picture_is_well_formed() -> None:
    for text in (draw([3.0, 2.0, 1.5], [3.0, 2.0, 1.5001]), PICTURE.read_text()):
        assert ElementTree.fromstring(text).tag.endswith("svg")
