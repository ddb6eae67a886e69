"""Whatever orders the engine's streams is missed when it is taken away: so the simulated device can be relied on.

Each mutation takes one line from the engine. It is found whatever the timing was, and mostly the bits are still right.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import penstock
from penstock import accelerator
from penstock.doctor import work
from penstock.hardware import system
from penstock.runtime.actions import Actions
from penstock.runtime.actions.saved_activations import SavedActivations
from penstock.runtime.executor import Executor
from penstock.runtime.streams import DeviceStreams
from penstock.schedule.ir.ops import Op
from penstock.schedule.program import ALIGN
from penstock.state import background
from penstock.state.arrays import StateArrays
from penstock.state.memory import HostSlab
from tests.accelerator import DEVICE, simulated, watching
from tests.accelerator.mutation import Mutation
from tests.engine.test_accelerator import SLACK, reserved_for_what_comes_back
from tests.models import MODELS
from tests.state.test_background import ORDER, Run
from tests.training import budget, run_steps, steps_of, wrap

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.mutation,
    pytest.mark.skipif(DEVICE != "sim", reason="needs the simulated accelerator"),
]

CASE = MODELS["skips"]
STEPS = steps_of(CASE, 2, lengths=(8, 8))

Doing = Callable[[Path], None]


def steps(where: penstock.Budget) -> None:
    """Steps that are called on another stream than the engine was made on."""
    device = torch.device(DEVICE, 0)
    its = accelerator.of(device)
    with wrap(CASE, where, device=DEVICE, precision="fp32", clip_grad_norm=1.0) as engine:
        with its.queued_on(its.stream(device)):
            for step in STEPS:
                micro_batches = [{k: t.to(device, non_blocking=True) for k, t in mb.items()} for mb in step]
                engine.step(micro_batches)
                for micro_batch in micro_batches:
                    micro_batch["tokens"].zero_()
            engine.evaluate(STEPS[0])
            for buffer in engine.model.buffers():
                buffer.clone()
        run_steps(engine, STEPS[:1])


def from_disk(path: Path) -> None:
    steps(budget(path, activations="disk", gradients="disk"))


def written_behind(path: Path) -> None:
    steps(budget(path, weights="device", state="device", durability="interval", interval=1))


def changed_and_written(path: Path) -> None:
    """A background write that begins while changes are queued."""
    run = Run(path, "device", DEVICE)
    for name in run.names:
        run.arrays.array(name).neg_()
    run.background.begin(ORDER, run.commit)
    run.background.wait()
    run.close()


class _Idle(threading.Thread):
    """A thread that does nothing, whatever it is for."""

    def run(self) -> None:
        pass


def written_by_who_changes(path: Path) -> None:
    """A background write, where all is changed on another stream before the write gets to it."""
    device = torch.device(DEVICE, 0)
    its, run = accelerator.of(device), Run(path, "device", DEVICE)
    for name in run.names:
        run.arrays.array(name).neg_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background.threading, "Thread", _Idle)  # which is one of its own, where it is watched
        run.background.begin(ORDER, run.commit)
    with its.queued_on(its.stream(device)):
        for name in run.names:
            run.background.before_change(name, 0, run.arrays.parts[name].numel)
            run.arrays.array(name).neg_()
    run.close()


def failed_and_again(path: Path) -> None:
    """A step of which a copy down fails when it is queued, and the same step again."""
    act = Actions.__call__

    def fails(self: Actions, op: Op) -> int:
        moved = act(self, op)
        if op.id.kind == "DG":
            raise OSError(5, "not today")
        return moved

    device = torch.device(DEVICE, 0)
    with wrap(CASE, budget(path, activations="disk"), device=DEVICE, precision="fp32", clip_grad_norm=1.0) as engine:
        micro_batches = [{k: t.to(device) for k, t in micro_batch.items()} for micro_batch in STEPS[0]]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Actions, "__call__", fails)
            with pytest.raises(OSError, match="not today"):
                engine.step(micro_batches)
        run_steps(engine, STEPS)


def measured(path: Path) -> None:
    """Copies between host and device as they are measured, with memory that is small."""
    device = torch.device(DEVICE, 0)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as closing:
        patch.setattr(work, "CHUNK", ALIGN)
        patch.setattr(system, "cache_size", lambda: 0)
        links = [work.copies(name, device, closing) for name in ("h2d", "d2h")]
        for load in (*links, *work.crossings(device, closing)):
            for worker in load.workers:
                worker()


@dataclass(frozen=True, kw_only=True)
class Missed(Mutation):
    """A line whose lack is found while something is done (``doing``)."""

    doing: Doing = from_disk


MUTATIONS = {
    "a stream waits for an op of another": Missed(
        owner=watching.PLAIN, name="begin", line="stream.wait_event(other.done)"
    ),
    "a host thread waits for an op of a stream": Missed(
        owner=watching.PLAIN, name="begin", line="other.done.synchronize()"
    ),
    "an op's event is recorded": Missed(
        owner=watching.PLAIN, name="end", line="mark.done.record(self.streams[mark.lane])"
    ),
    "whoever takes a buffer waits for its last user": Missed(
        owner=Executor,
        name="_take",
        line="waits += [self._users[slot] for slot in taken if slot in self._users]",
    ),
    "a saved activation's memory is kept until it is down": Missed(
        owner=SavedActivations, name="down", line='self._streams.used_on("d2h", data)'
    ),
    "what is copied from and to is page-locked": Missed(
        owner=HostSlab,
        name="__init__",
        line='if beside is not None and beside.type != "cpu":',
        instead="if beside is not None and False:",
        found="not page-locked",
    ),
    "what a background write copies to is page-locked": Missed(
        owner=background.Background,
        name="__init__",
        line="self._bounce = HostSlab(BOUNCE, beside=arrays.device)",
        instead="self._bounce = HostSlab(BOUNCE)",
        found="not page-locked",
        doing=changed_and_written,
    ),
    "a background write comes after what was queued before it": Missed(
        owner=background.DeviceCopies,
        name="copy_beside",
        line="self._stream.wait_event(self._begun)",
        doing=changed_and_written,
    ),
    "who writes before he changes comes after what was queued before it": Missed(
        owner=background.DeviceCopies,
        name="copy_here",
        line="self._its.current_stream(source.device).wait_event(self._begun)",
        doing=written_by_who_changes,
    ),
    "a background write knows what was queued before it": Missed(
        owner=background.DeviceCopies,
        name="mark",
        line="self._begun.record(self._its.current_stream(self._stream.device))",
        doing=changed_and_written,
    ),
    "the event of a background write's copy is recorded": Missed(
        owner=background.DeviceCopies,
        name="copy_beside",
        line="self._copied.record(self._stream)",
        doing=written_behind,
    ),
    "a background write has copied what may change": Missed(
        owner=background.DeviceCopies, name="copy_beside", line="self._copied.synchronize()", doing=written_behind
    ),
    "who writes before he changes copies before he changes": Missed(
        owner=background.DeviceCopies,
        name="copy_here",
        line="target.copy_(source)",
        instead="target.copy_(source, non_blocking=True)",
        doing=written_by_who_changes,
    ),
    "a step comes after what its caller has queued": Missed(
        owner=DeviceStreams, name="around_caller", line="compute.wait_stream(own)"
    ),
    "what a caller queues comes after the step": Missed(
        owner=DeviceStreams, name="around_caller", line="own.wait_stream(compute)"
    ),
    "a copy that is measured comes after its memory is made": Missed(
        owner=work, name="_moving", line="stream.wait_stream(its.current_stream(device))", doing=measured
    ),
}


def found_while(doing: Doing, path: Path) -> list[str]:
    sim = simulated.start()
    try:
        doing(path)
    except (ArithmeticError, OSError, RuntimeError, ValueError):  # of what was read too early
        if not sim.findings():
            raise
    found = sim.findings()
    sim.clear()
    return found


@pytest.mark.parametrize("microseconds", [None, 300.0], ids=["when waited for", "at random moments"])
@pytest.mark.parametrize(
    "doing", [from_disk, written_behind, changed_and_written, written_by_who_changes, failed_and_again, measured]
)
def test_the_engine_leaves_nothing_to_chance(doing: Doing, microseconds: float | None, tmp_path: Path) -> None:
    with simulated.patient(microseconds):
        assert found_while(doing, tmp_path / "store") == []


@pytest.mark.parametrize("name", MUTATIONS)
def test_it_is_found_where_nothing_says_that(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation = MUTATIONS[name]
    monkeypatch.setattr(mutation.owner, mutation.name, mutation.made())
    found = found_while(mutation.doing, tmp_path / "store")
    assert found
    assert all(mutation.found in each for each in found), found


def test_what_copies_that_wait_pass_through_is_page_locked(tmp_path: Path) -> None:
    """Such a copy is in order without that, and takes twice as long: so it is looked at where it is made."""
    device, locked = torch.device(DEVICE, 0), list[bool]()

    def pieces(self: StateArrays, name: str, bounce: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        locked.append(bounce.is_pinned())
        return plain(self, name, bounce)

    plain = StateArrays.pieces
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateArrays, "pieces", pieces)
        steps(budget(tmp_path / "store"))
    with closing(background.DeviceCopies(device)) as copies:
        locked.append(copies.bounce.bytes.is_pinned())
    assert len(locked) > 1
    assert all(locked)


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_memory_that_is_taken_before_its_last_use_is_over_is_more_than_planned(
    schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No clock misses that wait: torch's allocator has other memory for whoever does not wait for what was freed."""
    mutation = Mutation(owner=Executor, name="_run_op", line="other.done.synchronize()")
    monkeypatch.setattr(mutation.owner, mutation.name, mutation.made())
    reserved, planned = reserved_for_what_comes_back(schedule, tmp_path / "store")
    assert reserved > planned + SLACK
