"""Train a small Llama in several processes, each of which has its part of the state on disk; kill it, and go on.

torchrun --nproc-per-node 2 examples/ranks.py --disk runs/ranks
"""

import argparse
from pathlib import Path

import torch
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM

import penstock

ROWS, LENGTH, MICRO_BATCHES = 2, 64, 8
"""of a step, over all ranks"""


def main(disk: Path, steps: int) -> list[float]:
    mesh = penstock.torchrun_mesh()
    rank, ranks = mesh.get_local_rank(), mesh.size()
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4
    )
    with torch.device("meta"):  # the model has no memory, and is initialised group by group
        model = LlamaForCausalLM(config)
    losses = []
    with penstock.wrap(
        model,
        optimizer=penstock.AdamW(lr=3e-4),
        budget=penstock.Budget(device="256MiB", host="512MiB", disk=disk),
        strands=MICRO_BATCHES,  # 1, 2, 4 or 8 ranks give the same bits
        mesh=mesh,
    ) as engine:
        share = MICRO_BATCHES // ranks
        first = rank * share  # of this rank's micro-batches
        for step in range(engine.step_count, steps):
            stats = engine.step([micro_batch(step, m) for m in range(first, first + share)])
            losses.append(stats.loss)
            if rank == 0:
                print(f"step {stats.step}: loss {stats.loss:.4f}, {stats.tokens / stats.seconds:,.0f} tokens/s")
    distributed.destroy_process_group()
    return losses


def micro_batch(step: int, number: int) -> dict[str, torch.Tensor]:
    """Rows of this file's own text, drawn from a step and a number alone."""
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(step * MICRO_BATCHES + number)
    starts = torch.randint(len(text) - LENGTH, (ROWS,), generator=generator).tolist()
    rows = torch.stack([text[start : start + LENGTH] for start in starts])
    return {"input_ids": rows, "labels": rows}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disk", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    main(**vars(parser.parse_args()))
