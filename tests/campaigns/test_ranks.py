"""Ranks that are killed or stopped at any moment, one of them or all, whose drives fail at any system call, or whose
machine loses its power, go on from the last step that any of them had returned, or the one that was being committed,
and end with the bits of a run that nobody disturbed.
"""

import errno
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import penstock
from penstock.errors import RankError, StoreError
from penstock.store.store import Store
from tests.conftest import Campaign
from tests.faults import Call, Go, Nth, error, intercepted
from tests.models import PLAIN
from tests.patience import until
from tests.power import LOSSES, WriteLog
from tests.ranks.worlds import RankFailedError, World, together
from tests.training import AT_ONCE, budget, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = PLAIN
LENGTHS = (12, 8, 10, 12)
STEPS = 6
WAYS: tuple[dict[str, Any], ...] = (
    {"precision": "fp32", **AT_ONCE},
    {"precision": "bf16", "delay": 0.5},
    {"precision": "bf16", "speculate": False, **AT_ONCE},
    {"precision": "fp32", "delay": 0.5, "clip_grad_norm": 0.6},
    {"precision": "fp32", "schedule": "horizontal", "clip_grad_norm": 0.6},
    {"precision": "fp32", "stage": 0, "clip_grad_norm": 0.6, **AT_ONCE},
    {"precision": "bf16", "stage": 0, "delay": 0.5},
    {"precision": "bf16", "stage": 2, **AT_ONCE},
    {"precision": "bf16", "places": {"weights": "host", "state": "host", "durability": "interval", "interval": 2}},
)


def late(settings: dict[str, Any]) -> int:
    """Steps that had returned and that a kill may cost: with a delay the last one is committed within the next one, and
    every second one while the next two are done."""
    return 3 if "places" in settings else int(bool(settings.get("delay")))


def opened(mesh: DeviceMesh | None, disk: Path | None, settings: dict[str, Any]) -> penstock.Engine:
    own = {key: value for key, value in settings.items() if key != "places"}
    where = budget(disk, **(settings.get("places", {}) if disk else {}))
    return wrap(CASE, where, mesh=mesh, strands=4, **own)


