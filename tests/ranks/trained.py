"""A run of ``penstock.hf.Trainer`` as torchrun starts it: it ends after a checkpoint, goes on from that, and saves."""

import json
import sys
from pathlib import Path
from typing import Any

from penstock.hf import Trainer
from tests.library_runs import StopAfter, arguments, examples, llama, on_disk, shown

DATA, HELD_OUT = examples(16), examples(5)


def accuracy(prediction: Any) -> dict[str, float]:
    best, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    return {"accuracy": float((best == labels)[labels != -100].mean())}


def trainer(folder: Path, each: int, seed: int = 0, **given: Any) -> Trainer:
    """``each``: micro-batches of a step in this process. Steps of four in all: two an epoch."""
    settings = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "epoch", "per_device_eval_batch_size": 2}
    return Trainer(
        model=llama(seed=seed, dropout=0.1),
        args=arguments(folder / "run", gradient_accumulation_steps=each, **settings),
        train_dataset=DATA,
        eval_dataset=HELD_OUT,
        compute_metrics=accuracy,
        engine=on_disk(folder / "store", strands=2),
        **given,
    )


def main(folder: Path) -> None:
    stopped = trainer(folder, 2, callbacks=[StopAfter(3)])
    stopped.train()
    stopped.engine.close()
    resumed = trainer(folder, 2, seed=1)
    resumed.train(resume_from_checkpoint=True)
    resumed.save_model(str(folder / "out"))
    predicted = resumed.predict(HELD_OUT)
    if resumed.is_world_process_zero():
        found = {"shown": shown(resumed), "predicted": predicted.predictions.tolist()}
        (folder / "found.json").write_text(json.dumps(found))
    resumed.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
