"""Ranks of several hosts, as many on each: what they move crosses within hosts and between them, with the same bits."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.config import ZeroStage
from penstock.ranks.process_groups import Together
from tests.models import PLAIN
from tests.ranks.test_bits import BF16, FP32, HORIZONTAL, Numbers, Run, alone, equal, results, trained
from tests.ranks.worlds import together
from tests.training import budget, result_of, run_steps, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

HOSTS, EACH = 2, 2
HOW: Mapping[str, Any] = {"precision": "bf16", "clip_grad_norm": 1.0}


def on_a_host(mesh: DeviceMesh) -> None:
    """As torchrun on two hosts says it."""
    os.environ["GROUP_RANK"] = str(mesh.get_rank() // EACH)


def trained_on_hosts(mesh: DeviceMesh, numbers: Numbers, run: Run, disk: Path | None) -> dict[str, Any]:
    on_a_host(mesh)
    return trained(mesh, numbers, run, disk)


WAYS: dict[str, tuple[Numbers, Run]] = {
    "on disk, bf16": (BF16, Run(disk=True, chunk=4096)),
    "horizontal": (FP32, Run(settings=HORIZONTAL)),
    "stage 2": (BF16, Run(settings={"stage": 2})),
    "stage 0": (FP32, Run(settings={"stage": 0})),
}


@pytest.mark.campaign
@pytest.mark.parametrize("way", WAYS)
def test_two_hosts_of_two_ranks_have_the_bits_of_one_rank(way: str, tmp_path: Path) -> None:
    """Each time the test below has those of stage 2, and ``test_own_schedule`` those of stage 3, on disk."""
    numbers, run = WAYS[way]
    for found in together(HOSTS * EACH, trained_on_hosts, numbers, run, tmp_path / "store"):
        equal(found, alone(numbers))


CASE = PLAIN


def of_step(step: int, rank: int) -> Any:
    return CASE.micro_batches(1, seed=10 * step + rank)


@cache
def of_one_rank(ranks: int) -> dict[str, Any]:
    """What so many ranks find and leave, of one process that sums as they do."""
    with wrap(CASE, budget(None), strands=ranks, **HOW) as engine:
        steps = [[mb for rank in range(ranks) for mb in of_step(step, rank)] for step in (1, 2)]
        return results(engine, run_steps(engine, steps))


def crossed(mesh: DeviceMesh) -> list[dict[str, Any]]:
    """In each of ``GATHERS`` bytes of a step that a rank sends those of the other host; what two steps have found and
    left."""
    on_a_host(mesh)
    host, sent = mesh.get_rank() // EACH, list[int]()
    gather, exchange, trade = Together.gather_in, Together.exchange_in, Together.trade_in

    def elsewhere(ranks: Iterable[int]) -> int:
        return sum(rank // EACH != host for rank in ranks)

    def gather_in(ranks: Together, group: "dist.ProcessGroup", out: torch.Tensor, part: torch.Tensor) -> None:
        if group is not ranks.control:
            sent.append(part.nbytes * elsewhere(dist.get_process_group_ranks(group)))
        gather(ranks, group, out, part)

    def exchange_in(ranks: Together, group: "dist.ProcessGroup", out: torch.Tensor, into: torch.Tensor) -> None:
        sent.append(into.nbytes * elsewhere(dist.get_process_group_ranks(group)) // dist.get_world_size(group))
        exchange(ranks, group, out, into)

    def trade_in(
        ranks: Together,
        group: "dist.ProcessGroup",
        to: Mapping[int, torch.Tensor],
        of: Mapping[int, torch.Tensor],
    ) -> None:
        sent.append(sum(tensor.nbytes * elsewhere([rank]) for rank, tensor in to.items()))
        trade(ranks, group, to, of)

    def steps_in(stage: ZeroStage, *, secondary: bool) -> dict[str, Any]:
        with (
            pytest.MonkeyPatch.context() as patch,
            wrap(CASE, budget(None), mesh=mesh, stage=stage, **HOW) as engine,
        ):
            first = engine.step(of_step(1, mesh.get_rank()))
            assert engine.plan.settings.secondary == (stage == 3), "where there is room"
            engine.inside.planning.change(replace(engine.plan.settings, secondary=secondary))
            for name, counted in (("gather_in", gather_in), ("exchange_in", exchange_in), ("trade_in", trade_in)):
                patch.setattr(Together, name, counted)
            sent.clear()
            second, whole = engine.step(of_step(2, mesh.get_rank())), sum(sent)
            plan, groups = engine.plan, [group.spec for group in engine.inside.resources.groups]
            loads = Counter(op.id.group for op in plan.schedule.ops if op.id.kind == "HW")
            return {
                "sent": whole,
                "gathered": sum(groups[g].numel * count for g, count in loads.items()),
                "made": sum(groups[g].trainable for stage in plan.program.stages for g in stage.gradients),
                "elements": sum(group.numel for group in groups),
                "found": results(engine, result_of(engine, [first, second])),
            }

    return [steps_in(stage, secondary=secondary) for stage, secondary in GATHERS]


GATHERS: Sequence[tuple[ZeroStage, bool]] = ((2, False), (3, True), (3, False))
"""stages of ZeRO, with a secondary partition or without"""


def test_of_each_gradient_and_each_gather_a_host_sends_the_others_one_whole() -> None:
    """(w + 4) N (H - 1) / H bytes in stages 2 and 3, whatever the number of its ranks; in stage 3 without a secondary
    partition w more for what is gathered again; besides what they tell each other. With the bits of one rank."""
    found = together(HOSTS * EACH, crossed)
    for way, (stage, secondary) in enumerate(GATHERS):
        for by_way in found:
            equal(by_way[way]["found"], of_one_rank(HOSTS * EACH))
        for host in range(HOSTS):
            ranks = [by_way[way] for by_way in found[host * EACH : (host + 1) * EACH]]
            elements, gathered = ranks[0]["elements"], ranks[0]["gathered"]
            assert gathered == elements if stage == 2 or secondary else gathered > 1.5 * elements
            whole = (gathered * 2 + ranks[0]["made"] * 4) * (HOSTS - 1) // HOSTS
            assert whole <= sum(one["sent"] for one in ranks) <= whole * 1.01


def apart(mesh: DeviceMesh) -> tuple[int, dict[str, Any]]:
    """Collectives of gloo in a step of ranks that are each on a host of its own; what two steps have found and left."""
    os.environ["GROUP_RANK"] = str(mesh.get_rank())
    count = 0
    gather = Together.gather_in

    def gather_in(ranks: Together, group: "dist.ProcessGroup", out: torch.Tensor, part: torch.Tensor) -> None:
        nonlocal count
        count += group is not ranks.control
        gather(ranks, group, out, part)

    def exchange_in(*_: object) -> None:
        raise AssertionError("a collective of gloo")

    with pytest.MonkeyPatch.context() as patch, wrap(CASE, budget(None), mesh=mesh, stage=3, **HOW) as engine:
        patch.setattr(Together, "gather_in", gather_in)
        patch.setattr(Together, "exchange_in", exchange_in)
        steps = [engine.step(of_step(step, mesh.get_rank())) for step in (1, 2)]
        return count, results(engine, result_of(engine, steps))


def test_ranks_on_hosts_of_their_own_send_each_other_pieces_and_use_no_collective() -> None:
    """Those of gloo reach half of such a link."""
    for count, found in together(2, apart):
        assert count == 0
        equal(found, of_one_rank(2))
