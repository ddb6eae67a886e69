"""``bench.hosts``: what hosts send by the formula, and what is said of figures that miss what is required."""

from dataclasses import replace

import pytest
from bench.harness import BenchError
from bench.hosts import TORCH, Layout, Timed, check_same_losses, ratios, table_of_times, too_slow
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


def test_what_misses_is_said() -> None:
    good = found(FLAT, 1.1)
    assert good.bound == ("nic", pytest.approx(1.0))
    assert good.bytes_missed() == good.times_missed() == []
    assert ["1.20 times its largest" in line for line in found(FLAT, 1.2).times_missed()] == [True]
    assert ["0.90 s were predicted" in line for line in found(FLAT, 1.1, 0.9).times_missed()] == [True]
    loud = replace(good, ranks=[replace(one, host=SENT + SENT // 80, traced=7) for one in good.ranks])
    assert len(loud.bytes_missed()) == 4 + 2
    unknown = replace(good, ranks=[replace(one, predicted=None) for one in good.ranks])
    assert ["nothing" in line for line in unknown.times_missed()] == [True]


def test_the_pipeline_is_held_beside_all_others_whose_losses_are_the_same() -> None:
    layouts = [found(name, seconds) for name, seconds in ((FLAT, 5.0), (COPIES, 3.0), (PIPELINE, 2.0))]
    peer = Timed(name=TORCH.name, seconds=[3.0, 2.0, 2.5], losses=[2.0, 1.0])
    assert ratios(layouts, [peer]) == {FLAT: 2.5, COPIES: 1.5, "torch pipelining": 1.25}
    assert "| torch pipelining | 2.50 s | | | | | **1.25x** |" in table_of_times(layouts, [peer])
    assert too_slow(layouts, [peer]) == []
    slow = [*layouts[:-1], found(PIPELINE, 2.6)]
    assert [line.partition("as fast as ")[2].partition(",")[0] for line in too_slow(slow, [peer])] == [FLAT, peer.name]
    check_same_losses(layouts, [peer])
    with pytest.raises(BenchError, match="torch pipelining has the losses"):
        check_same_losses(layouts, [replace(peer, losses=[2.0, 1.01])])
