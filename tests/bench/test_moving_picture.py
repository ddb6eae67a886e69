"""The moving picture is of equal losses only, and a file that shows itself: no program, no path of a machine, small."""

import re
from xml.etree import ElementTree

import pytest
from bench.harness import BenchError
from bench.moving_picture import PICTURE, STEPS, check_equal
from bench.moving_svg import Line, Scene, cut, draw, times

LOSSES = [3.0, 2.5, 2.25]
SCENE = Scene(
    losses=LOSSES,
    first=[Line(text=text, at=at) for text, at in (("$ train", 0), ("step 1/3  loss 3.0000  x", 9), ("Killed", 10))],
    second=[Line(text="$ train", at=0), *(Line(text=f"step {i}/3  loss 2.5000  <&>", at=i) for i in (2, 3))],
    pid=4711,
)


def test_losses_that_differ_in_one_bit_are_refused() -> None:
    check_equal(LOSSES, list(LOSSES))
    with pytest.raises(BenchError, match=r"step 2.*nothing is drawn"):
        check_equal(LOSSES, [3.0, 2.5000000000000004, 2.25])


@pytest.mark.parametrize("drawn", [False, True], ids=["the committed picture", "a new one"])
def test_the_picture_is_one_small_file_without_a_program(drawn: bool) -> None:
    text = draw(SCENE) if drawn else PICTURE.read_text()
    names = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(text).iter()}
    assert not names & {"script", "image", "foreignObject"}
    assert len(text) < 100_000
    assert not re.search(r"(?<![<\w)])/\w+/", text), "a path from the root"
    for rule in ("prefers-reduced-motion: no-preference", "prefers-color-scheme: dark"):
        assert rule in text
    steps = SCENE.losses if drawn else range(STEPS)
    assert f"all {len(steps)} losses are equal" in text
    assert text.count("<circle class=") == 2 + sum(bool(re.search(r">step +\d+/", line)) for line in text.splitlines())


def test_lines_come_in_order_and_waits_are_shortened() -> None:
    at = times(SCENE)
    assert at == sorted(at)
    assert at[1] - at[0] < 1  # 9 seconds in truth


def test_a_line_that_is_too_long_ends_with_a_whole_field() -> None:
    assert cut("step 1  loss 6.0  norm 1.11 clipped", 30) == "step 1  loss 6.0 …"
    assert cut("short", 30) == "short"
