"""The examples for other libraries' loops do what they say: train a folder, survive a kill, and save one that loads."""

import json
import os
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from examples import fabric_loop, sft_trainer, trainer
from examples.small import chats
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import warm
from tests.patience import until

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 8
EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture(scope="module")
def given(small_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model that examples/small/scratch.sh makes, and chats."""
    path = tmp_path_factory.mktemp("chats") / "chat.jsonl"
    chats.main(path)
    return {"model": small_llama / "llama", "data": path, "template": EXAMPLES / "small" / "chat.jinja"}


def killed_after_a_checkpoint(example: ModuleType, folders: dict[str, Path]) -> None:
    """Start an example as a user would, and kill it when its first checkpoint is complete."""
    flags = [part for name, path in folders.items() for part in (f"--{name}", str(path))]
    script = EXAMPLES / f"{Path(str(example.__file__)).name}"
    # What TRL imports has temporary files of its own, which a process that is killed leaves.
    environment = os.environ | {"TMPDIR": str(folders["run"].parent)}
    with warm.start([script, *flags, "--steps", str(STEPS)], env=environment, quiet=True) as process:

        def has_a_checkpoint() -> bool:
            assert process.poll() is None, "it ended before its first checkpoint"
            return (folders["run"] / "checkpoint-4" / "trainer_state.json").exists()

        until(has_a_checkpoint)
        process.kill()
        assert process.wait() == -signal.SIGKILL


def losses(run: Any) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in run.state.log_history if "loss" in line]


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("example", [trainer, sft_trainer], ids=["trainer", "sft_trainer"])
def test_a_run_that_is_killed_and_resumed_saves_the_model_of_one_that_was_not(
    given: dict[str, Path], tmp_path: Path, example: ModuleType
) -> None:
    whole = given | {"run": tmp_path / "whole", "out": tmp_path / "out"}
    expected = losses(example.main(**whole, steps=STEPS))
    killed = given | {"run": tmp_path / "killed", "out": tmp_path / "killed-out"}
    (tmp_path / "killed").mkdir()
    torn = tmp_path / "killed" / "checkpoint-99"  # a later kill, while a checkpoint was written
    killed_after_a_checkpoint(example, killed | {"run": tmp_path / "killed"})
    torn.mkdir(exist_ok=True)
    (torn / "trainer_state.json").write_text('{"best')
    for later in (tmp_path / "killed").glob("checkpoint-*"):
        if later.name not in ("checkpoint-4", "checkpoint-99"):
            later.rename(tmp_path / later.name)  # it was faster than the kill
    assert losses(example.main(**killed, steps=STEPS))[4:] == expected[4:]
    names = ["model.safetensors", "config.json", "tokenizer.json"]
    assert [(tmp_path / "out" / n).read_bytes() for n in names] == [(killed["out"] / n).read_bytes() for n in names]
    assert expected[-1][1] < expected[0][1]
    speaks(tmp_path / "out")


def speaks(folder: Path) -> None:
    """The saved folder is a model and a tokenizer to everyone else."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    question = [{"role": "user", "content": "What does os.getcwd do?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        said = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert said.shape[1] > prompt["input_ids"].shape[1]


def test_a_loop_of_ones_own_learns(given: dict[str, Path], tmp_path: Path) -> None:
    torch.manual_seed(0)
    found = fabric_loop.main(**given, run=tmp_path / "run", steps=4)
    assert found[-1] < found[0] - 0.1
    assert {path.name for path in (tmp_path / "run" / "checkpoint").iterdir()} == {"penstock.snapshot", "state-4.pt"}


def test_the_chat_file_is_what_the_examples_say(given: dict[str, Path]) -> None:
    rows = [json.loads(line) for line in given["data"].read_text().splitlines()]
    assert len(rows) > 300
    assert all([m["role"] for m in row["messages"]] == ["user", "assistant"] for row in rows)
