"""Findings for several shapes of micro-batch are put together."""

from penstock.engine.probed import slowest_of
from penstock.shape.model import StageTimes


def test_halves_of_a_backward_have_times_where_those_of_all_shapes_have() -> None:
    """Where one shape's backwards are run as a whole, those of all are."""
    one, other = (StageTimes(forward=(x, 1.0), backward=(1.0, x), weights=(0.5, x)) for x in (2.0, 3.0))
    whole = StageTimes(forward=(1.0, 4.0), backward=(1.0, 1.0))
    assert slowest_of([one, other]) == StageTimes(forward=(3.0, 1.0), backward=(1.0, 3.0), weights=(0.5, 3.0))
    assert slowest_of([one, None, whole]) == StageTimes(forward=(2.0, 4.0), backward=(1.0, 2.0))
