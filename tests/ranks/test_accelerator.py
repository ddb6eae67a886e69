"""Ranks on accelerators have the bits of one rank on one, in all that they share: parts of the state, copies of it,
blocks of a pipeline, sequences. On the simulated one all accesses are ordered, too (``worlds``)."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import penstock
from penstock.doctor.between import link
from penstock.hardware.machine import Network
from penstock.ranks.process_groups import Together, join
from penstock.runtime import staging
from penstock.runtime.actions import crossing
from penstock.runtime.actions.between import Between
from penstock.runtime.actions.crossing import Crossing
from penstock.runtime.staging import Staging
from penstock.schedule import dealt
from penstock.schedule.ir.ops import Op
from penstock.schedule.ir.references import OpId
from tests.accelerator import DEVICE, build, simulated
from tests.accelerator.mutation import Mutation
from tests.engine.test_accelerator import Wide
from tests.models import PLAIN
from tests.patience import until
from tests.ranks import test_beside, test_bits, test_compact, test_copies, test_failures, test_pipeline, test_ulysses
from tests.ranks.test_bits import equal, results
from tests.ranks.worlds import World, pipeline, sharing, together
from tests.training import budget, run_steps, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def devices() -> None:
    """Skips where there are too few."""
    if DEVICE == "cuda":
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")
    elif build.compiler() is None:
        reason = "the simulated accelerator needs a C++ compiler"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


@contextmanager
def pieces(size: int | None) -> Iterator[None]:
    """Within, every message has a head of its own, and passes through the host in pieces of so many bytes; None:
    small ones have none, and no message is cut."""
    with pytest.MonkeyPatch.context() as patch:
        if size is not None:
            patch.setattr(crossing, "SMALL", -1)
            patch.setattr(dealt, "MESSAGE_PIECE", size)
        yield


def in_pieces(
    mesh: DeviceMesh, numbers: test_pipeline.Numbers, run: test_pipeline.Run, disk: Path, piece: int | None
) -> Any:
    with pieces(piece):
        return test_pipeline.trained(mesh, numbers, run, disk)


@cache
def alone(module: Any, numbers: Any) -> Any:
    """What one rank on an accelerator does, in memory."""
    return together(1, module.trained, numbers, module.Run(), None, on_device=True)[0]


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=[] if way == "horizontal, gradients in bf16, stage 2" else [pytest.mark.campaign])
        for way in test_bits.WAYS
    ],
)
def test_two_ranks_that_share_the_state_have_the_bits_of_one(way: str, tmp_path: Path) -> None:
    numbers, run = test_bits.WAYS[way]
    for found in together(2, test_bits.trained, numbers, run, tmp_path / "store", on_device=True):
        equal(found, alone(test_bits, numbers))


def on_hosts(mesh: DeviceMesh, hosts: int, numbers: test_bits.Numbers, run: test_bits.Run, disk: Path) -> Any:
    """Of one that has kept weights that have crossed between the hosts."""
    os.environ["GROUP_RANK"] = str(mesh.get_rank() * hosts // mesh.size())
    kept, leave = list[OpId](), Between.leave_crossed

    def leave_crossed(between: Between, op: Op) -> None:
        kept.append(op.id)
        leave(between, op)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Between, "leave_crossed", leave_crossed)
        found = test_bits.trained(mesh, numbers, run, disk)
    assert kept
    return found


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.campaign)])
def test_ranks_of_two_hosts_whose_weights_cross_once_have_the_bits_of_one(size: int, tmp_path: Path) -> None:
    numbers, run = test_bits.BF16, test_bits.Run(disk=True, chunk=4096)
    for found in together(size, on_hosts, 2, numbers, run, tmp_path / "store", on_device=True):
        equal(found, alone(test_bits, numbers))


PIPELINES = (("hidden states are collected", 2, None), ("1f1b, all on disk", 3, 1000))
"""Of which every run of the tests takes: a way, ranks, and the bytes of a message's pieces; None: each is one piece."""


@pytest.mark.parametrize(
    ("way", "size", "piece"),
    [
        pytest.param(*one, marks=[] if one in PIPELINES else [pytest.mark.campaign])
        for one in dict.fromkeys([*PIPELINES, *((way, size, None) for way, size in test_pipeline.IN_SHORT)])
    ],
)
def test_a_pipeline_has_the_bits_of_one_rank(way: str, size: int, piece: int | None, tmp_path: Path) -> None:
    """Whether messages pass through the host at once or in many pieces."""
    numbers, run = test_pipeline.WAYS[way]
    for found, (moved, said, formula) in pipeline(
        size, in_pieces, numbers, run, tmp_path / "store", piece, on_device=True
    ):
        equal(found, alone(test_pipeline, numbers))
        assert moved == said == formula


