"""The executor keeps every rule of a schedule under any timing, and comes to rest after any failure."""

import faulthandler
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from random import Random

import pytest
import torch

from penstock.runtime.executor import Executor
from penstock.runtime.pools import Pools
from penstock.runtime.serial import SerialExecutor
from penstock.runtime.streams import HostStreams, Mark
from penstock.schedule.ir.lanes import LOCAL_LANES
from penstock.schedule.ir.ops import Op, Schedule, reserved_bytes
from penstock.schedule.ir.text import parse_schedule
from tests.programs import Case, random_case

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_deadlock() -> Iterator[None]:
    """A run that hangs says where every thread is, and ends."""
    faulthandler.dump_traceback_later(60, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


class Recorder:
    """An action that takes a random moment, and notes when each op ran, where, and on which slots."""

    def __init__(self, schedule: Schedule, pools: Pools, seed: int, act: Callable[[Op], None] | None = None) -> None:
        self.pools = pools
        self.rng = Random(seed)
        self.act = act
        self.events: list[tuple[str, str]] = []  # (start or end, op), in the order in which they happened
        self.threads: dict[str, str] = {}
        self._lock = threading.Lock()

    def __call__(self, op: Op) -> None:
        with self._lock:
            self.events.append(("start", op.id))
            self.threads[op.id] = threading.current_thread().name
            pause = self.rng.choice((0, 0, 0, 20e-6, 200e-6))
        if pause:
            time.sleep(pause)
        if self.act is not None:
            self.act(op)
        with self._lock:
            self.events.append(("end", op.id))


def small(seed: int) -> Schedule:
    return small_case(seed).build()


def delayed(seed: int) -> Schedule:
    case = small_case(seed)
    return replace(case, family="vertical", settings=replace(case.settings, train=True, delay=0.5)).build()


def small_case(seed: int) -> Case:
    return random_case(seed, largest=3)


def assert_rules_kept(schedule: Schedule, events: list[tuple[str, str]], in_flight: dict[str, int]) -> None:
    """Every op once; lanes start in order; dependencies; nothing exceeds a pool; no more in flight than workers."""
    position = {event: i for i, event in enumerate(events)}
    assert len(events) == 2 * len(schedule.ops) == len(position)
    turn = {op.id: i for ops in schedule.lanes.values() for i, op in enumerate(ops)}
    for op in schedule.ops:
        assert position["start", op.id] < position["end", op.id]
        for other in op.after:
            # An op counts as done only when all before it in its lane are: the checker's proof rests on that.
            for earlier in schedule.lanes[schedule.by_id[other].lane][: turn[other] + 1]:
                assert position["end", earlier.id] < position["start", op.id], (earlier.id, op.id)
    for lane, ops in schedule.lanes.items():
        if in_flight.get(lane, 1) == 1:
            order = [name for what, name in events if what == "start" and schedule.by_id[name].lane == lane]
            assert order == [op.id for op in ops]
        running = 0
        for what, name in events:
            if schedule.by_id[name].lane == lane:
                running += 1 if what == "start" else -1
                assert running <= in_flight.get(lane, 1)
    free = {pool.name: pool.count for pool in schedule.pools}
    home: dict[str, str] = {}
    for what, name in events:
        op = schedule.by_id[name]
        for buffer, pool in op.takes if what == "start" else ():
            home[buffer] = pool
            free[pool] -= 1
            assert free[pool] >= 0, f"{name} took from a pool that was empty"
        for buffer in op.gives if what == "end" else ():
            free[home[buffer]] += 1
    assert free == {pool.name: pool.count for pool in schedule.pools}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(8))
def test_order_dependencies_and_pools_hold_whatever_the_timing(seed: int, workers: int) -> None:
    schedule = small(seed)
    pools = Pools(schedule, CPU)
    recorder = Recorder(schedule, pools, seed)
    executor = Executor(schedule, pools, recorder, HostStreams(), io_workers=workers)
    for _ in range(3):
        recorder.events.clear()
        executor.run()
        assert_rules_kept(schedule, recorder.events, {"read": workers, "write": workers})
        assert executor.marks.keys() == schedule.by_id.keys()
        for op in schedule.ops:
            mark = executor.marks[op.id]
            assert mark.lane == op.lane
            assert mark.start <= mark.end
            assert all(executor.marks[other].end <= mark.start for other in op.after)
        for tier in ("device", "host"):
            assert pools.peak[tier] <= schedule.peak_bytes(tier)
    executor.close()
    pools.close()


