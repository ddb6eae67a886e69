"""``transformers.Trainer`` on several ranks, each a process of its own: the run of one process with as many
micro-batches a step, to the bit, whose files one of them writes. So do TRL's trainers and a loop on Fabric, with
the figures of the libraries' own runs.
"""

import json
from collections.abc import Iterator
from contextvars import copy_context
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader, skip_first_batches
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers import TrainingArguments

from penstock.compat.accelerate import Neighbours, deal_neighbours
from penstock.compat.trl import Books, FiguresOf, of_dpo, of_reward, of_sft
from penstock.errors import ConfigError, ModelError
from penstock.hf import SFTTrainer
from penstock.hf.pieces import NOTES, Notes
from penstock.hf.training_arguments import check_arguments
from penstock.hf.trl_trainer import check_own
from tests.library_runs import CLOSE, check_same, on_disk, shown
from tests.ranks.launched import Launched
from tests.ranks.trained import HELD_OUT, loss_of_unlike_batches, on_engine, trainer, tuned

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=pytest.mark.campaign)])
def test_a_run_of_two_ranks_has_the_bits_of_one_that_did_not_stop(
    hosts: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The run has dropout, shuffled data, and a checkpoint within an epoch; what goes on begins with other values. In a
    pipeline ``test_trainer_layouts`` runs TRL's DPOTrainer each time."""
    cluster = None if hosts == 1 else request.getfixturevalue("two_hosts")
    (two := tmp_path / "two").mkdir()
    for own in (folders := [tmp_path / "host0", tmp_path / "host1"]):
        own.mkdir()
    words = ["-m", "tests.ranks.trained", two, "RewardTrainer", *(["DPOTrainer"] if hosts > 1 else [])]
    (code, _, errors), (other, quiet, _) = Launched(2, words, folders, cluster=cluster).outcomes()
    assert (code, other) == (0, 0), errors
    assert hosts > 1 or not quiet.split(), "preparing data prints empty lines, and the library speaks on each host"
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
    assert found["unlike"] == pytest.approx(loss_of_unlike_batches(one), rel=CLOSE["rtol"])
    one.end()
    logged = json.loads((two / "trl" / "logged.json").read_text())
    check_same([tuple(line) for line in logged["own"]], [tuple(line) for line in logged["plain"]])
    tokens = [[value for _, key, value in logged[who] if key.endswith("num_tokens")] for who in ("own", "plain")]
    assert tokens[0] == tokens[1] != []
    alone = tuned(SFTTrainer, tmp_path / "alone", 4, engine=on_disk(tmp_path / "alone" / "store", strands=2))
    alone.save_model(str(tmp_path / "alone" / "out"))
    alone.end()
    assert (two / "trl" / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "alone" / "out" / "model.safetensors"
    ).read_bytes()
    for own, plain in json.loads((two / "preferred" / "logged.json").read_text()).values():
        check_same([tuple(line) for line in own], [tuple(line) for line in plain])
    figures = json.loads((two / "fabric" / "figures.json").read_text())
    torch.testing.assert_close(torch.tensor(figures["own"]), torch.tensor(figures["plain"]), **CLOSE)
    *steps, _ = on_engine(tmp_path / "loop", range(4))
    assert [norm for _, norm in figures["own"][:-1]] == [norm for _, norm in steps]
    assert all(norm > 0.5 for _, norm in steps)


def test_ranks_that_take_turns_have_neighbouring_batches_of_each_step() -> None:
    def dealt(rows: int, processes: int, each: int) -> list[list[int]]:
        batches = BatchSampler(SequentialSampler(range(rows)), 1, drop_last=False)
        return [batch for [batch] in Neighbours(batches, processes, each)]

    assert dealt(10, 2, 2) == [0, 2, 1, 3, 4, 6, 5, 7, 8, 9]
    assert dealt(12, 3, 2) == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert dealt(7, 2, 2) == [0, 2, 1, 3, 4, 6, 5, 0]


def test_a_users_own_batches_are_told_the_epoch_through_those_of_neighbours() -> None:
    class ByEpoch(BatchSampler):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[list[int]]:
            return iter([[4 * self.epoch + place] for place in range(4)])

    told, never = (Neighbours(kind(SequentialSampler(range(4)), 1, False), 2, 2) for kind in (ByEpoch, BatchSampler))
    for batches in told, never:
        batches.set_epoch(1)
    assert [list(batches) for batches in (told, never)] == [[[4], [6], [5], [7]], [[0], [2], [1], [3]]]


def test_a_users_own_batches_are_told_the_epoch_that_is_resumed() -> None:
    """The library skips what it had of it, by batches around those that are dealt out."""

    class Told(BatchSampler):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    own = Told(SequentialSampler(range(8)), 1, False)
    loader = prepare_data_loader(DataLoader(range(8), batch_sampler=own), num_processes=2, put_on_device=False)
    assert deal_neighbours(loader, 2)
    rest = skip_first_batches(loader, 1)
    rest.set_epoch(3)
    rest.batch_sampler.batch_sampler.set_epoch(3)  # as the Trainer does, where it has that
    assert own.epoch == 3


@pytest.mark.parametrize("drop_last", [False, True])
def test_each_step_has_the_batches_that_the_library_takes_in_it(drop_last: bool) -> None:
    """Also where examples do not fill an epoch's last step, or not even its first batches."""
    for rows, processes, each in product(range(1, 30), (2, 3, 4), (1, 2, 3)):
        plain = BatchSampler(SequentialSampler(range(rows)), 2, drop_last)
        of_library, of_engine = (
            [list(BatchSamplerShard(batches, processes, process)) for process in range(processes)]
            for batches in (plain, Neighbours(plain, processes, each))
        )
        assert {len(found) for found in of_engine} == {len(of_library[0])}
        for step in range(0, len(of_library[0]), each):
            theirs, mine = ([found[step : step + each] for found in every] for every in (of_library, of_engine))
            assert [batch for turn in zip(*theirs, strict=True) for batch in turn] == [b for own in mine for b in own]


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
    assert found.accelerator.gather(tensor=torch.zeros(1)).shape == (1,)  # anywhere else it is the library's own
    assert found.accelerator.gather_for_metrics(input_data=torch.zeros(1)).shape == (1,)


def test_what_would_depend_on_who_has_which_micro_batch_is_refused(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, average_tokens_across_devices=False)
    check_arguments(args)
    request.getfixturevalue("second_of_two")
    with pytest.raises(ConfigError, match="average_tokens_across_devices=False cannot be honoured by several"):
        check_arguments(args)


def test_processes_that_could_not_be_started_again_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    request.getfixturevalue("second_of_two")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(ConfigError, match=r"call penstock\.torchrun_mesh\(\) before the TrainingArguments"):
        check_arguments(args)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    check_arguments(args)


@pytest.mark.parametrize(
    ("figures", "count"), [(of_sft, 4), (of_dpo, 15), (of_reward, 4)], ids=lambda given: getattr(given, "__name__", "")
)
def test_a_loss_that_gathers_more_or_less_than_trls_own_is_refused(figures: FiguresOf, count: int) -> None:
    def gathered(count: int) -> Books:
        books = Books()
        for value in range(count):
            check_own(books.note(torch.tensor(value), counted=True))
        return books

    with pytest.raises(ModelError, match="compute_loss gathers more"):
        check_own(Books().note([0], counted=True))
    for other in (count - 1, count + 1):
        books = gathered(other)
        with pytest.raises(ModelError, match="compute_loss gathers more"):
            check_own(books.of_processes("train", [books.gathered, books.gathered], None, figures))
    books = gathered(count)
    with pytest.raises(ModelError, match="compute_loss gathers more"):
        check_own(books.of_processes("train", [books.gathered, books.gathered[1:]], None, figures))
    check_own(books.of_processes("train", [books.gathered, books.gathered], None, figures))


def test_processes_that_the_arguments_do_not_know_of_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without GPUs, where accelerate takes each rank for the only one."""
    args = TrainingArguments(str(tmp_path), report_to=[])
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"2 processes started, and the TrainingArguments know of 1.*use_cpu=True"):
        check_arguments(args)
