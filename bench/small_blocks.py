"""What the host takes for a call of a block that computes next to nothing: a step against a plain PyTorch loop.

    python -m bench.small_blocks

A Llama of 16 blocks of width 64 in fp32, on one thread, micro-batches of 16 tokens, with all state in memory and room
for all graphs, so that nothing is computed twice. Steps of 4 and of 12 micro-batches take turns, of both sides. What 8
more of these take, by the processor's time, is that of 128 calls of a block, forward and backward. Where a GPU computes
a block sooner than the host queues it, this is what a step takes. Losses of both sides are compared.

Required: at most 2 times the plain loop's time of a call.
"""

import argparse
import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import penstock
from bench.harness import BenchError, machine, results_file, write_section

REQUIRED = 2.0
LAYERS = 16
FEW, MANY = 4, 12
_TOLERANCE = 1e-4
_VOCABULARY = 256

Step = Callable[[int], float]
"""A step of so many micro-batches: its mean loss."""


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=_VOCABULARY,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def batch(count: int) -> list[dict[str, torch.Tensor]]:
    draws = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, _VOCABULARY, (1, 16), generator=draws) for _ in range(count)]
    return [{"input_ids": ids, "labels": ids} for ids in tokens]


def plain() -> Step:
    trained: Any = model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4, fused=True)

    def step(count: int) -> float:
        losses = []
        for micro_batch in batch(count):
            loss = trained(**micro_batch).loss
            (loss / count).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        return statistics.fmean(losses)

    return step


def ours() -> Step:
    budget = penstock.Budget(device="4GiB", host="4GiB", durability="none")
    engines = {n: penstock.wrap(model(), optimizer=penstock.AdamW(lr=1e-4), budget=budget) for n in (FEW, MANY)}

    def step(count: int) -> float:
        return float(engines[count].step(batch(count)).loss)

    return step


def calls(rounds: int, sides: dict[str, Step]) -> dict[str, list[float]]:
    """Microseconds of the processor for a call of a block, forward and backward, of each round.

    Raises:
        BenchError: the sides' losses differ.
    """
    found: dict[str, list[float]] = {name: [] for name in sides}
    first = {name: step(FEW) for name, step in sides.items()}
    if max(first.values()) - min(first.values()) > _TOLERANCE:
        raise BenchError(f"the losses of the first step differ: {first}")
    for step in sides.values():
        step(MANY)
    for turn in range(rounds):
        gc.collect()
        gc.disable()  # of both sides: how long it takes depends on what has been imported
        for name, step in sides.items():
            taken = []
            for count in (FEW, MANY):
                begun = time.process_time()
                step(count)
                taken.append(time.process_time() - begun)
            if turn:  # what is set up once has been by then
                found[name].append((taken[1] - taken[0]) / (MANY - FEW) / LAYERS * 1e6)
        gc.enable()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.small_blocks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--no-results", action="store_true", help="print only")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = calls(options.rounds, {"torch": plain(), "penstock": ours()})
    ratio = statistics.median(a / b for a, b in zip(found["penstock"], found["torch"], strict=True))
    rows = ["| side | a call, forward and backward |", "|---|---|"]
    rows += [f"| {name} | {statistics.median(each):.0f} us |" for name, each in found.items()]
    text = "\n".join([*rows, "", f"{ratio:.2f} times the plain loop's ({REQUIRED} allowed)"])
    print(text)
    if not options.no_results:
        setting = f"Command: `python -m bench.small_blocks`, {options.rounds} rounds; {machine()}"
        write_section("small_blocks", f"{setting}\n\n{text}", results_file())
    return 0 if ratio <= REQUIRED else 1


if __name__ == "__main__":
    sys.exit(main())
