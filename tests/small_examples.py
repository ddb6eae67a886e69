"""Runs the scripts of examples/small as a user does, at a small size."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SMALL = (
    *("--steps", "3", "--batch.sequences", "4", "--plan", "null", "--device", "cpu", "--micro_batch_size", "2"),
    *("--model.config.hidden_size", "48", "--model.config.intermediate_size", "96", "--evaluate.batches", "1"),
    *("--model.config.num_hidden_layers", "2", "--data.sources", "[{path: stdlib, limit: 200KB}]"),
    *("--data.tokenizer.train.vocabulary", "600", "--lr_schedule.warmup_share", "0.4"),
)


def run(script: str, *words: str | Path) -> str:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [ROOT / "examples" / "small" / script, *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout
