"""Runs a schedule: each lane its ops in order, an op as soon as its turn has come, its dependencies are done and its
buffers are free.

    caller's thread      compute   (the model's suspended forwards are bound to it)
    a thread each        h2d, d2h, cpu, net, send, recv
    ``io_workers`` each  read, write: several ops in flight, so that a drive never waits for the next request

A thread that waits for its lane's turn sleeps at a gate of its own, and is woken by whoever makes the turn come. Ops
of a lane start in order and are published as done in order, which is what the checker's proof rests on. The first error
stops all lanes from starting anything more and surfaces as itself, with a note that names the op.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

from penstock.runtime.lanes import Gate, LaneState, Turn, lanes_of
from penstock.runtime.pools import Pools
from penstock.runtime.streams import Mark, Streams, settle
from penstock.schedule.ir.lanes import Lane
from penstock.schedule.ir.ops import Op, Schedule
from penstock.state.numa import Node

Action = Callable[[Op], int]
"""Does an op and returns the bytes that it has moved."""

_AS_IT_IS = nullcontext()


class Executor:
    """Owns the lane threads of one schedule. ``run`` executes one step; between steps nothing is in flight."""

    def __init__(
        self,
        schedule: Schedule,
        pools: Pools,
        act: Action,
        streams: Streams,
        *,
        io_workers: int = 2,
        binding: Node | None = None,
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        """``binding``: where the lanes' threads stay; the caller's, which is ``compute``, is not touched. ``failed``:
        told of the first error at once, so that nobody waits for what does not come any more."""
        self.schedule = schedule
        self.pools = pools
        self._act = act
        self.streams = streams
        self._binding = binding
        self._failed = failed
        self._lock = threading.Lock()
        self._by_name = lanes_of(schedule, streams)
        self._lanes = tuple(lane for lane in self._by_name.values() if lane.turns)
        self._compute = self._by_name["compute"]
        self._marks: dict[str, Mark] = {turn.op.id: turn.mark for lane in self._lanes for turn in lane.turns}
        self.marks: dict[str, Mark] = {}
        """marks of the last step's ops, if it came to its end; the next one writes them anew"""
        self._users: dict[tuple[str, int], Mark] = {}  # of each slot, who gave it back
        self._gate: Gate = Gate()  # the caller's
        self._running = 0  # ops under way in lane threads; compute runs in the thread that would wait for it
        self._left = 0  # ops that are not published
        self._closed = False
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        try:
            for lane in self._lanes:
                if lane is not self._compute:
                    for number in range(io_workers if lane.name in ("read", "write") else 1):
                        self._start_thread(lane.name, f"penstock-{lane.name}-{number}")
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
            self._run_all()
            self._surface()
            self.pools.end_step(self.schedule, partial(self.streams.resolve, self._marks.values()))
        except BaseException as error:  # be it an interrupt after all lanes have come to rest
            settle(self.streams, error)
            self.pools.reset()
            raise
        self.marks = self._marks

    def _run_all(self) -> None:
        """Run ops until all are done, or nothing runs any more after the first error."""
        try:
            self._begin()
            self._drain(self._compute, self._gate)
            self._wait_idle()
        except BaseException as error:  # noqa: BLE001 - KeyboardInterrupt may arrive in a wait: the lanes must come to rest first
            self._come_to_rest(error)
        finally:
            with self._lock:
                self._shut()

    def _begin(self) -> None:
        """Let the lanes start."""
        with self._lock:
            self.marks = {}
            self._users.clear()
            self._error = None
            self._left = len(self.schedule.ops)
            self._gate = Gate()  # what woke the caller for nothing is forgotten
            self._compute.sleepers.clear()
            self.pools.start_step()
            self.streams.restart()
            for lane in self._lanes:
                lane.begin()
            self._wake()

    def _shut(self) -> None:
        """Let nothing more start. Called with the lock held."""
        for lane in self._lanes:
            lane.open = 0

    def _come_to_rest(self, error: BaseException) -> None:
        """Stop the lanes, whatever else arrives meanwhile: they work on what the caller is about to look at."""
        while True:
            try:
                with self._lock:
                    self._note_error(error)
                self._wait_idle()
            except KeyboardInterrupt:
                continue
            return

    def _surface(self) -> None:
        """Raise the first error."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds activations, and would hold this frame, which holds it

    def close(self) -> None:
        """Stop the lane threads."""
        with self._lock:
            self._closed = True
            self._shut()
            for lane in self._lanes:
                while lane.sleepers:
                    _wake_one(lane)
        for thread in self._threads:
            thread.join()

    def _work(self, name: Lane) -> None:
        if self._binding is not None:
            self._binding.bind_thread()
        with self.streams.on(name):
            self._drain(self._by_name[name], Gate())

    def _drain(self, lane: LaneState, gate: Gate) -> None:
        """Run ops of a lane: those of compute until none is left to start, of others until the executor closes."""
        done: Turn | None = None
        while True:
            with self._lock:
                if done is not None:
                    self._finish(lane, done)
                    done = None
                turn = self._next(lane)
                if turn is None:
                    if self._closed or (lane is self._compute and lane.started >= lane.open):
                        return
                    lane.sleepers.append(gate)
                else:
                    waits, freed = self._take(lane, turn)
            if turn is None:
                gate.get()
            elif self._run_op(turn, waits, freed):
                done = turn

    def _next(self, lane: LaneState) -> Turn | None:
        """The lane's next op, if its turn has come."""
        if lane.started >= lane.open:
            return None
        turn = lane.turns[lane.started]
        for other, count in turn.needs:
            if other.published < count:
                return None
        return turn if not turn.op.takes or self.pools.can_take(turn.op) else None

    def _take(self, lane: LaneState, turn: Turn) -> tuple[Sequence[Mark], Sequence[Mark]]:
        """Start an op: what it is to wait for, and what has to be over before."""
        lane.started += 1
        self._running += lane is not self._compute
        if lane.sleepers and self._next(lane):
            _wake_one(lane)
        if not turn.op.takes:
            return turn.waits, ()
        taken = self.pools.take(turn.op)
        waits = [*turn.waits]
        waits += [self._users[slot] for slot in taken if slot in self._users]
        if not turn.counted:
            return waits, ()
        return waits, [self._users[s] for s in taken if s in self._users and self.pools.counted(s[0])]

    def _run_op(self, turn: Turn, waits: Sequence[Mark], freed: Sequence[Mark]) -> bool:
        """True if it has come to its end."""
        mark = turn.mark
        try:
            # What torch allocates is free only when another stream's last use of it is over, not when that is queued.
            for other in freed:
                if other.done is not None and other.lane != mark.lane:
                    other.done.synchronize()
            # Each op of compute anew: a model may be suspended while a stream of its own is current.
            with self.streams.on("compute") if mark.lane == "compute" else _AS_IT_IS:
                self.streams.begin(mark, waits)
                mark.moved = self._act(turn.op)
                self.streams.end(mark)
        except BaseException as error:  # noqa: BLE001 - whatever a lane raises surfaces in run()
            error.add_note(f"in op {turn.op.id} of schedule {self.schedule.name}")
            with self._lock:
                self._running -= turn.op.lane != "compute"
                self._note_error(error)
            return False
        return True

    def _finish(self, lane: LaneState, turn: Turn) -> None:
        """Publish an op, and those behind it that have waited for it. Called with the lock held."""
        self._running -= lane is not self._compute
        if turn.place == lane.published:
            self._publish(lane, turn)
            while lane.published in lane.finished:
                lane.finished.discard(lane.published)
                self._publish(lane, lane.turns[lane.published])
        else:
            lane.finished.add(turn.place)
        self._wake()

    def _publish(self, lane: LaneState, turn: Turn) -> None:
        lane.published += 1
        self._left -= 1
        if turn.op.gives:
            for slot in self.pools.give(turn.op):
                self._users[slot] = turn.mark

    def _wake(self) -> None:
        """Wake the lanes whose next op's turn has come, and the caller when the step is over. Called with the lock
        held."""
        for lane in self._lanes:
            if lane.sleepers and self._next(lane):
                _wake_one(lane)
        if self._over():
            self._gate.put(None)

    def _note_error(self, error: BaseException) -> None:
        """The first error is the one that surfaces. Called with the lock held."""
        self._shut()  # first: whatever interrupts this, nothing more starts
        if self._error is None:
            self._error = error
            if self._failed is not None:
                self._failed(error)
        self._wake()

    def _over(self) -> bool:
        """True if all ops are published, or nothing runs any more after an error."""
        return not self._left or (self._error is not None and not self._running)

    def _wait_idle(self) -> None:
        """Block the caller until the step is over."""
        while True:
            with self._lock:
                if self._over():
                    return
            self._gate.get()


def _wake_one(lane: LaneState) -> None:
    """Wake a thread of a lane. An interrupt in between leaves its gate: it is then woken once more, for nothing."""
    lane.sleepers[-1].put(None)
    lane.sleepers.pop()
