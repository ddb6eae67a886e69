"""Plain PyTorch's side of ``bench.overhead``: everything in memory, activation checkpointing, fused AdamW."""

import argparse
import time

import torch

from bench.workload import (
    BETAS,
    EPS,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Report,
    Tokens,
    Work,
    build_initial,
    recompute_activations,
)


def train(work: Work, report: Report) -> None:
    """Gradient accumulation over the step's micro-batches, each recomputing its layers in the backward."""
    model = build_initial(work)
    recompute_activations(model, reentrant=False)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
    )
    tokens = Tokens(work)
    report.start()
    for step in range(work.steps):
        start = time.perf_counter()
        micro_batches = tokens.step(step)
        losses = []
        for micro_batch in micro_batches:
            loss = model(**micro_batch).loss
            (loss / len(micro_batches)).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        report.step(seconds=time.perf_counter() - start, loss=sum(losses) / len(losses))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", required=True, help="the job, as JSON (bench.workload.Work)")
    parser.add_argument("--report", required=True, help="file that takes one line of JSON a step")
    arguments = parser.parse_args()
    work = Work.from_json(arguments.work)
    torch.set_num_threads(work.threads)
    train(work, Report(arguments.report))


if __name__ == "__main__":
    main()
