"""The commands under examples/small, run as they are but for sizes: from nothing to a chat model, killed on the way."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What scratch.sh has made."""
    made = tmp_path_factory.mktemp("small")
    written = run("scratch.sh", made, *SMALL).splitlines()[-1]
    assert written.startswith("def main(")
    return made


def test_a_chat_model_is_the_same_to_the_byte_whether_its_run_was_killed_or_not(folder: Path) -> None:
    small = ("--epochs", "0.06", "--batch.sequences", "4", "--micro_batch_size", "2", "--data.sequence_length", "128")
    said = run("chat.sh", folder, *small, "--lr_schedule.warmup_steps", "1", "--plan", "null", "--device", "cpu")
    assert "The run that was killed and the one that was not are the same, to the byte." in said
    assert "User: What does shutil.copyfile do?" in said
    whole, killed = ((folder / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "killed"))
    assert len(whole) == len(killed) >= 3
    told = next(line for line in said.splitlines() if line.startswith("killed after step"))
    assert 0 < int(told.split()[3]) < len(whole), "it was killed on the way"
