"""What ranks send each other, measured by themselves: all find the same."""

import os
import time
from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from penstock.doctor.between import link, look, other_bits
from penstock.hardware.machine import Between, Machine, Network, parse_machine
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


def found_of_hosts(mesh: DeviceMesh, each: int) -> tuple[Network, int]:
    """And the number of times that this rank has sent something to other hosts."""
    os.environ["GROUP_RANK"] = str(mesh.get_rank() // each)  # as torchrun on several hosts says it
    ranks, sent = join(mesh, torch.device("cpu")), list[object]()
    place = ranks if each == 1 else ranks.of_place
    try:
        with pytest.MonkeyPatch.context() as patch:
            measure_little(patch)
            exchange = place.exchange
            patch.setattr(place, "exchange", lambda *given: (sent.append(given), exchange(*given)))
            return link(ranks, torch.device("cpu"), 0.005, 1), len(sent)
    finally:
        ranks.close()


@pytest.mark.parametrize("each", [1, 2])
def test_hosts_find_their_link_by_one_rank_on_each(each: int) -> None:
    found = together(2 * each, found_of_hosts, each)
    links = [one for one, _ in found]
    assert links == links[:1] * len(links)
    assert min(links[0].bandwidth, links[0].latency) > 0
    assert {lane for pair in links[0].contention for lane in pair.split("+")} <= {"nic", "compute", "cpu", "h2d", "d2h"}
    assert [sent > 0 for _, sent in found] == ([True] + [False] * (each - 1)) * 2
    machine = Machine(name="box", host=host(), device=gpu(), nic=replace(links[0], contention={"compute+nic": 0.1}))
    assert parse_machine(machine.to_json(), "x") == machine


class Slow(Ranks):
    """Two ranks whose link takes so many seconds for each byte that one of them sends."""

    size = 2

    def __init__(self, pace: float) -> None:
        self._pace = pace

    def gather(self, out: torch.Tensor, part: torch.Tensor) -> None:
        time.sleep(part.nbytes * self._pace)

    def exchange(self, out: torch.Tensor, into: torch.Tensor) -> None:
        time.sleep(into[0].nbytes * self._pace)


def test_a_slow_link_is_measured_with_smaller_messages_and_as_slow_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slow, "is_first_on_host", True)
    monkeypatch.setattr(Slow, "hosts", 2)
    slow = Slow(1e-5)  # 100 kB/s, and messages of a quarter of a megabyte at most
    measure_little(monkeypatch)
    began = time.perf_counter()
    found = link(slow, torch.device("cpu"), 0.005, 1)
    assert found.bandwidth == pytest.approx(1e5, rel=0.3)
    assert time.perf_counter() - began < 20


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
