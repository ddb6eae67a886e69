"""Runs a schedule: each lane its ops in order, an op as soon as its turn has come, its dependencies are done and its
buffers are free.

    caller's thread      compute   (the model's suspended forwards are bound to it)
    a thread each        h2d, d2h, cpu, net
    ``io_workers`` each  read, write: several ops in flight, so that a drive never waits for the next request

Ops of a lane start in order and are published as done in order, which is what the checker's proof rests on. The
first error stops all lanes from starting anything more and surfaces as itself, with a note that names the op.
"""

import threading
from collections.abc import Callable, Sequence

from penstock.runtime.pools import Pools
from penstock.runtime.streams import DeviceStreams, HostStreams, Mark, settle
from penstock.schedule.ir.lanes import Lane
from penstock.schedule.ir.ops import Op, Schedule
from penstock.state.numa import Binding

Action = Callable[[Op], int]
"""Does an op and returns the bytes that it has moved."""


class _LaneState:
    """A lane's place in its list of ops. All fields are guarded by the executor's lock."""

    def __init__(self, ops: Sequence[Op], lock: threading.Lock) -> None:
        self.ops = ops
        self.ready = threading.Condition(lock)
        self.started = 0
        self.published = 0
        self.finished: set[int] = set()

    def rewind(self) -> None:
        self.started = self.published = 0
        self.finished.clear()


class Executor:
    """Owns the lane threads of one schedule. ``run`` executes one step; between steps nothing is in flight."""

    def __init__(
        self,
        schedule: Schedule,
        pools: Pools,
        act: Action,
        streams: HostStreams | DeviceStreams,
        *,
        io_workers: int = 2,
        binding: Binding | None = None,
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        """``binding``: where the lanes' threads stay; the caller's, which is ``compute``, is not touched. ``failed``:
        told of the first error at once, so that nobody waits for what does not come any more."""
        self.schedule = schedule
        self.pools = pools
        self._act = act
        self._streams = streams
        self._binding = binding
        self._failed = failed
        self._lock = threading.Lock()
        self._lanes: dict[Lane, _LaneState] = {
            lane: _LaneState(ops, self._lock) for lane, ops in schedule.lanes.items()
        }
        self._dependents: dict[str, list[str]] = {op.id: [] for op in schedule.ops}
        for op in schedule.ops:
            for other in op.after:
                self._dependents[other].append(op.id)
        self._missing: dict[str, int] = {}
        self.marks: dict[str, Mark] = {}
        self._slot_marks: dict[tuple[str, int], Mark] = {}
        self._running = 0  # ops under way in lane threads; compute runs in the thread that would wait for it
        self._active = self._closed = False
        self._error: BaseException | None = None
        workers: dict[Lane, int] = {"h2d": 1, "d2h": 1, "cpu": 1, "net": 1, "read": io_workers, "write": io_workers}
        self._threads: list[threading.Thread] = []
        try:
            for lane, number in ((lane, i) for lane, count in workers.items() for i in range(count)):
                if schedule.lanes.get(lane):
                    self._start_thread(lane, f"penstock-{lane}-{number}")
        except BaseException:
            self.close()
            raise

    def _start_thread(self, lane: Lane, name: str) -> None:
        thread = threading.Thread(target=self._work, args=(lane,), name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def run(self) -> None:
        """Run every op once. Times are in ``marks`` afterwards.

        Raises:
            BaseException: whatever the first failing op raised; all lanes have come to rest by then.
        """
        try:
            self._begin()
            self._drain("compute")
            self._wait_idle()
        except BaseException as error:  # noqa: BLE001 - KeyboardInterrupt may arrive in a wait: the lanes must come to rest first
            self._come_to_rest(error)
        finally:
            with self._lock:
                self._active = False
        self._surface()
        self._streams.resolve(self.marks.values())
        if self.schedule.carried:
            self.pools.end_step()

    def _begin(self) -> None:
        """Let the lanes start."""
        with self._lock:
            self._missing = {op.id: len(op.after) for op in self.schedule.ops}
            self.marks = {}
            self._slot_marks = {}
            self._error = None
            self.pools.start_step()
            self._streams.restart()
            for lane in self._lanes.values():
                lane.rewind()
            self._active = True
            self._wake()

    def _come_to_rest(self, error: BaseException) -> None:
        """Stop the lanes, whatever else arrives meanwhile: they work on what the caller is about to look at."""
        while True:
            try:
                self._fail(error)
                self._wait_idle()
            except KeyboardInterrupt:
                continue
            return

    def _surface(self) -> None:
        """Raise the first error, with every buffer given back."""
        error, self._error = self._error, None
        if error is not None:
            try:
                settle(self._streams, error)
                self.pools.reset()
                raise error
            finally:
                del error  # its traceback holds activations, and would hold this frame, which holds it

    def close(self) -> None:
        """Stop the lane threads."""
        with self._lock:
            self._closed = True
            for lane in self._lanes.values():
                lane.ready.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self, name: Lane) -> None:
        if self._binding is not None:
            self._binding.bind_thread()
        while self._next_step(name):
            self._drain(name)

    def _next_step(self, name: Lane) -> bool:
        """Block a lane's thread until there is something for it; False when the executor closes."""
        lane = self._lanes[name]
        with self._lock:
            while not self._closed and not (self._active and not self._error and lane.started < len(lane.ops)):
                lane.ready.wait()
            return not self._closed

    def _drain(self, name: Lane) -> None:
        """Run ops of a lane until none is left to start, or a lane has failed."""
        lane = self._lanes[name]
        while True:
            with self._lock:
                while (
                    self._active and self._error is None and lane.started < len(lane.ops) and not self._startable(lane)
                ):
                    lane.ready.wait()
                if not self._active or self._error is not None or lane.started == len(lane.ops):
                    return
                index = lane.started
                op = lane.ops[index]
                lane.started += 1
                self._running += name != "compute"
                taken = self.pools.take(op)
                waits = [self.marks[other] for other in op.after]
                waits += [self._slot_marks[slot] for slot in taken if slot in self._slot_marks]
                freed = [
                    self._slot_marks[slot] for slot in taken if slot in self._slot_marks and self.pools.counted(slot[0])
                ]
                if self._startable(lane):
                    lane.ready.notify()
            self._run_op(lane, index, op, waits, freed)

    def _run_op(self, lane: _LaneState, index: int, op: Op, waits: list[Mark], freed: list[Mark]) -> None:
        try:
            # What torch allocates is free only when another stream's last use of it is over, not when that is queued.
            for mark in freed:
                if mark.done is not None and mark.lane != op.lane:
                    mark.done.synchronize()
            with self._streams.run(op.lane, waits) as mark:
                mark.moved = self._act(op)
        except BaseException as error:  # noqa: BLE001 - whatever a lane raises surfaces in run()
            error.add_note(f"in op {op.id} of schedule {self.schedule.name}")
            with self._lock:
                self._running -= op.lane != "compute"
                self._note_error(error)
            return
        with self._lock:
            self._running -= op.lane != "compute"
            self.marks[op.id] = mark
            lane.finished.add(index)
            while lane.published in lane.finished:
                lane.finished.discard(lane.published)
                self._publish(lane.ops[lane.published])
                lane.published += 1
            self._wake()

    def _publish(self, op: Op) -> None:
        for other in self._dependents[op.id]:
            self._missing[other] -= 1
        for slot in self.pools.give(op):
            self._slot_marks[slot] = self.marks[op.id]

    def _startable(self, lane: _LaneState) -> bool:
        if lane.started == len(lane.ops):
            return False
        op = lane.ops[lane.started]
        return not self._missing[op.id] and (not op.takes or self.pools.can_take(op))

    def _wake(self) -> None:
        """Wake the lanes whose next op can start, and everyone when the step is over. Called with the lock held."""
        over = self._error is not None or all(lane.published == len(lane.ops) for lane in self._lanes.values())
        for lane in self._lanes.values():
            if over:
                lane.ready.notify_all()
            elif self._startable(lane):
                lane.ready.notify()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._note_error(error)

    def _note_error(self, error: BaseException) -> None:
        """The first error is the one that surfaces. Called with the lock held."""
        if self._error is None:
            self._error = error
            if self._failed is not None:
                self._failed(error)
        self._wake()

    def _wait_idle(self) -> None:
        """Block the caller until all ops are published, or until nothing runs any more after an error."""
        compute = self._lanes["compute"]
        with self._lock:
            while True:
                if self._error is not None and self._running == 0:
                    return
                if self._error is None and all(lane.published == len(lane.ops) for lane in self._lanes.values()):
                    return
                compute.ready.wait()
