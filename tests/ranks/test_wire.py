"""What ranks send each other: as the schedule says, and no more with more micro-batches."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.ranks.calls import Calls
from penstock.ranks.process_groups import Together
from penstock.ranks.watch import Place, Watch
from tests.accelerator import DEVICE
from tests.models import PLAIN
from tests.ranks.worlds import together
from tests.training import budget, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = PLAIN


class Done:
    """A collective that has been queued, and that torch counts as done."""

    def get_future(self) -> "torch.futures.Future[None]":
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future

    def wait(self) -> None:
        """The stream goes on after it; the host does not wait."""


class OneOfRanks(Together):
    """What waits for a collective, without others."""

    def __init__(self) -> None:
        store = dist.HashStore()
        self._watch = Watch(store, 0, [Place.here()], Calls())
        self._data = cast(Any, None)
        self._beside = {}
        self._apart = None

    def close(self) -> None:
        self._watch.close()
        for thread in self._beside.values():
            thread.close()


@pytest.mark.accelerator
def test_who_comes_back_from_a_collective_finds_the_device_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's next op may be of another stream, or of the host."""
    device = torch.device(DEVICE, 0)
    into = torch.ones(2, 500, device=device)
    out, seen = torch.empty_like(into), torch.zeros(1000).pin_memory()

    def queued(out: torch.Tensor, into: torch.Tensor, **_: Any) -> Done:
        out.copy_(into)
        seen.copy_(out, non_blocking=True)
        return Done()

    monkeypatch.setattr(dist, "all_to_all_single", queued)
    ranks = OneOfRanks()
    try:
        ranks.exchange(out, into)
        assert seen.sum() == 1000
    finally:
        ranks.close()


def sent(mesh: DeviceMesh, each: int, precision: str, schedule: str, stage: int = 3) -> dict[str, Any]:
    with wrap(CASE, budget(None), mesh=mesh, precision=precision, schedule=schedule, stage=stage) as engine:
        stats = engine.step(CASE.micro_batches(each, seed=mesh.get_rank()))
        groups = [group.spec for group in engine.inside.resources.groups]
        return {
            "moved": stats.bytes_moved["net"],
            "scheduled": engine.plan.schedule.bytes_per_lane()["net"],
            "traced": sum(event.bytes for event in engine.trace if event.lane == "net"),
            "gathered": sum(event.bytes for event in engine.trace if event.op.startswith("GW")),
            "exchanged": sum(event.bytes for event in engine.trace if event.op.startswith("SG")),
            "between": sum(event.bytes for event in engine.trace if event.op.startswith(("AR", "HR"))),
            "copied": {lane: stats.bytes_moved[lane] for lane in ("h2d", "d2h")},
            "to_copy": {lane: engine.plan.schedule.bytes_per_lane()[lane] for lane in ("h2d", "d2h")},
            "elements": [group.numel for group in groups],
            "trained": sum(group.trainable for group in groups),
            "made": sum(groups[g].trainable for s in engine.plan.program.stages for g in s.gradients),
            "stages": [(stage.forward_reads, stage.backward_reads) for stage in engine.plan.program.stages],
        }


Way = tuple[int, str, str, int]
"""Micro-batches of a rank, precision, schedule, stage of ZeRO."""
VERTICAL: tuple[Way, ...] = ((1, "fp32", "vertical", 3), (3, "fp32", "vertical", 3))
HORIZONTAL: tuple[Way, ...] = ((1, "bf16", "horizontal", 3), (3, "bf16", "horizontal", 3))
LOWER: tuple[Way, ...] = ((3, "bf16", "vertical", 0), (3, "bf16", "horizontal", 1), (3, "bf16", "vertical", 2))
REST: tuple[Way, ...] = ((3, "bf16", "horizontal", 0), (3, "bf16", "vertical", 1), (3, "bf16", "horizontal", 2))
"""Lower stages in the other order, of which a campaign takes all."""


def sent_in_each(mesh: DeviceMesh, ways: Sequence[Way]) -> dict[Way, dict[str, Any]]:
    return {way: sent(mesh, *way) for way in ways}


@pytest.fixture(scope="module")
def of_two(pytestconfig: pytest.Config) -> list[dict[Way, dict[str, Any]]]:
    """``sent`` in each way, by rank: the same two processes, which takes them as long to start as a few ways."""
    rest = REST if pytestconfig.getoption("--campaign") else ()
    return together(2, sent_in_each, (*VERTICAL, *HORIZONTAL, *LOWER, *rest))


def test_weights_cross_twice_and_gradients_once(of_two: list[dict[Way, dict[str, Any]]]) -> None:
    """(2w + 4) N (R - 1) / R bytes, less the second gather of weights that stay, and 8 bytes for each 4096 elements.
    What two stages use, as the group of the embedding and the head here, has a gradient of each.
    """
    for size, width, found in (
        (2, 4, [[of_rank[way] for of_rank in of_two] for way in VERTICAL]),
        (4, 2, [together(4, sent, 2, "bf16", "vertical")]),
    ):
        check_crossed_twice(size, width, found)


def check_crossed_twice(size: int, width: int, found: list[list[dict[str, Any]]]) -> None:
    for ranks in found:
        for one in ranks:
            assert one["moved"] == one["scheduled"] == one["traced"]
            *before, (last, _), ends = one["stages"]
            visits = [g for reads in (*before, (last, ())) for visit in reads for g in visit] + sorted(
                {*ends[0], *ends[1]}
            )
            gathers = sum(one["elements"][g] for g in visits)  # the last block's stay for its backward
            whole = gathers * width + one["made"] * 4 + one["trained"] // 4096 * 8
            assert one["moved"] == whole * (size - 1) // size
    assert found[0] == found[-1]


@pytest.mark.parametrize("way", [*LOWER, *(pytest.param(way, marks=pytest.mark.campaign) for way in REST)], ids=str)
def test_in_lower_stages_weights_cross_once_or_not_at_all(way: Way, of_two: list[dict[Way, dict[str, Any]]]) -> None:
    """(w + 4) N (R - 1) / R bytes with three micro-batches, whatever the schedule; with whole state on each rank
    8 N (R - 1) / R."""
    *_, stage = way
    for of_rank in of_two:
        one = of_rank[way]
        assert one["moved"] == one["scheduled"] == one["traced"]
        assert one["copied"] == one["to_copy"]
        weights = sum(one["elements"]) * 2 if stage else 0
        norms = one["trained"] // 4096 * 8 if stage else 0
        assert one["moved"] == (weights + one["made"] * (4 if stage else 8) + norms) // 2


def test_horizontally_weights_cross_for_each_micro_batch_and_gradients_once(
    of_two: list[dict[Way, dict[str, Any]]],
) -> None:
    size = 2
    found = [[of_rank[way] for of_rank in of_two] for way in HORIZONTAL]
    for ranks in found:
        for one in ranks:
            assert one["moved"] == one["scheduled"] == one["traced"]
            assert one["copied"] == one["to_copy"], "of all ranks' parts, gradients go down and their sum up"
            assert one["exchanged"] == one["made"] * 4 * (size - 1) // size
    once, thrice = (ranks[0]["gathered"] for ranks in found)
    assert 2 * once < thrice <= 3 * once, "but for what stays from one micro-batch to the next"
