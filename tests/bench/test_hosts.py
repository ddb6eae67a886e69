"""``bench.hosts``: what hosts send by the formula, and what is said of figures that miss what is required."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from bench.harness import BenchError
from bench.hosts import TORCH, Layout, Round, Timed, check_same_losses, ratios, table_of_times, times_missed
from bench.hosts_run import COPIES, FLAT, PIPELINE, Found, of_pipeline

from tests.programs import sent_bytes
from tests.schedule.test_vertical_pipeline import programs

PARTIAL = 8
SENT = round(25_000_000 * 1448 / 1514)
"""bytes that take a second at 200 Mbit/s, in full frames of Ethernet, which TCP and IP have a part of"""


def test_a_host_of_one_rank_sends_what_its_rank_sends() -> None:
    for ranks in (2, 3, 4):
        for rank, program in enumerate(programs(ranks)):
            assert program.dealt is not None
            norms = (ranks - 1) * program.dealt.partials * PARTIAL
            assert of_pipeline(program, 5, ranks, rank) == sent_bytes(program, 5) + norms


def test_what_stays_within_a_host_does_not_count() -> None:
    by_rank = [of_pipeline(program, 5, 4, rank) for rank, program in enumerate(programs(4))]
    first = programs(4)[0]
    by_host = [of_pipeline(first, 5, 2, host) for host in range(2)]
    assert 0 < sum(by_host) < sum(by_rank)


def found(name: str, seconds: float, predicted: float | None = None) -> Layout:
    one = Found(
        layout=name,
        rank=0,
        traced=8,
        scheduled=8,
        host=SENT,
        formula=SENT,
        seconds=seconds,
        predicted=seconds if predicted is None else predicted,
        busy={"compute": 0.5, "net": 3.0},
        losses=[2.0, 1.0],
    )
    return Layout(name=name, ranks=[replace(one, rank=rank) for rank in range(4)])


def of(*layouts: Layout, peers: Sequence[Timed] = ()) -> Round:
    return Round(layouts=layouts, peers=peers)


def test_what_misses_is_said() -> None:
    good = found(FLAT, 1.1)
    assert good.bound == ("nic", pytest.approx(1.0))
    assert good.bytes_missed() == times_missed([of(good)]) == []
    assert ["1.20 times its largest" in line for line in times_missed([of(found(FLAT, 1.2))])] == [True]
    assert ["1.22 of what was predicted" in line for line in times_missed([of(found(FLAT, 1.1, 0.9))])] == [True]
    loud = replace(good, ranks=[replace(one, host=SENT + SENT // 80, traced=7) for one in good.ranks])
    assert len(loud.bytes_missed()) == 4 + 2
    unknown = replace(good, ranks=[replace(one, predicted=None) for one in good.ranks])
    assert ["nothing" in line for line in times_missed([of(good), of(unknown)])] == [True]
    assert "| none |" in table_of_times([of(unknown)])


def test_the_pipeline_is_held_beside_all_others_whose_losses_are_the_same() -> None:
    layouts = [found(name, seconds) for name, seconds in ((FLAT, 5.0), (COPIES, 3.0), (PIPELINE, 2.0))]
    peer = Timed(name=TORCH.name, seconds=[3.0, 2.0, 2.5], losses=[2.0, 1.0])
    good = of(*layouts, peers=[peer])
    assert ratios([good]) == {FLAT: 2.5, COPIES: 1.5, "torch pipelining": 1.25}
    assert "| torch pipelining | 2.50 s | | | | | **1.25x** |" in table_of_times([good])
    assert not [line for line in times_missed([good]) if "as fast as" in line]
    slow = of(*layouts[:-1], found(PIPELINE, 2.6), peers=[peer])
    said = [line.partition("as fast as ")[2].partition(",")[0] for line in times_missed([slow]) if "as fast as" in line]
    assert said == [FLAT, peer.name]
    check_same_losses(good)
    with pytest.raises(BenchError, match="torch pipelining has the losses"):
        check_same_losses(of(*layouts, peers=[replace(peer, losses=[2.0, 1.01])]))


def test_a_ratio_is_that_of_one_round_in_which_the_machine_is_as_fast_for_all() -> None:
    rounds = []
    for slower in (1.0, 1.6, 1.3):  # of the whole machine, in turn
        peer = Timed(name=TORCH.name, seconds=[2.2 * slower], losses=[2.0, 1.0])
        runs = [found(FLAT, 5.0 * slower, 4.9 * slower), found(PIPELINE, 2.0 * slower, 2.0 * slower)]
        rounds.append(of(*runs, peers=[peer] if slower > 1 else []))
    assert ratios(rounds) == {FLAT: pytest.approx(2.5), TORCH.name: pytest.approx(1.1)}
    flat = table_of_times(rounds).splitlines()[2]
    assert flat.startswith(f"| {FLAT} | 6.50 s | nic 1.00 s | 6.50 | 6.37 s | 1.02 |")
