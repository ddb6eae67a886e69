"""``python -m bench.adamw``: the AdamW step of a streamed parameter, against torch's fused one with its two casts.

Both sides do the same: read a bf16 gradient, update an fp32 master and moments, write a bf16 working copy. torch needs
a cast of the gradient before its fused kernel and one of the master after it; ours is one pass. Both run with the same
number of threads on the same kind of memory (huge pages where the system gives them, as Penstock's own buffers are),
in turns within one run, each round in the opposite order of the last. A copy of as many bytes as one pass reads and
writes (14 + 14 per parameter) is timed in the same rounds: what the memory can do. So are steps of state in less
memory: bf16 weights with the lower halves of their master copy, and moments in fp32, bf16 or 8 bits.

Medians of all rounds, and the median over rounds of the ratio within a round, which a busy machine disturbs least.
"""

import argparse
import mmap
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from bench.harness import machine, write_section
from penstock.optim import kernels, library
from penstock.optim.codes import GROUP, Codes, Moment
from penstock.optim.formula import Hyper
from penstock.optim.norm import BLOCK

SPLIT, COMPACT = "split, fp32 moments", "split, 8-bit moments"
"""what training in bf16 does, with moments in fp32 and in 8 bits"""
MUST_REACH = {SPLIT: 1.7, COMPACT: 1.5}  # times as fast as torch
COMPACT_AT_MOST = 1.3  # times as long as with moments in fp32
BYTES_EACH_WAY = 14  # per parameter: 2 + 4 + 4 + 4 read, 4 + 4 + 4 + 2 written
FP32, BF16, INT16 = torch.float32, torch.bfloat16, torch.int16
MOMENTS = {"fp32": (FP32, FP32), "bf16": (BF16, BF16), "8-bit": (torch.int8, torch.uint8)}
MOMENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "8-bit": 1 + 2 / GROUP}
HYPER = Hyper(kind="adamw", lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)

Work = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Setting:
    numel: int
    threads: int
    rounds: int


def zeros(dtype: torch.dtype, numel: int) -> torch.Tensor:
    """[numel] zeros in memory that is mapped and touched before anything is timed."""
    memory = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).zero_()


