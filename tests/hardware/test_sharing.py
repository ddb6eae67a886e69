"""A machine as each of several ranks sees it: together they have what there is, and no rank more than alone."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import Budget
from penstock.errors import ConfigError
from penstock.hardware.drives import with_room
from penstock.hardware.machine import Between, Collectives, Machine, Network, Sustained
from penstock.hardware.sharing import (
    drives_of,
    knows_ranks,
    of_each_rank,
    of_pipeline,
    room_of_each,
    too_full,
    within_host,
)
from tests.machines import GIB, drive, gpu, host

RANKS = st.integers(2, 9)
BETWEEN = (
    Between(ranks=2, bandwidth=1e9, latency=1e-3, contention={"net+cpu": 0.5}),
    Between(ranks=4, bandwidth=6e8, latency=3e-3),
)
LEFT = Sustained(write=1.5e9, read_both=4e9, write_both=1e9, after=GIB)


def machine(*, drives: int = 0, cores: int = 8, kind: str = "cpu") -> Machine:
    device = gpu(kind=kind, flops={"fp32": 1e12}, h2d=9e9, d2h=8e9, h2d_both=6e9, d2h_both=5e9)
    return Machine(
        name="box",
        host=host(cores=cores),
        device=device,
        drives=tuple(drive(path=f"/d{i}", sustained=LEFT) for i in range(drives)),
        between=BETWEEN,
        contention={"cpu+h2d": 0.3, "net+cpu": 0.1},
    )


@given(RANKS, st.integers(1, 12), st.integers(1, 16))
def test_ranks_have_no_more_together_than_there_is(ranks: int, threads: int, cores: int) -> None:
    whole = machine(cores=cores)
    own = of_each_rank(whole, ranks, threads)
    assert ranks * own.host.memory <= whole.host.memory
    for name, rate in whole.host.optimizer.items():
        assert ranks * own.host.optimizer[name] <= rate * (1 + 1e-9)
    at_once = max(whole.host.copy, whole.device.h2d_both + whole.device.d2h_both)
    for alone, each in ((whole.device.h2d, own.device.h2d), (whole.device.d2h, own.device.d2h)):
        assert each <= alone
        assert ranks * each <= at_once * (1 + 1e-9) * max(1, alone / max(whole.device.h2d, whole.device.d2h))
    assert own.device.h2d_both + own.device.d2h_both <= at_once / ranks * (1 + 1e-9)
    computed = ranks * own.device.flops["fp32"]
    assert computed <= whole.device.flops["fp32"] * (1 + 1e-9)


def test_a_gpu_is_each_rank_s_own() -> None:
    whole = machine(kind="cuda")
    assert of_each_rank(whole, 4).device == whole.device


@given(RANKS, st.integers(1, 9))
def test_drives_are_dealt_as_directories_are(ranks: int, count: int) -> None:
    """Ranks that share a drive have it together, and what the slowest rank has nobody undercuts."""
    whole = machine(drives=count)
    budget = Budget(device="1GiB", host="1GiB", disk=[d.path for d in whole.drives])
    dealt = [drives_of(whole.drives, rank, ranks) for rank in range(ranks)]
    for rank, own in enumerate(dealt):
        folders = [str(path.parent) for path in budget.of_rank(rank, ranks).disk_paths]
        assert [d.path for d in own] == folders
        for part in own:
            assert part.steady.write / part.write == pytest.approx(0.5)
    for d in whole.drives:
        shares = [part.read for own in dealt for part in own if part.path == d.path]
        assert sum(shares) == pytest.approx(d.read)
    slowest = of_each_rank(whole, ranks).drives
    assert slowest in dealt
    pace = [len(own) * min(d.write for d in own) for own in dealt]
    assert len(slowest) * min(d.write for d in slowest) == pytest.approx(min(pace))


@given(RANKS)
def test_what_was_measured_counts_and_else_the_nearest_with_as_much_in_all(ranks: int) -> None:
    own = of_each_rank(machine(), ranks)
    near = BETWEEN[0] if ranks <= 3 else BETWEEN[1]
    assert own.network is not None
    assert own.network.bandwidth * ranks == pytest.approx(near.bandwidth * near.ranks)
    assert own.network.latency / ranks == pytest.approx(near.latency / near.ranks)
    assert own.contention["net+cpu"] == near.contention.get("net+cpu", 0.1)
    assert own.contention["cpu+h2d"] == 0.3


def test_a_profile_that_does_not_tell_is_refused_and_one_rank_needs_none() -> None:
    before = replace(machine(), between=())
    assert not knows_ranks(before, 2)
    assert of_each_rank(before, 1) is before
    with pytest.raises(ConfigError, match="does not tell how fast ranks send to each other"):
        of_each_rank(before, 2)
    linked = replace(before, network=Network(bandwidth=1e11, latency=1e-5))
    assert of_each_rank(linked, 2).network == linked.network


NIC = Network(bandwidth=1e9, latency=1e-3)
WITHIN = Between(ranks=2, bandwidth=4e9, latency=1e-4)


def linked(**changes: Any) -> Machine:
    return replace(machine(), **{"nic": NIC, "between": (WITHIN,)} | changes)


def test_of_several_hosts_what_leaves_one_goes_at_its_ranks_share_of_the_network() -> None:
    """Four ranks on two hosts send three parts: one to the other host, two within their own, on two lanes or in one
    op."""
    found = of_each_rank(linked(), 4, hosts=2)
    assert isinstance(found.network, Collectives)
    assert (found.network.bandwidth, found.network.exchange, found.network.latency) == (4e9, 4e9, 1e-4)
    assert 3 / found.network.of_all == pytest.approx(1 / 0.5e9 + 2 / 4e9)
    assert found.network.latency_of_all == pytest.approx(1.1e-3)
    assert found.across == Network(bandwidth=0.5e9, latency=1e-3)
    assert found.host.memory == machine().host.memory // 2
    one_each = of_each_rank(linked(between=()), 2, hosts=2)
    assert one_each.network is not None
    assert one_each.network.bandwidth == pytest.approx(NIC.bandwidth)
    assert one_each.host == machine().host
    with pytest.raises(ConfigError, match="does not tell how fast hosts send to each other"):
        of_each_rank(linked(nic=None), 4, hosts=2)
    with pytest.raises(ConfigError, match="does not tell how fast ranks send to each other"):
        of_each_rank(linked(between=()), 4, hosts=2)


def test_ranks_of_a_host_that_are_no_power_of_two_exchange_gradients_on_one_level() -> None:
    """Six ranks on two hosts send five parts: of what is gathered one leaves the host, of gradients three."""
    seen = of_each_rank(linked(), 6, hosts=2)
    found, own = seen.network, 4e9 * 2 / 3
    assert isinstance(found, Collectives)
    assert found.bandwidth == pytest.approx(own)
    assert seen.across == Network(bandwidth=1e9 / 3, latency=1e-3)
    assert 5 / found.exchange == pytest.approx(3 * 3 / 1e9 + 2 / own)
    gathered, exchanged = 3 / 1e9 + 4 / own, 3 * 3 / 1e9 + 2 / own
    assert 2 * 5 / found.of_all == pytest.approx(gathered + exchanged)


def test_with_a_copy_on_each_host_gradients_alone_leave_it() -> None:
    found = of_each_rank(linked(), 4, hosts=2, copies=2)
    assert found.network == Network(bandwidth=WITHIN.bandwidth, latency=WITHIN.latency)
    assert found.across is not None
    assert (found.across.bandwidth, found.across.latency) == (pytest.approx(NIC.bandwidth / 2), NIC.latency)
    of_one = of_each_rank(linked(), 4, copies=2)
    assert of_one.network == of_one.across == Network(bandwidth=2e9, latency=2e-4)
    with pytest.raises(ConfigError, match="some are on a part of a host"):
        of_each_rank(linked(), 12, hosts=3, copies=2)


def test_what_a_link_of_hosts_slows_is_slowed_by_each_lane_that_goes_over_it() -> None:
    nic = replace(NIC, contention={"compute+nic": 0.08, "nic+compute": 0.02})
    seen = of_each_rank(linked(nic=nic, between=()), 2, hosts=2)
    assert {"compute+net": 0.08, "net+compute": 0.02}.items() <= seen.contention.items()
    seen = of_each_rank(linked(nic=nic, between=(replace(WITHIN, contention={"compute+net": 0.9}),)), 4, hosts=2)
    assert {"compute+nic": 0.08, "nic+compute": 0.02, "compute+net": 0.9}.items() <= seen.contention.items()
    copies = of_each_rank(linked(nic=nic), 4, hosts=2, copies=2)
    assert copies.contention["compute+nic"] == 0.08
    assert "compute+net" not in copies.contention, "weights cross within the host"
    copies = of_each_rank(linked(nic=nic, between=()), 4, hosts=4, copies=2)
    for lane in ("net", "nic"):  # both cross
        assert copies.contention[f"compute+{lane}"] == 0.08
        assert copies.contention[f"{lane}+compute"] == 0.02
    pipeline = of_pipeline(linked(nic=nic, between=()), 2, hosts=2)
    assert pipeline.contention["compute+send"] == 0.08, "for both ways: to receive takes no time in a simulation"
    assert pipeline.contention["send+compute"] == 0.02
    assert of_each_rank(linked(nic=nic), 2).contention == of_each_rank(linked(), 2).contention, "of one host"


def test_collectives_that_leave_a_host_slow_and_are_slowed_as_its_link() -> None:
    """Not as those within it, which the processors carry: exchanges of three ranks of a host, which have one level, and
    collectives of neighbours in pipelines that are on several hosts."""
    nic = replace(NIC, contention={"compute+nic": 0.08})
    within = replace(WITHIN, contention={"compute+net": 0.9, "net+cpu": 0.7})
    whole = linked(nic=nic, between=(within,))
    for ranks in (4, 6):
        seen = of_each_rank(whole, ranks, hosts=2).contention
        assert seen["compute+nic"] == 0.08
        crosses = ranks == 6
        assert (seen["compute+net"], seen.get("net+cpu")) == ((0.08, None) if crosses else (0.9, 0.7))
    for hosts, beside in ((2, 3), (4, 4)):
        seen = of_pipeline(whole, 2 * beside, hosts=hosts, beside=beside).contention
        assert seen["compute+send"] == 0.08
        crosses = hosts == 4
        assert (seen["compute+net"], seen.get("net+cpu")) == ((0.08, None) if crosses else (0.9, 0.7))


def test_every_rank_has_room_on_disk_as_the_one_with_the_least_has() -> None:
    """Of three drives and two ranks one rank has two, and one a single one; four ranks have a third, or half of one."""
    drives = machine(drives=3).drives
    assert [room_of_each(drives, ranks) for ranks in (1, 2, 3, 4)] == [1500 * GIB, 500 * GIB, 500 * GIB, 250 * GIB]
    full = (replace(drives[0], free=100 * GIB), *drives[1:])
    assert room_of_each(full, 2) == 200 * GIB
    assert room_of_each((), 2) == 0
    given = with_room(drives, 300 * GIB)
    assert [each.free for each in given] == [100 * GIB] * 3
    assert room_of_each(given, 2) == 100 * GIB


def test_a_drive_has_room_for_the_ranks_that_are_on_it_whatever_others_need() -> None:
    drives = tuple(drive(path=f"/d{n}", free=free) for n, free in enumerate((18, 100)))
    assert too_full(drives, (20, 14)) == (20, 18), "as much as both need is free, but not where the first is"
    assert too_full(drives, (14, 90)) is None, "far more than twice what the fuller one has"
    assert too_full(drives, (9, 14, 9)) is None
    assert too_full(drives, (9, 14, 10)) == (19, 18)
    assert too_full(drives, (36,)) is None, "striped"
    assert too_full(drives, (38,)) == (19, 18)
    assert too_full((), (0, 0)) is None
    halves = tuple(drive(path=f"/none{n}", free=17, directories=2) for n in range(2))
    assert too_full(halves, (20, 14)) is None, "directories on one file system"
    assert too_full(halves, (20, 15)) == (35, 34)


def test_what_attention_sends_stays_on_the_hosts_that_share_a_sequence() -> None:
    whole = linked()
    assert whole.nic is not None
    within = within_host(whole, 2).bandwidth
    for ranks, hosts, copies in ((4, 2, 1), (4, 2, 2), (8, 4, 2)):
        seen = of_each_rank(whole, ranks, hosts=hosts, copies=copies, cp=2)
        assert seen.of_sequence is not None
        assert seen.of_sequence.bandwidth == within
    seen = of_each_rank(whole, 4, hosts=2, cp=4)
    assert seen.of_sequence is not None
    # 3 parts for others, of which 2 leave the host, over the nic that both of its ranks use, and 1 does not
    assert seen.of_sequence.bandwidth == pytest.approx(3 / (2 * 2 / whole.nic.bandwidth + 1 / within))
    assert (
        of_pipeline(whole, 8, hosts=2, beside=4, cp=2).of_sequence == of_each_rank(whole, 8, hosts=2, cp=2).of_sequence
    )
    assert of_each_rank(whole, 4, hosts=2).of_sequence is None
