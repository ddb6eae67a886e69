"""Fine-tune a model on a chat file with transformers.Trainer, its state on disk and in a little memory.

    examples/small/scratch.sh runs/small        # a small model to begin with: 3 minutes on two cores
    python examples/small/chats.py runs/small/chat.jsonl
    python examples/trainer.py --model runs/small/llama --data runs/small/chat.jsonl \\
        --template examples/small/chat.jinja --run runs/trainer --out runs/small/tuned

Kill it when you like: the same command goes on from the last checkpoint, to the same numbers. In two processes:
``torchrun --nproc-per-node 2 --max-restarts 3 -- examples/trainer.py --model ...``
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, TrainingArguments

import penstock
import penstock.hf


def main(model: Path, data: Path, template: Path, run: Path, out: Path, steps: int) -> penstock.hf.Trainer:
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun has started this, and may start it again
        penstock.torchrun_mesh()
    loaded = penstock.hf.load(model)  # no weights are read: the model has no memory yet
    tokenizer = AutoTokenizer.from_pretrained(loaded.folder)
    tokenizer.chat_template = template.read_text()

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        """Loss on the assistant's turns alone."""
        found = tokenizer.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
        spoken = zip(found["input_ids"], found.pop("assistant_masks"), strict=True)
        return dict(found) | {"labels": [token if said else -100 for token, said in spoken]}

    rows = load_dataset("json", data_files=str(data), split="train", cache_dir=str(run / "cache"))
    trainer = penstock.hf.Trainer(
        model=loaded.model,
        args=TrainingArguments(
            str(run),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=4,
            max_steps=steps,
            learning_rate=3e-3,
            warmup_steps=2,
            logging_steps=1,
            save_steps=4,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=rows.map(encode, remove_columns=rows.column_names),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        processing_class=tokenizer,
        engine=penstock.hf.EngineArguments(
            budget=penstock.Budget(device="96MiB", host="32MiB", disk=run / "state", weights="disk", state="disk"),
            weights=loaded.weights,
            overwrite=True,
        ),
    )
    trainer.train(resume_from_checkpoint=penstock.hf.last_checkpoint(run))
    trainer.save_model(str(out))
    trainer.end()
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "data", "template", "run", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30)
    main(**vars(parser.parse_args()))
