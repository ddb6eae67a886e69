"""Fine-tune a model on a chat file in a loop of your own on Lightning Fabric, its state on disk.

examples/small/scratch.sh runs/small        # a small model to begin with: 3 minutes on two cores
python examples/small/chats.py runs/small/chat.jsonl
python examples/fabric_loop.py --model runs/small/llama --data runs/small/chat.jsonl \\
    --template examples/small/chat.jinja --run runs/fabric
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, DataCollatorForSeq2Seq

import penstock
import penstock.hf
from penstock.fabric import PenstockStrategy

ACCUMULATE = 4


def main(model: Path, data: Path, template: Path, run: Path, steps: int) -> list[float]:
    loaded = penstock.hf.load(model)  # no weights are read: the model has no memory yet
    tokenizer = AutoTokenizer.from_pretrained(loaded.folder)
    tokenizer.chat_template = template.read_text()
    run.mkdir(parents=True, exist_ok=True)
    strategy = PenstockStrategy(
        budget=penstock.Budget(device="96MiB", host="32MiB", disk=run / "state", weights="disk", state="disk"),
        weights=loaded.weights,
        clip_grad_norm=1.0,
    )
    fabric = Fabric(devices=1, strategy=strategy)
    rows = [json.loads(line)["messages"] for line in data.read_text().splitlines()]
    encoded: Any = [dict(tokenizer.apply_chat_template(row, return_dict=True)) for row in rows]
    for row in encoded:
        row["labels"] = list(row["input_ids"])
    loader = DataLoader(
        encoded, batch_size=4, shuffle=True, drop_last=True, collate_fn=DataCollatorForSeq2Seq(tokenizer)
    )
    batches = iter(fabric.setup_dataloaders(loader))
    net, optimizer = fabric.setup(loaded.model, torch.optim.AdamW(loaded.model.parameters(), lr=3e-3))
    losses = []
    for step in range(steps):
        micro_batches = [next(batches) for _ in range(ACCUMULATE)]
        found = [net(**batch).loss for batch in micro_batches]  # recorded: the model has not run yet
        for loss in found:
            fabric.backward(loss / ACCUMULATE)
        fabric.clip_gradients(net, optimizer, max_norm=1.0)
        optimizer.step()  # all micro-batches, block by block
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in found) / ACCUMULATE)
        print(f"step {step + 1}: loss {losses[-1]:.4f}")
    fabric.save(run / "checkpoint", {"model": net, "optimizer": optimizer, "step": steps})
    strategy.engine.close()
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "data", "template", "run"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12)
    main(**vars(parser.parse_args()))
