"""Runs of libraries' loops as torchrun starts them: ``penstock.hf.Trainer``, which ends after a checkpoint, goes on
from that, and saves; TRL's trainers and a loop on Fabric, the library's own and the engine's. On several hosts
state is in a directory of each one's own.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from lightning_fabric import Fabric
from transformers import default_data_collator

from penstock.fabric import PenstockStrategy
from penstock.hf import SFTTrainer, Trainer
from tests.library_runs import COMMON, StopAfter, arguments, examples, in_memory, llama, on_disk, shown, tokenizer
from tests.preferred import by_processes

DATA, HELD_OUT = examples(16), examples(5)
EVALUATED = {"eval_strategy": "epoch", "per_device_eval_batch_size": 2}
HOSTS, EACH = (int(os.environ.get(f"{whose}_WORLD_SIZE", 1)) for whose in ("GROUP", "LOCAL"))


def accuracy(prediction: Any) -> dict[str, float]:
    best, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    return {"accuracy": float((best == labels)[labels != -100].mean())}


def masked_where_padded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch as some collators make it: one without padding has no mask."""
    batch = default_data_collator(rows)
    if batch["attention_mask"].all():
        del batch["attention_mask"]
    return batch


def loss_of_unlike_batches(trainer: Trainer) -> float:
    """The loss of batches of two rows with as many labels in each, of which the third has no mask: when ranks take
    two at once, there are entries on one of them alone."""
    rows = [{"input_ids": [*range(1, 13)], "attention_mask": [1] * 12, "labels": [*range(1, 12), -100]}] * 12
    rows = [row if i in (4, 5) else row | {"attention_mask": [1] * 11 + [0]} for i, row in enumerate(rows)]
    trainer.compute_metrics, trainer.data_collator = None, masked_where_padded
    return float(trainer.evaluate(rows)["eval_loss"])


def drive(path: Path) -> Path:
    """The path, or on several hosts one of this host's own."""
    return path if HOSTS == 1 else Path("-".join(path.parts[-2:]))


def trainer(folder: Path, each: int, seed: int = 0, layout: dict[str, int] | None = None, **given: Any) -> Trainer:
    """``each``: micro-batches of a step in this process. Steps of four in all: two an epoch. ``layout``: how processes
    share the model."""
    settings = {"save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": each}
    return Trainer(
        args=arguments(folder / "run", **settings, **EVALUATED),
        eval_dataset=HELD_OUT,
        engine=on_disk(drive(folder / "store"), **{"strands": 2} | (layout or {})),
        **{"model": llama(seed=seed, dropout=0.1), "train_dataset": DATA, "compute_metrics": accuracy} | given,
    )


def talks(count: int) -> Dataset:
    """Prompts and completions of several lengths."""
    words = ["all", "state", "on", "disk", "planned", "the", "same", "way", "in", "any", "machine"]
    return Dataset.from_list(
        [
            {"prompt": " ".join(words[i % 7 :]), "completion": " " + " ".join(words[: 2 + 5 * i % 11])}
            for i in range(count)
        ]
    )


PACKED = {"packing": True, "max_length": 256, "per_device_train_batch_size": 1, "num_train_epochs": 2}
PACKED |= {"eval_strategy": "no"}


def tuned(
    cls: type[trl.SFTTrainer], folder: Path, each: int, settings: dict[str, Any] | None = None, **given: Any
) -> trl.SFTTrainer:
    """After two steps, each of four micro-batches in all, and what an epoch's evaluation leaves over. ``settings``:
    others than those."""
    common = {"bf16": False, "eval_strategy": "epoch", "gradient_accumulation_steps": each, "num_train_epochs": 1}
    trainer = cls(
        model=llama(),
        args=trl.SFTConfig(str(folder / "run"), per_device_eval_batch_size=2, **COMMON | common | (settings or {})),
        train_dataset=talks(16),
        eval_dataset=talks(5),
        processing_class=tokenizer(),
        **given,
    )
    trainer.train()
    return trainer


