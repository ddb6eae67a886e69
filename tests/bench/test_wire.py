"""``bench.wire`` at a small size: what it holds beside each other is counted apart, and a difference is said."""

from dataclasses import replace
from pathlib import Path

import pytest
from bench.wire import World, table
from bench.wire_run import Sent, look
from bench.workload import Work
from torch.distributed.device_mesh import DeviceMesh

from bench import namespace
from tests.ranks.worlds import together

LINES = [
    "Inter-|   Receive                                        |  Transmit",
    " face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs ...",
    "  eth0: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16",
    "    lo: 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36",
]


def sent(mesh: DeviceMesh, scratch: str) -> list[Sent]:
    work = Work(model="gpt-tiny", micro_batches=1, batch=1, length=8, steps=1, threads=1, scratch=scratch)
    return list(look(mesh, work, (1, 4)))


def test_trace_schedule_and_formula_are_equal_and_the_kernel_has_counted_them(tmp_path: Path) -> None:
    world = World(ranks=2, sent=together(2, sent, str(tmp_path)))
    assert world.missed(counted=False) == []
    assert [one.micro_batches for one in world.sent[0]] == [1, 4]
    assert world.overhead(0) > 1, "headers, and here whatever else is sent on this machine"
    off = replace(world.sent[1][1], scheduled=0)
    (said,) = replace(world, sent=[world.sent[0], [world.sent[1][0], off]]).missed(counted=False)
    assert said.startswith(f"2 ranks, rank 1, 4 micro-batches: {off.traced} bytes in the trace, 0 in the schedule")


def test_too_many_bytes_and_a_peer_that_sends_too_few_are_said() -> None:
    one = Sent(micro_batches=4, traced=100, scheduled=100, published=110, kept=20, norm=10, kernel=202)
    world = World(ranks=2, sent=[[one], [one]], peer={"released": 808, "default": 404})
    assert world.missed(counted=True) == []
    assert "| 2 | released | 808 | 4.00 |" in table([world], counted=True)
    loud = replace(world, sent=[[replace(one, kernel=203)], [one]])
    assert [line.split(": ")[1][:25] for line in loud.missed(counted=True)] == [
        "the kernel counts 1.0150 ",
        "DeepSpeed sends 3.98 time",
    ]


def test_the_loopback_is_found_among_the_interfaces() -> None:
    assert namespace.sent_on_loopback(LINES) == 29
    with pytest.raises(RuntimeError, match="no lo"):
        namespace.sent_on_loopback(LINES[:-1])
