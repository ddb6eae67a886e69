"""Runs of ``penstock.hf.Trainer`` and TRL's trainers whose processes take batches together, as torchrun starts
them: a pipeline, which ends after a checkpoint, goes on from that, evaluates and saves, of four packs documents, too;
and ranks that share each sequence.
"""

import json
import os
import sys
from pathlib import Path

import transformers
import trl

from penstock.hf import SFTTrainer
from tests.library_runs import StopAfter, arguments, in_memory, llama, on_disk, shown
from tests.preferred import by_processes
from tests.ranks.trained import DATA, EVALUATED, HELD_OUT, PACKED, trainer, tuned

EACH = 4 // int(os.environ["WORLD_SIZE"])
"""micro-batches of a step that each process is dealt"""


def pipeline(folder: Path) -> None:
    layout = {"pipeline": 2}
    stopped = trainer(folder, EACH, layout=layout, callbacks=[StopAfter(3)])
    stopped.train()
    stopped.engine.close()
    resumed = trainer(folder, EACH, seed=1, layout=layout)
    resumed.train(resume_from_checkpoint=True)
    resumed.save_model(str(folder / "out"))
    predicted = resumed.predict(HELD_OUT)
    found = {"shown": shown(resumed), "predicted": predicted.predictions.tolist()}
    resumed.end()
    if EACH == 1:
        packed = tuned(
            SFTTrainer, folder / "trl", EACH, PACKED, engine=on_disk(folder / "trl" / "store", strands=2, **layout)
        )
        packed.save_model(str(folder / "trl" / "out"))
        found["packed"] = shown(packed), shown(tuned(trl.SFTTrainer, folder / "plain", EACH, PACKED))
        packed.end()
    found["preferred"] = by_processes(folder / "preferred", EACH, in_memory(strands=2, **layout), "DPOTrainer")
    if resumed.is_world_process_zero():
        (folder / "found.json").write_text(json.dumps(found))


def spans(folder: Path) -> None:
    """Some batches have no label that counts, as in the library's own run."""
    data = [{**row, "labels": [-100] * len(row["labels"])} if i in (2, 3, 9) else row for i, row in enumerate(DATA)]
    plain = transformers.Trainer(
        model=llama(),
        args=arguments(folder / "plain", gradient_accumulation_steps=EACH, **EVALUATED),
        train_dataset=data,
        eval_dataset=HELD_OUT,
    )
    plain.train()
    plain.save_model(str(folder / "plain" / "out"))
    layout = {"cp": 2, "strands": 4}
    own = trainer(folder, EACH, layout=layout, compute_metrics=None, model=llama(), train_dataset=data)
    own.train()
    own.save_model(str(folder / "out"))
    if own.is_world_process_zero():
        (folder / "found.json").write_text(json.dumps({"own": shown(own), "plain": shown(plain)}))
    own.end()
    logged = {"plain": shown(tuned(trl.SFTTrainer, folder / "trl" / "plain", EACH))}
    own = tuned(SFTTrainer, folder / "trl", EACH, engine=on_disk(folder / "trl" / "store", cp=2))
    logged["own"] = shown(own)
    own.end()
    if own.is_world_process_zero():
        (folder / "trl" / "found.json").write_text(json.dumps(logged))


if __name__ == "__main__":
    pipeline(Path(sys.argv[1]) / "pipeline")
    spans(Path(sys.argv[1]) / "spans")