def fine_tune(folder: Path) -> dict[str, Any]:
    """What both log, the engine's model being saved."""
    plain = tuned(trl.SFTTrainer, folder / "plain", 2)
    own = tuned(SFTTrainer, folder, 2, engine=on_disk(drive(folder / "store"), strands=2))
    own.save_model(str(folder / "out"))
    found = {"plain": shown(plain), "own": shown(own)}
    own.end()
    return found


def looped(fabric: Fabric, mine: range, first: int = 0, last: int = 3, **paths: Path) -> list[Any]:
    """Figures of all processes of a loop as users write it, whose steps have four micro-batches, of which this process
    takes ``mine``: (loss, norm) of each step from ``first`` on, and losses in evaluation.
    """
    model = llama()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    state = {"model": model, "optimizer": optimizer, "done": 0}
    if "resume" in paths:
        fabric.load(paths["resume"], state)
        assert state["done"] == first
    batches = [{key: torch.tensor([row[key]]) for key in row} for row in examples(4 * last)]
    found: list[Any] = []
    for step in range(first, last):
        losses = []
        for i in mine:
            with fabric.no_backward_sync(model, enabled=i < mine[-1]):
                loss = model(**batches[4 * step + i]).loss
                fabric.backward(loss / len(mine))
            losses.append(loss.detach())
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(fabric.all_reduce(sum(losses) / len(mine))), float(norm)))
    model.eval()
    with torch.no_grad():
        found.append(fabric.all_gather(model(**batches[mine[0]]).loss).tolist())
    if "save" in paths:
        fabric.save(paths["save"], state | {"done": last})
    return found


def on_engine(disk: Path, mine: range, *rest: Any, layout: dict[str, Any] | None = None, **paths: Path) -> list[Any]:
    budget = on_disk(drive(disk)).budget
    strategy = PenstockStrategy(budget=budget, plan=None, clip_grad_norm=0.5, **{"strands": 2} | (layout or {}))
    fabric = Fabric(accelerator="cpu", devices=EACH, num_nodes=HOSTS, strategy=strategy)
    found = looped(fabric, mine, *rest, **paths)
    strategy.engine.close()
    return found


def loop(folder: Path) -> dict[str, list[Any]]:
    folder.mkdir(exist_ok=True)
    plain = Fabric(accelerator="cpu", devices=EACH, num_nodes=HOSTS)
    plain.launch()
    mine = range(2 * plain.global_rank, 2 * plain.global_rank + 2)
    begun = on_engine(folder / "first", mine, 0, 2, save=folder / "saved")
    resumed = on_engine(folder / "second", mine, 2, resume=folder / "saved")
    return {"plain": looped(plain, mine), "own": begun[:2] + resumed}


def main(folder: Path, *preferring: str) -> None:
    """``preferring``: TRL's trainers of preferences and rewards to run."""
    stopped = trainer(folder, 2, callbacks=[StopAfter(3)])
    stopped.train()
    stopped.engine.close()
    resumed = trainer(folder, 2, seed=1)
    resumed.train(resume_from_checkpoint=True)
    resumed.save_model(str(folder / "out"))
    predicted = resumed.predict(HELD_OUT)
    found = {"shown": shown(resumed), "predicted": predicted.predictions.tolist()}
    found["unlike"] = loss_of_unlike_batches(resumed)
    if resumed.is_world_process_zero():
        (folder / "found.json").write_text(json.dumps(found))
    resumed.end()
    logged = fine_tune(folder / "trl")
    preferred = by_processes(folder / "preferred", 2, in_memory(strands=2), *preferring)
    figures = loop(folder / "fabric")
    if resumed.is_world_process_zero():
        (folder / "trl" / "logged.json").write_text(json.dumps(logged))
        (folder / "preferred" / "logged.json").write_text(json.dumps(preferred))
        (folder / "fabric" / "figures.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
