"""Runs the scripts of examples/small as a user does, at a small size."""

import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.patience import PATIENCE
from tests.warm_shell import commands

ROOT = Path(__file__).parent.parent
SMALL = (
    *("--steps", "3", "--batch.sequences", "4", "--plan", "null", "--device", "cpu", "--micro_batch_size", "2"),
    *("--model.config.hidden_size", "48", "--model.config.intermediate_size", "96", "--evaluate.batches", "1"),
    *("--model.config.num_hidden_layers", "2", "--data.sources", "[{path: stdlib, limit: 200KB}]"),
    *("--data.tokenizer.train.vocabulary", "600", "--lr_schedule.warmup_share", "0.4"),
)


def run(script: str, *words: str | Path) -> str:
    with TemporaryDirectory() as folder, commands(Path(folder)) as place:
        done = subprocess.run(
            [ROOT / "examples" / "small" / script, *words],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PATH": f"{place}{os.pathsep}{os.environ['PATH']}"},
            timeout=PATIENCE,
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout
