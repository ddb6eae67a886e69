"""The commands under examples/small, run as they are but for sizes: from nothing to a chat model, killed on the way."""

import re
from pathlib import Path

from tests.small_examples import run


def test_a_chat_model_is_the_same_to_the_byte_whether_its_run_was_killed_or_not(small_llama: Path) -> None:
    small = ("--epochs", "0.06", "--batch.sequences", "4", "--micro_batch_size", "2", "--data.sequence_length", "128")
    said = run("chat.sh", small_llama, *small, "--lr_schedule.warmup_steps", "1", "--plan", "null", "--device", "cpu")
    assert "The run that was killed and the one that was not are the same, to the byte." in said
    assert "User: What does shutil.copyfile do?" in said
    whole, killed = ((small_llama / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "killed"))
    assert len(whole) == len(killed) >= 3
    told = re.search(r"killed after step (\d+) of", said)  # behind whatever line the killed run was about to write
    assert told is not None
    assert 0 < int(told[1]) < len(whole), "it was killed on the way"
