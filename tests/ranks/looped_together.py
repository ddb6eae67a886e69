"""A loop on Fabric whose processes share the model in other ways than all its state, as torchrun starts it: pipelines,
and of four processes copies of the state, too."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch.nn import functional
from torch.utils.data import DataLoader

import penstock
from penstock.fabric import PenstockStrategy
from tests.library_runs import examples, llama
from tests.ranks.trained import on_engine

SIZE = int(os.environ.get("WORLD_SIZE", 1))
LAYOUTS: dict[str, dict[str, int]] = {"pipeline": {"pipeline": 2}}
if SIZE == 4:
    LAYOUTS["copies"] = {"copies": 2, "strands": 4}


def of_logits(layout: dict[str, Any]) -> list[Any]:
    """Figures of a loop that computes its loss of the model's logits: the loss, and numbers of an evaluation's. Then
    the data that this process is dealt."""
    budget = penstock.Budget(device="64MiB", host="64MiB")
    strategy = PenstockStrategy(budget=budget, plan=None, **{"strands": 2} | layout)
    fabric = Fabric(accelerator="cpu", devices=SIZE, strategy=strategy)
    model = llama()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    found = []
    ids = [torch.tensor([row["input_ids"]]) for row in examples(4)]
    groups = SIZE // layout.get("pipeline", 1)
    each, group = 4 // groups, fabric.global_rank % groups
    for _ in range(2):
        losses = []
        for one in ids[group * each : (group + 1) * each]:
            logits = model(input_ids=one, use_cache=False).logits
            losses.append(functional.cross_entropy(logits[0, :-1], one[0, 1:]))
            fabric.backward(losses[-1] / each)
        optimizer.step()
        optimizer.zero_grad()
        found.append([loss.item() for loss in losses])
    model.eval()
    with torch.no_grad():
        output = model(input_ids=ids[0], use_cache=False)
    found.append([float(output.logits.double().sum()), *output.logits.shape])
    dealt = [int(x) for x in fabric.setup_dataloaders(DataLoader(torch.arange(8), batch_size=1))]
    strategy.engine.close()
    return [found, dealt]


def main(folder: Path) -> None:
    rank, figures = int(os.environ["RANK"]), {}
    for name, layout in LAYOUTS.items():
        groups = SIZE // layout.get("pipeline", 1)
        each, group = 4 // groups, rank % groups
        mine = range(group * each, (group + 1) * each)
        looped = on_engine(folder / f"{name} store", mine, 0, 2, layout=layout, save=folder / name)
        figures[name] = [looped, *of_logits(layout)]
    (folder / f"figures-{rank}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
