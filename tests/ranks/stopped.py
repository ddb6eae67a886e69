"""A Trainer as torchrun starts it, of whose ranks one fails between two steps: raises an error, or is stopped. ``end``:
it raises an error, and all end their trainers whatever happens."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from penstock.hf import Trainer
from penstock.ranks import watch
from tests.library_runs import arguments, examples, in_memory, llama


class FailsOnOne(TrainerCallback):
    """After the second step, on the second rank."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2 and args.process_index == 1:
            if self.how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            raise OSError("no more data")


def main(folder: Path, how: str) -> None:
    watch.SILENT = 3.0
    trainer = Trainer(
        model=llama(),
        args=arguments(folder / "run", gradient_accumulation_steps=2),
        train_dataset=examples(16),
        callbacks=[FailsOnOne(how)],
        engine=in_memory(),
    )
    try:
        trainer.train()
    finally:
        if how == "end":
            trainer.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
