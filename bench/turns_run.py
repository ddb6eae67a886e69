"""The process of ``bench.turns`` that has the engines: they take their steps in turn; prints one line of JSON."""

import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import penstock
from bench.harness import BenchError, block_device
from bench.placed import in_words
from bench.turns import Job, Measured, Planned, Taken, Variant
from bench.workload import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY, Tokens, build, disk_bytes
from penstock.hardware.machine import load_machine
from penstock.report.causes import measured_bars
from penstock.report.series import Bar
from penstock.report.trace_file import MeasuredStep, Ran
from penstock.schedule.ir.text import op_id

_SECTOR = 512


class Side:
    """One variant's engine, and what it has done."""

    def __init__(self, job: Job, variant: Variant, engine: penstock.Engine) -> None:
        self.name = variant.name
        self.taken: list[Taken] = []
        self._drive = _drive(Path(job.work.scratch))
        self._engine = engine
        self._commits: list[float] = []
        store = engine.inside.resources.commits.store
        assert store is not None
        self._store = store
        commit = store.commit

        def timed(record: dict[str, Any]) -> None:
            start = time.perf_counter()
            commit(record)
            self._commits.append(time.perf_counter() - start)

        store.commit = timed  # type: ignore[method-assign]

    def step(self, micro_batches: Sequence[Mapping[str, Any]]) -> None:
        """Take a step and keep what it did."""
        state, process, drive = self._store.stats, disk_bytes()[1], self._drive_written()
        self._commits.clear()
        start = time.perf_counter()
        stats = self._engine.step(micro_batches)
        seconds = time.perf_counter() - start
        now, drive_now = self._store.stats, self._drive_written()
        trace = self._trace(stats.step)
        self.taken.append(
            Taken(
                seconds=seconds,
                loss=stats.loss,
                grad_norm=stats.grad_norm,
                repeats=stats.repeats,
                in_lanes=trace.time,
                busy={str(lane): seconds for lane, seconds in trace.busy.items()},
                idle=self._idle(trace),
                state_read=now.bytes_read - state.bytes_read,
                state_written=now.bytes_written - state.bytes_written,
                process_written=disk_bytes()[1] - process,
                drive_written=None if drive is None or drive_now is None else drive_now - drive,
                commits=tuple(self._commits),
            )
        )
        print(f"  step {stats.step:<3} {self.name:<16} {seconds:.3f} s, loss {stats.loss:.6f}", file=sys.stderr)

    def planned(self) -> Planned:
        """The plan of the steps taken."""
        plan, prediction = self._engine.plan, self._engine.prediction
        alike = replace(plan.settings, wait=False, speculate=False)
        return Planned(
            settings=repr(alike),
            described=in_words(plan),
            delay=plan.settings.delay,
            speculates=plan.schedule.speculative,
            predicted=None if prediction is None else prediction.time,
            work={} if prediction is None else {str(lane): seconds for lane, seconds in prediction.work(0).items()},
            graphs=plan.graphs_kept,
            calls=plan.calls,
            device_bytes=plan.device_bytes,
        )

    def _trace(self, step: int) -> MeasuredStep:
        events = self._engine.trace
        origin = min(event.start for event in events)
        ops = (
            Ran(id=e.op, lane=e.lane, start=e.start - origin, end=e.end - origin, nbytes=e.bytes)
            for e in sorted(events, key=lambda event: event.start)
        )
        return MeasuredStep(step=step, ops=tuple(ops), memory={}, whole=True, file="")

    def _idle(self, trace: MeasuredStep) -> dict[str, float]:
        """Seconds that the busiest lane was idle, by what it waited for; then what came after its last op."""
        lane = max(trace.busy, key=lambda lane: trace.busy[lane])
        bars = [bar for bar in measured_bars(trace.ops, self._engine.plan.schedule) if bar.lane == lane]
        idle: dict[str, float] = defaultdict(float)
        until = 0.0
        for bar in sorted(bars, key=lambda bar: bar.start):
            if bar.start > until:
                idle[_cause(bar)] += bar.start - until
            until = max(until, bar.end)
        idle["(after its last op)"] += trace.time - until
        return dict(idle)

    def _drive_written(self) -> int | None:
        """Bytes that the drive under test has written since it was started, for whoever asked."""
        return None if self._drive is None else int((self._drive / "stat").read_text().split()[6]) * _SECTOR


def _cause(bar: Bar) -> str:
    """What an op waited for, in as few words as many ops share."""
    if bar.cause is None:
        return "(no op: starting up)"
    if bar.cause.pool:
        return f"a free buffer of {bar.cause.pool.rstrip('0123456789.')}"
    return op_id(bar.cause.op).kind


def _drive(path: Path) -> Path | None:
    try:
        return Path("/sys/dev/block") / block_device(path)
    except BenchError:
        return None


def _open(job: Job, variant: Variant, folder: Path) -> penstock.Engine:
    where = {"device": job.device, "host": job.host, "weights": "disk", "state": "disk"} | dict(variant.budget)
    return penstock.wrap(
        build(job.work.model),
        optimizer=penstock.AdamW(
            lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, moments=variant.moments
        ),
        budget=penstock.Budget(disk=folder, **where),
        precision=job.precision,
        device="cpu",
        plan=None if job.profile is None else load_machine(Path(job.profile)),
        **({"clip_grad_norm": None} | dict(variant.wrap)),
    )


def run(job: Job) -> Measured:
    """All steps of all variants, in turn, each round beginning with another variant."""
    work, tokens = job.work, Tokens(job.work)
    torch.set_num_threads(work.threads)
    with ExitStack() as closing:
        sides = []
        for i, variant in enumerate(job.variants):
            folder = Path(work.scratch) / f"store-{os.getpid()}-{i}"
            sides.append(Side(job, variant, closing.enter_context(_open(job, variant, folder))))
        for step in range(work.steps):
            first = step % len(sides)
            for side in sides[first:] + sides[:first]:
                side.step(tokens.step(step))
        return Measured(
            job=job,
            parameters=sum(p.numel() for p in build(work.model).parameters()),
            plans={side.name: side.planned() for side in sides},
            steps={side.name: tuple(side.taken[1:]) for side in sides},
        )


def main() -> int:
    print(run(Job.from_json(sys.argv[1])).to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