def test_compute_runs_in_the_callers_thread_and_every_other_lane_in_its_own() -> None:
    schedule = small(1)
    pools = Pools(schedule, CPU)
    recorder = Recorder(schedule, pools, 0)
    executor = Executor(schedule, pools, recorder, HostStreams(), io_workers=2)
    executor.run()
    executor.close()
    me = threading.current_thread().name
    for op in schedule.ops:
        where = recorder.threads[op.id]
        assert where == me if op.lane == "compute" else where.startswith(f"penstock-{op.lane}-")


def test_a_held_buffer_is_nobody_elses() -> None:
    """Each taker writes its mark into its buffer; whoever touches the buffer later must find it."""
    for seed in (0, 2, 5, 6):
        schedule = small(seed)
        pools = Pools(schedule, CPU)
        backed = {pool.name for pool in schedule.pools if pool.backed}
        owned = {name: i % 251 + 1 for i, (name, pool) in enumerate(_takes(schedule)) if pool in backed}

        def act(op: Op, pools: Pools = pools, owned: dict[str, int] = owned) -> None:
            for name, _ in op.takes:
                if name in owned:
                    pools.buffer(name)[:64] = owned[name]
            for name in {*op.reads, *op.writes, *op.gives} & owned.keys():
                assert pools.buffer(name)[:64].eq(owned[name]).all(), f"{op.id}: {name} was overwritten"

        executor = Executor(schedule, pools, Recorder(schedule, pools, seed, act), HostStreams(), io_workers=3)
        for _ in range(3):
            executor.run()
        executor.close()
        pools.close()


def _takes(schedule: Schedule) -> list[tuple[str, str]]:
    return [take for op in schedule.ops for take in op.takes]


class Oops(Exception):  # noqa: N818 - not an error of ours
    pass


def _rich_case() -> Schedule:
    """A schedule with ops on all lanes and of most kinds."""
    best = max((small(seed) for seed in range(40)), key=lambda s: len({op.id.kind for op in s.ops}))
    assert all(best.lanes[lane] for lane in LOCAL_LANES)
    return best


RICH = _rich_case()