def go_on(
    mesh: DeviceMesh, disk: Path, settings: dict[str, Any]
) -> tuple[int, dict[int, float], dict[str, torch.Tensor]]:
    """Train to the last step from wherever a store is; each step is noted once it has returned."""
    share, rank, losses = len(LENGTHS) // mesh.size(), mesh.get_rank(), {}
    with opened(mesh, disk, settings) as engine:
        begun = engine.step_count
        for step, micro_batches in enumerate(steps_of(CASE, STEPS, lengths=LENGTHS)[begun:], start=begun + 1):
            losses[step] = engine.step(micro_batches[rank * share : (rank + 1) * share]).loss
            noted = os.open(disk.parent / f"returned-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(noted, b"%d\n" % step)
            os.close(noted)
        return begun, losses, dict(engine.master_parameters())


def returned(disk: Path) -> int:
    """The last step that any rank has returned."""
    return max((int(n) for file in disk.parent.glob("returned-*") for n in file.read_text().split()), default=0)


def _await(world: World, disk: Path, step: int) -> None:
    """A rank has returned from that step, or ended."""
    until(lambda: returned(disk) >= step or any(process.exitcode is not None for process in world.processes))


def kill(world: World, rng: Random, disk: Path) -> int:
    """Kill one rank, or all of them, at some moment of the run, however fast it is; how many."""
    world.joined()
    done = returned(disk)
    last = rng.randint(min(done, STEPS - 1), STEPS - 1)
    _await(world, disk, last - 1)
    began = time.monotonic()
    _await(world, disk, last)
    step = max(time.monotonic() - began, 0.03)
    time.sleep(rng.uniform(0, step if last > done else 0.5))  # before the first step all is made, and probed
    victims = [rng.randrange(world.size)] if rng.random() < 0.75 else list(range(world.size))
    for victim in victims:
        pid = world.processes[victim].pid
        if pid is not None and world.processes[victim].exitcode is None:
            os.kill(pid, signal.SIGKILL)
    return len(victims)


Wanted = tuple[dict[int, float], dict[str, torch.Tensor]]


@cache
def undisturbed(way: int) -> Wanted:
    """The losses and the parameters of any number of ranks that nobody disturbs: those of one process."""
    with opened(None, None, WAYS[way]) as engine:
        losses = {n: engine.step(step).loss for n, step in enumerate(steps_of(CASE, STEPS, lengths=LENGTHS), start=1)}
        return losses, dict(engine.master_parameters())


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_ranks_that_are_killed_go_on_bit_by_bit(way: int, campaign: Campaign, tmp_path: Path) -> None:
    kills = alone = 0
    for case in range(way, campaign.cases(way + 1, 90), len(WAYS)):
        rng = Random(case)
        settings, size, folder = WAYS[way], rng.choice((2, 2, 4)), tmp_path / str(case)
        folder.mkdir()
        wanted, parameters = undisturbed(way)
        disk, losses = folder / "store", dict[int, float]()
        for attempt in range(8):
            before = returned(disk)
            world = World(size, go_on, disk, settings)
            if attempt < (3 if campaign.full else 1):
                count = kill(world, rng, disk)
                kills, alone = kills + count, alone + (count == 1)
            found = world.outcomes()
            for one in found:
                if isinstance(one, RankFailedError):
                    assert one.kind == "RankError", one
                elif one is not None:
                    begun, new, last = one
                    assert before - late(settings) <= begun <= before + 1, (case, attempt, before, begun)
                    losses |= new
            if all(isinstance(one, tuple) for one in found):
                break
        else:
            raise AssertionError(f"case {case} does not end")
        assert {step: losses[step] for step in losses} == {step: wanted[step] for step in losses}, case
        assert all(torch.equal(last[name], tensor) for name, tensor in parameters.items()), case
    assert kills
    campaign.found(f"{kills} ranks killed, {alone} of them alone: every run went on from its last step, bit by bit")


def assert_gone_on(found: Any, wanted: Wanted, *, least: int, most: int) -> None:
    """A run that found a step from ``least`` to ``most`` has ended as it would have."""
    begun, losses, parameters = found
    assert least <= begun <= most, (least, begun, most)
    assert losses == {step: wanted[0][step] for step in range(begun + 1, STEPS + 1)}
    assert all(torch.equal(parameters[name], tensor) for name, tensor in wanted[1].items())


def killed_at_a_call(mesh: DeviceMesh, disk: Path, settings: dict[str, Any], victim: int, call: int) -> Any:
    """One rank is killed at a system call on its store."""
    if mesh.get_rank() != victim:
        return go_on(mesh, disk, settings)

    def die(call: Call, go: Go) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with intercepted(disk / f"rank-{victim}", Nth(call, die)):
        return go_on(mesh, disk, settings)


def calls_of(mesh: DeviceMesh, disk: Path, settings: dict[str, Any]) -> tuple[range, ...]:
    """The numbers of this rank's system calls on its store that are within each commit."""
    found, count = list[range](), Nth(-1, error(errno.EIO))
    real = Store.commit

    def commit(*args: Any) -> None:
        first = len(count.calls)
        real(*args)
        found.append(range(first, len(count.calls) + 1))

    with pytest.MonkeyPatch.context() as patch, intercepted(disk / f"rank-{mesh.get_rank()}", count):
        patch.setattr(Store, "commit", commit)
        go_on(mesh, disk, settings)
    return tuple(found)


def test_a_rank_is_killed_around_each_call_of_a_commit(campaign: Campaign, tmp_path: Path) -> None:
    """Calls of other steps come in another order in each run, as threads make them; those of a commit do not."""
    rng, settings, wanted = Random(0), WAYS[0], undisturbed(0)
    (tmp_path / "calls").mkdir()
    calls = together(2, calls_of, tmp_path / "calls" / "store", settings)
    cases = [(rank, call) for rank in range(2) for call in calls[rank][STEPS // 2]]
    for rank, call in cases if campaign.full else rng.sample(cases, 1):
        (tmp_path / "killed").mkdir()
        disk = tmp_path / "killed" / "store"
        found = World(2, killed_at_a_call, disk, settings, rank, call).outcomes()
        assert found[rank] is None
        assert isinstance(found[1 - rank], RankFailedError)
        before = returned(disk)
        for one in together(2, go_on, disk, settings):
            assert_gone_on(one, wanted, least=before, most=before + 1)
        shutil.rmtree(disk.parent)
    campaign.found(f"a rank killed around each of {len(cases)} system calls of a commit: all gone on, bit by bit")


def each_of(
    what: Callable[..., list[Any]], folder: Path, settings: dict[str, Any], cases: Sequence[Any]
) -> Iterator[Any]:
    """What two ranks say of each case, some cases in a world of their own."""
    for first in range(0, len(cases), 10):
        yield from zip(*together(2, what, folder, settings, cases[first : first + 10]), strict=True)


def with_faults(
    mesh: DeviceMesh, folder: Path, settings: dict[str, Any], cases: Sequence[tuple[int, int, int]]
) -> list[tuple[str, int, Any]]:
    """A call on one rank's store fails, again and again: what each run said and where it was, and how the next went."""
    found = []
    for victim, call, code in cases:
        disk, rank, said = folder / f"{victim}-{call}-{code}" / "store", mesh.get_rank(), ""
        disk.parent.mkdir(exist_ok=True)
        hook = Nth(call if rank == victim else -1, error(code), lambda call: call.writes or call.flushes)
        try:
            with intercepted(disk / f"rank-{rank}", hook):
                go_on(mesh, disk, settings)
        except (StoreError, RankError) as failed:
            said = type(failed).__name__
        notes = disk.parent / f"returned-{rank}"
        before = int(notes.read_text().split()[-1]) if notes.exists() else 0
        found.append((said, before, go_on(mesh, disk, settings)))
    return found


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_a_drive_that_fails_at_any_call_of_any_rank(way: int, campaign: Campaign, tmp_path: Path) -> None:
    rng, failed, settings, wanted = Random(f"fails {way}"), 0, WAYS[way], undisturbed(way)
    cases = [
        (n % 2, call, rng.choice((errno.ENOSPC, errno.EIO)))
        for n, call in enumerate(rng.sample(range(260), campaign.cases(2, 60)))
    ]
    for outcomes in each_of(with_faults, tmp_path, settings, cases):
        before = max(step for _, step, _ in outcomes)
        for _, _, after in outcomes:
            assert_gone_on(after, wanted, least=before - late(settings), most=before + 1)
        failed += any(said for said, _, _ in outcomes)
    campaign.found(f"{failed} runs of two ranks ended by ENOSPC or EIO at a call of one: all gone on, bit by bit")


def logged(mesh: DeviceMesh, folder: Path, settings: dict[str, Any]) -> WriteLog:
    """What a run writes and flushes on this rank's drive."""
    rank = mesh.get_rank()
    log = WriteLog(folder / "store" / f"rank-{rank}", folder / f"base-{rank}", clock=time.monotonic_ns)
    with log.recording():
        go_on(mesh, folder / "store", settings)
    return log


def all_gone_on(mesh: DeviceMesh, folder: Path, settings: dict[str, Any], disks: Sequence[Path]) -> list[Any]:
    return [go_on(mesh, disk, settings) for disk in disks]


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_the_power_fails_with_each_drive_at_another_point(way: int, campaign: Campaign, tmp_path: Path) -> None:
    """One instant for all drives, each of which has lost what it will of what it was not told to flush by then."""
    rng, begun, settings, wanted = Random(f"cut {way}"), Counter[int](), WAYS[way], undisturbed(way)
    logs, disks, bounds = together(2, logged, tmp_path, settings), list[Path](), list[tuple[int, int]]()
    for case in range(campaign.cases(1, 50)):
        commit = rng.choice(rng.choice(logs).commits)
        instant = rng.randint(commit.began, commit.ended)
        disks.append(tmp_path / str(case) / "store")
        for rank, log in enumerate(logs):
            disks[-1].mkdir(parents=True, exist_ok=True)
            log.image(instant, rng.choice(LOSSES), rng, disks[-1] / f"rank-{rank}")
        least = min(max((c.step for c in log.commits if c.ended <= instant), default=0) for log in logs)
        bounds.append((least, max(c.step for log in logs for c in log.commits if c.began <= instant)))
    for outcomes, (least, most) in zip(each_of(all_gone_on, tmp_path, settings, disks), bounds, strict=True):
        for one in outcomes:
            assert_gone_on(one, wanted, least=least, most=most)
            begun[one[0]] += 1
    campaign.found(f"power cut of two ranks' drives, gone on from step (times two) {dict(sorted(begun.items()))}")


def stopped(case: int, folder: Path, size: int, victim: int, first: int, wait: float) -> None:
    """One of ``size`` ranks is stopped, ``wait`` seconds after the step ``first``, and killed when the others have long
    given it up."""
    settings, wanted, disk = WAYS[case % len(WAYS)], undisturbed(case % len(WAYS)), folder / "store"
    world = World(size, go_on, disk, settings)
    pid = world.processes[victim].pid
    assert pid is not None
    world.joined()
    while returned(disk) < first:
        time.sleep(0.01)
    time.sleep(wait)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(12.0)
    os.kill(pid, signal.SIGKILL)
    before = returned(disk)
    for rank, one in enumerate(world.outcomes()):
        if isinstance(one, RankFailedError):
            assert f"rank {victim}" in one.said or "another rank was gone" in one.said, (case, rank, one.said)
    for one in together(size, go_on, disk, settings):
        assert_gone_on(one, wanted, least=before - late(settings), most=before + 1)


def test_a_rank_that_is_stopped_is_named_and_all_go_on(campaign: Campaign, tmp_path: Path) -> None:
    """Six runs at a time, as each does nothing for nearly all of it."""
    if not campaign.full:
        pytest.skip("a silence takes eight seconds; tests/ranks/test_failures.py has one")
    rng, cases = Random(3), 30
    for way in range(len(WAYS)):  # by one thread
        undisturbed(way)
    with ThreadPoolExecutor(6) as pool:
        running = []
        for case in range(cases):
            (folder := tmp_path / str(case)).mkdir()
            size = rng.choice((2, 4))
            given = rng.randrange(size), rng.randrange(4), rng.uniform(0, 0.3)
            running.append(pool.submit(stopped, case, folder, size, *given))
        for one in running:
            one.result()
    campaign.found(f"{cases} ranks stopped (SIGSTOP): all gone on, bit by bit")


def go_on_saving(
    mesh: DeviceMesh, path: Path, settings: dict[str, Any], victim: int, call: int
) -> tuple[int, dict[int, float], dict[str, torch.Tensor]]:
    """Train to the last step from a snapshot, if there is one, which each step replaces; one rank is killed at a system
    call of its saves."""

    def die(call: Call, go: Go) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    share, rank, losses = len(LENGTHS) // mesh.size(), mesh.get_rank(), {}
    hook = Nth(call if rank == victim else -1, die)
    with opened(mesh, None, settings) as engine:
        if path.exists():
            engine.load(path)
        begun = engine.step_count
        for step, micro_batches in enumerate(steps_of(CASE, STEPS, lengths=LENGTHS)[begun:], start=begun + 1):
            losses[step] = engine.step(micro_batches[rank * share : (rank + 1) * share]).loss
            with intercepted(path.parent, hook, names=True):
                engine.save(path, overwrite=True)
            with (path.parent.parent / f"returned-{rank}").open("a") as file:
                file.write(f"{step}\n")
        return begun, losses, dict(engine.master_parameters())


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_ranks_that_are_killed_while_they_save_go_on_from_a_whole_snapshot(
    way: int, campaign: Campaign, tmp_path: Path
) -> None:
    """Each time by another number of ranks; what a kill has left half written goes with the next save."""
    if not campaign.full:
        pytest.skip("five seconds; tests/ranks has what fails, and a rank that is killed after a save")
    rng, killed, between, (wanted, parameters) = Random(f"saved {way}"), 0, 0, undisturbed(way)
    for case in range(way, 40, len(WAYS)):
        path, losses = tmp_path / str(case) / "in" / "snapshot", dict[int, float]()
        path.parent.mkdir(parents=True)
        for attempt in range(8):
            size, before = rng.choice((2, 4)), returned(path.parent)
            call = rng.randrange(200) if attempt < 3 else -1
            found = World(size, go_on_saving, path, WAYS[way], rng.randrange(size), call).outcomes()
            killed += any(one is None for one in found)
            for one in found:
                if isinstance(one, RankFailedError):
                    assert one.kind == "RankError", one
                elif one is not None:
                    begun, new, last = one
                    assert before <= begun <= before + 1, (case, attempt, before, begun)
                    between += begun > before and one is found[0]
                    losses |= new
            if all(isinstance(one, tuple) for one in found):
                break
        else:
            raise AssertionError(f"case {case} does not end")
        assert losses == {step: wanted[step] for step in losses}, case
        assert all(torch.equal(last[name], tensor) for name, tensor in parameters.items()), case
        if begun < STEPS:  # else there was no save after the last kill
            assert [item.name for item in path.parent.iterdir()] == ["snapshot"]
    campaign.found(
        f"a rank of two or four killed in {killed} saves, {between} of which were in place: every run went on from the "
        "last, by any number of ranks, bit by bit"
    )
