"""What ranks send each other, measured by themselves: all find the same."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from penstock.doctor.between import look, other_bits
from penstock.hardware.machine import Between, Machine, parse_machine
from penstock.ranks.group import Ranks, T
from penstock.ranks.process_groups import join
from tests.doctor.test_doctor import measure_little
from tests.machines import gpu, host
from tests.ranks.worlds import together

pytestmark = pytest.mark.usefixtures("one_thread")


def found(mesh: DeviceMesh) -> Between:
    ranks = join(mesh, torch.device("cpu"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            measure_little(patch)
            return look(ranks, 0.005, 1)
    finally:
        ranks.close()


def test_all_ranks_find_the_same_and_a_profile_keeps_it() -> None:
    one, other = together(2, found)
    assert one == other
    assert one.ranks == 2
    assert min(one.bandwidth, one.latency) > 0
    assert {lane for pair in one.contention for lane in pair.split("+")} <= {"net", "compute", "cpu", "h2d", "d2h"}
    assert one.other_bits == ()
    machine = Machine(
        name="box", host=host(), device=gpu(kind="cpu"), between=(replace(one, other_bits=("adamw.fp32",)),)
    )
    assert parse_machine(machine.to_json(), "x") == machine


class OfTwo(Ranks):
    """This rank beside one whose digests are given."""

    def __init__(self, **theirs: str) -> None:
        self._theirs = theirs

    def gather_objects(self, what: str, value: T) -> list[T]:
        assert isinstance(value, dict)
        return [value, value | self._theirs]  # type: ignore[list-item]


def test_what_one_rank_computes_otherwise_is_named() -> None:
    assert other_bits(OfTwo()) == ()
    assert other_bits(OfTwo(**{"adamw.bf16": "1", "product": "2"})) == ("adamw.bf16", "product")
