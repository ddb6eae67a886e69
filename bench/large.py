"""Peak memory of training a model whose state is many times the memory it was given.

    python -m bench.large

A Llama of 1.3B parameters (24 layers of 2048, vocabulary 32,000; 16 GB of fp32 weights and AdamW state) goes from
the meta device to disk and through 2 steps of 256 tokens. Two processes are measured by the kernel: one that loads
the same packages, builds the same model on the meta device and computes one product of the model's size (its resident
memory is the constant that no budget can take away), and one that trains (its peak, ``VmHWM``). Required of the
second: at most 2.5 GB, at most its budget plus the constant, and within 5% of what was planned plus the constant.

Both run with ``MALLOC_MMAP_THRESHOLD_=1048576``. Without it glibc keeps up to some 150 MB of freed activations for
itself, which is memory that no tensor uses but that the kernel counts.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import penstock
from bench.harness import ROOT, SCRATCH, BenchError, machine, results_file, write_section
from bench.placed import in_words
from bench.workload import (
    BETAS,
    EPS,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Tokens,
    Work,
    build,
    disk_bytes,
    peak_rss,
    resident,
)

REQUIRED = 2_500_000_000
TOLERANCE = 0.05
MODEL = "llama-1.3b"
TOKENS = 256
STATE_BYTES_PER_PARAMETER = 12  # fp32: the master copy is the weights, and two moments
_MARK = "bench.large: "


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What the training process says of itself. Bytes."""

    peak_rss: int
    planned_device: int
    planned_host: int
    parameters: int
    losses: list[float]
    seconds: list[float]
    read: int
    written: int


def constant(threads: int) -> int:
    """Resident bytes of a process that has loaded everything and computed as this model does, but trains nothing.

    Measured after one forward and backward of a matrix product of the model's own size, whose operands are freed
    again: what is left are the packages, and the buffers that the math libraries keep per thread.
    """
    torch.set_num_threads(threads)
    with torch.device("meta"):
        build(MODEL)
    x, weight = torch.ones(TOKENS, 2048, requires_grad=True), torch.ones(5504, 2048, requires_grad=True)
    torch.autograd.backward(torch.nn.functional.linear(x, weight).sum())
    del x, weight
    return resident()


def train(work: Work, device: str, host: str) -> Trained:
    """Initialise the model on disk from the meta device and train it for the steps of ``work``."""
    store = Path(work.scratch) / "penstock-large"
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir()
    with torch.device("meta"):
        model = build(work.model)
    tokens = Tokens(work)
    try:
        with penstock.wrap(
            model,
            optimizer=penstock.AdamW(lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY),
            budget=penstock.Budget(device=device, host=host, disk=store, weights="disk", state="disk"),
            precision="fp32",
            clip_grad_norm=None,
            device="cpu",
        ) as engine:
            before = disk_bytes()
            stats = [engine.step(tokens.step(step)) for step in range(work.steps)]
            after = disk_bytes()
            print(in_words(engine.plan), flush=True)
            return Trained(
                peak_rss=peak_rss(),
                planned_device=engine.plan.device_bytes,
                planned_host=engine.plan.host_bytes,
                parameters=sum(p.numel() for p in model.parameters()),
                losses=[s.loss for s in stats],
                seconds=[s.seconds for s in stats],
                read=(after[0] - before[0]) // work.steps,
                written=(after[1] - before[1]) // work.steps,
            )
    finally:
        shutil.rmtree(store, ignore_errors=True)


def child(*flags: str, threads: int) -> str:
    """Run this file again with ``flags`` and return what it left behind its mark; the rest of its output is shown.

    Raises:
        BenchError: it failed.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.large", "--threads", str(threads), *flags],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": str(threads), "MALLOC_MMAP_THRESHOLD_": "1048576"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    marked = None
    for line in process.stdout:
        if line.startswith(_MARK):
            marked = line.removeprefix(_MARK)
        else:
            print(line, end="", flush=True)
    if process.wait() != 0 or marked is None:
        raise BenchError(f"{' '.join(flags)} ended with code {process.returncode}; see above")
    return marked


def describe(trained: Trained, base: int, device: str, host: str) -> str:
    """The section of the results file."""
    budget = penstock.Budget(device=device, host=host)
    given = budget.device_bytes + budget.host_bytes
    planned = trained.planned_device + trained.planned_host
    rows = [
        f"Llama classes, {trained.parameters / 1e9:.2f}B parameters from the meta device, fp32, {machine()}",
        "",
        "| | bytes |",
        "|---|---|",
        f"| weights and optimizer state on disk | {trained.parameters * STATE_BYTES_PER_PARAMETER / 1e9:.2f} GB |",
        f"| budget: device {device} + host {host} | {given / 1e9:.3f} GB |",
        f"| constant: the same packages and one product of the model's size | {base / 1e9:.3f} GB |",
        f"| planned out of the budget: device + host | {planned / 1e9:.3f} GB |",
        f"| planned + constant | {(planned + base) / 1e9:.3f} GB |",
        f"| **peak resident memory** (at most {REQUIRED / 1e9:.1f} GB) | **{trained.peak_rss / 1e9:.3f} GB** |",
        f"| peak over planned + constant (within {TOLERANCE:.0%}) | {trained.peak_rss / (planned + base) - 1:+.1%} |",
        f"| disk read, written per step | {trained.read / 1e9:.1f}, {trained.written / 1e9:.1f} GB |",
        "",
        "Steps: "
        + ", ".join(f"{s:.1f} s (loss {loss:.4f})" for s, loss in zip(trained.seconds, trained.losses, strict=True)),
        "",
        "Command: `python -m bench.large`",
    ]
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help="directory with 20 GB free")
    parser.add_argument("--device", default="1GiB", help="device budget")
    parser.add_argument("--host", default="512MiB", help="host budget")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--no-record", action="store_true", help="print, but leave the results file alone")
    parser.add_argument("--child", choices=["constant", "train"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.threads)
    work = Work(
        model=MODEL,
        micro_batches=1,
        batch=1,
        length=TOKENS,
        steps=2,
        threads=arguments.threads,
        scratch=str(arguments.scratch.resolve()),
    )
    if arguments.child == "constant":
        print(f"{_MARK}{constant(arguments.threads)}")
        return 0
    if arguments.child == "train":
        print(f"{_MARK}{json.dumps(asdict(train(work, arguments.device, arguments.host)))}")
        return 0
    try:
        base = int(child("--child", "constant", threads=arguments.threads))
        flags = ("--scratch", work.scratch, "--device", arguments.device, "--host", arguments.host)
        trained = Trained(**json.loads(child("--child", "train", *flags, threads=arguments.threads)))
    except BenchError as error:
        print(f"bench.large: {error}", file=sys.stderr)
        return 2
    body = describe(trained, base, arguments.device, arguments.host)
    print(body)
    if not arguments.no_record:
        print(f"recorded in {write_section('large', body, results_file())}")
    budget = penstock.Budget(device=arguments.device, host=arguments.host)
    allowed = min(REQUIRED, budget.device_bytes + budget.host_bytes + base)
    expected = trained.planned_device + trained.planned_host + base
    return 0 if trained.peak_rss <= allowed and abs(trained.peak_rss / expected - 1) <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
