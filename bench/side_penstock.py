"""Penstock's side of the benchmarks against peers, through the public interface only: everything on disk, or what the
plan leaves there of what does not fit the budgets."""

import argparse
import os
import shutil
import time
from pathlib import Path

import torch

import penstock
from bench.placed import in_words
from bench.workload import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY, Report, Tokens, Work, build_initial


def train(work: Work, report: Report, device: str, host: str, *, planned: bool) -> None:
    """Train in fp32, clipping off, with weights and optimizer state on the disk of ``work.scratch``, or as ``planned``
    in memory as far as the budgets go."""
    store = Path(work.scratch) / "penstock"
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir()
    tier = None if planned else "disk"
    budget = penstock.Budget(device=device, host=host, disk=store, weights=tier, state=tier)
    optimizer = penstock.AdamW(lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    tokens = Tokens(work)
    with penstock.wrap(
        build_initial(work),
        optimizer=optimizer,
        budget=budget,
        precision="fp32",
        clip_grad_norm=None,
        recompute=True,  # as the other sides do
        device="cpu",
    ) as engine:
        report.start()
        for step in range(work.steps):
            start, before = time.perf_counter(), os.times().system
            stats = engine.step(tokens.step(step))
            seconds, system = time.perf_counter() - start, os.times().system - before
            report.step(seconds=seconds, loss=stats.loss, compute=_compute(engine, system))
            if step == 0:
                print(in_words(engine.plan), flush=True)
                if (predicted := engine.prediction) is not None:
                    print(f"predicted: {predicted.time:.1f} s, at least {predicted.lower_bound:.1f} s", flush=True)
    shutil.rmtree(store)


def _compute(engine: penstock.Engine, system: float) -> float:
    """Seconds of the last step's forwards and backwards, less the most that other lanes took of the cores meanwhile:
    the time of their copies and optimizer steps, and what the ``system`` took of it, as for reads and writes."""
    busy = dict.fromkeys(("compute", "h2d", "d2h", "cpu"), 0.0)
    for event in engine.trace:
        if event.lane in busy:
            busy[event.lane] += event.end - event.start
    return busy.pop("compute") - sum(busy.values()) - system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", required=True, help="the job, as JSON (bench.workload.Work)")
    parser.add_argument("--report", required=True, help="file that takes one line of JSON a step")
    parser.add_argument("--device", required=True, help="memory of the device tier, such as 256MiB")
    parser.add_argument("--host", required=True, help="memory of the host tier")
    parser.add_argument("--planned", action="store_true", help="the plan says what is in memory; else nothing is")
    arguments = parser.parse_args()
    work = Work.from_json(arguments.work)
    torch.set_num_threads(work.threads)
    train(work, Report(arguments.report), arguments.device, arguments.host, planned=arguments.planned)


if __name__ == "__main__":
    main()