*_, COMPACT, ON_DISK = test_compact.WAYS["copies, adamw"]
COPIES = test_copies.WAYS | {
    "adamw in 8 bits, stage 2": (COMPACT, replace(ON_DISK, settings={**ON_DISK.settings, "stage": 2}))
}


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[] if way == "adamw in 8 bits, stage 2" else [pytest.mark.campaign]) for way in COPIES],
)
def test_two_copies_of_two_ranks_each_have_the_bits_of_one_rank(way: str, tmp_path: Path) -> None:
    numbers, run = COPIES[way]
    for found in together(4, test_copies.trained_in_copies, numbers, run, tmp_path / "store", on_device=True):
        equal(found, alone(test_bits, numbers))


@pytest.mark.parametrize(
    "optimizer", [test_compact.MUON, pytest.param(test_bits.ADAMW, marks=pytest.mark.campaign)], ids=["muon", "adamw"]
)
def test_two_pipelines_of_two_ranks_have_the_bits_of_one_rank(
    optimizer: penstock.AdamW | penstock.Muon, tmp_path: Path
) -> None:
    numbers, run = test_beside.WAYS["on disk, early, bf16"]
    numbers = replace(numbers, optimizer=optimizer)
    (wanted,) = together(1, test_beside.by_itself, numbers, on_device=True)
    for found in together(4, test_beside.in_pipelines, 2, numbers, run, tmp_path / "store", on_device=True):
        equal(found, wanted)


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("name", ["llama", "packed"])
def test_ranks_that_share_each_sequence_are_close_to_one_rank(name: str) -> None:
    wanted = together(1, test_ulysses.trained, name, clip_grad_norm=0.5, on_device=True)[0]
    for found in sharing(2, test_ulysses.trained, name, clip_grad_norm=0.5, on_device=True):
        test_ulysses.close(found, wanted)


@cache
def nothing_happened() -> list[float]:
    """``undisturbed``, of one rank."""
    found: list[float] = together(1, undisturbed, on_device=True)[0]
    return found


def undisturbed(mesh: DeviceMesh) -> list[float]:
    """The losses of the steps of two ranks that nothing happens to, by one that sums as they do."""
    with wrap(test_failures.CASE, budget(None), mesh=mesh, strands=2) as engine:
        return run_steps(engine, steps_of(test_failures.CASE, 4, lengths=test_failures.LENGTHS)).losses


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_device_that_waits_for_a_rank_that_is_gone_is_not_waited_for(how: int, tmp_path: Path) -> None:
    """The others' streams stand in a collective by then, and go on only when that is given up."""
    world = World(2, test_failures.to_be_ended, tmp_path / "store", how, 1, on_device=True)
    pid = world.processes[1].pid
    assert pid is not None
    if how == signal.SIGSTOP:
        until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    else:
        world.processes[1].join()
    since = time.monotonic()
    world.processes[0].join(20)
    assert time.monotonic() - since < (7 if how == signal.SIGSTOP else 5)
    if how == signal.SIGSTOP:
        os.kill(pid, signal.SIGKILL)
    (other,) = test_failures.others(world.outcomes(), 1)
    assert other.kind == "RankError"
    assert "rank 1 " in other.said
    if how == signal.SIGSTOP:
        return
    wanted = (2, nothing_happened()[2:])
    assert together(2, test_failures.steps, tmp_path / "store", 2, on_device=True) == [wanted] * 2


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("schedule", ["vertical", "1f1b"])
def test_a_pipeline_whose_rank_is_killed_goes_on_from_its_last_commit(schedule: str, tmp_path: Path) -> None:
    ((_, whole),) = together(1, test_pipeline.steps, tmp_path / "alone", 4, on_device=True)
    first, second = World(
        2, test_pipeline.to_be_killed, tmp_path / "store", schedule, axis="pp", on_device=True
    ).outcomes()
    assert (first.kind, first.said, second) == ("RankError", "rank 1 was killed", None)
    again = pipeline(2, test_pipeline.steps, tmp_path / "store", 2, schedule, on_device=True)
    assert again == [(2, whole[2:])] * 2


# ---- what passes through host memory


def memory(mesh: DeviceMesh, schedule: str) -> tuple[int, int, int]:
    """Bytes that torch's allocator has reserved at most in a step, and that the plan counts; those of host memory that
    messages pass through."""
    where = budget(None, weights="host", state="host", activations="host", device="1GiB", host="1GiB")
    micro_batches = [{"x": torch.randn(4096, Wide.WIDTH)} for _ in range(6)]
    with penstock.wrap(
        Wide(),
        budget=where,
        loss_fn=lambda model, mb: model(mb["x"]),
        device=mesh.device_type,
        mesh=mesh,
        optimizer=penstock.AdamW(),
        precision="fp32",
        schedule=schedule,
        recompute=True,
    ) as engine:
        engine.step(micro_batches)
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        engine.step(micro_batches)
        counted = {what: n for _, what, n in engine.plan.schedule.fixed}
        return torch.accelerator.max_memory_reserved(), engine.plan.device_bytes, counted["messages"]


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("schedule", ["vertical", "1f1b"])
def test_what_a_pipeline_reserves_of_the_device_is_planned(schedule: str) -> None:
    """What comes from other ranks is written on another stream, for which the allocator has memory of its own, and
    which it would have a second time for what compute may still read of what is gone."""
    slack = 64 << 20 if DEVICE == "cuda" else 1 << 18
    for reserved, planned, messages in pipeline(3, memory, schedule, on_device=True):
        assert reserved <= planned + slack
        assert messages == 4 * 4096 * Wide.WIDTH * 4


