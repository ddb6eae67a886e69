"""``transformers.Trainer`` on several ranks, each a process of its own: the run of one process with as many
micro-batches a step, to the bit, whose files one of them writes.
"""

import json
from contextvars import copy_context
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.utils.data import BatchSampler, SequentialSampler
from transformers import TrainingArguments
from trl import SFTConfig

from penstock.compat.accelerate import Neighbours
from penstock.errors import ConfigError, ModelError
from penstock.hf import SFTTrainer
from penstock.hf.trainer import NOTES, Notes
from penstock.hf.training_arguments import check_arguments
from tests.library_runs import in_memory, llama, shown
from tests.ranks.launched import Launched
from tests.ranks.trained import HELD_OUT, trainer

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_run_of_two_ranks_has_the_bits_of_one_that_did_not_stop(tmp_path: Path) -> None:
    """The run has dropout, shuffled data, and a checkpoint within an epoch; what goes on begins with other values."""
    (two := tmp_path / "two").mkdir()
    (code, _, errors), (other, quiet, _) = Launched(2, ["-m", "tests.ranks.trained", two], ROOT).outcomes()
    assert (code, other, quiet) == (0, 0, ""), errors
    one = trainer(tmp_path / "one", 4)
    one.train()
    one.save_model(str(tmp_path / "one" / "out"))
    found = json.loads((two / "found.json").read_text())
    mine = [tuple(line) for line in found["shown"]]
    trained = [line for line in shown(one) if not line[1].startswith("eval")]
    assert [line for line in mine if not line[1].startswith("eval")][:-1] == trained[:-1]  # since the resumption
    assert (two / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "one" / "out" / "model.safetensors"
    ).read_bytes()
    np.testing.assert_array_equal(np.array(found["predicted"], np.float32), one.predict(HELD_OUT).predictions)
    one.end()


def test_ranks_that_take_turns_have_neighbouring_batches_of_each_step() -> None:
    def dealt(rows: int, processes: int, each: int) -> list[list[int]]:
        batches = BatchSampler(SequentialSampler(range(rows)), 1, drop_last=False)
        return [batch for [batch] in Neighbours(batches, processes, each)]

    assert dealt(10, 2, 2) == [0, 2, 1, 3, 4, 6, 5, 7, 8, 9]
    assert dealt(12, 3, 2) == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert dealt(7, 2, 2) == [0, 2, 1, 3, 4, 5, 6]  # three cannot be dealt out to two


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments that were made alone say that there are two processes."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(TrainingArguments, "world_size", 2)


def test_a_loss_that_gathers_is_refused_before_ranks_wait_for_each_other(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    found = trainer(tmp_path, 4)
    request.getfixturevalue("second_of_two")

    def within_a_forward() -> None:
        NOTES.set(Notes())
        with pytest.raises(ModelError, match="compute_loss gathers from other processes"):
            found.accelerator.gather(torch.zeros(1))

    copy_context().run(within_a_forward)
    assert found.accelerator.gather(torch.zeros(1)).shape == (1,)  # anywhere else it is the library's own


def test_trls_trainer_is_refused(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    args = SFTConfig(str(tmp_path), report_to=[], bf16=False, use_cpu=True)
    request.getfixturevalue("second_of_two")
    with pytest.raises(ConfigError, match="one process of 2, and TRL's losses gather figures"):
        SFTTrainer(model=llama(), args=args, train_dataset=Dataset.from_list([]), engine=in_memory())


def test_processes_that_the_arguments_do_not_know_of_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without GPUs, where accelerate takes each rank for the only one."""
    args = TrainingArguments(str(tmp_path), report_to=[])
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"2 processes started, and the TrainingArguments know of 1.*use_cpu=True"):
        check_arguments(args)