@pytest.mark.parametrize("kind", sorted({op.id.kind for op in RICH.ops}))
@pytest.mark.parametrize("error", [Oops, KeyboardInterrupt])
def test_an_error_in_any_kind_of_op_surfaces_as_itself_and_the_next_run_works(
    kind: str, error: type[BaseException]
) -> None:
    pools = Pools(RICH, CPU)
    ops = [op for op in RICH.ops if op.id.kind == kind]
    bad: str | None = None

    def act(op: Op) -> None:
        if op.id == bad:
            raise error("broken")

    recorder = Recorder(RICH, pools, 1, act)
    executor = Executor(RICH, pools, recorder, HostStreams(), io_workers=2)
    for op in (ops[0], ops[len(ops) // 2], ops[-1]):
        bad = op.id
        recorder.events.clear()
        with pytest.raises(error, match="broken") as caught:
            executor.run()
        assert f"in op {bad} of schedule {RICH.name}" in caught.value.__notes__
        before = list(recorder.events)
        started = [name for what, name in before if what == "start"]
        ended = [name for what, name in before if what == "end"]
        assert set(started) - set(ended) == {bad}, "only the op that failed is unfinished"
        time.sleep(0.002)
        assert recorder.events == before, "a lane went on after run() had returned"
        assert pools.in_use == reserved_bytes(RICH)
        bad = None
        recorder.events.clear()
        executor.run()
        assert_rules_kept(RICH, recorder.events, {"read": 2, "write": 2})
    executor.close()


def test_the_first_of_several_errors_is_the_one_that_surfaces() -> None:
    pools = Pools(RICH, CPU)
    failed: list[BaseException] = []
    lock = threading.Lock()

    def act(op: Op) -> None:
        with lock:
            failed.append(Oops(op.id))
            raise failed[-1]

    executor = Executor(RICH, pools, act, HostStreams(), io_workers=4)
    for _ in range(20):
        failed.clear()
        with pytest.raises(Oops) as caught:
            executor.run()
        assert caught.value in failed
    executor.close()


class Failing(HostStreams):
    """A device that has failed: it says so whenever it is waited for."""

    failed = False

    def synchronize(self) -> None:
        if self.failed:
            raise RuntimeError("the device is gone")


@pytest.mark.parametrize("executor_type", [Executor, SerialExecutor])
def test_a_device_that_fails_after_an_op_did_hides_no_error_and_keeps_no_buffer(
    executor_type: type[Executor] | type[SerialExecutor],
) -> None:
    pools, streams = Pools(RICH, CPU), Failing()
    bad = RICH.ops[len(RICH.ops) // 2].id

    def act(op: Op) -> None:
        if op.id == bad:
            streams.failed = True
            raise Oops("broken")

    executor = executor_type(RICH, pools, act, streams)
    with pytest.raises(Oops) as caught:
        executor.run()
    assert caught.value.__notes__[1:] == ["and what was queued then failed: the device is gone"]
    assert pools.in_use == reserved_bytes(RICH)
    streams.failed, bad = False, ""
    executor.run()
    executor.close()


def test_an_interrupt_while_the_caller_waits_for_other_lanes_surfaces_when_they_are_at_rest() -> None:
    """Ctrl-C arrives in the main thread, which waits between two compute ops: nothing may be left running."""
    pools = Pools(RICH, CPU)
    lane = RICH.lanes["compute"]
    waits, waited_for = next((n, RICH.by_id[b]) for n, op in enumerate(lane) for b in op.after if n and b.lane == "h2d")
    interrupts = iter([True])

    def act(op: Op) -> None:
        if op is waited_for and next(interrupts, False):
            while ("end", lane[waits - 1].id) not in recorder.events:
                time.sleep(0.001)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]
        time.sleep(0.002)

    recorder = Recorder(RICH, pools, 1, act)
    executor = Executor(RICH, pools, recorder, HostStreams(), io_workers=2)
    with pytest.raises(KeyboardInterrupt):
        executor.run()
    before = list(recorder.events)
    assert sum(what == "start" for what, _ in before) == sum(what == "end" for what, _ in before)
    time.sleep(0.01)
    assert recorder.events == before
    recorder.events.clear()
    executor.run()
    assert_rules_kept(RICH, recorder.events, {"read": 2, "write": 2})
    executor.close()


class Interrupted(HostStreams):
    """A device that is waited for when Ctrl-C arrives, once."""

    def __init__(self, call: str) -> None:
        self._call = call

    def _arrive(self, call: str) -> None:
        if self._call == call:
            self._call = ""
            raise KeyboardInterrupt

    def synchronize(self) -> None:
        self._arrive("synchronize")

    def resolve(self, marks: Iterable[Mark]) -> None:
        self._arrive("resolve")


@pytest.mark.parametrize(
    ("executor", "call"), [(Executor, "resolve"), (SerialExecutor, "resolve"), (SerialExecutor, "synchronize")]
)
def test_an_interrupt_behind_an_op_or_all_of_them_leaves_pools_as_a_step_finds_them(
    executor: type[Executor] | type[SerialExecutor], call: str
) -> None:
    carrying = next(s for s in map(delayed, range(100)) if s.carried)
    pools = Pools(carrying, CPU)
    found = executor(carrying, pools, lambda _: 0, Interrupted(call))
    with pytest.raises(KeyboardInterrupt):
        found.run()
    found.run()
    found.run()
    found.close()


@pytest.mark.parametrize("executor", [Executor, SerialExecutor])
def test_an_interrupt_behind_an_error_hides_it_not_and_leaves_pools_as_a_step_finds_them(
    executor: type[Executor] | type[SerialExecutor],
) -> None:
    pools, calls = Pools(RICH, CPU), itertools.count()

    def act(_: Op) -> int:
        if next(calls) == 0:
            raise ValueError("first")
        return 0

    found = executor(RICH, pools, act, Interrupted("synchronize"))
    with pytest.raises(ValueError, match="first"):
        found.run()
    found.run()
    found.close()


def test_lanes_overlap() -> None:
    """Reads of the next weights run while compute is busy, or the executor would be as slow as the oracle."""
    pools = Pools(RICH, CPU)
    recorder = Recorder(RICH, pools, 1, lambda _: time.sleep(0.0005))
    executor = Executor(RICH, pools, recorder, HostStreams(), io_workers=2)
    executor.run()
    executor.close()
    running, most = set[str](), 0
    for what, name in recorder.events:
        running = running | {name} if what == "start" else running - {name}
        most = max(most, len({RICH.by_id[n].lane for n in running}))
    assert most >= 2


def test_close_ends_every_thread() -> None:
    before = threading.active_count()
    pools = Pools(RICH, CPU)
    executor = Executor(RICH, pools, lambda _: None, HostStreams(), io_workers=3)
    assert threading.active_count() == before + 3 + 2 * 3
    executor.run()
    executor.close()
    assert threading.active_count() == before


def test_a_read_that_overtakes_an_earlier_one_counts_as_done_only_after_it() -> None:
    """The checker takes an op that waits for the second read to come after the first one, too."""
    schedule = parse_schedule("schedule example micro-batches 1 chunk 4096\nRS0.0\nRS0.1\nOP0.1 after RS0.1\n")
    pools = Pools(schedule, CPU)

    def act(op: Op) -> None:
        while op.id == "RS0.0" and ("end", "RS0.1") not in recorder.events:
            time.sleep(0.001)

    recorder = Recorder(schedule, pools, 0, act)
    executor = Executor(schedule, pools, recorder, HostStreams(), io_workers=2)
    executor.run()
    executor.close()
    assert recorder.events.index(("end", "RS0.1")) < recorder.events.index(("end", "RS0.0")), "two were in flight"
    assert_rules_kept(schedule, recorder.events, {"read": 2})


def test_many_runs_of_one_executor() -> None:
    schedule = small(3)
    pools = Pools(schedule, CPU)
    count = [0]
    lock = threading.Lock()

    def act(op: Op) -> None:
        with lock:
            count[0] += 1

    executor = Executor(schedule, pools, act, HostStreams(), io_workers=4)
    for _ in range(100):
        executor.run()
    executor.close()
    assert count[0] == 100 * len(schedule.ops)


# ---- the oracle


@pytest.mark.parametrize("seed", range(6))
def test_the_oracle_runs_the_same_ops_one_at_a_time_on_the_same_pools(seed: int) -> None:
    schedule = small(seed)
    pools = Pools(schedule, CPU)
    recorder = Recorder(schedule, pools, seed)
    oracle = SerialExecutor(schedule, pools, recorder, HostStreams())
    for _ in range(2):
        recorder.events.clear()
        oracle.run()
        assert_rules_kept(schedule, recorder.events, {})
        assert [what for what, _ in recorder.events] == ["start", "end"] * len(schedule.ops)
        assert oracle.marks.keys() == schedule.by_id.keys()
    assert set(recorder.threads.values()) == {threading.current_thread().name}
    oracle.close()


def test_an_error_in_the_oracle_names_the_op_and_the_next_run_works() -> None:
    pools = Pools(RICH, CPU)
    bad = [RICH.ops[len(RICH.ops) // 2].id]

    def act(op: Op) -> None:
        if op.id in bad:
            raise Oops("broken")

    oracle = SerialExecutor(RICH, pools, act, HostStreams())
    with pytest.raises(Oops) as caught:
        oracle.run()
    assert caught.value.__notes__ == [f"in op {bad[0]} of schedule {RICH.name}"]
    bad.clear()
    oracle.run()
    assert len(oracle.marks) == len(RICH.ops)