class Shift(nn.Module):
    """A block whose input's gradient is in the memory of its output's."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.by).unsqueeze(0).squeeze(0)


class Shifts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Shift() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def shifted(mesh: DeviceMesh) -> Any:
    """Training where a gradient is sent a while after it could have been."""
    micro_batches = [{"x": torch.linspace(m, m + 1, 8 * 40).view(40, 8)} for m in range(8)]
    send = Crossing.send

    def late(self: Crossing, op: Op) -> None:
        time.sleep(0.05 if op.id.kind == "SD" and op.peer == 0 else 0)
        send(self, op)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Crossing, "send", late)
        return _shifted(mesh, micro_batches)


def _shifted(mesh: DeviceMesh, micro_batches: list[dict[str, torch.Tensor]]) -> Any:
    with penstock.wrap(
        Shifts(),
        budget=budget(None, weights="host", state="host"),
        loss_fn=lambda model, mb: model(mb["x"]),
        device=mesh.device_type,
        mesh=mesh,
        optimizer=penstock.AdamW(),
        precision="fp32",
        schedule="vertical" if mesh.size() == 1 else "1f1b",
    ) as engine:
        return results(engine, run_steps(engine, [micro_batches] * 3))


def test_what_a_block_hands_on_of_what_has_come_is_not_written_over() -> None:
    wanted = together(1, shifted, on_device=True)[0]
    for found in pipeline(2, shifted, on_device=True):
        equal(found, wanted)


MUTATIONS = {
    "what comes besides is kept until compute has used it": Mutation(
        owner=Crossing, name="_memory", line='self._streams.used_on("compute", found)'
    ),
    "what has come is not written over while something refers to it": Mutation(
        owner=Crossing, name="given", line="self._leave((pool.name, slot))"
    ),
    "the event of a piece's copy is recorded": Mutation(
        owner=Staging, name="_mark", line="found.record(self._its.current_stream(self._device))"
    ),
    "what messages pass through is page-locked": Mutation(
        owner=Staging,
        name="__init__",
        line="self._slab = HostSlab(2 * _EACH_WAY * piece, beside=device)",
        instead="self._slab = HostSlab(2 * _EACH_WAY * piece)",
        found="not page-locked",
    ),
    "a piece is sent when it has been copied": Mutation(owner=staging, name="_hand_on", line="came.synchronize()"),
    "a piece is received when the one before is on the device": Mutation(
        owner=Staging, name="receive", line="left.pop(0).synchronize()", instead="left.pop(0)"
    ),
    "a message is on the device before the next one is received": Mutation(
        owner=Staging, name="receive", line="copied.synchronize()"
    ),
    "what follows a collective comes after it": Mutation(owner=Together, name="_wait", line="work.wait()"),
}


def mutated(mesh: DeviceMesh, name: str) -> None:
    mutation = MUTATIONS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mutation.owner, mutation.name, mutation.made())
        try:
            if mutation.owner is Together:
                test_bits.trained(mesh, *test_bits.WAYS["in memory"], None)
            elif mutation.name == "given":
                shifted(mesh)
            else:
                case = test_bits.CASES["gemma3"] if mutation.name == "_memory" else PLAIN
                with pieces(1000), wrap(case, budget(None), mesh=mesh) as engine:
                    run_steps(engine, steps_of(case, 1, lengths=(8, 8, 8)))
        except (ArithmeticError, RuntimeError, ValueError):  # of what was read too early
            if not simulated.start().findings():
                raise


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_is_left_out_is_a_line_of_the_engine(name: str) -> None:
    MUTATIONS[name].made()


@pytest.mark.mutation
@pytest.mark.skipif(DEVICE != "sim", reason="needs the simulated accelerator")
@pytest.mark.parametrize("name", MUTATIONS)
def test_it_is_found_where_nothing_says_that(name: str) -> None:
    axis = "dp_shard" if MUTATIONS[name].owner is Together else "pp"
    found = World(2, mutated, name, axis=axis, on_device=True).outcomes()
    assert any("found by the simulated accelerator" in one.said for one in found if one is not None), found


def linked(mesh: DeviceMesh) -> Network:
    os.environ["GROUP_RANK"] = str(mesh.get_rank())  # each on a host of its own
    device = torch.device(mesh.device_type, torch.accelerator.current_device_index())
    ranks = join(mesh, device)
    try:
        return link(ranks, device, 0.005, 1)
    finally:
        ranks.close()


def test_hosts_with_accelerators_find_their_link_by_what_these_send() -> None:
    """Which slows nothing: what computes, and what moves its data, is none of the host's."""
    one, other = together(2, linked, on_device=True)
    assert one == other
    assert min(one.bandwidth, one.latency) > 0
    assert one.contention == {}
