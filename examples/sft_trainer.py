"""Fine-tune a model on a chat file with TRL's SFTTrainer, its state on disk and in a little memory.

    examples/small/scratch.sh runs/small        # a small model to begin with: 3 minutes on two cores
    python examples/small/chats.py runs/small/chat.jsonl
    python examples/sft_trainer.py --model runs/small/llama --data runs/small/chat.jsonl \\
        --template examples/small/chat.jinja --run runs/sft --out runs/small/tuned

Kill it when you like: the same command goes on from the last checkpoint, to the same numbers. In two processes:
``torchrun --nproc-per-node 2 --max-restarts 3 -- examples/sft_trainer.py --model ...``
"""

import argparse
import os
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import SFTConfig

import penstock
import penstock.hf


def main(model: Path, data: Path, template: Path, run: Path, out: Path, steps: int) -> penstock.hf.SFTTrainer:
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun has started this, and may start it again
        penstock.torchrun_mesh()
    loaded = penstock.hf.load(model)  # no weights are read: the model has no memory yet
    tokenizer = AutoTokenizer.from_pretrained(loaded.folder)
    tokenizer.chat_template = template.read_text()
    trainer = penstock.hf.SFTTrainer(
        model=loaded.model,
        args=SFTConfig(
            str(run),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            max_steps=steps,
            max_length=128,
            packing=True,  # no attention across documents: TRL gives each its own positions
            assistant_only_loss=True,
            learning_rate=3e-3,
            warmup_steps=2,
            logging_steps=1,
            save_steps=4,
            report_to=[],
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=load_dataset("json", data_files=str(data), split="train", cache_dir=str(run / "cache")),
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