def our_step(
    grad: torch.Tensor, threads: int, *, with_norm: bool = False, split: bool = False, of: str = "fp32"
) -> Work:
    """``split``: the master copy is in two halves, else beside its copy in bf16. ``of``: the moments' form."""
    n = len(grad)
    master, weights = zeros(FP32, n).add_(0.5), zeros(BF16, n)
    rest = zeros(INT16, n) if split else master
    if split:
        kernels.split(weights, rest, master)
    moments = tuple(moment(dtype, n) for dtype in MOMENTS[of])
    partials = np.zeros(n // BLOCK) if with_norm else None
    count = 0

    def work() -> None:
        nonlocal count
        count += 1
        kernels.step(
            HYPER, count, grad=grad, weights=weights, rest=rest, moments=moments, partials=partials, threads=threads
        )

    return work


def moment(dtype: torch.dtype, n: int) -> Moment:
    values = zeros(dtype, n)
    return values if dtype.is_floating_point else Codes(codes=values, scales=zeros(INT16, n // GROUP))


def torch_step(grad: torch.Tensor) -> Work:
    n = len(grad)
    master, out = torch.nn.Parameter(zeros(FP32, n).add_(0.5)), zeros(BF16, n)
    master.grad = zeros(FP32, n)
    optimizer = torch.optim.AdamW(
        [master], lr=HYPER.lr, betas=HYPER.betas, eps=HYPER.eps, weight_decay=HYPER.weight_decay, fused=True
    )
    optimizer.step()  # makes the state, which is then moved to the same kind of memory
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[master][name] = zeros(FP32, n)

    def work() -> None:
        assert master.grad is not None
        master.grad.copy_(grad)
        optimizer.step()
        out.copy_(master.detach())

    return work


def copy(n: int) -> Work:
    source, target = zeros(torch.uint8, n * BYTES_EACH_WAY), zeros(torch.uint8, n * BYTES_EACH_WAY)
    return lambda: target.copy_(source)


def alternate(sides: dict[str, Work], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side in each round, after one round that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(-1, rounds):
        for name in sides if turn % 2 else reversed(sides):
            time.sleep(0.01)  # torch's threads spin on after their work, which must not be on the next one's clock
            start = time.perf_counter()
            sides[name]()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def bytes_moved(name: str) -> float:
    """Bytes per parameter that a side reads and writes; torch's passes are not counted."""
    if name.startswith("split"):
        return 2 + 2 * (4 + 2 * MOMENT_BYTES[name.split()[1]])
    return 2 * BYTES_EACH_WAY


def report(setting: Setting, seconds: dict[str, list[float]]) -> tuple[str, bool]:
    """The section's text, and whether what must be reached is."""
    n = setting.numel
    rows = ["| | ms, median | ms, best | GB/s, median | torch / this | copy / this |", "|---|---|---|---|---|---|"]
    for name, times in seconds.items():
        ratios = [f"{over(seconds, other, name):.2f}" for other in ("torch", "copy")]
        median = statistics.median(times)
        bandwidth = "" if name == "torch" else f"{bytes_moved(name) * n / median / 1e9:.1f}"
        rows.append(f"| {name} | {median * 1e3:.1f} | {min(times) * 1e3:.1f} | {bandwidth} | {' | '.join(ratios)} |")
    reached = {name: over(seconds, "torch", name) for name in MUST_REACH}
    longer, of_copy = over(seconds, COMPACT, SPLIT), over(seconds, "copy", SPLIT)
    head = (
        f"`python -m bench.adamw --rounds {setting.rounds} --threads {setting.threads}`: {n / 1e6:.0f}M parameters, "
        "bf16 gradient in, fp32 master and moments, bf16 copy out; *split*: bf16 weights and the lower halves of their "
        f"master copy. {setting.rounds} rounds in turns, {setting.threads} threads each, {library.levels()[-1]} "
        f"kernels. Load average of the machine at the end: {os.getloadavg()[0]:.1f} (about {setting.threads} when "
        "nothing else runs)."
    )
    best = min(seconds["torch"]) / min(seconds[SPLIT])
    verdict = (
        f"**{reached[SPLIT]:.2f}x torch's fused AdamW with its two casts** in bf16 (must reach {MUST_REACH[SPLIT]}x); "
        f"a copy of {BYTES_EACH_WAY} bytes of each parameter takes {of_copy:.2f} times as long. Ratios are medians of "
        f"rounds; torch's best round against our best is {best:.2f}x.\n\n"
        f"**Moments in 8 bits: {reached[COMPACT]:.2f}x torch** (must reach {MUST_REACH[COMPACT]}x), {longer:.2f} times "
        f"as long as with moments in fp32 (at most {COMPACT_AT_MOST})."
    )
    if os.getloadavg()[0] > 1.5 * setting.threads:
        verdict += " The machine was busy with other work: this says little about an idle one."
    met = all(reached[name] >= least for name, least in MUST_REACH.items()) and longer <= COMPACT_AT_MOST
    return "\n\n".join([machine(), head, "\n".join(rows), verdict]), met


def over(seconds: dict[str, list[float]], one: str, other: str) -> float:
    """How many times as long one side takes as another: the median over rounds."""
    return statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=50, help="parameters")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=60)
    flags = parser.parse_args()
    if kernels.backend() != "native":
        raise SystemExit("the native library is what is measured, and it is not in use: pip install -e . builds it")
    setting = Setting(
        numel=flags.millions * 1_000_000 // BLOCK * BLOCK, threads=flags.threads, rounds=max(flags.rounds, 1)
    )
    torch.set_num_threads(setting.threads)
    grad = zeros(BF16, setting.numel).normal_()
    sides = {
        "penstock": our_step(grad, setting.threads),
        "penstock, with the norm": our_step(grad, setting.threads, with_norm=True),
        **{f"split, {of} moments": our_step(grad, setting.threads, split=True, of=of) for of in MOMENTS},
        "torch": torch_step(grad),
        "copy": copy(setting.numel),
    }
    text, reached = report(setting, alternate(sides, setting.rounds))
    print(text)
    print(f"\nkept in {write_section('adamw', text)}")
    return 0 if reached else 1


if __name__ == "__main__":
    raise SystemExit(main())
