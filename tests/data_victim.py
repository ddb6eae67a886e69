"""A run on streamed data for ``test_data_resume``: prints a hash of each step's micro-batches, and may be killed.

python -m tests.data_victim FOLDER STEPS KILL_AFTER
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import xxhash

import penstock
from penstock.config import DataConfig, SourceConfig
from penstock.data.batches import Batches, Step
from penstock.data.opening import open_data
from tests import models
from tests.data_documents import batches_of, tokenizer


def batches(folder: Path, **changes: Any) -> Batches:
    """Two weighted sources that are streamed and packed, in small windows."""
    bpe = tokenizer()
    sources = (
        SourceConfig(path=str(folder / "a.jsonl"), weight=3.0),
        SourceConfig(path=str(folder / "b.csv.gz"), fields={"text": "body"}, weight=1.0),
    )
    settings: dict[str, Any] = {"sources": sources, "sequence_length": 32, "streaming": True, "shuffle": 40, **changes}
    data = open_data(DataConfig(**settings), folder, seed=5, own=bpe)
    return batches_of(data.train, data.train.packing, 32, fingerprint=data.identity.fingerprint)  # type: ignore[attr-defined]


def digest(step: Step) -> str:
    state = xxhash.xxh3_64()
    for mb in step.micro_batches:
        for name in sorted(mb):
            state.update(name.encode())
            state.update(mb[name].numpy().tobytes())
    return state.hexdigest()


def train(folder: Path, steps: int) -> Iterator[str]:
    """A line for each step: its number, its data's hash, its loss."""
    torch.manual_seed(0)
    budget = penstock.Budget(device="8MiB", host="16MiB", disk=folder / "store", weights="disk", state="disk")
    # A delay leaves part of each step to the next, whose commit comes then.
    with (
        penstock.wrap(
            models.llama(num_hidden_layers=2, vocab_size=320),
            optimizer=penstock.AdamW(lr=1e-3),
            budget=budget,
            precision="fp32",
            device="cpu",
            delay=0.5,
        ) as engine,
        closing(batches(folder).steps(engine.position)) as data,
    ):
        while engine.step_count < steps:
            step = next(data)
            stats = engine.step(step.micro_batches, position=step.position)
            yield f"{engine.step_count} {digest(step)} {stats.loss}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number, line in enumerate(train(Path(sys.argv[1]), int(sys.argv[2])), start=1):
        print(line, flush=True)
        if number == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
