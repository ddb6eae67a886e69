"""The process of ``bench.replan`` that has the engines: they take their steps in turn; prints one line of JSON."""

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import penstock
from bench.placed import in_words
from bench.replan import FOLLOWS, Job, Measured, Taken
from bench.workload import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY, Tokens, build
from penstock.hardware.machine import load_machine


def _open(job: Job, name: str) -> penstock.Engine:
    profile = job.profiles[job.stretches[0][0] if name == FOLLOWS else name]
    return penstock.wrap(
        build(job.work.model),
        optimizer=penstock.AdamW(lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY),
        budget=penstock.Budget(disk=Path(job.work.scratch) / f"store-{os.getpid()}-{name}", **job.budget),
        precision="fp32",
        device="cpu",
        plan=load_machine(Path(profile)),
        replan=name == FOLLOWS,
        clip_grad_norm=None,
    )


def _step(stretch: int, name: str, engine: penstock.Engine, micro_batches: Sequence[Mapping[str, Any]]) -> Taken:
    start = time.perf_counter()
    stats = engine.step(micro_batches)
    seconds = time.perf_counter() - start
    predicted = None if engine.prediction is None else engine.prediction.time
    taken = Taken(
        stretch=stretch,
        name=name,
        step=stats.step,
        seconds=seconds,
        loss=stats.loss,
        predicted=predicted,
        change=stats.plan_change,
    )
    said = "" if predicted is None else f", {predicted:.3f} predicted"
    print(f"  {stretch + 1} step {stats.step:<3} {name:<8} {seconds:.3f} s{said}", file=sys.stderr)
    if taken.change is not None:
        print(f"    {taken.change}", file=sys.stderr)
    return taken


def run(job: Job) -> Measured:
    """All steps of all engines, in turn, each round beginning with another one."""
    tokens = Tokens(job.work)
    torch.set_num_threads(job.work.threads)
    steps: list[Taken] = []
    plans: list[dict[str, str]] = []
    with ExitStack() as closing:
        names = (FOLLOWS, *job.profiles) if len(job.stretches) > 1 else (FOLLOWS,)
        engines = {name: closing.enter_context(_open(job, name)) for name in names}
        for name, engine in engines.items():  # probes and plans, at the rate of its profile
            job.hold(job.stretches[0][0] if name == FOLLOWS else name)
            engine.prepare(tokens.step(0))
        for stretch, (rate, count) in enumerate(job.stretches):
            job.hold(rate)
            for i in range(count):
                turn = list(engines)
                for name in turn[i % len(turn) :] + turn[: i % len(turn)]:
                    engine = engines[name]
                    steps.append(_step(stretch, name, engine, tokens.step(engine.step_count)))
            plans.append({name: repr(engine.plan.settings) for name, engine in engines.items()})
            for name, engine in engines.items():
                print(f"  {name}:\n    " + in_words(engine.plan), file=sys.stderr)
    return Measured(
        job=job, parameters=sum(p.numel() for p in build(job.work.model).parameters()), steps=steps, plans=plans
    )


def main() -> int:
    logging.basicConfig(format="    %(message)s", stream=sys.stderr)
    logging.getLogger("penstock").setLevel(logging.DEBUG)  # what is searched in vain is said, too
    print(run(Job.from_json(sys.argv[1])).to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
